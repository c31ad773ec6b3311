"""Laws of waiting in turns: the lines take turns, a share is a share, and who goes away leaves nothing behind."""

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.server.support import Running, asking, eventually, running_server
from vmmkv.server.config import FrontConfig
from vmmkv.server.http import errors
from vmmkv.server.http.app import INLINE_LOGPROBS, MAX_TOKENISING, WRITING_AT_ONCE
from vmmkv.server.turns import QueueFull, ShareFull, Turns


def test_lines_take_turns_however_long_one_is() -> None:
    async def law() -> list[str]:
        turns, order = Turns("x", at_once=1, most=100, shared=True), list[str]()

        async def work(owner: str) -> None:
            await turns.begin(owner)
            order.append(owner)
            await asyncio.sleep(0)
            turns.end(owner)

        await asyncio.gather(*(work("long") for _ in range(10)), *(work("short") for _ in range(2)))
        assert not turns._here and not turns._at_work and not turns._lines and turns._free == 1
        return order

    assert asyncio.run(law())[:5] == ["long", "long", "short", "long", "short"]


def test_one_who_asks_for_much_leaves_a_place_at_work_and_three_quarters_of_the_queue() -> None:
    async def law() -> None:
        turns = Turns("texts", at_once=2, most=8, shared=True)
        flood = [asyncio.create_task(turns.begin("flood")) for _ in range(3)]
        await asyncio.sleep(0)
        assert [task.done() for task in flood] == [True, False, True]
        with pytest.raises(ShareFull, match="2 texts of this key"):
            flood[2].result()
        await asyncio.wait_for(turns.begin("other"), 10)
        turns.end("flood")
        await asyncio.wait_for(flood[1], 10)

    asyncio.run(law())


def test_all_that_may_wait_is_bounded_too() -> None:
    async def law() -> None:
        turns = Turns("texts", at_once=1, most=2, shared=False)
        await turns.begin("a")
        waiting = asyncio.create_task(turns.begin("a"))
        await asyncio.sleep(0)
        with pytest.raises(QueueFull, match="2 texts wait"):
            await turns.begin("b")
        turns.end("a")
        await waiting

    asyncio.run(law())


@pytest.mark.parametrize("when", ["it waits", "its turn has just come"])
def test_who_goes_away_leaves_nothing_behind(when: str) -> None:
    async def law() -> None:
        turns = Turns("texts", at_once=1, most=9, shared=False)
        await turns.begin("a")
        gone, stays = (asyncio.create_task(turns.begin(name)) for name in "bc")
        await asyncio.sleep(0)
        if when == "it waits":
            gone.cancel()
            turns.end("a")
        else:
            turns.end("a")
            gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        await asyncio.wait_for(stays, 10)
        turns.end("c")
        assert gone.cancelled() and not turns._here and not turns._at_work and not turns._lines and turns._free == 1

    asyncio.run(law())


def test_who_goes_away_keeps_the_turn_until_the_thread_is_done() -> None:
    async def law() -> None:
        turns, go = Turns("texts", at_once=1, most=9, shared=False), threading.Event()
        begun = threading.Event()

        def work() -> bool:
            begun.set()
            return go.wait(20)

        gone = asyncio.create_task(turns.in_thread("a", work))
        await asyncio.to_thread(begun.wait, 10)
        gone.cancel()
        await asyncio.gather(gone, return_exceptions=True)
        after = asyncio.create_task(turns.in_thread("b", lambda: 7))
        await asyncio.sleep(0.05)
        assert not after.done()
        go.set()
        assert await asyncio.wait_for(after, 10) == 7

    asyncio.run(law())


def test_a_share_that_is_full_is_a_429_and_a_queue_that_is_full_a_503() -> None:
    own, all_of_it = errors.no_turn(ShareFull("x")), errors.no_turn(QueueFull("x"))
    assert (own.status, all_of_it.status) == (429, 503)
    assert own.headers and own.headers["Retry-After"] and all_of_it.headers and all_of_it.headers["Retry-After"]


class TestTokenising:
    @pytest.fixture
    def shared(self) -> Iterator[Running]:
        with running_server(front=FrontConfig(api_keys=("a-key-of-one", "a-key-of-two"))) as server:
            server.service.tokenising = Turns("long texts", at_once=2, most=8, shared=True)
            yield server

    def test_a_key_whose_long_texts_wait_has_a_429_and_another_is_served(
        self, shared: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        tokenizer, go = shared.service.tokenizer, threading.Event()
        assert tokenizer is not None
        encode = tokenizer.encode_one

        def slow(prompt: str, **options: bool) -> list[int]:
            assert not prompt.startswith("slow") or go.wait(20)
            return encode(prompt, **options)

        monkeypatch.setattr(tokenizer, "encode_one", slow)

        def ask(key: str, text: str) -> int:
            body, headers = {"prompt": text * 2000}, {"Authorization": f"Bearer {key}"}
            return shared.http.post("/tokenize", json=body, headers=headers).status_code

        flood = [threading.Thread(target=ask, args=("a-key-of-one", "slow")) for _ in range(2)]
        for thread in flood:
            thread.start()
        assert eventually(lambda: shared.service.tokenising._here.total() == 2)
        assert ask("a-key-of-one", "quick") == 429
        assert ask("a-key-of-two", "quick") == 200
        go.set()
        for thread in flood:
            thread.join(20)
        assert ask("a-key-of-one", "quick") == 200

    @pytest.fixture
    def taken(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
        """A server whose only turn somebody has until the test ends."""
        with running_server() as server:
            tokenizer, go = server.service.tokenizer, threading.Event()
            assert tokenizer is not None
            monkeypatch.setattr(tokenizer, "encode_one", lambda prompt, **options: [97] if go.wait(60) else [])
            server.service.tokenising = Turns("long texts", at_once=1, most=8, shared=False)
            has_it = threading.Thread(target=server.http.post, args=("/tokenize",), kwargs={"json": {"prompt": "a" * 9999}})
            has_it.start()
            try:
                assert eventually(lambda: server.service.tokenising._at_work.total() == 1)
                yield server
            finally:
                go.set()
                has_it.join(20)

    COMPLETION = ("/v1/completions", {"prompt": "a" * 9999})
    CHAT = ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a" * 9999}]})
    TOKENS = ("/tokenize", {"prompt": "a" * 9999})

    @pytest.mark.parametrize("path, body", [COMPLETION, CHAT])
    def test_who_waits_for_a_turn_has_an_answer_when_the_time_is_over(
        self, taken: Running, path: str, body: dict[str, Any]
    ) -> None:
        late = taken.http.post(path, json={"model": "tiny", "timeout": 0.1, **body}, timeout=5)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        assert eventually(lambda: taken.service.tokenising._here.total() == 1 and taken.service.intake.num_sequences == 0)

    @pytest.mark.parametrize("path, body", [COMPLETION, CHAT, TOKENS])
    def test_who_goes_away_while_waiting_for_a_turn_gives_back_the_place(
        self, taken: Running, path: str, body: dict[str, Any]
    ) -> None:
        with asking(taken.url, path, {"model": "tiny", **body}):
            assert eventually(lambda: taken.service.tokenising._here.total() == 2)
        assert eventually(lambda: taken.service.tokenising._here.total() == 1, within_s=2)
        assert eventually(lambda: taken.service.intake.num_sequences == 0, within_s=2)

    @pytest.mark.parametrize("keys, is_shared", [((), False), (("one",), False), (("one", "two"), True)])
    def test_the_places_are_shared_only_where_several_ask(self, keys: tuple[str, ...], is_shared: bool) -> None:
        api_keys = tuple(f"a-key-of-{name}" for name in keys)
        with running_server(front=FrontConfig(api_keys=api_keys, admin_key="the-admins-key")) as server:
            assert (server.service.tokenising.most_each < MAX_TOKENISING) == is_shared
            assert server.service.grammars._shared == is_shared


LONG: dict[str, Any] = {"model": "tiny", "prompt": "a" * 120, "max_tokens": 120, "logprobs": 5}
"""Of more log-probabilities than are written on the event loop."""


class TestWriting:
    @pytest.mark.parametrize("keys", [(), ("a-key-of-one", "a-key-of-two")])
    def test_finished_answers_wait_for_their_turn_to_be_written_and_none_is_turned_away(self, keys: tuple[str, ...]) -> None:
        assert INLINE_LOGPROBS < 120 * 5
        with running_server(front=FrontConfig(api_keys=keys)) as server:
            writing, answers = server.service.writing, list[httpx.Response]()
            server.service.tokenising = Turns("long texts", at_once=1, most=1, shared=False)
            for turns, count in ((writing, WRITING_AT_ONCE), (server.service.tokenising, 1)):
                for place in range(count):
                    asyncio.run_coroutine_threadsafe(turns.begin(f"somebody {place}"), server.loop).result(10)

            def ask() -> None:
                headers = {"Authorization": f"Bearer {keys[0]}"} if keys else {}
                answers.append(server.http.post("/v1/completions", json=LONG, headers=headers))

            askers = [threading.Thread(target=ask) for _ in range(4)]
            for asker in askers:
                asker.start()
            assert eventually(lambda: writing._here.total() == WRITING_AT_ONCE + 4) and not answers
            for place in range(WRITING_AT_ONCE):
                server.loop.call_soon_threadsafe(writing.end, f"somebody {place}")
            for asker in askers:
                asker.join(20)
            assert [answer.status_code for answer in answers] == [200] * 4
            assert {len(answer.json()["choices"][0]["logprobs"]["tokens"]) for answer in answers} == {120}
            assert eventually(lambda: not writing._here)

    def test_who_goes_away_before_the_answer_is_written_gives_back_the_place(self) -> None:
        with running_server() as server:
            writing = server.service.writing
            for place in range(WRITING_AT_ONCE):
                asyncio.run_coroutine_threadsafe(writing.begin(place), server.loop).result(10)
            with asking(server.url, "/v1/completions", LONG):
                assert eventually(lambda: writing._here.total() == WRITING_AT_ONCE + 1)
            assert eventually(lambda: writing._here.total() == WRITING_AT_ONCE)
