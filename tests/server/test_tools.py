"""Tools and reasoning over HTTP: what the model is shown, what its answer must follow, and how that is read."""

import json
from typing import Any

import pytest

from tests.server.support import CHAT, HELLO, Running
from tests.server.tiny import TEMPLATE, byte_tokenizer
from tests.structured_output import in_worker
from tests.tools.templates import CALLS_OF, PLAIN, STRANGE, template, written
from vmmkv_server.protocol import Gate
from vmmkv_server.structured_output import compiler as compiling
from vmmkv_server.structured_output.matcher import DIGEST_BYTES
from vmmkv_server.tokenizer import Tokenizer
from vmmkv_server.tools.calls import Toolset
from vmmkv_server.tools.forms import form_of

WEATHER: Any = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "The weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
        "strict": True,
    },
}
EVERY = [template(written(text)) for _, text, _ in CALLS_OF]
"""A template of each form, and some of unknown ones."""
HERMES = EVERY[next(index for index, (form, _, _) in enumerate(CALLS_OF) if form == "hermes")]
CLOCK: Any = {"type": "function", "function": {"name": "get_time"}}
NAMED: Any = {"type": "function", "function": {"name": "get_weather"}}
UNSERVED: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "object", "not": {"type": "strange"}}}}
OF_TEXT: Any = {"type": "function", "function": {"name": "f", "parameters": {"type": "string"}}}
STRANGE_FORMAT: Any = {"type": "json_schema", "json_schema": {"schema": {"type": "strange"}}}
CALL = '{"name": "get_weather", "arguments": {"city": "Brest"}}'
IN_TAGS = f"<tool_call>\n{CALL}\n</tool_call>"


@pytest.fixture
def server(with_grammars: Running) -> Running:
    return with_grammars


def asked(server: Running) -> str:
    """The last prompt that the engine got, as text."""
    return server.tokenizer.text_of(server.generates[-1].prompt, skip_special_tokens=False)


def thinks(server: Running, text: str) -> None:
    """Have it answer so, from now on, with one token each for the begin and the end of reasoning."""
    tokenizer = byte_tokenizer()
    tokenizer.add_tokens(["<think>", "</think>"])
    tokenizer.chat_template = THINKING
    server.service.tokenizer = Tokenizer(tokenizer)
    ids = tokenizer.backend_tokenizer.encode(text).ids
    server.engine.answer = lambda _: ids


def streamed(server: Running, **body: Any) -> tuple[dict[str, Any], str | None]:
    """The message that a client makes of a stream's deltas, and the reason of its end."""
    message: dict[str, Any] = {"content": None, "reasoning": None, "tool_calls": None}
    reasons = []
    stream = server.openai.chat.completions.create(**({"model": "tiny", "messages": HELLO, "stream": True} | body))
    for chunk in stream:
        (choice,) = chunk.choices
        delta = choice.delta.model_dump()
        reasons += [choice.finish_reason] if choice.finish_reason else []
        for name in ("content", "reasoning"):
            if delta.get(name):
                message[name] = (message[name] or "") + delta[name]
        assert delta.get("reasoning") == delta.get("reasoning_content")
        for call in delta["tool_calls"] or ():
            calls = message["tool_calls"] = message["tool_calls"] or []
            if call["id"] is not None:
                assert call["index"] == len(calls) and call["type"] == "function"
                calls.append({"name": call["function"]["name"], "arguments": ""})
            else:
                assert call["function"]["name"] is None
            calls[call["index"]]["arguments"] += call["function"]["arguments"]
    (reason,) = reasons
    return message, reason


def whole(server: Running, **body: Any) -> tuple[dict[str, Any], str | None]:
    """The same of an answer that comes at once."""
    reply = server.chat(**body)
    assert reply.status_code == 200, reply.text
    (choice,) = reply.json()["choices"]
    message = choice["message"]
    calls = message.get("tool_calls")
    if calls is not None:
        assert all(call.keys() == {"id", "type", "function"} for call in calls)
        assert len({call["id"] for call in calls}) == len(calls) and all(len(call["id"]) == 29 for call in calls)
    return {
        "content": message["content"],
        "reasoning": message.get("reasoning_content"),
        "tool_calls": None if calls is None else [call["function"] for call in calls],
    }, choice["finish_reason"]


def called(*names: str, content: str | None = None, reasoning: str | None = None) -> dict[str, Any]:
    calls = [{"name": name, "arguments": '{"city": "Brest"}'} for name in names]
    return {"content": content, "reasoning": reasoning, "tool_calls": calls or None}


class TestCalls:
    @pytest.mark.parametrize("choice", ["required", NAMED])
    def test_an_answer_that_must_call_has_a_grammar_and_becomes_a_call(self, server: Running, choice: Any) -> None:
        server.answers(CALL)
        for answer in (whole, streamed):
            assert answer(server, tools=[CLOCK, WEATHER], tool_choice=choice) == (called("get_weather"), "tool_calls")
            assert server.generates[-1].grammar[DIGEST_BYTES:].startswith(b"{")

    @pytest.mark.parametrize(
        ("text", "content", "names"),
        [
            (IN_TAGS, None, ["get_weather"]),
            (f"{IN_TAGS}\n{IN_TAGS}", None, ["get_weather", "get_weather"]),
            (f"Let me see.\n{IN_TAGS}", "Let me see.", ["get_weather"]),
            ("It rains.", "It rains.", []),
            (IN_TAGS.replace("get_weather", "other"), IN_TAGS.replace("get_weather", "other"), []),
        ],
    )
    def test_an_answer_is_text_or_calls_as_the_model_decides(
        self, server: Running, text: str, content: str | None, names: list[str]
    ) -> None:
        server.shows(HERMES)
        server.answers(text)
        wanted = called(*names, content=content), "tool_calls" if names else "stop"
        for answer in (whole, streamed):
            assert answer(server, tools=[WEATHER]) == wanted

    def test_a_call_that_is_cut_off_is_a_part_of_one(self, server: Running) -> None:
        server.shows(HERMES)
        server.answers(IN_TAGS)
        for answer in (whole, streamed):
            message, reason = answer(server, tools=[WEATHER], max_tokens=len(IN_TAGS) - 20)
            assert reason == "length" and message["tool_calls"][0]["arguments"].startswith('{"city": "')

    @pytest.mark.parametrize(
        ("stop", "arguments", "reason"),
        [
            ("Br", '{"city": "', "stop"),
            ("</tool_call>", '{"city": "Brest"}', "tool_calls"),
            ("Next", '{"city": "Brest"}', "tool_calls"),
        ],
    )
    def test_a_stop_string_within_a_call_leaves_a_part_of_one(
        self, server: Running, stop: str, arguments: str, reason: str
    ) -> None:
        """Clients make the calls of an answer that ended with `tool_calls`."""
        server.shows(HERMES)
        server.answers(f"{IN_TAGS}\nNext {IN_TAGS}")
        for answer in (whole, streamed):
            wanted = {"content": None, "reasoning": None, "tool_calls": [{"name": "get_weather", "arguments": arguments}]}
            assert answer(server, tools=[WEATHER], stop=[stop]) == (wanted, reason)

    def test_an_answer_that_is_cut_off_before_its_call_is_empty(self, server: Running) -> None:
        for shown, text, asks in (
            (
                EVERY[next(index for index, (form, _, _) in enumerate(CALLS_OF) if form == "mistral")],
                "[",
                {"tool_choice": "required"},
            ),
            (HERMES, "<tool_call>\n{", {"tool_choice": "required"}),
            (HERMES, "<tool_call>\n{", {}),
        ):
            server.shows(shown)
            server.answers(text + "x")
            message, reason = whole(server, tools=[WEATHER], max_tokens=len(text), **asks)
            assert (message["content"] or "", message["tool_calls"], reason) == ("", None, "length")
            message, _ = streamed(server, tools=[WEATHER], max_tokens=len(text), **asks)
            assert not message["content"]

    def test_each_choice_has_its_own_calls(self, server: Running) -> None:
        server.answers(CALL)
        choices = server.chat(tools=[WEATHER], tool_choice="required", n=3).json()["choices"]
        ids = {choice["message"]["tool_calls"][0]["id"] for choice in choices}
        assert len(ids) == 3 and all(choice["finish_reason"] == "tool_calls" for choice in choices)

    @pytest.mark.parametrize("stream", [False, True])
    @pytest.mark.parametrize(
        ("text", "choice"), [(CALL, "required"), (f"It\n{IN_TAGS}\n{IN_TAGS}\nmay <tool_call> rain.\n", "auto")]
    )
    def test_each_token_of_a_call_has_its_log_probability(self, server: Running, text: str, choice: str, stream: bool) -> None:
        if choice == "auto":
            server.shows(HERMES)
        server.answers(text)
        asks: Any = {"model": "tiny", "messages": HELLO, "tools": [WEATHER], "tool_choice": choice, "logprobs": True}
        reply: Any = server.openai.chat.completions.create(**asks, stream=stream)
        scored = [
            token.token
            for chunk in (reply if stream else [reply])
            for choice in chunk.choices
            if choice.logprobs
            for token in choice.logprobs.content
        ]
        assert "".join(scored) == text and bool(server.generates[-1].gate) == (choice == "auto")

    def test_a_request_without_tools_is_answered_as_it_is(self, server: Running) -> None:
        server.answers(IN_TAGS)
        server.shows(HERMES)
        for asks in ({}, {"tools": []}, {"tools": [WEATHER], "tool_choice": "none"}):
            reply = server.chat(**asks).json()["choices"][0]
            assert reply["message"] == {"role": "assistant", "content": IN_TAGS, "refusal": None}
            assert "get_weather" not in asked(server) and server.generates[-1].grammar == b""


class TestShowing:
    def test_a_template_shows_the_tools_or_a_plain_text_does(self, server: Running) -> None:
        for shown in (TEMPLATE, HERMES):
            server.shows(shown)
            assert server.chat(tools=[WEATHER, CLOCK]).status_code == 200
            assert all(part in asked(server) for part in ("get_weather", "The weather of a city.", "get_time", "hello"))
            tokens = server.post("/tokenize", {"messages": HELLO, "tools": [WEATHER, CLOCK]}).json()["tokens"]
            assert tokens == server.generates[-1].prompt

    @pytest.mark.parametrize("shown", [TEMPLATE, PLAIN, *(pytest.param(each, marks=pytest.mark.nightly) for each in EVERY)])
    @pytest.mark.parametrize("tools", [None, [WEATHER]])
    def test_a_conversation_with_calls_is_always_taken(self, server: Running, shown: str, tools: Any) -> None:
        server.shows(shown)
        calls = [
            {
                "id": f"call_{city}",
                "type": "function",
                "function": {"name": "get_weather", "arguments": json.dumps({"city": city})},
            }
            for city in ("Brest", "Nîmes")
        ]
        messages = [
            *HELLO,
            {"role": "assistant", "content": None, "tool_calls": calls, "refusal": None, "function_call": None},
            {"role": "tool", "tool_call_id": "call_Brest", "content": "drizzle"},
            {"role": "tool", "tool_call_id": "call_Nîmes", "content": [{"type": "text", "text": "mistral"}]},
            {"role": "user", "content": "and then?"},
        ]
        reply = server.chat(messages=messages, tools=tools, tool_choice="required" if tools else None)
        assert reply.status_code == 200, reply.text
        assert all(part in asked(server) for part in ("get_weather", "Brest", "Nîmes", "drizzle", "mistral", "and then?"))
        for broken in ("", "{", "[1]", '{"city": '):
            messages[1] = {"role": "assistant", "tool_calls": [{"function": {"name": "get_weather", "arguments": broken}}]}
            assert server.chat(messages=messages, tools=tools, tool_choice="required" if tools else None).status_code == 200


class TestRefusals:
    @pytest.mark.parametrize(
        ("body", "param", "said"),
        [
            ({"tools": [WEATHER], "tool_choice": {"type": "function", "function": {"name": "f"}}}, "tool_choice",
             "'f' is none of the tools, which are get_weather"),
            ({"tool_choice": "required"}, "tool_choice", "there are no tools to call"),
            ({"tools": [], "tool_choice": NAMED}, "tool_choice", "there are no tools to call"),
            ({"tools": [WEATHER], "tool_choice": "any"}, "tool_choice", '"required"'),
            ({"tools": [WEATHER, WEATHER]}, "tools.1.function.name", "give each its own"),
            ({"tools": [WEATHER] * 129}, "tools", "128"),
            ({"tools": [{"type": "function", "function": {"name": "a b"}}]}, "tools.0.function.name", "'a b'"),
            ({"tools": [{"type": "function", "function": {"name": "f", "made_up": 1}}]}, "tools.0.function", "'made_up'"),
            ({"tools": [{"type": "code"}]}, "tools.0.type", "function"),
            ({"tools": [{"type": "custom", "custom": {"name": "f"}}]}, "tools.0.type", 'only tools of type "function"'),
            ({"tools": [{"type": "function", "name": "f"}]}, "tools.0.name",
             'send {"type": "function", "function": {"name": ...}}.'),
            ({"tools": [OF_TEXT], "tool_choice": "required"}, "tools.0.function.parameters", "arguments are of type 'object'"),
            ({"tools": [CLOCK], "response_format": STRANGE_FORMAT},
             "response_format.json_schema.schema", "strange"),
            ({"tools": [CLOCK], "tool_choice": "required", "response_format": STRANGE_FORMAT},
             "response_format.json_schema.schema", "strange"),
            ({"tools": [WEATHER], "structured_outputs": {"regex": "a"}}, "structured_outputs", '"tool_choice": "none"'),
            ({"tools": [WEATHER], "tool_choice": "required", "use_beam_search": True}, "use_beam_search", "tool_choice"),
            ({"tools": [WEATHER], "tool_choice": "required", "ignore_eos": True}, "ignore_eos", "tool_choice"),
            ({"tools": [WEATHER], "min_tokens": 2}, "min_tokens", "or tools"),
            ({"tools": [WEATHER], "use_beam_search": True}, "use_beam_search", "or tools"),
            ({"functions": [{"name": "f"}]}, "functions", '"tools"'),
            ({"function_call": {"name": "f"}}, "function_call", '"tool_choice"'),
            ({"messages": [{"role": "assistant", "content": "", "function_call": {"name": "f", "arguments": ""}}]},
             "messages.0", '"tool_calls"'),
        ],
    )  # fmt: skip
    def test_it_is_named(self, server: Running, body: dict[str, Any], param: str, said: str) -> None:
        error = server.refuses(CHAT, **body)
        assert error["param"].startswith(param) and said in error["message"], error

    @pytest.mark.parametrize("asks", [{"tool_choice": "required"}, {}])
    def test_a_schema_that_is_not_served_names_its_tool(self, server: Running, asks: Any) -> None:
        server.shows(HERMES)
        error = server.refuses(CHAT, tools=[WEATHER, UNSERVED], **asks)
        assert error["param"] == "tools.1.function.parameters" and "tool 'f': /not has type" in error["message"], error

    def test_a_model_of_an_unknown_form_calls_only_where_it_must(self, server: Running) -> None:
        server.shows(STRANGE["its own form"])
        server.answers(CALL)
        assert "--tool-call-parser" in server.refuses(CHAT, tools=[WEATHER])["message"]
        assert whole(server, tools=[WEATHER], tool_choice="required")[0] == called("get_weather")
        assert "get_weather" in asked(server)


THINKING = """\
{%- for message in messages %}<|im_start|>{{ message.role }}
{{ message.content.split('</think>')[-1] }}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% if enable_thinking is defined and not enable_thinking %}<think>

</think>

{% endif %}{% endif %}"""


class TestGrammars:
    """Where an answer's grammar begins, and what it allows."""

    @pytest.mark.parametrize(
        ("name", "shown"), [(name, shown) for (name, *_), shown in zip(CALLS_OF, EVERY, strict=True) if name]
    )
    def test_calls_that_the_model_makes_by_itself_follow_it(self, server: Running, name: str, shown: str) -> None:
        server.shows(shown)
        assert server.chat(tools=[CLOCK, WEATHER]).status_code == 200
        sent, form = server.generates[-1], form_of(shown)
        assert form is not None and sent.grammar
        tools = Toolset.of([CLOCK, WEATHER])
        assert tools is not None
        assert sent.gate == Gate(
            triggers=form.triggers(tools),
            is_first=form.is_first,
            repeats=form.repeats(tools),
            in_code=form.in_code or form.is_first,
        )
        assert server.chat(tools=[CLOCK, WEATHER], tool_choice="required").status_code == 200
        assert server.generates[-1].gate is None

    def test_an_answer_ends_with_the_one_call_that_it_may_have(self, server: Running) -> None:
        for shown in EVERY:
            server.shows(shown)
            if (form := form_of(shown)) is not None:
                assert server.chat(tools=[CLOCK, WEATHER], parallel_tool_calls=False).status_code == 200
                gate = server.generates[-1].gate
                assert gate is not None and gate.triggers and not gate.repeats, form.name

    def test_it_begins_behind_the_reasoning(self, server: Running) -> None:
        server.shows(THINKING)
        server.answers(f"Well.\n</think>\n\n{CALL}")
        asks: list[Any] = [
            {"response_format": {"type": "json_object"}},
            {"tools": [WEATHER], "tool_choice": "required"},
            {"tools": [WEATHER]},
        ]
        for asking in asks:
            for answer in (whole, streamed):
                message, _ = answer(server, **asking)
                assert message["reasoning"] == "Well." and asked(server).endswith("<|im_start|>assistant\n<think>")
                gate = server.generates[-1].gate
                assert gate is not None and gate.behind == "</think>" and bool(gate.triggers) == (asking == asks[-1])
            reply = server.chat(**asking, chat_template_kwargs={"enable_thinking": False})
            gate = server.generates[-1].gate
            assert reply.status_code == 200 and asked(server).endswith("</think>\n\n")
            assert (gate is None) == (asking != asks[-1]) and (gate is None or not gate.behind)

    def test_text_beside_tools_may_have_a_form_of_its_own(self, server: Running) -> None:
        server.shows(HERMES)
        ports = {"type": "object", "properties": {"port": {"enum": ["Brest"]}}, "required": ["port"]}
        asks: Any = {"tools": [WEATHER], "response_format": {"type": "json_schema", "json_schema": {"schema": ports}}}
        for text, message, reason in (
            ('{"port": "Brest"}', called(content='{"port": "Brest"}'), "stop"),
            (IN_TAGS, called("get_weather"), "tool_calls"),
        ):
            server.answers(text)
            assert whole(server, **asks) == streamed(server, **asks) == (message, reason)
            sent = server.generates[-1]
            assert sent.grammar and sent.gate is None
        server.shows(EVERY[next(index for index, (form, _, _) in enumerate(CALLS_OF) if form == "mistral")])
        assert "special token" in server.refuses(CHAT, **asks)["message"]

    def test_calls_need_none_unless_their_tool_is_strict(self, server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
        """A schema may be served by no grammar, or be too large to compile. That is found out once."""
        server.shows(HERMES)
        server.answers(IN_TAGS)
        loose = {"type": "function", "function": WEATHER["function"] | {"strict": False}}
        large: Any = {"type": "function", "function": {"name": "large"}}
        monkeypatch.setattr(compiling, "compiled_by_worker", in_worker.refuse)
        for other in (UNSERVED, large):
            assert whole(server, tools=[loose, other]) == (called("get_weather"), "tool_calls")
            assert (server.generates[-1].grammar, server.generates[-1].gate) == (b"", None)
        monkeypatch.setattr(compiling, "compiled_by_worker", in_worker.sleep)
        assert whole(server, tools=[loose, large]) == (called("get_weather"), "tool_calls")
        assert server.generates[-1].grammar == b""
        large["function"]["strict"] = True
        error = server.refuses(CHAT, tools=[loose, large])
        assert (error["param"], error["code"]) == ("tools", "invalid_grammar") and "too large" in error["message"]


class TestReasoning:
    @pytest.mark.parametrize("begin", ["<think>\n", "<think>"])
    def test_it_is_apart_from_the_answer(self, server: Running, begin: str) -> None:
        server.shows(THINKING)
        server.answers(f"{begin}It may\nrain.\n</think>\n\nYes.")
        wanted = {"content": "Yes.", "reasoning": "It may\nrain.", "tool_calls": None}
        for answer in (whole, streamed):
            assert answer(server) == (wanted, "stop")

    def test_its_tokens_are_counted(self, server: Running) -> None:
        """As those before the token that ends it."""
        for text, asks, counted in (
            ("<think>abc</think>Yes.</think>", {}, 4),
            ("<think>abc</think>Yes.", {"logprobs": True, "n": 2}, 8),
            ("<think>abc", {}, 4),
            ("Yes. <think>abc</think>", {}, None),
            ("abc</think>{}", {"response_format": {"type": "json_object"}}, 3),
            ("<think>abc</think>Yes.", {"max_tokens": 3}, 3),
            ("<think>abc</think>Yes.", {"stop": ["c"]}, 4),
        ):
            thinks(server, text)
            usage = server.chat(**asks).json()["usage"]
            assert usage.get("completion_tokens_details") == (counted and {"reasoning_tokens": counted}), text
            if asks.keys() <= {"max_tokens", "stop"}:
                asked = {"model": "tiny", "messages": HELLO, "stream_options": {"include_usage": True}, **asks}
                *_, last = server.openai.chat.completions.create(stream=True, **asked)
                details = last.usage.completion_tokens_details
                assert (details and details.reasoning_tokens) == counted

    def test_a_prompt_that_ends_within_it_has_begun_it(self, server: Running) -> None:
        server.shows(THINKING.replace("{% endif %}{% endif %}", "{% endif %}<think>\n{% endif %}"))
        for text, content in (("Well.\n</think>\nYes.", "Yes."), ("Well.", None), ("<think>\nWell.</think>", None)):
            server.answers(text)
            for answer in (whole, streamed):
                assert answer(server) == ({"content": content, "reasoning": "Well.", "tool_calls": None}, "stop")

    def test_an_answer_that_is_nothing_but_markers_is_empty(self, server: Running) -> None:
        server.shows(THINKING)
        for text in ("<think>", "<think>\n\n</think>\n\n"):
            server.answers(text)
            assert server.chat().json()["choices"][0]["message"] == {"role": "assistant", "content": "", "refusal": None}

    def test_a_model_that_is_told_not_to_answers_at_once(self, server: Running) -> None:
        server.shows(THINKING)
        server.answers("Yes. </think>")
        for asks in ({"chat_template_kwargs": {"enable_thinking": False}}, {"reasoning_effort": "none"}):
            reply = server.chat(**asks).json()["choices"][0]
            assert reply["message"] == {"role": "assistant", "content": "Yes. </think>", "refusal": None}
            assert asked(server).endswith("</think>\n\n")
        error = server.refuses(CHAT, reasoning_effort="high")
        assert error["param"] == "reasoning_effort" and "leave it out" in error["message"]

    def test_calls_come_behind_it(self, server: Running) -> None:
        server.shows(THINKING)
        server.answers(f"<think>Which city?</think>\n{CALL}")
        for answer in (whole, streamed):
            assert answer(server, tools=[WEATHER]) == (called("get_weather", reasoning="Which city?"), "tool_calls")
