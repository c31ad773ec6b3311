"""What is logged, in both formats, and when the periodic line comes."""

import asyncio
import io
import json
import logging
from collections.abc import Iterator
from typing import Any

import pytest

from tests.server.support import Running
from vmmkv_server import logs, metrics
from vmmkv_server.metrics import Rates
from vmmkv_server.protocol import Snapshot
from vmmkv_server.statistics import AnswerStatistics, MemoryStatistics, PrefixStatistics, SchedulerStatistics


@pytest.fixture(autouse=True)
def root() -> Iterator[None]:
    """The root logger as it was, afterwards."""
    root = logging.getLogger()
    handlers, level = root.handlers.copy(), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


def configured(level: str, log_format: str) -> io.StringIO:
    """As a process of our own does it, which has no handlers; where the lines go."""
    file = io.StringIO()
    logging.getLogger().handlers.clear()
    logs.configure_logging(level, log_format, file)
    return file


def lines(file: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.getvalue().splitlines()]


def test_each_line_of_json_has_message_values_and_the_request() -> None:
    file = configured("info", "json")
    log = logging.getLogger("a.logger")

    async def serve(name: str) -> None:
        logs.bind_request(name)
        await asyncio.sleep(0)
        log.info("answered %d", 7, extra={"tokens": 3})

    async def both() -> None:
        await asyncio.gather(serve("cmpl-a"), serve("cmpl-b"))
        log.debug("not wanted")
        log.warning("two\nlines, ünlatin")

    asyncio.run(both())
    first, second, last = lines(file)
    assert {first["request_id"], second["request_id"]} == {"cmpl-a", "cmpl-b"}
    assert (first["event"], first["tokens"], first["level"], first["logger"]) == ("answered 7", 3, "info", "a.logger")
    assert first["timestamp"].endswith("Z")
    assert last["event"] == "two\nlines, ünlatin" and "request_id" not in last


def test_an_exception_is_part_of_its_line() -> None:
    file = configured("info", "json")
    try:
        raise RuntimeError("the reason")
    except RuntimeError:
        logging.getLogger("x").exception("it failed")
    (line,) = lines(file)
    assert line["event"] == "it failed" and "RuntimeError: the reason" in line["exception"]


def test_lines_for_people_have_no_colours_where_nobody_sees_them() -> None:
    file = configured("debug", "console")
    logging.getLogger("x").info("it is so", extra={"running": 3})
    assert "it is so" in file.getvalue() and "running=3" in file.getvalue() and "\x1b" not in file.getvalue()


def test_what_is_printed_is_logged_line_by_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level("INFO"):
        printed = logs.LogLines(logging.getLogger("printed"))
        for text in ("one", " line\ntwo", "\n", "\n", "three"):
            printed.write(text)
    assert caplog.messages == ["one line", "two"]


def test_a_request_that_ends_has_its_id_in_the_log(server: Running) -> None:
    file = configured("debug", "json")
    answer = server.chat()
    (line,) = (line for line in lines(file) if line["event"] == "request ended")
    assert (line["request_id"], line["outcome"]) == (answer.headers["x-request-id"], "finished")
    assert line["tokens"][0] == answer.json()["usage"]["prompt_tokens"]


def snapshot(*, running: int = 0, generated: int = 0, prompt: int = 0, hits: int = 0, missed: int = 0) -> Snapshot:
    return Snapshot(
        scheduler=SchedulerStatistics(requests_running=running),
        answers=AnswerStatistics(prompt_tokens=prompt, generation_tokens=generated),
        memory=MemoryStatistics(kv_budget_bytes=1000),
        prefix=PrefixStatistics(prefix_hit_tokens=hits, prefix_missed_tokens=missed),
    )


def test_rates_are_differences() -> None:
    old, new = snapshot(hits=10), snapshot(generated=50, prompt=8, hits=40, missed=10)
    assert Rates.between(old, new, 2.0) == Rates(generated_per_s=25.0, prompt_per_s=4.0, hit_rate=0.75)
    assert Rates.between(new, new, 2.0).hit_rate is None


class Engine:
    """As much of an EngineClient as the line is made of."""

    def __init__(self) -> None:
        self.now: Snapshot | None = None
        self.num_looks = 0

    @property
    def snapshot(self) -> Snapshot | None:
        self.num_looks += 1
        return self.now


def test_the_line_comes_only_while_something_happens(caplog: pytest.LogCaptureFixture) -> None:
    engine = Engine()

    async def live() -> list[int]:
        counts = []
        telling = asyncio.create_task(metrics.log_rates(engine, every_s=0.02))  # type: ignore[arg-type]
        for now in (None, snapshot(), snapshot(running=1), snapshot(generated=9), snapshot(generated=9)):
            engine.now = now
            before, looks = len(caplog.messages), engine.num_looks
            async with asyncio.timeout(60):
                while engine.num_looks < looks + 3:  # after each it says what it has to say before another task has a turn
                    await asyncio.sleep(0.001)
            counts.append(len(caplog.messages) - before)
        telling.cancel()
        return counts

    with caplog.at_level("INFO", logger="vmmkv_server.metrics"):
        loading, idle, running, done, nothing = asyncio.run(live())
    assert (loading, idle, done, nothing) == (0, 0, 1, 0)
    assert running == 3
    assert caplog.records[-1].__dict__["generated_tok_s"] == 450.0
