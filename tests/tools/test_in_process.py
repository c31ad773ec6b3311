"""Tools in `LLM.chat`: outputs have the calls that the same request over HTTP gets."""

import json
from collections.abc import Iterator
from typing import Any

import pytest

from tests.engine.conftest import tiny_model
from tests.server.tiny import byte_tokenizer
from vmmkv import MIB
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.protocol import Gate, Generate

ASK: Any = [{"role": "user", "content": "Light?"}]
LAMP: Any = {
    "type": "function",
    "function": {
        "name": "set_lamp",
        "parameters": {"type": "object", "properties": {"on": {"type": "boolean"}}, "required": ["on"]},
    },
}
PARAMS = SamplingParams(max_tokens=100, seed=1)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    path = tmp_path_factory.mktemp("models") / "tiny"
    tiny_model(vocab_size=258, eos_token_id=257).save_pretrained(path)
    byte_tokenizer().save_pretrained(path)
    with LLM(path, device="cpu", max_num_seqs=4, kv_budget_bytes=64 * MIB, max_tokens=2048) as one:
        yield one


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "set_lamp"}}])
def test_outputs_have_the_calls_that_they_must(llm: LLM, choice: Any) -> None:
    conversations: Any = [ASK, [*ASK, {"role": "assistant", "content": "Which?"}, {"role": "user", "content": "All."}]]
    answers = llm.chat(conversations, PARAMS, tools=[LAMP], tool_choice=choice, parallel_tool_calls=False)
    for answer in answers:
        (output,) = answer.outputs
        (call,) = output.tool_calls
        assert call.name == "set_lamp" and json.loads(call.arguments).keys() == {"on"} and call.id.startswith("call_")
        assert (output.text, output.reasoning, output.finish_reason) == ("", None, "tool_calls")
        result = {"role": "tool", "tool_call_id": call.id, "content": "done"}
        asked = {"id": call.id, "function": {"name": call.name, "arguments": call.arguments}}
        assert llm.chat([*ASK, {"role": "assistant", "tool_calls": [asked]}, result], PARAMS)[0].error is None


def test_calls_that_the_model_makes_by_itself_follow_their_schema(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, sent = llm.loaded.engine, []
    receive = engine.receive
    monkeypatch.setattr(engine, "receive", lambda message: (sent.append(message), receive(message)))
    unserved: Any = {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "uniqueItems": True, "not": {}}},
    }
    assert llm.chat(ASK, PARAMS, tools=[LAMP])[0].error is None
    assert llm.chat(ASK, PARAMS, tools=[LAMP, unserved])[0].error is None
    (first,), (second,) = ([each for each in sent if isinstance(each, Generate)][at : at + 1] for at in (0, 1))
    assert first.grammar and first.gate == Gate(triggers=('{"name": "set_lamp"',), is_first=True)
    assert not second.grammar and second.gate is None
    unserved["function"]["strict"] = True
    with pytest.raises(ValueError, match=r"tools.1.function.parameters: "):
        llm.chat(ASK, PARAMS, tools=[LAMP, unserved])


def test_a_free_answer_is_text(llm: LLM) -> None:
    for options in ({}, {"tools": []}, {"tools": [LAMP], "tool_choice": "none"}):
        (output,) = llm.chat(ASK, PARAMS, **options)[0].outputs
        assert not output.tool_calls and output.text == llm.chat(ASK, PARAMS)[0].outputs[0].text


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ({"tools": [LAMP], "tool_choice": "any"}, 'tool_choice: it must be "none", "auto", "required"'),
        ({"tools": [], "tool_choice": "required"}, "tool_choice: there are no tools to call"),
        ({"tools": [LAMP, LAMP]}, "tools.1.function.name: 'set_lamp' is the name of another tool"),
        ({"tools": ["set_lamp"]}, "tools.0: it must be {"),
        ({"tools": [{"type": "function", "function": {"name": "f", "description": 5}}]}, "tools.0.function.description"),
        (
            {"tools": [{"type": "function", "function": {"name": "f", "paramters": {}}}]},
            "tools.0.function: 'paramters' is none of",
        ),
        ({"tools": [{"type": "function", "function": {"name": "f", "parameters": 5}}]}, "tools.0.function.parameters"),
    ],
)
def test_tools_that_cannot_be_served_are_refused_by_their_place(llm: LLM, options: Any, said: str) -> None:
    with pytest.raises(ValueError) as refused:
        llm.chat(ASK, PARAMS, **options)
    assert said in str(refused.value)


def test_structured_outputs_are_for_answers_without_tools(llm: LLM) -> None:
    params = SamplingParams(structured_outputs={"choice": ["a", "b"]})
    with pytest.raises(ValueError, match="leave one of them out"):
        llm.chat(ASK, params, tools=[LAMP])
