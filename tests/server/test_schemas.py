"""Laws of request bodies as such: null, and values that ask for nothing, in every one of them."""

from typing import Any

import pytest
from pydantic import ValidationError

from tests.server.support import HELLO
from vmmkv_server.http.responses_api import (
    FlatTool,
    InputCall,
    InputItem,
    InputMessage,
    InputReasoning,
    InputResult,
    ReasoningOptions,
    ResponsesRequest,
    TextFormat,
    TextOptions,
)
from vmmkv_server.http.schemas import (
    ChatMessage,
    ChatRequest,
    CompletionRequest,
    DetokenizeRequest,
    GenerationRequest,
    JsonSchema,
    ResetRequest,
    ResizeRequest,
    ResponseFormat,
    StreamOptions,
    StructuredOutputs,
    TokenizeRequest,
)
from vmmkv_server.http.tools import (
    CalledFunction,
    FunctionDefinition,
    FunctionTool,
    ToolCall,
    ToolChoiceFields,
    ToolFields,
    TurnFields,
)
from vmmkv_server.http.wire import WireRequest

LEAST: dict[type[WireRequest], dict[str, Any]] = {
    CalledFunction: {"name": "f"},
    ChatMessage: HELLO[0],
    ChatRequest: {"messages": HELLO},
    CompletionRequest: {"prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    FlatTool: {"type": "function", "name": "f"},
    FunctionDefinition: {"name": "f"},
    FunctionTool: {"type": "function", "function": {"name": "f"}},
    InputCall: {"type": "function_call", "call_id": "c", "name": "f", "arguments": "{}"},
    InputItem: {},
    InputMessage: {"type": "message", **HELLO[0]},
    InputReasoning: {"type": "reasoning"},
    InputResult: {"type": "function_call_output", "call_id": "c", "output": "x"},
    JsonSchema: {"schema": {"type": "null"}},
    ResetRequest: {},
    ResizeRequest: {"budget_bytes": 1},
    ResponseFormat: {"type": "text"},
    ReasoningOptions: {},
    ResponsesRequest: {"input": HELLO},
    StreamOptions: {},
    StructuredOutputs: {"choice": ["a", "b"]},
    TextFormat: {"type": "text"},
    TextOptions: {},
    TokenizeRequest: {"prompt": "a"},
    ToolCall: {"function": {"name": "f"}},
    ToolChoiceFields: {},
    ToolFields: {},
    TurnFields: {},
}
"""Each kind of body, with no more than it needs."""


def all_of(form: type[WireRequest]) -> set[type[WireRequest]]:
    return {form}.union(*map(all_of, form.__subclasses__()))


def test_every_kind_of_body_is_tested_here() -> None:
    bases = {*GenerationRequest.__mro__, *ResponsesRequest.__mro__[1:]}
    assert all_of(WireRequest) - bases == LEAST.keys()


@pytest.mark.parametrize("form", LEAST)
def test_null_is_the_default_of_all_that_may_be_left_out(form: type[WireRequest]) -> None:
    least, schema = LEAST[form], form.model_json_schema()
    nulls = dict.fromkeys([*schema.get("properties", ()), *form.unserved]) | least
    assert form.model_validate(nulls) == form.model_validate(least)
    for name, field in schema.get("properties", {}).items():
        assert (name in schema.get("required", ())) == ({"type": "null"} not in field.get("anyOf", ())), name


def refuses(form: type[WireRequest], name: str, value: Any) -> bool:
    """Whether a field refuses a value, whatever others say of it."""
    try:
        form.model_validate(LEAST[form] | {name: value})
    except ValidationError as error:
        return any(each["loc"][:1] == (name,) for each in error.errors())
    return False


@pytest.mark.parametrize("form", [ChatRequest, CompletionRequest, DetokenizeRequest, ResizeRequest, ResponsesRequest])
def test_a_whole_number_may_be_written_as_a_float_and_no_bool_is_one(form: type[WireRequest]) -> None:
    """Languages with one kind of number write 3.0."""
    checked = set()
    for name, field in form.model_json_schema()["properties"].items():
        parts = [each for part in (field, *field.get("anyOf", ())) for each in (part, *part.get("anyOf", ()))]
        types = {each.get("type") for each in parts}
        lists = [each["items"] for each in parts if each.get("type") == "array"]
        for each, form_of in [
            *((part, lambda value: value) for part in parts),
            *((part, lambda value: [value]) for part in lists),
        ]:
            if each.get("type") == "integer":
                checked.add(name)
                assert not refuses(form, name, form_of(float(max(1, each.get("minimum", 1))))), name
                assert refuses(form, name, form_of(1.5)), name
                assert refuses(form, name, form_of(True)) or "boolean" in types, name
    assert checked >= {
        ChatRequest: {"max_tokens", "n", "seed", "priority", "stop_token_ids", "top_k", "top_logprobs", "beam_width"},
        CompletionRequest: {"prompt", "logprobs", "min_tokens"},
        DetokenizeRequest: {"tokens"},
        ResizeRequest: {"budget_bytes"},
        ResponsesRequest: {"max_output_tokens", "seed", "priority"},
    }[form]  # fmt: skip


def test_floats_that_are_whole_are_token_ids_and_options_of_a_policy() -> None:
    policy = {"type": "tova", "budget": 9, "every": 3}
    asked = CompletionRequest(model=None, prompt=[1.0, 2], kv_policy=policy | {"every": 3.0}, stop_token_ids=[7.0])  # type: ignore[arg-type]
    assert asked.prompt == [[1, 2]] and asked.params.kv_policy == policy and asked.params.stop_token_ids == (7,)
    assert CompletionRequest(prompt=[[1.0], [2]]).prompt == [[1], [2]]  # type: ignore[arg-type]


@pytest.mark.parametrize(("given", "wanted"), [(True, 1), (False, None), (None, None), (0, 0), (2.0, 2)])
def test_true_asks_a_completion_for_one_likeliest_token_at_each_place(given: Any, wanted: int | None) -> None:
    assert CompletionRequest.model_validate({"prompt": "a", "logprobs": given}).params.logprobs == wanted


def test_null_is_the_default_of_a_policys_options() -> None:
    policy = {"type": "tova", "budget": 9}
    options = dict.fromkeys(("every", "positions", "share_prompt"))
    plain, nulls = (
        CompletionRequest(model="tiny", prompt="a", kv_policy=given).params.kv_policy for given in (policy, policy | options)
    )
    assert plain == nulls


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("chat_template_kwargs", {"enable_thinking": None}),
        ("logit_bias", {"5": None}),
        ("mm_processor_kwargs", {"fps": None}),
        ("response_format", {"type": "text", "json_schema": None}),
        ("stream_options", {"include_usage": None, "continuous_usage_stats": None, "include_obfuscation": None}),
        ("vllm_xargs", {"a": None}),
    ],
)
def test_null_is_the_default_of_what_an_object_holds(name: str, value: Any) -> None:
    plain, nulls = (ChatRequest.model_validate(LEAST[ChatRequest] | given) for given in ({}, {name: value}))
    assert (nulls.params, nulls.stream_counts, nulls.grammar_param) == (plain.params, plain.stream_counts, "")
    assert not nulls.chat_template_kwargs


def test_options_of_a_stream_that_ask_for_nothing_go_with_any_answer() -> None:
    for asked in ({}, {"include_usage": False}):
        assert CompletionRequest.model_validate({"prompt": "a", "stream_options": asked})
    with pytest.raises(ValidationError, match="only for stream=true"):
        CompletionRequest.model_validate({"prompt": "a", "stream_options": {"include_usage": True}})


@pytest.mark.parametrize(
    ("name", "values"),
    [("add_special_tokens", [True, 1, 0]), ("add_generation_prompt", [False]), ("echo", [True]), ("tools", [[{}]])],
)
def test_a_chat_that_asks_for_more_than_nothing_is_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            ChatRequest.model_validate(LEAST[ChatRequest] | {name: value})


@pytest.mark.parametrize("tools", [{}, {"tools": []}, {"tools": None}, {"functions": []}])
def test_a_choice_among_no_tools_asks_for_nothing(tools: dict[str, Any]) -> None:
    for choice in ("auto", "none", None):
        asked = ChatRequest.model_validate(LEAST[ChatRequest] | tools | {"tool_choice": choice, "function_call": choice})
        assert asked.toolset is None


@pytest.mark.parametrize("form", [ChatRequest, TokenizeRequest])
def test_a_conversation_is_asked_for_alike_wherever_it_goes(form: type[WireRequest]) -> None:
    neutral = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "tools": []}
    assert form.model_validate({"model": "tiny", "messages": HELLO, **neutral})
    for name, value in (*((name, not value) for name, value in neutral.items() if name != "tools"), ("chat_template", "x")):
        with pytest.raises(ValueError, match=name):
            form.model_validate({"model": "tiny", "messages": HELLO, name: value})
