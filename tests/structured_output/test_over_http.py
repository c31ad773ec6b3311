"""Answers by a grammar over HTTP: how they are asked for, what is refused, what is sent; and the compiler's limits."""

import asyncio
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.server.fake_engine import READY
from tests.server.support import CHAT, HELLO, Running, asking, eventually, running_server
from tests.server.tiny import byte_tokenizer
from vmmkv_server.http import generation
from vmmkv_server.structured_output import schema as schemas
from vmmkv_server.structured_output.compiler import GrammarCompiler
from vmmkv_server.structured_output.matcher import DIGEST_BYTES

COLOUR = {"type": "object", "properties": {"colour": {"enum": ["red", "blue"]}}, "required": ["colour"]}


@pytest.fixture(scope="module")
def _server(model_dir: Path) -> Iterator[Running]:
    ends = [int(byte_tokenizer().eos_token_id)]
    ready = msgspec.structs.replace(READY, model=str(model_dir), end_tokens=ends)
    with running_server(ready=ready) as running:
        yield running


@pytest.fixture
def server(_server: Running) -> Running:
    _server.reset()
    return _server


@pytest.mark.parametrize(
    "body",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "colour", "schema": COLOUR, "strict": True}}},
        {"structured_outputs": {"json": COLOUR}},
        {"structured_outputs": {"json": '{"type": "boolean"}'}},
        {"structured_outputs": {"json_object": True, "json": None, "disable_any_whitespace": False}},
        {"structured_outputs": {"regex": "[0-9]{4}"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"grammar": 'root ::= "a" root | "b"'}},
    ],
)
def test_the_engine_is_sent_what_was_asked_for_on_both_routes(server: Running, body: dict[str, Any]) -> None:
    for reply in (server.chat(max_tokens=4, **body), server.complete(max_tokens=4, **body)):
        assert reply.status_code == 200, reply.text
    assert all(request.grammar[DIGEST_BYTES:].startswith(b"{") for request in server.generates)


@pytest.mark.parametrize("body", [{}, {"response_format": {"type": "text"}}, {"structured_outputs": None}])
def test_a_free_answer_has_no_grammar(server: Running, body: dict[str, Any]) -> None:
    assert server.chat(max_tokens=4, **body).status_code == 200
    assert server.sent.grammar == b""


def schema(value: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": value}}}


@pytest.mark.parametrize(
    ("body", "param", "said"),
    [
        (schema({"type": "strange"}), "response_format.json_schema.schema", "type 'strange'"),
        (schema({"$ref": "#/$defs/none"}), "response_format.json_schema.schema", "nothing there"),
        (schema({"type": "integer", "minimum": 5, "maximum": 3}), "response_format.json_schema.schema", "allows no value"),
        (schema({"const": "\ud800"}), "response_format.json_schema.schema", "half of a surrogate pair"),
        ({"structured_outputs": {"choice": ["\ud800"]}}, "structured_outputs.choice", "half of a surrogate pair"),
        ({"response_format": {"type": "json_schema"}}, "response_format.json_schema", "needs a json_schema"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "json_object"),
        ({"structured_outputs": {"regex": "([a"}}, "structured_outputs.regex", "Unclosed"),
        ({"structured_outputs": {"regex": "(?=a)b"}}, "structured_outputs.regex", "Lookahead is not supported"),
        ({"structured_outputs": {"grammar": "root ::= x"}}, "structured_outputs.grammar", "not defined"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice", "1 to 1024"),
        ({"structured_outputs": {"json": "{"}}, "structured_outputs.json", "not the JSON of a schema (Expecting property"),
        ({"structured_outputs": {"json": "[" * 60_000}}, "structured_outputs.json", "not the JSON of a schema"),
        ({"structured_outputs": {"json": "[]"}}, "structured_outputs.json", "send an object"),
        ({"structured_outputs": {}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"json": None, "json_object": False}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"regex": "a", "choice": ["b"]}}, "structured_outputs", "exactly one"),
        ({"structured_outputs": {"lark": "a"}}, "structured_outputs.lark", "Unknown parameter"),
        ({"guided_regex": "a"}, "guided_regex", "structured_outputs"),
        ({"guided_json": None}, "guided_json", "Unknown parameter"),
        ({"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}, "response_format", "send one"),
        ({"structured_outputs": {"regex": "a"}, "ignore_eos": True}, "ignore_eos", "leave ignore_eos out"),
        ({"structured_outputs": {"regex": "a"}, "min_tokens": 1}, "min_tokens", "or structured_outputs.regex"),
        ({"response_format": {"type": "json_object"}, "min_tokens": 1}, "min_tokens", "or response_format"),
        ({"structured_outputs": {"regex": "a"}, "use_beam_search": True, "temperature": 0}, "use_beam_search", "sampled"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_refused_with_its_name_and_a_reason(
    server: Running, body: dict[str, Any], param: str, said: str
) -> None:
    error = server.refuses(CHAT, max_tokens=4, **body)
    assert error["param"].rstrip(".") == param and said in error["message"], error


@pytest.mark.parametrize("path", [CHAT, f"{CHAT}/render"])
@pytest.mark.parametrize("body", [schema(COLOUR), {"structured_outputs": {"json": COLOUR}}])
def test_a_schema_is_not_read_on_the_event_loop(
    server: Running, path: str, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where it would hold up all streams: one at the limits takes seconds."""
    on_loop, read = list[bool](), schemas.grammar_of

    def watched(given: Any) -> str:
        on_loop.append(asyncio._get_running_loop() is not None)
        return read(given)

    monkeypatch.setattr(schemas, "grammar_of", watched)
    assert server.post(path, {"messages": HELLO, "max_tokens": 4} | body).status_code == 200
    assert on_loop == [False]
    refused = server.post(path, {"messages": HELLO} | schema({"type": "strange"}))
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "response_format.json_schema.schema")


@pytest.mark.parametrize(
    "body",
    [
        *({"structured_outputs": one} for one in ({"regex": "a"}, {"choice": ["a"]}, {"grammar": 'root ::= "a"'})),
        {"response_format": {"type": "json_object"}},
    ],
)
def test_only_schemas_wait_for_a_schema_that_is_being_read(
    server: Running, body: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    may_end, read, render = threading.Event(), schemas.grammar_of, f"{CHAT}/render"

    def slow(given: Any) -> str:
        assert given != COLOUR or may_end.wait(60)
        return read(given)

    monkeypatch.setattr(schemas, "grammar_of", slow)
    with ThreadPoolExecutor() as threads:
        long = threads.submit(server.post, render, {"messages": HELLO} | schema(COLOUR))
        assert server.post(render, {"messages": HELLO, "max_tokens": 4} | body).status_code == 200
        assert not long.done()
        may_end.set()
        assert long.result().status_code == 200


@pytest.mark.parametrize("body", [{"structured_outputs": {"regex": "a"}}, {"use_beam_search": True}, {}])
def test_one_token_is_computed_as_routers_ask_an_engine_that_prefills(server: Running, body: dict[str, Any]) -> None:
    asked = {"max_tokens": 1, "max_completion_tokens": 1, "min_tokens": 1, "temperature": 0} | body
    assert server.post(CHAT, {"model": "tiny", "messages": HELLO} | asked).status_code == 200


class TestWhileItIsCompiled:
    @pytest.fixture
    def slow(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> Running:
        async def never(*_: object, **options: object) -> bytes:
            await asyncio.sleep(3600)
            raise AssertionError

        monkeypatch.setattr(GrammarCompiler, "knows", lambda *_, **options: True)
        monkeypatch.setattr(GrammarCompiler, "compile", never)
        return server

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_has_its_time_and_no_more(self, slow: Running, stream: bool) -> None:
        late = slow.chat(structured_outputs={"regex": "a"}, timeout=0.2, stream=stream)
        assert (late.status_code, late.json()["error"]["code"]) == (408, "request_timeout")
        assert eventually(lambda: slow.service.queue.num_sequences == 0)

    def test_a_server_that_ends_answers(self, monkeypatch: pytest.MonkeyPatch) -> None:
        with running_server() as server, ThreadPoolExecutor() as threads:

            async def never(*_: object, **options: object) -> float:
                await asyncio.sleep(3600)
                raise AssertionError

            monkeypatch.setattr(GrammarCompiler, "start", never)
            asked = threads.submit(server.chat, structured_outputs={"regex": "a"})
            assert eventually(lambda: server.service.queue.num_sequences == 1)
            server.loop.call_soon_threadsafe(server.client.fail, "The server is shutting down.")
            answered = asked.result(60)
        assert (answered.status_code, answered.json()["error"]["code"]) == (503, "service_unavailable")

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_client_that_goes_away_gives_its_place_back(self, slow: Running, stream: bool) -> None:
        body = {"model": "tiny", "messages": HELLO, "structured_outputs": {"regex": "a"}, "stream": stream}
        with asking(slow, CHAT, body):
            assert eventually(lambda: slow.service.queue.num_sequences == 1)
        assert eventually(lambda: slow.service.queue.num_sequences == 0)


class TestStart:
    """Of the compiler's process."""

    @pytest.fixture
    def fresh(self) -> Iterator[Running]:
        with running_server() as running:
            yield running
            asyncio.run_coroutine_threadsafe(running.service.grammars.close(), running.loop).result(60)

    def test_one_that_takes_too_long_is_a_503_and_ends(self, fresh: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("vmmkv_server.structured_output.compiler.START_S", 0.05)
        refused = fresh.chat(structured_outputs={"regex": "a"})
        assert (refused.status_code, refused.json()["error"]["code"]) == (503, "service_unavailable")
        assert "did not start (not within 0.05 s)" in refused.json()["error"]["message"]
        assert fresh.chat().status_code == 200

    @pytest.mark.parametrize("stream", [False, True])
    def test_a_request_does_not_pay_for_it(self, fresh: Running, monkeypatch: pytest.MonkeyPatch, stream: bool) -> None:
        late_s, now_s = 0.0, time.perf_counter
        monkeypatch.setattr(generation, "time", SimpleNamespace(perf_counter=lambda: now_s() + late_s))

        async def start(*_: object, **options: object) -> float:
            nonlocal late_s
            late_s += 3600
            return 1.0

        async def compiled(*_: object, **options: object) -> bytes:
            return b"{}"

        monkeypatch.setattr(GrammarCompiler, "start", start)
        monkeypatch.setattr(GrammarCompiler, "compile", compiled)
        answer = fresh.chat(structured_outputs={"regex": "a"}, timeout=60, stream=stream)
        assert answer.status_code == 200 and "timeout" not in answer.text
