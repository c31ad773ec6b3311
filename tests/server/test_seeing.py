"""What those who look are shown: the memory map, the stream, the page's files, and what is asked of the engine for it."""

import asyncio
import contextlib
import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.server.fake_engine import SILENT_SEED
from tests.server.support import Running, asking, eventually
from vmmkv.memory.memory_map import MappedRun, RunState, SlotMap, SlotState
from vmmkv.server import engine_client
from vmmkv.server.engine_client import MapUnavailable, MemoryMaps
from vmmkv.server.http import page
from vmmkv.server.protocol import AskMap, MemoryMap, Message

PAGE = Path(__file__).parents[2] / "server" / "http" / "page"


def a_map(*slots: SlotMap, requests: dict[int, str] | None = None) -> MemoryMap:
    return MemoryMap(num_slots=8, slot_pages=[64], slots=list(slots), requests=requests or {}, took_us=12.3)


def live(slot: int, *runs: MappedRun) -> SlotMap:
    return SlotMap(slot, SlotState.LIVE, 100, [list(runs)])


def run(page: int, num_pages: int, num_holders: int, handle: int, state: RunState = RunState.LIVE) -> MappedRun:
    return MappedRun(page, num_pages, state, num_holders, handle)


def asked(server: Running) -> int:
    return sum(isinstance(message, AskMap) for message in server.engine.received)


class TestMap:
    def test_it_says_what_is_mapped_and_what_is_shared(self, server: Running) -> None:
        first = live(1, run(0, 4, 3, handle=70), run(4, 2, 2, handle=71), run(6, 1, 1, 72, RunState.AHEAD))
        second = live(3, run(0, 4, 3, handle=70), run(4, 1, 1, handle=73))
        server.engine.memory_map = a_map(first, second, requests={1: "cmpl-a-0"})
        found = server.http.get("/kv").json()
        assert (found["num_slots"], found["slot_pages"], found["page_bytes"]) == (8, [64], 2 << 20)
        assert found["memory"]["budget_bytes"] == 1 << 26
        assert found["slots"] == [
            {
                "slot": 1,
                "state": "live",
                "tokens": 100,
                "request": "cmpl-a-0",
                # What the tree alone holds too is not shared between slots.
                "runs": [[0, 0, 4, "live", 2, 0], [0, 4, 2, "live", 1, None], [0, 6, 1, "ahead", 1, None]],
            },
            {
                "slot": 3,
                "state": "live",
                "tokens": 100,
                "request": None,
                "runs": [[0, 0, 4, "live", 2, 0], [0, 4, 1, "live", 1, None]],
            },
        ]

    def test_a_map_of_256_slots_is_some_tens_of_kilobytes(self, server: Running) -> None:
        slots = [live(slot, run(0, 9, 256, 7), run(9, 30, 2, slot + 100), run(39, 2, 1, slot + 500)) for slot in range(1, 257)]
        server.engine.memory_map = a_map(*slots, requests={slot: f"chatcmpl-{slot:032x}-0" for slot in range(1, 257)})
        assert len(server.http.get("/kv").content) < 64 << 10

    def test_many_who_ask_at_once_are_one_question(self, server: Running) -> None:
        began_s = time.monotonic()
        with ThreadPoolExecutor(16) as clients:
            answers = list(clients.map(lambda _: server.http.get("/kv").status_code, range(16)))
        assert answers == [200] * 16
        assert asked(server) <= 1 + (time.monotonic() - began_s) / engine_client.FRESH_S

    def test_in_a_second_the_engine_is_asked_four_times_at_most(self, server: Running) -> None:
        began_s = time.monotonic()
        num_answers = 0
        with server.http as http:
            while asked(server) < 4:  # a map is of now, or of a moment ago: else this goes on for ever
                num_answers += http.get("/kv").status_code == 200
        assert num_answers > 4, "each was a question of its own"
        assert time.monotonic() - began_s >= 3 * engine_client.FRESH_S

    def test_a_dead_engine_is_503_at_once(self, fresh: Running) -> None:
        fresh.engine.memory_map = None
        with ThreadPoolExecutor(1) as client:
            waits = client.submit(fresh.http.get, "/kv")
            assert eventually(lambda: asked(fresh) == 1)
            fresh.engine_dies("it was a test")
            assert waits.result(8).status_code == 503, "not the ten seconds that a map is waited for"
        assert fresh.http.get("/kv").json()["error"]["message"] == "it was a test"

    def test_a_prefix_keeps_its_number_and_a_number_that_is_free_is_given_again(self) -> None:
        def numbers(maps: MemoryMaps, *handles: int) -> list[int]:
            slots = [live(1 + index, run(0, 1, 2, handle)) for index, handle in enumerate(sorted((*handles, *handles)))]
            return [slot["runs"][0][5] for slot in maps._drawn(a_map(*slots))["slots"][::2]]

        maps = MemoryMaps(lambda message: None)
        assert numbers(maps, 10, 20, 30) == [0, 1, 2]
        assert numbers(maps, 20, 30) == [1, 2]
        assert numbers(maps, 5, 20, 30) == [0, 1, 2]

    def test_an_engine_that_says_nothing_is_waited_for_no_longer_than_is_said(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(engine_client, "FRESH_S", 60)

        async def ask() -> list[Message]:
            sent: list[Message] = []
            maps = MemoryMaps(sent.append)
            for _ in range(2):
                with pytest.raises(MapUnavailable, match="no map"):
                    await maps.get(within_s=0.01)
            maps.take(a_map())
            assert (await maps.get())["num_slots"] == 8
            return sent

        assert len(asyncio.run(ask())) == 1


def read_events(response: httpx.Response) -> Iterator[tuple[str, Any]]:
    kind = ""
    for line in response.iter_lines():
        if line.startswith("event: "):
            kind = line[7:]
        elif line.startswith("data: "):
            yield kind, json.loads(line[6:])


class TestStream:
    def test_it_begins_with_state_and_map_and_goes_on_with_what_is_new(self, server: Running) -> None:
        server.engine.memory_map = a_map(live(1, run(0, 2, 1, 5)))
        seen: dict[str, list[Any]] = {"state": [], "map": []}
        with contextlib.ExitStack() as stack:
            response = stack.enter_context(stack.enter_context(server.http).stream("GET", "/events"))
            assert response.headers["content-type"].startswith("text/event-stream")
            for kind, data in read_events(response):
                seen[kind].append(data)
                if len(seen["map"]) == 1 and len(seen["state"]) == 1:
                    server.engine.memory_map = a_map(live(1, run(0, 3, 1, 5)))
                    stack.enter_context(self._asking(server))
                if len(seen["map"]) == 2 and any(state["requests"] for state in seen["state"]):
                    break
        state = next(state for state in seen["state"] if state["requests"])
        assert state["health"]["status"] == "ok" and state["model"] == "tiny"
        (flight,) = state["requests"]
        assert flight["id"].startswith("chatcmpl-") and flight["prompt_tokens"] > 0 and flight["age_s"] >= 0
        assert seen["map"][1]["slots"][0]["runs"] == [[0, 0, 3, "live", 1, None]]

    @staticmethod
    def _asking(server: Running) -> contextlib.AbstractContextManager[None]:
        """In flight for as long as the block lasts."""
        body = {"model": "tiny", "messages": [{"role": "user", "content": "a secret"}], "seed": SILENT_SEED}
        return asking(server, "/v1/chat/completions", body)

    def test_an_answer_that_is_sent_whole_is_counted_as_it_comes(self, server: Running) -> None:
        server.engine.endless, server.engine.step_s, server.engine.cached = True, 0.02, lambda _: 3
        body = {"model": "tiny", "prompt": "abcd", "max_tokens": 240}
        seen: list[dict[str, Any]] = []
        with asking(server, "/v1/completions", body), server.http as http, http.stream("GET", "/events") as response:
            for kind, data in read_events(response):
                if kind == "state" and data["requests"] and data["requests"][0]["has_begun"]:
                    seen += data["requests"]
                    if len(seen) == 2:
                        break
        first, second = seen
        assert 0 < first["generated_tokens"] < second["generated_tokens"] < 240
        assert first["cached_tokens"] == second["cached_tokens"] == 3

    def test_what_the_engine_has_not_said_is_null_and_no_zero(self, server: Running) -> None:
        with self._asking(server), server.http as http, http.stream("GET", "/events") as response:
            (flight,) = next(data["requests"] for kind, data in read_events(response) if kind == "state" and data["requests"])
        assert (flight["has_begun"], flight["cached_tokens"], flight["generated_tokens"]) == (False, None, None)

    def test_no_text_of_anybody_is_in_it(self, server: Running) -> None:
        text = ""
        with self._asking(server), server.http as http, http.stream("GET", "/events") as response:
            for kind, data in read_events(response):
                text += json.dumps(data)
                if kind == "state" and data["requests"]:
                    break
        assert "secret" not in text

    def test_nobody_looks_and_the_engine_is_asked_nothing(self, server: Running) -> None:
        with server.http as http, http.stream("GET", "/events") as response:
            next(read_events(response))
        assert eventually(lambda: not server.service.dashboard._news)

        def is_quiet() -> bool:
            before = asked(server)
            time.sleep(2.5 * page.TICK_S)
            return asked(server) == before

        assert eventually(is_quiet)

    def test_many_viewers_cost_the_engine_what_one_does_and_there_is_a_limit(
        self, server: Running, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(page, "MAX_VIEWERS", 3)
        with server.http as http:
            streams = [http.stream("GET", "/events") for _ in range(4)]
            events = [read_events(stream.__enter__()) for stream in streams[:3]]
            for each in events:  # kept: a response is closed when who reads it goes
                next(each)
            last = streams[3].__enter__()
            assert last.status_code == 503
            before, began_s = asked(server), time.monotonic()
            time.sleep(1.2)
            assert asked(server) - before <= 1 + (time.monotonic() - began_s) / engine_client.FRESH_S
            for stream in streams:
                stream.__exit__(None, None, None)

    def test_it_ends_when_the_server_does(self, server: Running) -> None:
        with server.http as http, http.stream("GET", "/events") as response:
            events = read_events(response)
            next(events)
            server.loop.call_soon_threadsafe(server.service.dashboard.close)
            for _ in events:
                pass


class TestPage:
    def test_it_is_served_with_a_policy_that_lets_nothing_in(self, server: Running) -> None:
        for path in ("/", *(f"/page/{name}" for name in page.FILES)):
            answer = server.http.get(path)
            assert answer.status_code == 200
            assert answer.headers["content-security-policy"] == page._HEADERS["Content-Security-Policy"]
            assert answer.headers["x-content-type-options"] == "nosniff"
        assert (
            "unsafe" not in page._HEADERS["Content-Security-Policy"]
            and "default-src 'none'" in page._HEADERS["Content-Security-Policy"]
        )

    def test_what_is_no_file_of_it_is_404(self, server: Running) -> None:
        for name in ("nothing.js", "..%2f..%2fapp.py", "%2e%2e/app.py"):
            assert server.http.get(f"/page/{name}").status_code == 404

    def test_whatever_it_names_is_there_and_nothing_of_others(self) -> None:
        texts = {name: content.decode() for name, (content, _) in page.FILES.items()}
        assert set(texts) == {path.name for path in PAGE.iterdir() if path.suffix in {".css", ".html", ".js", ".svg"}}
        for name, text in texts.items():
            named = re.findall(r'(?:src|href)="(?!#)([^"]+)"|from "\./([^"]+)"', text)
            for link in filter(None, (each for pair in named for each in pair)):
                assert link.removeprefix("/page/") in texts, f"{name} names {link}"
            addresses = set(re.findall(r"https?://[^\s\"']+", text)) - {"http://www.w3.org/2000/svg"}
            assert not addresses, name

    def test_no_script_or_style_stands_in_the_page_itself(self) -> None:
        text = page.FILES["index.html"][0].decode()
        assert not re.search(r"<style|\sstyle=|\son[a-z]+=|javascript:", text)
        assert re.findall(r"<script[^>]*>(.*?)</script>", text, re.DOTALL) == [""]

    def test_every_element_that_a_script_looks_for_is_there(self) -> None:
        html = page.FILES["index.html"][0].decode()
        for name in ("main.js", "chat.js"):
            for wanted in re.findall(r'find\("([^"]+)"\)', page.FILES[name][0].decode()):
                assert f'id="{wanted}"' in html, wanted
