"""Laws of request bodies as such: null, and values that ask for nothing, in every one of them."""

from typing import Any

import pytest

from tests.server.support import HELLO
from vmmkv.server.http.schemas import (
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
    WireRequest,
)

LEAST: dict[type[WireRequest], dict[str, Any]] = {
    ChatMessage: HELLO[0],
    ChatRequest: {"model": "tiny", "messages": HELLO},
    CompletionRequest: {"model": "tiny", "prompt": "a"},
    DetokenizeRequest: {"tokens": [1]},
    JsonSchema: {"schema": {"type": "null"}},
    ResetRequest: {},
    ResizeRequest: {"budget_bytes": 1},
    ResponseFormat: {"type": "text"},
    StreamOptions: {},
    StructuredOutputs: {"choice": ["a", "b"]},
    TokenizeRequest: {"prompt": "a"},
}
"""Each kind of body, with no more than it needs."""


def all_of(form: type[WireRequest]) -> set[type[WireRequest]]:
    return {form}.union(*map(all_of, form.__subclasses__()))


def test_every_kind_of_body_is_tested_here() -> None:
    asked = {form for form in all_of(WireRequest) if form not in GenerationRequest.__mro__}
    assert asked == LEAST.keys()


@pytest.mark.parametrize("form", LEAST)
def test_null_is_the_default_of_all_that_may_be_left_out(form: type[WireRequest]) -> None:
    least, schema = LEAST[form], form.model_json_schema()
    nulls = dict.fromkeys([*schema.get("properties", ()), *form.unserved]) | least
    assert form.model_validate(nulls) == form.model_validate(least)
    for name, field in schema.get("properties", {}).items():
        assert (name in schema.get("required", ())) == ({"type": "null"} not in field.get("anyOf", ())), name


def test_null_is_the_default_of_a_policys_options() -> None:
    policy = {"type": "tova", "budget": 9}
    options = dict.fromkeys(("every", "positions", "share_prompt"))
    plain, nulls = (
        CompletionRequest(model="tiny", prompt="a", kv_policy=given).params.kv_policy for given in (policy, policy | options)
    )
    assert plain == nulls


@pytest.mark.parametrize(
    ("name", "values"),
    [("add_special_tokens", [True, 1, 0]), ("add_generation_prompt", [False]), ("echo", [True]), ("tools", [[{}]])],
)
def test_a_chat_that_asks_for_more_than_nothing_is_refused(name: str, values: list[Any]) -> None:
    for value in values:
        with pytest.raises(ValueError, match=name):
            ChatRequest.model_validate(LEAST[ChatRequest] | {name: value})


@pytest.mark.parametrize("form", [ChatRequest, TokenizeRequest])
def test_a_conversation_is_asked_for_alike_wherever_it_goes(form: type[WireRequest]) -> None:
    neutral = {"add_generation_prompt": True, "continue_final_message": False, "add_special_tokens": False, "tools": []}
    assert form.model_validate({"model": "tiny", "messages": HELLO, **neutral})
    for name, value in (*((name, not value) for name, value in neutral.items() if name != "tools"), ("chat_template", "x")):
        with pytest.raises(ValueError, match=name):
            form.model_validate({"model": "tiny", "messages": HELLO, name: value})
