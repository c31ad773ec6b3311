"""Request bodies as pydantic models: OpenAI's completions and chat completions, and vLLM's additions to them.

A parameter that would change the answer and is not served is refused, unless its value asks for nothing (`suffix: ""`).
Parameters that never change an answer here are taken and have no effect (`metadata`, `user`, ...).
Types and OpenAI's limits are checked here; what a parameter may be is checked by SamplingParams.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Final, Literal, Self

from pydantic import (
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    WithJsonSchema,
    create_model,
    model_validator,
)

from vmmkv_server.http.tools import ToolChoiceFields, ToolFields, TurnFields
from vmmkv_server.http.wire import Unserved, WireRequest, refusal, without_nulls
from vmmkv_server.kv_policy import KVPolicyLike
from vmmkv_server.sampling_params import (
    MAX_BIAS,
    MAX_CHOICES,
    MAX_INDEX,
    STRUCTURE_DEFAULTS,
    Interval,
    InvalidParam,
    SamplingParams,
)
from vmmkv_server.structured_output.schema import (
    MAX_SOURCE_CHARS,
    Grammar,
    of_object,
    of_schema,
    of_structured_outputs,
)
from vmmkv_server.tokenizer import Prompt, TemplateVariable

MAX_STOP_CHARS: Final = 4096
"""Most characters of all stop strings of a request together: the server makes one automaton of them."""
MAX_STOP_TOKEN_IDS: Final = 64
MAX_NAME_CHARS: Final = 1024
"""Most characters of `cache_salt`, `user` and other names."""
MAX_TIMEOUT_S: Final = 86_400.0
MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
"""Most likeliest tokens at each place."""
MAX_TEMPLATE_VARIABLES: Final = 16
MAX_VARIABLE_CHARS: Final = 1024

# Values with several forms.

_VARIABLE_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
RESERVED: Final = frozenset(
    ("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
     "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "bos_token", "eos_token", "unk_token", "sep_token",
     "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now")
)  # fmt: skip
"""Template variables that the renderer sets itself; another template, for one, would be the client's program."""


def _as_whole(value: Any) -> Any:
    """3.0 is 3: languages with one kind of number write it so."""
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _as_prompts(value: Any) -> list[Prompt]:
    """A list of prompts from any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if value and (ids := _token_ids(value)) is not None:
        return [ids]
    if isinstance(value, list) and value:
        if len(value) > MAX_CHOICES:
            many = f"it has {len(value)} prompts and a request may have {MAX_CHOICES}; send the others in further requests"
            raise refusal("", many)
        if all(isinstance(item, str) for item in value):
            return value
        lists: list[Prompt] = [ids for item in value if (ids := _token_ids(item)) is not None]
        if len(lists) == len(value):
            return lists
    raise refusal("", "it must be a string, a list of strings, a list of token ids or a list of such lists, and not empty")


def _token_ids(value: Any) -> list[int] | None:
    """A list of token ids; None for anything else."""
    if not isinstance(value, list):
        return None
    ids = value if set(map(type, value)) <= {int} else list(map(_as_whole, value))
    return ids if set(map(type, ids)) <= {int} else None


def _as_policy(value: Any) -> Any:
    if not isinstance(value, dict | str):
        raise refusal("", 'it must be a string, or an object such as {"type": "streaming_llm", "window": 2048}')
    if isinstance(value, str):
        return value
    return {name: _as_whole(option) for name, option in without_nulls(value).items()}


def _as_num_logprobs(value: Any) -> Any:
    """vLLM's completions take a chat's true for 1; false asks for none."""
    return (1 if value else None) if isinstance(value, bool) else value


def _as_stops(value: Any) -> Any:
    if not isinstance(value, str | list):
        raise refusal("", "it must be a string, or a list of strings")
    stops = [value] if isinstance(value, str) else value
    num_chars = sum(len(stop) for stop in stops if isinstance(stop, str))
    if num_chars > MAX_STOP_CHARS:
        raise refusal("", f"it has {num_chars} characters together, and may have {MAX_STOP_CHARS}")
    return stops


def _as_text(value: Any) -> Any:
    """Text parts, joined with nothing between them. Their other fields, such as `cache_control`, are left out."""
    if not isinstance(value, list):
        return value
    for part in value:
        match part:
            case {"type": "text", "text": str()}:
                continue
        raise refusal("", 'only parts of the form {"type": "text", "text": "..."} are served')
    return "".join(part["text"] for part in value)


def _as_biases(value: Any) -> Any:
    """`logit_bias` has token ids as strings, for JSON's objects have no other keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise refusal("", f"it has {len(value)} tokens and may have {MAX_LOGIT_BIASES}")
    for key in value:
        if not re.fullmatch(r"0|[1-9][0-9]{0,9}", str(key)):  # one way to write each, so that none is lost
            raise refusal("", f'its keys must be token ids, as in {{"50256": -100}}, and {key!r} is none')
    return {int(key): bias for key, bias in without_nulls(value).items()}


def _as_variables(value: Any) -> dict[str, TemplateVariable]:
    if not isinstance(value, dict) or len(value) > MAX_TEMPLATE_VARIABLES:
        raise refusal("", f"it must be an object of {MAX_TEMPLATE_VARIABLES} names at most")
    for name, each in value.items():
        if name in RESERVED:
            raise refusal(name, "the server sets this variable of chat templates itself: leave it out")
        if not re.fullmatch(_VARIABLE_NAME, name):
            raise refusal("", "its names must be those of variables, in 64 characters at most")
        is_small_text = isinstance(each, str) and len(each) <= MAX_VARIABLE_CHARS
        is_number = isinstance(each, int) or (isinstance(each, float) and math.isfinite(each))
        if not (each is None or is_small_text or is_number):
            wanted = f"it must be null, true, false, a number, or a text of {MAX_VARIABLE_CHARS} characters at most"
            raise refusal(name, wanted)
    variables: dict[str, TemplateVariable] = without_nulls(value)
    return variables


def _as_effort(value: Any) -> Any:
    if value != "none":
        raise refusal("", 'it may be "none"; leave it out, and the model reasons as it does by itself')
    return value


Effort = Annotated[Literal["none"], BeforeValidator(_as_effort)]
_WHOLE: Final = BeforeValidator(_as_whole)
"""Validator of each integer of a request."""
Text = Annotated[str, Field(max_length=MAX_NAME_CHARS)]
TokenId = Annotated[int, Field(ge=0, lt=MAX_INDEX), _WHOLE]
_NumLogprobs = Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _WHOLE]
NumLogprobs = Annotated[
    _NumLogprobs | None, BeforeValidator(_as_num_logprobs, json_schema_input_type=_NumLogprobs | bool | None)
]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]
Biases = Annotated[dict[int, Bias], BeforeValidator(_as_biases, json_schema_input_type=dict[str, Bias | None])]
_Ids = Annotated[list[Annotated[int, Field(ge=0), _WHOLE]], Field(min_length=1)]
_UpToMost = Field(min_length=1, max_length=MAX_CHOICES)
Prompts = Annotated[
    list[Prompt],
    PlainValidator(
        _as_prompts, json_schema_input_type=str | Annotated[list[str], _UpToMost] | _Ids | Annotated[list[_Ids], _UpToMost]
    ),
]
_Stop = Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]
Stops = Annotated[list[_Stop], BeforeValidator(_as_stops, json_schema_input_type=_Stop | list[_Stop])]
_TEXT_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
}
Content = Annotated[
    str, BeforeValidator(_as_text), WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]})
]
_VARIABLES: Final = {
    "type": "object",
    "maxProperties": MAX_TEMPLATE_VARIABLES,
    "propertyNames": {"pattern": f"^{_VARIABLE_NAME}$", "not": {"enum": sorted(RESERVED)}},
    "additionalProperties": {"type": ["null", "boolean", "number", "string"], "maxLength": MAX_VARIABLE_CHARS},
}
TemplateVariables = Annotated[dict[str, TemplateVariable], PlainValidator(_as_variables), WithJsonSchema(_VARIABLES)]


# Structured outputs.

Source = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]


class JsonSchema(WireRequest):
    """The schema of a `response_format`."""

    name: Annotated[str, Field(max_length=64)] = "response"
    description: Annotated[str, Field(max_length=1024)] | None = None
    """Text for people: the model does not see it."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Answers follow the schema in any case."""


class ResponseFormat(WireRequest):
    """OpenAI's `response_format`."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            types = '"text", "json_object" or "json_schema", as in {"type": "json_object"}'
            raise refusal("", f"it must be an object whose type is {types}")
        return data

    @property
    def has_grammar(self) -> bool:
        """Does the answer follow a grammar? Else it is plain text."""
        return self.type != "text"

    @property
    def schema_of_text(self) -> dict[str, Any] | None:
        """The JSON schema of the answer; None for plain text."""
        if not self.has_grammar:
            return None
        return {"type": "object"} if self.json_schema is None else self.json_schema.schema_

    def grammar(self) -> Grammar:
        """The grammar of the answer. Raises: GrammarRefused. Cost: as `of_schema`."""
        return of_object() if self.json_schema is None else of_schema(self.json_schema.schema_)

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.type == "json_schema" and self.json_schema is None:
            raise refusal("json_schema", '"type": "json_schema" needs a json_schema with a schema')
        if self.type != "json_schema" and self.json_schema is not None:
            raise refusal("json_schema", 'a json_schema goes with "type": "json_schema", and no other')
        return self


class StructuredOutputs(WireRequest):
    """vLLM's `structured_outputs`: exactly one of these."""

    unserved: ClassVar[Unserved] = {name: values for name, values in STRUCTURE_DEFAULTS.items() if name != "json_object"}
    json_: Annotated[dict[str, Any] | str | None, Field(alias="json")] = None
    """A JSON schema, or its text."""
    regex: Source | None = None
    """A regular expression that the whole answer matches."""
    choice: list[str] | None = None
    """Texts, of which the answer is one."""
    grammar_: Annotated[Source | None, Field(alias="grammar")] = None
    """GBNF, with a rule `root`."""
    json_object: Literal[True] | None = None
    """Any JSON object."""

    @property
    def kind(self) -> str:
        """The name of the one that is given."""
        return next(iter(self.model_fields_set)).rstrip("_")

    def grammar(self) -> Grammar:
        """The grammar of the answer. Raises: GrammarRefused. Cost: as `of_schema`."""
        return of_structured_outputs(self.model_dump(by_alias=True, exclude_unset=True))

    @model_validator(mode="before")
    @classmethod
    def _no_object(cls, data: Any) -> Any:
        """False is the default of `json_object`."""
        return data | {"json_object": None} if isinstance(data, dict) and data.get("json_object") is False else data

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(self.model_fields_set) != 1:
            raise refusal("", "it must have exactly one of json, regex, choice, grammar and json_object")
        return self


# Generation.


class StreamOptions(WireRequest):
    """Parts of a stream beside text."""

    unserved: ClassVar[Unserved] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    """End with a chunk that counts tokens."""
    continuous_usage_stats: bool | None = None
    """vLLM's: every chunk counts tokens so far."""


_PARAMS: Final = SamplingParams.__dataclass_fields__
_STATED_OTHERWISE: Final = frozenset(["max_tokens", "logprobs", "prompt_logprobs", "beam_width", "structured_outputs"])
"""Sampling parameters that follow from other fields of a request, see `GenerationRequest.params`."""
_OF_OTHER_FORM: Final = frozenset(["n", "stop", "stop_token_ids", "logit_bias", "kv_policy"])
"""Sampling parameters that have another form in JSON, or closer limits."""
_OPENAI_MOST: Final = {"temperature": 2.0}


def _wire_field(param: "dataclasses.Field[Any]") -> Any:
    """The type and the default of a sampling parameter over HTTP."""
    interval: Interval | None = param.metadata.get("interval")
    if interval is None:
        form: Any = param.type
    elif interval.kind is int:
        form = Annotated[int, Field(ge=interval.least, lt=interval.end), _WHOLE]
    else:
        gt, ge = (interval.least, None) if interval.is_open else (None, interval.least)
        form = Annotated[float, Field(gt=gt, ge=ge, le=_OPENAI_MOST.get(param.name, interval.end), allow_inf_nan=False)]
    return form, param.default


if TYPE_CHECKING:

    class _SamplingFields(WireRequest):  # other fields are read as `GenerationRequest.params`
        length_penalty: float
else:
    _derived = {name: _wire_field(_PARAMS[name]) for name in _PARAMS if name not in _STATED_OTHERWISE | _OF_OTHER_FORM}
    _SamplingFields = create_model("_SamplingFields", __base__=WireRequest, **_derived)


class GenerationRequest(_SamplingFields):
    """Fields of completions and chat completions: those of SamplingParams, and those below. Null means the default."""

    prompt_param: ClassVar[str]
    """The field with the prompts."""
    default_tokens: ClassVar[int | None] = None
    """New tokens if the request does not say; None for as many as fit."""
    is_continued: ClassVar[bool] = False
    """Does the answer go on in the prompt's text?"""

    model: str | None = None
    """Name of the served model; no other is there."""
    n: Annotated[int, Field(ge=1), _WHOLE] = 1
    """Choices for each prompt: sampled with consecutive seeds, or the best of a beam search."""
    max_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    stop: Stops = Field(default_factory=list)
    stop_token_ids: Annotated[list[TokenId], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    logit_bias: Biases | None = None
    """Amounts to add to the logits of these tokens; 100 or -100 as good as forces or forbids one."""
    kv_policy: Annotated[KVPolicyLike, BeforeValidator(_as_policy)] | None = None
    """Rows of its KV cache that the request keeps."""
    response_format: ResponseFormat | None = None
    """JSON, of a schema or any object. OpenAI has it for chats alone, vLLM for completions too."""

    # vLLM's additions.
    priority: Annotated[int, Field(ge=-MAX_INDEX, lt=MAX_INDEX), _WHOLE] = 0
    """Priority: requests with lower ones run first."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """Salt of the prefix cache: only requests of one salt, or without, share prefixes. Those of different API keys never do."""
    use_beam_search: bool = False
    """Search for the likeliest answers instead of sampling. Stop strings cut the texts that the search found."""
    beam_width: Annotated[int, Field(ge=1), _WHOLE] | None = None
    """Beams of the search; `n` by default."""
    structured_outputs: StructuredOutputs | None = None
    """A JSON schema, a regular expression, choices or a grammar that the answer follows."""
    kv_transfer_params: dict[str, Any] | None = None
    """Routers send it where engines prefill and decode apart. It is not read: rows are found by their tokens."""

    # Our own.
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None
    """Seconds from the request's arrival, after which it ends with an error (408), or its stream with one."""

    # Taken without effect: none of these changes an answer here.
    user: Text | None = None
    metadata: dict[str, Any] | None = None
    safety_identifier: Text | None = None
    prompt_cache_key: Text | None = None
    prompt_cache_retention: Text | None = None
    service_tier: Text | None = None

    @model_validator(mode="before")
    @classmethod
    def _refuse_guided(cls, data: Any) -> Any:
        """vLLM's names before it had `structured_outputs`."""
        for name in ("json", "regex", "choice", "grammar"):
            if isinstance(data, dict) and data.get(f"guided_{name}") is not None:
                raise refusal(f"guided_{name}", f'send "structured_outputs": {{"{name}": ...}}, which says the same')
        return data

    @model_validator(mode="after")
    def _parts_agree(self) -> Self:
        for param, why in self._conflicts():
            raise refusal(param, why)
        _ = self.params
        return self

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        """Parameters that do not go with the others, and why; the first one is reported."""
        if not self.stream and (self.stream_counts.include_usage or self.stream_counts.continuous_usage_stats):
            yield "stream_options", "stream_options is only for stream=true"
        if self.stream_counts.continuous_usage_stats and not self.stream_counts.include_usage:
            yield "stream_options", "continuous_usage_stats is only for include_usage=true"
        if self.use_beam_search and self.stream:
            yield "stream", "a beam search knows its answer at its end only: leave stream out"
        if not self.use_beam_search and self.beam_width is not None:
            yield "beam_width", "beam_width is only for use_beam_search=true"
        if not self.use_beam_search and self.length_penalty != 1.0:
            yield "length_penalty", "length_penalty is only for use_beam_search=true"
        param = self.grammar_param
        if param == "response_format" and self.structured_outputs is not None:
            yield param, "response_format and structured_outputs both say what the answer is: send one"
        for name in ("use_beam_search", "ignore_eos", "min_tokens"):
            if param and getattr(self, name) and not (name == "min_tokens" and self._is_prefill):
                why = "an answer that follows a grammar is sampled, and ends where that ends"
                yield name, f"{why}: leave {name} out, or {param}"
        param, each = ("n", self.n) if self.beam_width is None else ("beam_width", self.beam_width)
        if (num_sequences := each * self.num_prompts) > MAX_CHOICES:
            prompts = f" for each of {self.num_prompts} prompts" if self.num_prompts > 1 else ""
            yield (
                param,
                f"{param}={each}{prompts} makes {num_sequences} sequences, and a request may have {MAX_CHOICES}: "
                f"lower {param} to {MAX_CHOICES // self.num_prompts} and send further requests for the others",
            )

    @property
    def _is_prefill(self) -> bool:
        """Is it for one token of a grammar or beam search? Routers ask an engine that prefills so, with min_tokens=1."""
        return self.wanted_tokens == 1 and (self.use_beam_search or bool(self.grammar_param))

    @functools.cached_property
    def params(self) -> SamplingParams:
        """Parameters of each choice, or of the beam search. Without a limit in the request, `max_tokens` is the largest."""
        given = {name: getattr(self, name) for name in self.model_fields_set & _PARAMS.keys() - _STATED_OTHERWISE}
        given["max_tokens"] = MAX_INDEX - 1 if self.wanted_tokens is None else self.wanted_tokens
        given["logprobs"], given["prompt_logprobs"] = self._num_logprobs()
        if self._is_prefill:
            given.pop("min_tokens", None)
        if self.use_beam_search:
            given |= {"beam_width": self.beam_width or self.n, "temperature": given.get("temperature", 0.0)}
        try:
            return SamplingParams(**given)
        except InvalidParam as error:
            param = "n" if error.param == "beam_width" and self.beam_width is None else error.param
            raise refusal(param.replace("prompt_logprobs", "logprobs"), f"it {error.reason}") from error

    @property
    def grammar_param(self) -> str:
        """The parameter that has the grammar of the answer; empty if none has."""
        return self.grammar_source.removesuffix(".json_schema.schema")

    @property
    def grammar_source(self) -> str:
        """The parameter that a grammar is written in; empty for none."""
        if self.response_format is not None and self.response_format.has_grammar:
            return "response_format" if self.response_format.json_schema is None else "response_format.json_schema.schema"
        return "" if self.structured_outputs is None else f"structured_outputs.{self.structured_outputs.kind}"

    @property
    def has_schema(self) -> bool:
        """Is the grammar a JSON schema that the client wrote?"""
        return self.grammar_source in ("response_format.json_schema.schema", "structured_outputs.json")

    def grammar(self) -> Grammar:
        """The grammar of the answer, if `grammar_param` has one. Raises: GrammarRefused.

        Cost: as `of_schema` for a schema, about a millisecond otherwise.
        """
        if self.response_format is not None and self.response_format.has_grammar:
            return self.response_format.grammar()
        assert self.structured_outputs is not None, "no parameter has a grammar"
        return self.structured_outputs.grammar()

    @property
    def wanted_tokens(self) -> int | None:
        """New tokens of each answer at most, if given."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        """Prompts to continue."""
        return 1

    def _num_logprobs(self) -> tuple[int | None, int | None]:
        """`logprobs` and `prompt_logprobs` of SamplingParams."""
        return None, None

    @functools.cached_property
    def stream_counts(self) -> StreamOptions:
        """Options of a stream: the chunks that count tokens."""
        return self.stream_options or StreamOptions()


_NEUTRAL: Final[Unserved] = {
    **dict.fromkeys(("allowed_token_ids", "prompt_logprobs", "repetition_detection", "request_id"), ()),
    **dict.fromkeys(("truncate_prompt_tokens", "truncation_side"), ()),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True, False),  # they are never shown
    **dict.fromkeys(("include_stop_str_in_output", "return_token_ids", "return_tokens_as_token_ids", "store"), (False,)),
    "bad_words": ([],),
    "vllm_xargs": ({},),
    # vllm-router writes these into the bodies that it has read, with its defaults.
    "no_stop_trim": (False,),
    "return_hidden_states": (False,),
}
"""Unserved parameters of completions and chat completions alike."""


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: each prompt has `n` choices in the answer, those of the first prompt first."""

    unserved: ClassVar[Unserved] = {
        **_NEUTRAL,
        "suffix": ("",),
        "best_of": (1,),
        "add_special_tokens": (True,),
        "prompt_embeds": (),
    }
    prompt_param = "prompt"
    default_tokens = 16  # OpenAI's
    is_continued = True
    prompt: Prompts
    max_tokens: Annotated[int, Field(ge=0), _WHOLE] | None = None
    """0 asks for the log-probabilities of the prompt alone, by `echo` and `logprobs`."""
    logprobs: NumLogprobs = None
    """The log-probability of each token of the answer, and of so many of the likeliest at its place; true for 1."""
    echo: bool | None = None
    """Begin each answer with its prompt; with `logprobs`, those of the prompt's tokens too."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        yield from super()._conflicts()
        if self.max_tokens == 0 and (not self.echo or self.logprobs is None):
            yield "max_tokens", "max_tokens=0 is only for echo=true with logprobs; send at least 1 otherwise"
        if self.max_tokens == 0 and (param := self.grammar_param):
            yield "max_tokens", f"max_tokens=0 leaves nothing that {param} could be followed by: raise it"

    @property
    def num_prompts(self) -> int:
        """Prompts to continue."""
        return len(self.prompt)

    def _num_logprobs(self) -> tuple[int | None, int | None]:
        return self.logprobs, self.logprobs if self.echo else None


class ChatMessage(TurnFields):
    """One turn of a conversation. All that it has beside role and content goes to the template too, which may show it."""

    model_config = ConfigDict(extra="allow")
    unserved: ClassVar[Unserved] = {
        **dict.fromkeys(("refusal", "function_call", "audio"), ()),
        "prefix": (False,),
    }
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content


_OF_TEMPLATES: Final[Unserved] = {
    "add_generation_prompt": (True,),
    "continue_final_message": (False,),
    "chat_template": (),
    "documents": ([],),
    **dict.fromkeys(("mm_processor_kwargs", "media_io_kwargs"), ({},)),
}
"""Unserved parameters of chats, whether they are answered or tokenised."""


class ChatRequest(ToolChoiceFields, GenerationRequest):
    """POST /v1/chat/completions."""

    unserved: ClassVar[Unserved] = {
        **_NEUTRAL,
        **_OF_TEMPLATES,
        "functions": ([],),
        "function_call": ("none", "auto"),  # of no functions, for others are refused
        **dict.fromkeys(("audio", "prediction", "web_search_options", "thinking_token_budget"), ()),
        "modalities": (["text"],),
        "verbosity": ("medium",),
        "echo": (False,),
        "add_special_tokens": (False,),  # a template writes its own
        # vllm-router writes these too.
        **dict.fromkeys(("include_reasoning", "separate_reasoning", "stream_reasoning"), (True,)),
    }
    prompt_param = "messages"
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: TemplateVariables | None = None
    """vLLM's: variables of the model's own chat template, such as `enable_thinking`."""
    reasoning_effort: Effort | None = None
    """`none`: the template gets `enable_thinking: false`, if `chat_template_kwargs` does not say otherwise."""
    max_completion_tokens: Annotated[int, Field(ge=1), _WHOLE] | None = None
    logprobs: bool | None = None
    """Have the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS), _WHOLE] | None = None
    """Likeliest tokens with log-probabilities at each place, beside each chosen token's own."""

    def _conflicts(self) -> Iterator[tuple[str, str]]:
        yield from self.tool_conflicts()
        if self.toolset is not None and self.structured_outputs is not None:
            why = 'leave it out, or send "tool_choice": "none"; response_format may say what text is'
            yield "structured_outputs", f"an answer that may call tools follows no other grammar: {why}"
        yield from super()._conflicts()
        if None not in (self.max_tokens, self.max_completion_tokens) and self.max_tokens != self.max_completion_tokens:
            yield "max_tokens", "max_tokens and max_completion_tokens mean the same: send one"
        if self.top_logprobs and not self.logprobs:
            yield "top_logprobs", "top_logprobs is only for logprobs=true"

    @property
    def grammar_param(self) -> str:
        """The parameter that has the grammar of the answer; empty if none has."""
        if self.toolset is None:
            return super().grammar_param
        return "tools" if self.toolset.choice == "auto" else "tool_choice"

    @property
    def text_schema(self) -> dict[str, Any] | None:
        """The JSON schema that text follows; None for any text."""
        return None if self.response_format is None else self.response_format.schema_of_text

    @property
    def template_variables(self) -> dict[str, TemplateVariable]:
        """Variables of the chat template."""
        of_effort: dict[str, TemplateVariable] = {} if self.reasoning_effort is None else {"enable_thinking": False}
        return of_effort | (self.chat_template_kwargs or {})

    @property
    def wanted_tokens(self) -> int | None:
        """New tokens at most, by either of the names; None for as many as fit."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    def _num_logprobs(self) -> tuple[int | None, int | None]:
        return (self.top_logprobs or 0) if self.logprobs else None, None


# Other routes.


class TokenizeRequest(ToolFields):
    """POST /tokenize: one prompt, or one conversation in the model's chat template."""

    unserved = _OF_TEMPLATES
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool | None = None
    """Add the model's own start token to a prompt: the default, as in /v1/completions. Templates write their own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "send either prompt or messages")
        if self.chat_template_kwargs and self.messages is None:
            raise refusal("chat_template_kwargs", "chat_template_kwargs is only for messages")
        if self.tools and self.messages is None:
            raise refusal("tools", "tools are only for messages")
        for param, why in self.tool_conflicts():
            raise refusal(param, why)
        if self.add_special_tokens and self.messages is not None:
            raise refusal(
                "add_special_tokens", "add_special_tokens is only for prompt: the template of messages writes its own"
            )
        return self


class DetokenizeRequest(WireRequest):
    """POST /detokenize."""

    model: str | None = None
    tokens: Annotated[list[int], BeforeValidator(lambda value: _token_ids(value) or value)]


class ResetRequest(WireRequest):
    """POST /kv/reset: `{}`."""


class ResizeRequest(WireRequest):
    """POST /kv/resize."""

    budget_bytes: Annotated[int, Field(ge=1, lt=1 << 62), _WHOLE]
    """The new value of --kv-budget."""
