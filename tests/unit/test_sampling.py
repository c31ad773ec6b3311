"""What may be asked of a generation, and how a refusal reads."""

import copy
import dataclasses
import inspect
import math
import pickle
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from vmmkv_server.http.schemas import ChatRequest, CompletionRequest
from vmmkv_server.sampling_params import ELSEWHERE, InvalidParam, SamplingParams
from vmmkv_server.structured_output.schema import of_choices


def test_the_defaults_ask_for_sixteen_tokens_of_the_model_as_it_is() -> None:
    params = SamplingParams()
    assert (params.max_tokens, params.temperature, params.top_p, params.top_k, params.min_p) == (16, 1.0, 1.0, 0, 0.0)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.0, 0.0, 1.0)
    assert (params.logit_bias, params.seed, params.n, params.stop, params.logprobs) == ({}, None, 1, (), None)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0},
        {"temperature": 1e-9, "top_p": 1e-9, "min_p": 1.0},
        {"top_k": 2**31 - 1, "max_tokens": 1},
        {"presence_penalty": -2.0, "frequency_penalty": 2, "repetition_penalty": 0.01},
        {"logit_bias": {0: -100.0, 50256: 100}},
        {"seed": -(2**63)},
        {"stop": ("\n", "###"), "stop_token_ids": (2, 0), "ignore_eos": True},
        {"logprobs": 0, "n": 128},
        {"min_tokens": 5, "max_tokens": 5},
        {"prompt_logprobs": 0, "max_tokens": 0},
    ],
)
def test_the_ends_of_the_ranges_are_inside(options: dict[str, Any]) -> None:
    params = SamplingParams(**options)
    assert all(getattr(params, name) == value for name, value in options.items())


@pytest.mark.parametrize(
    ("name", "value", "wanted"),
    [
        ("max_tokens", 0, "at least 1"),
        ("max_tokens", 1.0, "at least 1"),
        ("max_tokens", True, "at least 1"),
        ("min_tokens", -1, "0 to max_tokens, which is 16"),
        ("min_tokens", 17, "0 to max_tokens, which is 16"),
        ("prompt_logprobs", -1, "0 or more"),
        ("temperature", -0.1, "0 for the likeliest token"),
        ("temperature", math.nan, "0 for the likeliest token"),
        ("temperature", math.inf, "finite"),
        ("temperature", "1", "0 for the likeliest token"),
        ("top_p", 0.0, "above 0 and at most 1"),
        ("top_p", 1.1, "above 0 and at most 1"),
        ("top_k", -2, "0 to keep all tokens"),
        ("top_k", 2.5, "0 to keep all tokens"),
        ("min_p", -0.1, "to 1"),
        ("min_p", 1.1, "to 1"),
        ("presence_penalty", 2.5, "from -2 to 2"),
        ("frequency_penalty", math.nan, "from -2 to 2"),
        ("repetition_penalty", 0.0, "from 0.01 to 100"),
        ("logit_bias", [1], "a mapping from token ids"),
        ("logit_bias", {-1: 1.0}, "a token id"),
        ("logit_bias", {"1": 1.0}, "a token id"),
        ("seed", 2**63, "64 bits"),
        ("n", 0, "at least 1"),
        ("n", 129, "at most 128"),
        ("stop", "", "texts that are not empty"),
        ("stop", ("",), "texts that are not empty"),
        ("stop", [5], "texts that are not empty"),
        ("stop", 5, "a list of texts"),
        ("stop", b"x", "a list of texts"),
        ("stop", None, "a list of texts"),
        ("stop_token_ids", 2, "a list of token ids"),
        ("stop_token_ids", "2", "a list of token ids"),
        ("stop_token_ids", (-2,), "token ids, 0 or more"),
        ("stop_token_ids", [2.0], "token ids, 0 or more"),
        ("seed", np.float64(1), "64 bits"),
        ("ignore_eos", 1, "True or False"),
        ("logprobs", -1, "0 or more"),
        *(
            ("structured_outputs", asked, "one of json, regex, choice, grammar, json_object")
            for asked in ({}, {"json": {}, "regex": "a"}, "[0-9]", {"grammar": None, "json_object": False})
        ),
    ],
)
def test_a_refusal_names_the_option_and_what_it_may_be(name: str, value: Any, wanted: str) -> None:
    with pytest.raises(ValueError) as raised:
        SamplingParams(**{name: value})
    assert str(raised.value).startswith(f"{name} is ")
    assert wanted in str(raised.value)


@pytest.mark.parametrize(
    ("asked", "said"),
    [
        ({"json": Path}, r"\.json is a class; wanted a schema, such as MyModel\.model_json_schema\(\)$"),
        ({"json": 5}, r"\.json is 5; wanted a schema"),
        ({"json_object": "yes"}, r"\.json_object is 'yes'; wanted true"),
        ({"regex": "a", "whitespace_pattern": " "}, r"\.whitespace_pattern is ' ', which is not served: leave it out"),
        ({"regex": re.compile("a")}, r"\.regex is re\.compile\('a'\); wanted a text"),
        ({"choice": "yes"}, r"\.choice is 'yes'; wanted a list of texts"),
        ({"choice": ["yes", 1]}, r"\.choice is \['yes', 1\]; wanted a list of texts"),
        ({"grammar": 5}, r"\.grammar is 5; wanted a text in GBNF"),
        ({"jsn": {}}, r" has no option jsn; did you mean json\?$"),
        ({None: "a"}, r" has no option None; it has json, regex, choice, grammar, json_object$"),
    ],
)
def test_a_structure_is_refused_by_its_kind_and_what_that_may_be(asked: Any, said: str) -> None:
    with pytest.raises(InvalidParam, match="^structured_outputs" + said):
        SamplingParams(structured_outputs=asked)


DUMPED: dict[str, Any] = {
    **dict.fromkeys(("json", "regex", "grammar", "json_object", "whitespace_pattern", "structural_tag", "_backend")),
    **dict.fromkeys(("disable_fallback", "disable_any_whitespace", "disable_additional_properties"), False),
    "_backend_was_auto": False,
}
"""vLLM's StructuredOutputsParams by `dataclasses.asdict`, without the one that is given."""


def test_a_dump_of_vllms_structure_is_that_structure() -> None:
    assert SamplingParams(structured_outputs=DUMPED | {"choice": ["a"]}).structured_outputs == {"choice": ["a"]}
    body = {"prompt": "a", "structured_outputs": DUMPED | {"choice": ["a"], "json_object": False}}
    request = CompletionRequest.model_validate(body)
    assert request.grammar_param == "structured_outputs.choice" and request.grammar() == of_choices(["a"])
    with pytest.raises(ValueError, match="disable_additional_properties"):
        CompletionRequest.model_validate(body | {"structured_outputs": {"regex": "a", "disable_additional_properties": True}})


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("stop", "###", ("###",)),
        ("stop", ["a", "b"], ("a", "b")),
        ("stop_token_ids", [2, 0], (2, 0)),
        ("stop_token_ids", np.array([2, 0]), (2, 0)),
        ("top_k", -1, 0),
        ("max_tokens", np.int64(3), 3),
        ("temperature", np.float32(0.5), 0.5),
        ("temperature", 0, 0.0),
        ("seed", np.uint8(7), 7),
        ("logit_bias", {np.int32(5): np.float64(1)}, {5: 1.0}),
    ],
)
def test_what_means_the_same_is_kept_in_one_form(name: str, value: Any, kept: Any) -> None:
    found = getattr(SamplingParams(**{name: value}), name)
    assert repr(found) == repr(kept)


def test_what_is_changed_afterwards_is_not_changed_in_it() -> None:
    bias, stop = {5: 1.0}, ["a"]
    params = SamplingParams(logit_bias=bias, stop=stop)
    bias[6] = 2.0
    stop.append("b")
    assert (params.logit_bias, params.stop) == ({5: 1.0}, ("a",))


def test_a_bias_out_of_range_is_named_by_its_token() -> None:
    with pytest.raises(ValueError, match=r"^logit_bias\[7\] is 101.0; wanted from -100 to 100"):
        SamplingParams(logit_bias={1: 1.0, 7: 101.0})


@pytest.mark.parametrize(
    ("option", "said"),
    [
        ("response_format", "HTTP alone has it"),
        ("priority", "give LLM.generate priorities"),
        ("top_logprobs", "logprobs is how many of the likeliest"),
        ("temprature", r"did you mean temperature\?"),
        ("max_new_tokens", r"did you mean .*max_tokens"),
        ("xyz", "it has max_tokens, min_tokens, temperature, .*kv_policy$"),
    ],
)
def test_an_option_that_there_is_not_is_refused_with_what_there_is(option: str, said: str) -> None:
    with pytest.raises(TypeError, match=said):
        SamplingParams(**{option: 1})


def test_what_only_a_request_over_http_has_is_known() -> None:
    over_http = {*ChatRequest.model_fields, *CompletionRequest.model_fields} - {"model", "messages", "prompt"}
    assert over_http - {one.name for one in dataclasses.fields(SamplingParams)} == ELSEWHERE.keys()


@pytest.mark.parametrize("body", [ChatRequest, CompletionRequest])
def test_every_parameter_is_a_field_of_both_requests_over_http(body: type[ChatRequest] | type[CompletionRequest]) -> None:
    own = {one.name for one in dataclasses.fields(SamplingParams)}
    assert own - body.model_fields.keys() == {"prompt_logprobs"}, "which follows from echo"


def test_it_has_a_signature_and_can_be_copied() -> None:
    assert list(inspect.signature(SamplingParams).parameters) == [one.name for one in dataclasses.fields(SamplingParams)]
    params = SamplingParams(stop=["a"], n=2)
    assert params == copy.deepcopy(params) == pickle.loads(pickle.dumps(params)) == dataclasses.replace(params, n=2)


def test_it_is_frozen_and_by_keyword_only() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 0.0  # type: ignore[misc]
    with pytest.raises(TypeError):
        SamplingParams(16)  # type: ignore[misc]
