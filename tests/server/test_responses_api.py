"""OpenAI's Responses API: what the model is asked is what a chat asks, and answers are the same whole and streamed."""

import json
from typing import Any

import msgspec
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.server.fake_engine import FAIL_SEED, SILENT_SEED
from tests.server.support import HELLO, Running, eventually
from tests.server.test_tools import CALL, HERMES, IN_TAGS, NAMED, THINKING, UNSERVED, WEATHER, asked, thinks
from tests.server.tiny import TEMPLATE

RESPONSES = "/v1/responses"
TOOL: Any = {"type": "function", **WEATHER["function"]}
BAD_TOOL: Any = {"type": "function", **UNSERVED["function"]}
EVENT: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
OUTPUT: Any = {"type": "function_call_output", "call_id": "call_1", "output": "drizzle"}
FUNCTION: Any = {"name": "get_weather", "arguments": '{"city": "Brest"}'}
CALLED: Any = {"type": "function_call", "call_id": "call_1", **FUNCTION}
NAMED_HERE: Any = {"type": "function", "name": "get_weather"}


@pytest.fixture
def server(with_grammars: Running) -> Running:
    return with_grammars


def whole(server: Running, **body: Any) -> dict[str, Any]:
    """The answer, which has the form of OpenAI's."""
    reply = server.post(RESPONSES, {"input": "hello", **body})
    assert reply.status_code == 200, reply.text
    answer: dict[str, Any] = reply.json()
    Response.model_validate(answer, strict=True)
    return answer


def events(server: Running, **body: Any) -> list[dict[str, Any]]:
    """The events of a stream, which have the form of OpenAI's, in order."""
    reply = server.post(RESPONSES, {"input": "hello", "stream": True, **body})
    assert reply.status_code == 200 and reply.headers["content-type"].startswith("text/event-stream"), reply.text
    assert reply.text.endswith("\n\n")
    told = [dict(line.split(": ", 1) for line in event.split("\n")) for event in reply.text[:-2].split("\n\n")]
    found: list[dict[str, Any]] = [json.loads(each["data"]) for each in told]
    assert [each["event"] for each in told] == [each["type"] for each in found]
    assert [each["sequence_number"] for each in found] == list(range(len(found)))
    for each in found:
        EVENT.validate_python(each, strict=True)
    return found


def plain(answer: Any) -> Any:
    """An answer without what is drawn or measured anew for each: ids and times."""
    if isinstance(answer, dict):
        return {name: plain(part) for name, part in answer.items() if name not in ("id", "call_id", "created_at")}
    return [plain(part) for part in answer] if isinstance(answer, list) else answer


def texts(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """The type and the text of each item of an output."""
    return [
        (item["type"], item["arguments"] if "arguments" in item else "".join(part["text"] for part in item["content"]))
        for item in answer["output"]
    ]


class TestInput:
    @pytest.mark.parametrize(
        ("body", "messages"),
        [
            ({"input": "hello"}, HELLO),
            ({"input": HELLO}, HELLO),
            ({"input": [{"type": "message", "role": "user", "status": "completed",
                         "content": [{"type": "input_text", "text": "hel"}, {"type": "input_text", "text": "lo"}]}]}, HELLO),
            ({"input": "hello", "instructions": "Be brief."}, [{"role": "system", "content": "Be brief."}, *HELLO]),
            ({"input": [{"role": "developer", "content": "Rhyme."}, *HELLO], "instructions": "Be brief."},
             [{"role": "system", "content": "Be brief.\n\nRhyme."}, *HELLO]),
            ({"input": [{"role": "system", "content": "Rhyme."}, *HELLO], "instructions": "Be brief."},
             [{"role": "system", "content": "Be brief.\n\nRhyme."}, *HELLO]),
            ({"input": [*HELLO, {"role": "assistant", "content": "Yes?", "phase": "final_answer"}, *HELLO]},
             [*HELLO, {"role": "assistant", "content": "Yes?"}, *HELLO]),
            ({"input": [*HELLO, CALLED, OUTPUT]},
             [*HELLO, {"role": "assistant", "tool_calls": [{"id": "call_1", "function": FUNCTION}]},
              {"role": "tool", "tool_call_id": "call_1", "content": "drizzle"}]),
            ({"input": [*HELLO, {"type": "reasoning", "id": "rs_1", "summary": [], "encrypted_content": "?"},
                        {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}, *HELLO]},
             [*HELLO, {"role": "assistant", "content": "A"}, {"role": "assistant", "content": "B"}, *HELLO]),
        ],
    )  # fmt: skip
    def test_it_is_the_conversation_of_a_chat(self, server: Running, body: Any, messages: Any) -> None:
        server.shows(HERMES)
        whole(server, **body)
        assert server.chat(messages=messages).status_code == 200
        ours, theirs = server.generates
        assert ours.prompt == theirs.prompt

    def test_an_output_may_be_sent_back_as_it_is(self, server: Running) -> None:
        shown = "message.reasoning_content ~ '/' ~ message.content"
        server.shows(THINKING.replace("message.content.split('</think>')[-1]", shown))
        server.answers("<think>Hm.</think>\n\nYes.")
        turns: list[Any] = [*HELLO]
        answer = server.openai.responses.create(model="tiny", input=turns)
        assert [item.type for item in answer.output] == ["reasoning", "message"]
        turns += [*answer.output, {"role": "user", "content": "And?"}]
        server.openai.responses.create(model="tiny", input=turns)
        assert "assistant\nHm./Yes.<|im_end|>" in asked(server)
        server.shows(HERMES)
        server.answers(f"Let me see.\n{IN_TAGS}\nAnd again.\n{IN_TAGS}")
        answer = server.openai.responses.create(model="tiny", input=HELLO, tools=[TOOL])
        assert [item.type for item in answer.output] == ["message", "function_call"] * 2
        results = [OUTPUT | {"call_id": item.call_id} for item in answer.output if item.type == "function_call"]
        dumped: list[Any] = [item.model_dump() for item in answer.output]
        prompts = []
        for output in (answer.output, dumped):
            server.openai.responses.create(model="tiny", input=[*HELLO, *output, *results], tools=[TOOL])
            prompts.append(server.generates[-1].prompt)
        calls = [{"id": each["call_id"], "function": FUNCTION} for each in results]
        said = {"role": "assistant", "content": "Let me see.\nAnd again.", "tool_calls": calls}
        told = [{"role": "tool", "tool_call_id": each["call_id"], "content": "drizzle"} for each in results]
        server.chat(messages=[*HELLO, said, *told], tools=[WEATHER])
        assert prompts == [server.generates[-1].prompt] * 2

    def test_parameters_are_those_of_a_chat(self, server: Running) -> None:
        shared = {"temperature": 0.5, "top_p": 0.25, "seed": 7, "priority": 3, "stop": ["x"], "cache_salt": "s", "top_k": 5}
        silent: Any = {"store": False, "include": [], "reasoning": {"effort": None}, "text": {"verbosity": "medium"}}
        silent |= {"truncation": "disabled", "service_tier": "auto", "background": None, "previous_response_id": None}
        answer = whole(server, **shared, **silent, max_output_tokens=9.0, user="u", metadata={"a": "b"})
        assert server.chat(**shared, max_completion_tokens=9).status_code == 200
        ours, theirs = (msgspec.structs.replace(each, request_id="") for each in server.generates)
        assert ours == theirs
        assert (answer["temperature"], answer["top_p"], answer["max_output_tokens"]) == (0.5, 0.25, 9)
        assert (answer["user"], answer["metadata"], answer["store"], answer["tool_choice"]) == ("u", {"a": "b"}, False, "auto")

    def test_the_client_needs_to_send_nothing_but_the_input(self, server: Running) -> None:
        answer = server.openai.responses.create(model="tiny", input="hello")
        assert answer.id.startswith("resp_") and answer.status == "completed"
        assert answer.output_text == "".join(part for _, part in texts(answer.model_dump()))


class TestAnswers:
    @pytest.mark.parametrize(
        ("template", "text", "asks", "output"),
        [
            (HERMES, "It rains.", {}, [("message", "It rains.")]),
            (HERMES, "", {}, [("message", "")]),
            (HERMES, IN_TAGS, {"tools": [TOOL]}, [("function_call", '{"city": "Brest"}')]),
            (HERMES, f"Well.\n{IN_TAGS}\n{IN_TAGS}", {"tools": [TOOL]},
             [("message", "Well."), *[("function_call", '{"city": "Brest"}')] * 2]),
            (TEMPLATE, CALL, {"tools": [TOOL], "tool_choice": "required"}, [("function_call", '{"city": "Brest"}')]),
            (TEMPLATE, CALL, {"tools": [TOOL], "tool_choice": NAMED_HERE}, [("function_call", '{"city": "Brest"}')]),
            (HERMES, IN_TAGS, {"tools": [TOOL], "tool_choice": "none"}, [("message", IN_TAGS)]),
            (THINKING, "<think>It may\nrain.</think>\n\nYes.", {}, [("reasoning", "It may\nrain."), ("message", "Yes.")]),
            (THINKING, f"<think>Hm.</think>\n{CALL}", {"tools": [TOOL]},
             [("reasoning", "Hm."), ("function_call", '{"city": "Brest"}')]),
        ],
    )  # fmt: skip
    def test_a_stream_has_the_items_of_the_whole(
        self, server: Running, template: str, text: str, asks: Any, output: list[tuple[str, str]]
    ) -> None:
        server.shows(template)
        server.answers(text)
        answer, told = whole(server, **asks), events(server, **asks)
        assert texts(answer) == output
        assert answer["status"] == "completed" and {item["status"] for item in answer["output"]} == {"completed"}
        assert [each["type"] for each in told[:2]] == ["response.created", "response.in_progress"]
        assert told[-1]["type"] == "response.completed" and plain(told[-1]["response"]) == plain(answer)
        items: dict[int, Any] = {}
        pieces: dict[int, str] = {}
        for each in told:
            index, kind = each.get("output_index"), each["type"].removeprefix("response.")
            assert index is None or each["item_id"] == told[-1]["response"]["output"][index]["id"]
            if kind == "output_item.added":
                assert each["item"]["status"] == "in_progress" and index == len(pieces)
                pieces[index] = ""
            elif kind.endswith(".delta"):
                pieces[index] += each["delta"]
            elif kind.endswith(".done") and kind not in ("content_part.done", "output_item.done"):
                assert each.get("text", each.get("arguments")) == pieces[index]
            elif kind == "output_item.done":
                items[index] = each["item"]
        assert list(items.values()) == told[-1]["response"]["output"]
        assert list(pieces.values()) == [text for _, text in output]

    def test_a_call_that_a_stop_string_cut_off_is_incomplete(self, server: Running) -> None:
        server.shows(HERMES)
        server.answers(IN_TAGS)
        (call,) = whole(server, tools=[TOOL], stop=["Br"])["output"]
        assert (call["status"], call["arguments"]) == ("incomplete", '{"city": "')
        (call,) = whole(server, tools=[TOOL], stop=["</tool_call>"])["output"]
        assert (call["status"], call["arguments"]) == ("completed", FUNCTION["arguments"])

    @pytest.mark.parametrize(
        ("text", "asks", "statuses"),
        [("It rains.", {}, ["incomplete"]), (f"Well.\n{IN_TAGS}", {"tools": [TOOL]}, ["completed", "incomplete"])],
    )
    def test_one_that_is_cut_off_is_incomplete(self, server: Running, text: str, asks: Any, statuses: list[str]) -> None:
        server.shows(HERMES)
        server.answers(text)
        asks = asks | {"max_output_tokens": len(text) - 15 if len(statuses) > 1 else 3}
        answer, told = whole(server, **asks), events(server, **asks)
        assert answer["status"] == "incomplete" and answer["incomplete_details"] == {"reason": "max_output_tokens"}
        assert [item["status"] for item in answer["output"]] == statuses
        assert told[-1]["type"] == "response.incomplete" and plain(told[-1]["response"]) == plain(answer)

    def test_tokens_are_counted_as_a_chat_counts_them(self, server: Running) -> None:
        ours, theirs = whole(server)["usage"], server.chat().json()["usage"]
        assert (ours["input_tokens"], ours["output_tokens"], ours["total_tokens"]) == (
            theirs["prompt_tokens"], theirs["completion_tokens"], theirs["total_tokens"])  # fmt: skip
        assert ours["input_tokens_details"]["cached_tokens"] == theirs["prompt_tokens_details"]["cached_tokens"]
        assert events(server)[-1]["response"]["usage"] == ours

    def test_tokens_of_reasoning_are_counted(self, server: Running) -> None:
        for text, asks, counted in (
            ("<think>abc</think>Yes.", {}, 4),
            ("<think>abc</think>Yes.", {"max_output_tokens": 3}, 3),
            ("<think>abc</think>Yes.", {"stop": ["c"]}, 4),
            ("Yes. <think>abc</think>", {}, 0),
        ):
            thinks(server, text)
            assert whole(server, **asks)["usage"]["output_tokens_details"] == {"reasoning_tokens": counted}, (text, asks)

    def test_tools_have_the_grammar_that_a_chat_has(self, server: Running) -> None:
        server.shows(HERMES)
        asks: list[tuple[Any, Any]] = [
            ({}, {}),
            ({"tool_choice": "required", "parallel_tool_calls": False},) * 2,
            ({"tool_choice": NAMED_HERE}, {"tool_choice": NAMED}),
        ]
        for ours, theirs in asks:
            answer = whole(server, tools=[TOOL], **ours)
            assert answer["tools"] == [TOOL] and answer["tool_choice"] == ours.get("tool_choice", "auto")
            assert answer["parallel_tool_calls"] == ours.get("parallel_tool_calls", True)
            assert server.chat(tools=[WEATHER], **theirs).status_code == 200
            first, second = server.generates[-2:]
            assert first.grammar and (first.grammar, first.gate, first.prompt) == (second.grammar, second.gate, second.prompt)

    def test_text_may_follow_a_schema(self, server: Running) -> None:
        class City(BaseModel):
            name: str

        server.answers('{"name":"Brest"}')
        answer = server.openai.responses.parse(model="tiny", input="hello", text_format=City)
        assert answer.output_parsed == City(name="Brest")
        schema = answer.text.format.model_dump(by_alias=True)["schema"]
        for ours, theirs in (
            ({"type": "json_schema", "name": "City", "schema": schema},
             {"type": "json_schema", "json_schema": {"name": "City", "schema": schema}}),
            ({"type": "json_object"},) * 2,
            ({"type": "text"},) * 2,
        ):  # fmt: skip
            assert whole(server, text={"format": ours})["text"] == {"format": ours}
            assert server.chat(response_format=theirs).status_code == 200
            assert server.generates[-1].grammar == server.generates[-2].grammar
            assert bool(server.generates[-1].grammar) == (ours != {"type": "text"})

    def test_the_client_reads_a_stream(self, server: Running) -> None:
        server.shows(HERMES)
        server.answers(f"Well.\n{IN_TAGS}")
        with server.openai.responses.stream(model="tiny", input="hello", tools=[TOOL]) as stream:
            deltas = [event.delta for event in stream if event.type == "response.output_text.delta"]
            answer = stream.get_final_response()
        assert "".join(deltas) == answer.output_text == "Well."
        assert [item.parsed_arguments for item in answer.output if item.type == "function_call"] == [{"city": "Brest"}]

    def test_what_it_repeats_of_a_request_can_always_be_written(self, server: Running) -> None:
        strange: Any = TOOL | {"strict": None, "parameters": {"default": float("nan"), "title": "\ud800"}}
        asks: Any = {"metadata": {"half\ud800": "\udc00"}, "tools": [strange], "tool_choice": "none"}
        for answer in (whole(server, **asks), events(server, **asks)[-1]["response"]):
            assert answer["metadata"] == {"half?": "?"}
            assert answer["tools"][0]["parameters"] == {"default": None, "title": "?"}


class TestFailures:
    def test_an_error_after_the_start_is_an_event(self, server: Running) -> None:
        for asks, said in (({"seed": FAIL_SEED}, "fail"), ({"seed": SILENT_SEED, "timeout": 0.1}, "0.1 s")):
            last = events(server, **asks)[-1]
            assert last["type"] == "response.failed" and last["response"]["status"] == "failed"
            assert last["response"]["error"]["code"] == "server_error" and said in last["response"]["error"]["message"]
        assert server.post(RESPONSES, {"input": "hello", "seed": FAIL_SEED}).status_code == 500

    def test_a_client_that_leaves_ends_its_request(self, server: Running) -> None:
        server.never_ends()
        stream = server.openai.responses.create(model="tiny", input="hello", stream=True)
        for event in stream:
            if event.type == "response.output_text.delta":
                break
        stream.close()
        assert eventually(lambda: server.sent.request_id in server.engine.aborted())

    def test_another_model_is_not_found(self, server: Running) -> None:
        with pytest.raises(openai.NotFoundError, match="'other'"):
            server.openai.responses.create(model="other", input="hello")

    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ({"input": None}, "input", "a list of items"),
            ({"input": []}, "input", "1 item"),
            ({"input": "a" * 5000}, "input", "tokens"),
            ({"input": "\ud800"}, "input", "half of a surrogate pair"),
            ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "input.0.type", "'item_reference'"),
            ({"input": [{"type": "computer_call"}]}, "input.0", "'function_call_output'"),
            ({"input": [{"role": "user", "content": [{"type": "input_image"}]}]}, "input.0.content", "input_text"),
            ({"input": [{"role": "tool", "content": "x"}]}, "input.0.role", "'developer'"),
            ({"input": [OUTPUT | {"output": None}]}, "input.0.output", "Missing required parameter: 'input.0.output'"),
            ({"input": [CALLED | {"made_up": 1}]}, "input.0.made_up", "'made_up'"),
            ({"store": True}, "store", "send false"),
            ({"background": True}, "background", "send false"),
            ({"previous_response_id": "resp_1"}, "previous_response_id", 'send the turns before it in "input"'),
            ({"conversation": "conv_1"}, "conversation", "leave it out"),
            ({"reasoning": {"effort": "high"}}, "reasoning.effort", "leave it out"),
            ({"reasoning": {"summary": "auto"}}, "reasoning.summary", "not supported by this server; leave it out"),
            ({"truncation": "auto"}, "truncation", '"disabled"'),
            ({"include": ["message.output_text.logprobs"]}, "include", "[]"),
            ({"max_tokens": 5}, "max_tokens", "send max_output_tokens."),
            ({"messages": HELLO}, "messages", "send input."),
            ({"max_output_tokens": 0}, "max_output_tokens", "1"),
            ({"max_output_tokens": 5000}, "max_output_tokens", "lower max_output_tokens to"),
            ({"temperature": 3}, "temperature", "2"),
            ({"tools": [{"type": "web_search", "search_context_size": "low"}]}, "tools.0.type", '"function"'),
            ({"tools": [WEATHER]}, "tools.0", 'send {"type": "function", "name": ...}.'),
            ({"tools": [TOOL | {"name": "a b"}]}, "tools.0.name", "'a b'"),
            ({"tools": [TOOL] * 129}, "tools", "128"),
            ({"tools": [TOOL, BAD_TOOL], "tool_choice": "required"}, "tools.1.parameters", "strange"),
            ({"tools": [TOOL], "tool_choice": {"type": "function", "name": "f"}}, "tool_choice", "get_weather"),
            ({"tools": [TOOL], "tool_choice": {"type": "web_search"}}, "tool_choice", '{"type": "function", "name": ...}'),
            ({"tool_choice": "required"}, "tool_choice", "send tools"),
            ({"text": {"format": {"type": "json_schema", "name": "x"}}}, "text.format.schema", "'text.format.schema'"),
            ({"text": {"format": {"type": "json_schema", "schema": {"type": "strange"}}}}, "text.format.schema", "strange"),
            ({"text": {"format": {"type": "text", "schema": {}}}}, "text.format", "json_schema"),
            ({"text": {"format": {"type": "json_object"}}, "ignore_eos": True}, "ignore_eos", "or text.format"),
            ({"text": {"verbosity": "low"}}, "text", '"medium"'),
        ],
    )  # fmt: skip
    def test_what_is_not_served_is_refused_by_name(self, server: Running, body: dict[str, Any], param: str, said: str) -> None:
        reply = server.post(RESPONSES, {"input": "hello", **body})
        error = reply.json()["error"]
        assert reply.status_code == 400 and not server.generates
        assert error["param"].startswith(param) and said in error["message"], error
        for name in ("messages", "response_format", "max_completion_tokens", ".function."):
            assert name in body or name not in error["message"] + (error["code"] or ""), error
