"""The HTTP process's side of the socket to the engine."""

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest
import zmq.asyncio

from tests.server.fake_engine import FAIL_SEED, READY, SILENT_SEED, FakeEngine
from vmmkv_server.engine_client import Answers, Dead, EngineClient, EngineDead, EngineNotReady, RequestFailed
from vmmkv_server.protocol import Abort, FromEngine, Generate, Loading, Output, Shutdown
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.statistics import AnswerStatistics, MemoryStatistics, SchedulerStatistics

pytestmark = pytest.mark.anyio


@pytest.fixture
def loading() -> list[Loading]:
    """What the client has reported of the engine's start."""
    return []


@pytest.fixture
async def client(tmp_path: Path, loading: list[Loading]) -> AsyncIterator[EngineClient]:
    client = EngineClient(f"ipc://{tmp_path}/e", on_loading=loading.append)
    client.start()
    yield client
    await client.close()


@pytest.fixture
async def engine(client: EngineClient) -> AsyncIterator[FakeEngine]:
    """The engine that the client is connected to."""
    engine = FakeEngine(client.address)
    engine.start()
    assert await asyncio.wait_for(client.settled(), 60) == READY
    yield engine
    await client.close()
    engine.stop()


def request(request_id: str, *, seed: int = 0, num_tokens: int = 8) -> Generate:
    return Generate(request_id=request_id, prompt=[1, 2, 3], params=SamplingParams(max_tokens=num_tokens, seed=seed))


async def every(answers: Answers) -> list[Output]:
    """All outputs of these requests, in order."""
    outputs = []
    async for news in answers:
        for each in news:
            assert isinstance(each, Output)
            outputs.append(each)
    return outputs


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(60):
        while not condition():
            await asyncio.sleep(0.01)


async def test_nothing_is_sent_before_the_engine_is_ready(client: EngineClient) -> None:
    with pytest.raises(EngineNotReady, match="loading"):
        client.submit([request("a")])


async def test_loading_is_reported_in_order(engine: FakeEngine, loading: list[Loading]) -> None:
    assert [(step.stage, step.done, step.total) for step in loading] == [("weights", done, 2) for done in range(3)]


async def test_leaving_the_block_aborts_unfinished_requests_alone(client: EngineClient, engine: FakeEngine) -> None:
    with client.submit([request("done"), request("silent", seed=SILENT_SEED)]) as answers:
        async for news in answers:
            if isinstance(news[-1], Output) and news[-1].finish_reason is not None:
                break
    await until(lambda: engine.aborted() == {"silent"})
    answers.close()
    with client.submit([request("after")]) as answers:  # all that was sent before has arrived before it
        await every(answers)
    assert sum(isinstance(message, Abort) for message in engine.received) == 1


async def test_tokens_of_an_aborted_request_are_dropped(client: EngineClient, engine: FakeEngine) -> None:
    engine.endless = True
    with client.submit([request("a", num_tokens=1 << 20), request("b", num_tokens=100)]) as answers:
        await until(lambda: answers.num_tokens > 100)
        answers.abort("a")
        assert {output.request_id for output in await every(answers)} == {"b"}


async def test_a_failed_request_leaves_the_others_alone(client: EngineClient, engine: FakeEngine) -> None:
    with client.submit([request("good")]) as good, client.submit([request("bad", seed=FAIL_SEED)]) as bad:
        with pytest.raises(RequestFailed, match="told to fail"):
            await anext(bad)
        assert (await every(good))[-1].finish_reason == "stop"


async def test_what_the_engine_sent_before_it_died_still_counts(
    client: EngineClient, engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vmmkv_server.engine_client.LAST_WORDS_S", 60.0)
    with client.submit([request("a")]) as answers:
        ending = asyncio.create_task(client.engine_ended("exit code 3"))
        assert (await every(answers))[-1].finish_reason == "stop"
        assert not ending.done()
        ending.cancel()
    await until(lambda: client.snapshot is not None and client.snapshot.answers.generation_tokens == 3)  # the last message


async def test_a_message_that_cannot_be_read_ends_the_connection(client: EngineClient) -> None:
    with zmq.asyncio.Context() as context, context.socket(zmq.PAIR) as stranger:
        stranger.connect(client.address)
        await stranger.send(b"hello")
        phase = await asyncio.wait_for(client.settled(), 60)
        assert isinstance(phase, Dead) and "cannot be read" in phase.reason


async def test_an_error_of_the_receiving_task_fails_all_requests(client: EngineClient, engine: FakeEngine) -> None:
    def broken(message: FromEngine) -> None:
        raise KeyError(message)

    client.handle = broken  # type: ignore[method-assign]
    with client.submit([request("a")]) as answers, pytest.raises(EngineDead, match="KeyError"):
        await asyncio.wait_for(anext(answers), 60)


async def test_of_requests_of_which_one_cannot_be_encoded_none_is_sent(client: EngineClient, engine: FakeEngine) -> None:
    with pytest.raises(OverflowError):
        client.submit([request("a"), msgspec.structs.replace(request("b"), prompt=[1 << 70])])
    assert client.num_unfinished == 0
    with client.submit([request("c")]) as answers:
        assert {output.request_id for output in await every(answers)} == {"c"}
    assert [message.request_id for message in engine.received if isinstance(message, Generate)] == ["c"]


async def test_shutdown_reaches_the_engine_and_close_is_idempotent(client: EngineClient, engine: FakeEngine) -> None:
    client.shutdown()
    await client.close()
    await client.close()
    await until(lambda: any(isinstance(message, Shutdown) for message in engine.received))


async def test_a_thousand_requests_at_once_are_all_answered_and_none_is_kept(client: EngineClient, engine: FakeEngine) -> None:
    async def one(number: int) -> list[Output]:
        with client.submit([request(f"r{number}")]) as answers:
            return await every(answers)

    got = await asyncio.gather(*(one(number) for number in range(1000)))
    assert all(messages[-1].finish_reason == "stop" for messages in got)
    assert client.num_unfinished == client.waiting_tokens == 0


async def test_silence_lasts_from_a_request_until_a_step_or_until_no_work_is_left(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(now_s=100.0, monotonic=lambda: clock.now_s, perf_counter=time.perf_counter)
    monkeypatch.setattr("vmmkv_server.engine_client.time", clock)
    client = EngineClient("ipc:///not/there")
    client.phase = READY
    idle = FakeEngine("ipc:///not/there").snapshot()
    working = msgspec.structs.replace(idle, scheduler=SchedulerStatistics(requests_running=1))
    client.handle(working)
    assert client.silent_s() == 0
    answers = client.submit([request("a")])
    client.handle(working)  # a turn of the loop that computed nothing
    clock.now_s += 5
    client.handle(working)
    assert client.silent_s() == 5
    for change in (
        {"memory": MemoryStatistics(kv_tokens=1)},
        {"answers": AnswerStatistics(prompt_tokens=1)},
        {"answers": AnswerStatistics(generation_tokens=1)},
    ):
        clock.now_s += 2
        assert client.silent_s() > 0
        working = msgspec.structs.replace(working, **change)  # type: ignore[arg-type]
        client.handle(working)
        assert client.silent_s() == 0
    answers.close()  # the abort is work too
    clock.now_s += 2
    assert client.silent_s() == 2
    client.handle(msgspec.structs.replace(working, scheduler=idle.scheduler))
    assert client.silent_s() == 0
