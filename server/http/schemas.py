"""What is asked over the wire, as pydantic models: OpenAI's completions and chat completions, as far as they are served.

A parameter of OpenAI's that is not served is refused, unless it has the value that asks for nothing (`echo=false`,
`tools=[]`): a client that sets it would else get something other than it asked for and never know. `user` asks for nothing.
"""

import math
import re
from collections.abc import Iterator, Mapping
from typing import Annotated, Any, ClassVar, Final, Literal, Self, TypeAlias

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, PlainValidator, WithJsonSchema, model_validator
from pydantic_core import PydanticCustomError

from vmmkv.server.sampling_params import MAX_BIAS, MAX_CHOICES, MAX_LENGTH_PENALTY, MAX_PENALTY, MAX_REPETITION_PENALTY
from vmmkv.server.structured_output.schema import MAX_SOURCE_CHARS, Grammar, GrammarRefused, of_choices, of_object, of_schema

# -------- schema base
# What every request body has in common: strict types, no unknown names, and plain words about what is not served.

Unserved: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Names of parameters, each with the values that ask for nothing, besides null."""


class WireRequest(BaseModel):
    """Strict (no `"5"` for 5), closed to unknown fields, and plain about those of OpenAI's that it does not serve."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[Unserved] = {}
    """What is refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unserved.keys() & data.keys():
            value, neutral = data[name], cls.unserved[name]
            # Types are compared too, for 0 == False: the one may ask for something where the other does not.
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                wanted = f"leave it out or send {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "The parameter '{param}' is not supported by this server; {wanted}.",
                    {"param": name, "wanted": wanted},
                )
        return {name: value for name, value in data.items() if name not in cls.unserved}


def refusal(param: str, message: str) -> PydanticCustomError:
    """A complaint about what several parameters say together, with the one to name."""
    why = message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
    return PydanticCustomError("combination", "{why}", {"why": why, "param": param})


# -------- sampling schemas
# How tokens are chosen, as asked for over the wire: OpenAI's parameters, and vLLM's beside them.

MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
"""Of the likeliest tokens at each place."""
MAX_PROMPT_LOGPROBS: Final = 1 << 17
"""Of the prompts of one request, all their choices together, those of the likeliest tokens among them: each is named in the
answer, which takes a few microseconds, some of them under Python's lock without a pause."""
PROMPT_TOKEN_WEIGHT: Final = 4
"""What a token of a prompt counts for there beside its likeliest: it has a text, a place and a table of its own."""


def _as_token_ids(value: Any) -> Any:
    """`logit_bias` has token ids as strings, for JSON's objects have no other keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError(
            "logit_bias", "it has {given} tokens and may have {limit}", {"given": len(value), "limit": MAX_LOGIT_BIASES}
        )
    strange = next((key for key in value if not re.fullmatch(r"[0-9]{1,10}", str(key))), None)
    if strange is not None:
        raise PydanticCustomError(
            "logit_bias", 'its keys must be token ids, as in {"50256": -100}, and {key} is none', {"key": repr(strange)}
        )
    return {int(key): bias for key, bias in value.items()}


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]


class SamplingFields(WireRequest):
    """What decides which token comes next. What is absent or null asks for nothing; temperature and top_p are 1 then."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """Not OpenAI's: only the likeliest so many can be drawn; 0 or -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Not OpenAI's: only tokens at least so likely as this share of the likeliest one can be drawn."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)] | None
    ) = None
    """Not OpenAI's: above 1, tokens of the prompt and the answer are less likely to come again."""
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_as_token_ids)] | None = None
    """Added to the logits of these tokens; 100 or -100 as good as forces or forbids one."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None

    def shaping(self) -> Iterator[str]:
        """The names of those that are set and change which token comes next, but for the temperature and the seed."""
        neutral: dict[str, tuple[Any, ...]] = {
            "top_p": (1,),
            "top_k": (0, -1),
            "min_p": (0,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in (None, *values):
                yield name


# -------- template schemas
# What a request may tell the model's own chat template, as vLLM has it: `chat_template_kwargs`.

MAX_VARIABLES: Final = 16
MAX_VARIABLE_CHARS: Final = 1024
"""Of a text."""
_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
RESERVED: Final = frozenset(
    ("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
     "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "bos_token", "eos_token", "unk_token", "sep_token",
     "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now")
)  # fmt: skip
"""What the renderer sets itself: another template, for one, would be the client's program in the server."""

TemplateVariable: TypeAlias = str | float | bool | None
"""One of JSON's scalars."""


def _is_small_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_VARIABLE_CHARS
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _as_variables(value: Any) -> dict[str, TemplateVariable]:
    if not isinstance(value, dict) or len(value) > MAX_VARIABLES:
        raise PydanticCustomError("variables", "it must be an object of {limit} names at most", {"limit": MAX_VARIABLES})
    for name, each in value.items():
        if name in RESERVED:
            raise refusal(name, "the server sets this variable of chat templates itself: leave it out")
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise PydanticCustomError("variables", "its names must be those of variables, in 64 characters at most")
        if not _is_small_scalar(each):
            wanted = f"it must be null, true, false, a number, or a text of {MAX_VARIABLE_CHARS} characters at most"
            raise refusal(name, wanted)
    return value


TemplateVariables = Annotated[
    dict[str, TemplateVariable],
    PlainValidator(_as_variables),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_VARIABLES,
            "propertyNames": {"pattern": f"^{_NAME}$", "not": {"enum": sorted(RESERVED)}},
            "additionalProperties": {"type": ["null", "boolean", "number", "string"], "maxLength": MAX_VARIABLE_CHARS},
        }
    ),
]


# -------- answer schemas
# What is answered over the wire, as pydantic models: OpenAI's completions and chat completions, whole and in chunks.

FinishReason = Literal["stop", "length"]

_Sparse = Field(exclude_if=lambda value: value is None)
"""Left out of the answer, rather than null, when there is nothing to say."""


class PromptTokensDetails(BaseModel):
    """Of the prompts' tokens."""

    cached_tokens: int
    """Those that the prefix cache had, so that they were not computed."""


class Usage(BaseModel):
    """Tokens: each prompt's once, however many choices it has, and those of all candidates, returned or not."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails


class CompletionLogprobs(BaseModel):
    """Of the tokens of a completion, or of those that a chunk adds. Lists of one length."""

    text_offset: list[int]
    """Where each begins, in characters of the whole answer."""
    token_logprobs: list[float | None]
    """Null for the first token of a prompt that is echoed, which comes after nothing."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Of the likeliest at each place, and of the one that was chosen."""


class TopLogprob(BaseModel):
    """A token that could come at some place, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """Its UTF-8, which may be a part of a character; null for an id without text."""


class TokenLogprob(TopLogprob):
    """The token that came, and those that were the likeliest to come."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Of the tokens of a reply, or of those that a chunk adds."""

    content: list[TokenLogprob]
    refusal: None = None


class CompletionChoice(BaseModel):
    """One continuation of one prompt, or of a chunk the text that is new."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class Completion(BaseModel):
    """The answer of /v1/completions, and each chunk of its stream."""

    id: str
    object: Literal["text_completion"] = "text_completion"
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, _Sparse] = None


class AssistantMessage(BaseModel):
    """A whole reply."""

    role: Literal["assistant"] = "assistant"
    content: str
    refusal: None = None


class ChatChoice(BaseModel):
    """The reply to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletion(BaseModel):
    """The answer of /v1/chat/completions."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class Delta(BaseModel):
    """What a chunk adds; the first names the role."""

    role: Annotated[Literal["assistant"] | None, _Sparse] = None
    content: Annotated[str | None, _Sparse] = None


class ChunkChoice(BaseModel):
    """A choice within a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: FinishReason | None


class ChatCompletionChunk(BaseModel):
    """A chunk of a streamed chat completion."""

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChunkChoice]
    usage: Annotated[Usage | None, _Sparse] = None


class Model(BaseModel):
    """What is served. Known once the engine is ready: `max_model_len`, the tokens of one request, and whose `implementation`
    of the model it is, `vmmkv` or `transformers`."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vmmkv"
    max_model_len: int | None = None
    implementation: str | None = None


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[Model]


class Health(BaseModel):
    """The answer of /health: 200 when `ok`, else 503 and why."""

    status: Literal["ok", "loading", "draining", "stuck", "dead"]
    reason: str | None = None


class Version(BaseModel):
    """The answer of /version."""

    version: str


class ErrorDetail(BaseModel):
    """What went wrong."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


# -------- schemas
# How an answer by a grammar is asked for over the wire: OpenAI's `response_format`, vLLM's `structured_outputs`.

OLDER_NAMES: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's, before it had `structured_outputs`: refused, with what is served."""

Source = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]


class JsonSchema(WireRequest):
    """Of `response_format`."""

    name: Annotated[str, Field(max_length=64)] = "response"
    description: Annotated[str, Field(max_length=1024)] | None = None
    """For people: the model does not see it."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Answers follow the schema in any case."""


class ResponseFormat(WireRequest):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise refusal(
                "", 'it must be an object whose type is "text", "json_object" or "json_schema", as in {"type": "json_object"}'
            )
        return data

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("json_schema", 'a json_schema goes with "type": "json_schema", and no other')
        try:
            self.grammar()
        except GrammarRefused as error:
            raise refusal("json_schema.schema", str(error)) from error
        return self

    def grammar(self) -> Grammar | None:
        """What the answer follows; None if it is plain text. Raises: GrammarRefused."""
        if self.json_schema is not None:
            return of_schema(self.json_schema.schema_)
        return of_object() if self.type == "json_object" else None


class StructuredOutputs(WireRequest):
    """vLLM's: one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    """A schema."""
    regex: Source | None = None
    """That the whole answer matches."""
    choice: list[str] | None = None
    """Of texts."""
    grammar_: Annotated[Source | None, Field(alias="grammar")] = None
    """GBNF, with a rule `root`."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1 or self.param == "":
            raise refusal("", "it must have exactly one of json, regex, choice and grammar")
        try:
            self.grammar()
        except GrammarRefused as error:
            raise refusal(self.param, str(error)) from error
        return self

    @property
    def param(self) -> str:
        """The name of the one that is given."""
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar_}
        return next((name for name, value in values.items() if value is not None), "")

    def grammar(self) -> Grammar:
        """What the answer follows. Raises: GrammarRefused."""
        if self.json_ is not None:
            return of_schema(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return of_choices(self.choice) if self.choice is not None else Grammar("ebnf", self.grammar_ or "")


# -------- schemas

Prompt = str | list[int]
MAX_STOP_STRINGS = 4
MAX_STOP_CHARS = 1024
MAX_STOP_TOKEN_IDS = 64
MAX_NAME_CHARS = 1024
"""Of `cache_salt` and `user`."""
MAX_TIMEOUT_S = 86_400.0


_TOKEN_IDS: Final = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_PROMPT_FORMS: Final = {
    "anyOf": [
        {"type": "string"},
        {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": MAX_CHOICES},
        _TOKEN_IDS,
        {"type": "array", "items": _TOKEN_IDS, "minItems": 1, "maxItems": MAX_CHOICES},
    ]
}
"""Of `prompt`, for the OpenAPI document; and of `stop` and `content`."""
_STOP: Final = {"type": "string", "minLength": 1, "maxLength": MAX_STOP_CHARS}
_STOP_FORMS: Final = {"anyOf": [_STOP, {"type": "array", "items": _STOP, "maxItems": MAX_STOP_STRINGS}, {"type": "null"}]}
_TEXT_PART: Final = {
    "type": "object",
    "properties": {"type": {"const": "text"}, "text": {"type": "string"}},
    "required": ["type", "text"],
    "additionalProperties": False,
}
_CONTENT_FORMS: Final = {"anyOf": [{"type": "string"}, {"type": "array", "items": _TEXT_PART}]}


def _as_prompts(value: Any) -> list[Prompt]:
    """A list of prompts from any of OpenAI's four forms: text, texts, token ids, lists of token ids."""
    if isinstance(value, str):
        return [value]
    if isinstance(value, list) and value:
        if _are_token_ids(value):
            return [value]
        if len(value) > MAX_CHOICES:
            raise PydanticCustomError(
                "prompt",
                "it has {given} prompts and a request may have {limit}; send the others in further requests",
                {"given": len(value), "limit": MAX_CHOICES},
            )
        if all(isinstance(item, str) for item in value):
            return value
        if all(isinstance(item, list) and _are_token_ids(item) for item in value):
            return value
    raise PydanticCustomError(
        "prompt", "it must be a string, a list of strings, a list of token ids or a list of such lists, and not empty"
    )


def _are_token_ids(items: list[Any]) -> bool:
    return all(type(item) is int for item in items)


def _as_list(value: Any) -> Any:
    """`stop` may be one string or none."""
    if value is None:
        return []
    if not isinstance(value, str | list):
        raise PydanticCustomError("stop", "it must be a string, or a list of {limit} at most", {"limit": MAX_STOP_STRINGS})
    return [value] if isinstance(value, str) else value


def _as_text(value: Any) -> Any:
    """Text parts joined with nothing between them, so that what the client wrote is what the template gets."""
    if not isinstance(value, list):
        return value
    for part in value:
        if (
            not isinstance(part, dict)
            or part.keys() != {"type", "text"}
            or part["type"] != "text"
            or not isinstance(part["text"], str)
        ):
            raise PydanticCustomError("content", 'only parts of the form {"type": "text", "text": "..."} are served')
    return "".join(part["text"] for part in value)


class StreamOptions(WireRequest):
    """How a stream ends."""

    unserved: ClassVar[Unserved] = {"include_obfuscation": (False,)}
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    """vLLM's, and load clients send it: every chunk says the usage so far."""


class GenerationRequest(SamplingFields):
    """What completions and chat completions have in common."""

    model: str
    n: Annotated[int, Field(ge=1)] | None = None
    """Choices for each prompt: sampled with seeds that follow each other, or the best that a beam search finds."""
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    stop: Annotated[
        list[Annotated[str, Field(min_length=1, max_length=MAX_STOP_CHARS)]],
        BeforeValidator(_as_list),
        Field(max_length=MAX_STOP_STRINGS),
        WithJsonSchema(_STOP_FORMS),
    ] = Field(default_factory=list)
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool = False
    """Not OpenAI's: go on past the model's end token, for benchmarks."""
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=1 << 31)]], Field(max_length=MAX_STOP_TOKEN_IDS)] = Field(
        default_factory=list
    )
    """Not OpenAI's: token ids that end the answer, as the model's own end tokens do."""
    min_tokens: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None
    """Not OpenAI's: before the answer has so many tokens no end token is sampled, nor one of `stop_token_ids`, even with
    `ignore_eos`, and no stop string ends it."""
    priority: Annotated[int, Field(ge=-(1 << 31), lt=1 << 31)] = 0
    """Not OpenAI's: requests of a lower one go first, whenever they came."""
    user: Annotated[str, Field(max_length=MAX_NAME_CHARS)] | None = None
    """Whom the client asks for, which changes nothing here: callers are told apart by their keys, and by `cache_salt`."""
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_NAME_CHARS)] | None = None
    """Not OpenAI's: only requests of one salt, or those without, share what the prefix cache holds. Those of different API
    keys share nothing."""
    timeout: Annotated[float, Field(gt=0, le=MAX_TIMEOUT_S, allow_inf_nan=False)] | None = None
    """Not OpenAI's: seconds from the request's arrival, after which it ends with an error (408), or its stream with one."""
    use_beam_search: bool = False
    """Not OpenAI's: answer with the likeliest texts that a search finds, sampling nothing. Stop strings cut the texts that
    it found; the search itself knows `stop_token_ids`."""
    beam_width: Annotated[int, Field(ge=1)] | None = None
    """Not OpenAI's: beams of the search; `n` of them unless it is given."""
    length_penalty: Annotated[float, Field(ge=-MAX_LENGTH_PENALTY, le=MAX_LENGTH_PENALTY, allow_inf_nan=False)] = 1.0
    """Not OpenAI's: beams compare by log-probability / (number of tokens) ** length_penalty."""

    @model_validator(mode="after")
    def _stream_options_need_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise refusal("stream_options", "stream_options is only for stream=true")
        return self

    @model_validator(mode="after")
    def _usage_in_chunks_is_usage(self) -> Self:
        if self.includes_usage_so_far and not self.include_usage:
            raise refusal("stream_options", "continuous_usage_stats is only for include_usage=true")
        return self

    @model_validator(mode="after")
    def _beams_have_what_they_need(self) -> Self:
        if not self.use_beam_search:
            for name, is_set in (("beam_width", self.beam_width is not None), ("length_penalty", self.length_penalty != 1.0)):
                if is_set:
                    raise refusal(name, f"{name} is only for use_beam_search=true")
            return self
        if self.temperature:
            raise refusal("temperature", "a beam search samples nothing: leave temperature out or send 0")
        for name in self.shaping():
            raise refusal(name, f"a beam search compares the model's own probabilities: leave {name} out")
        if self.min_tokens:
            raise refusal("min_tokens", "a beam search ends where its beams do: leave min_tokens out, or use_beam_search")
        if self.num_logprobs is not None:
            raise refusal("logprobs", "a beam search has no log-probabilities of single tokens: leave logprobs out")
        if self.stream:
            raise refusal("stream", "a beam search knows its answer at its end only: leave stream out")
        if self.num_choices > self.num_beams:
            raise refusal(
                "n",
                f"n={self.num_choices} choices cannot come from {self.num_beams} beams: "
                f"raise beam_width to {self.num_choices} or lower n to {self.num_beams}",
            )
        return self

    structured_outputs: StructuredOutputs | None = None
    """vLLM's: a JSON schema, a regular expression, choices or a grammar that the answer follows."""
    response_format: ResponseFormat | None = None
    """JSON, of a schema or any object. OpenAI has it for chats alone, vLLM for completions too."""

    @model_validator(mode="before")
    @classmethod
    def _older_names_say_the_newer(cls, data: Any) -> Any:
        given = [name for name in OLDER_NAMES if isinstance(data, dict) and data.get(name) is not None]
        if given:
            raise refusal(given[0], f'send "structured_outputs": {{"{OLDER_NAMES[given[0]]}": ...}}, which says the same')
        return data

    @model_validator(mode="after")
    def _one_grammar(self) -> Self:
        if self.structured_outputs is not None and self.response_format is not None and self.response_format.type != "text":
            raise refusal("response_format", "response_format and structured_outputs both say what the answer is: send one")
        return self

    @model_validator(mode="after")
    def _a_grammar_can_be_followed(self) -> Self:
        param, _ = self.grammar
        if not param:
            return self
        for name, is_set in (
            ("use_beam_search", self.use_beam_search),
            ("ignore_eos", self.ignore_eos),
            ("min_tokens", bool(self.min_tokens)),
        ):
            if is_set:
                raise refusal(
                    name,
                    f"an answer that follows a grammar is sampled, and ends where that ends: leave {name} out, or {param}",
                )
        return self

    @property
    def grammar(self) -> tuple[str, Grammar | None]:
        """What the answer follows, after the name of the parameter that says so; "" if it is free."""
        if self.response_format is not None and (grammar := self.response_format.grammar()) is not None:
            return "response_format", grammar
        if self.structured_outputs is None:
            return "", None
        return f"structured_outputs.{self.structured_outputs.param}", self.structured_outputs.grammar()

    @model_validator(mode="after")
    def _choices_are_not_too_many(self) -> Self:
        param, each = self.widest
        num_sequences = each * self.num_prompts
        if num_sequences > MAX_CHOICES:
            prompts = f" for each of {self.num_prompts} prompts" if self.num_prompts > 1 else ""
            raise refusal(
                param,
                f"{param}={each}{prompts} makes {num_sequences} sequences, and a request may have {MAX_CHOICES}: "
                f"lower {param} to {MAX_CHOICES // self.num_prompts} and send further requests for the others",
            )
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """New tokens of each answer at most, if that was said."""
        return self.max_tokens

    @property
    def num_prompts(self) -> int:
        """Texts to continue."""
        return 1

    @property
    def num_choices(self) -> int:
        """Of the answer, for each prompt."""
        return 1 if self.n is None else self.n

    @property
    def num_candidates(self) -> int:
        """Texts made for each prompt, of which `num_choices` are returned. A beam search makes no more than those."""
        return self.num_choices

    @property
    def widest(self) -> tuple[str, int]:
        """How many sequences of the engine each prompt needs, after the name of the parameter that says so."""
        return ("n", self.num_choices) if self.beam_width is None else ("beam_width", self.beam_width)

    @property
    def num_logprobs(self) -> int | None:
        """Of how many of the likeliest tokens the answer has log-probabilities, beside those chosen; None for no such thing."""
        return None

    @property
    def num_prompt_logprobs(self) -> int | None:
        """The same for the tokens of the prompt."""
        return None

    @property
    def num_beams(self) -> int:
        """The width of the beam search; 0 without one."""
        return (self.beam_width or self.num_choices) if self.use_beam_search else 0

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a chunk that counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def includes_usage_so_far(self) -> bool:
        """Whether every chunk counts tokens."""
        return self.stream_options is not None and bool(self.stream_options.continuous_usage_stats)


class CompletionRequest(GenerationRequest):
    """POST /v1/completions: each prompt has `n` choices in the answer, those of the first prompt first."""

    unserved: ClassVar[Unserved] = {"suffix": ("",)}
    prompt: Annotated[list[Prompt], PlainValidator(_as_prompts), WithJsonSchema(_PROMPT_FORMS)]
    max_tokens: Annotated[int, Field(ge=0)] | None = None
    """0 asks for the log-probabilities of the prompt alone, by `echo` and `logprobs`."""
    logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """The log-probability of each token of the answer, and of so many of the likeliest at its place."""
    best_of: Annotated[int, Field(ge=1)] | None = None
    """Sample so many for each prompt, and return the `n` whose tokens have the highest mean log-probability, best first."""
    echo: bool | None = None
    """Have each answer begin with its prompt; with `logprobs`, those of the prompt's tokens too."""

    @model_validator(mode="after")
    def _something_is_asked_for(self) -> Self:
        if self.max_tokens == 0 and self.num_prompt_logprobs is None:
            raise refusal("max_tokens", "max_tokens=0 is only for echo=true with logprobs; send at least 1 otherwise")
        if self.max_tokens == 0 and self.grammar[0]:
            raise refusal("max_tokens", f"max_tokens=0 leaves nothing that {self.grammar[0]} could be followed by: raise it")
        return self

    @model_validator(mode="after")
    def _best_of_can_choose(self) -> Self:
        if self.best_of is None:
            return self
        if self.use_beam_search:
            raise refusal("best_of", "best_of is for sampling: leave it out and send beam_width")
        if self.best_of < self.num_choices:
            raise refusal(
                "best_of",
                f"best_of={self.best_of} is less than n={self.num_choices}: "
                f"raise best_of to {self.num_choices} or leave it out",
            )
        if self.best_of > self.num_choices and self.stream:
            raise refusal("best_of", "which are the best is known at the end only: leave stream out, or best_of")
        return self

    @property
    def num_prompts(self) -> int:
        """Each is a text to continue."""
        return len(self.prompt)

    @property
    def num_candidates(self) -> int:
        """Texts made for each prompt, of which `num_choices` are returned."""
        return self.num_choices if self.best_of is None else self.best_of

    @property
    def num_logprobs(self) -> int | None:
        """As asked for."""
        return self.logprobs

    @property
    def num_prompt_logprobs(self) -> int | None:
        """As of the answer, if the prompt is part of it."""
        return self.logprobs if self.echo else None

    @property
    def widest(self) -> tuple[str, int]:
        """As for all requests, or `best_of`."""
        return super().widest if self.best_of is None else ("best_of", self.best_of)


class ChatMessage(WireRequest):
    """One turn of a conversation."""

    unserved: ClassVar[Unserved] = {
        "name": (),
        "refusal": (),
        "tool_calls": ([],),
        "tool_call_id": (),
        "function_call": (),
        "audio": (),
        "annotations": ([],),
    }
    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_as_text), WithJsonSchema(_CONTENT_FORMS)]


class ChatRequest(GenerationRequest):
    """POST /v1/chat/completions."""

    unserved: ClassVar[Unserved] = {
        "tools": ([],),
        "tool_choice": ("none",),
        "parallel_tool_calls": (True, False),
        "functions": ([],),
        "function_call": ("none",),
        "modalities": (["text"],),
        "audio": (),
        "prediction": (),
        "reasoning_effort": ("none",),
        "verbosity": (),
        "store": (False,),
        "metadata": ({},),
        "service_tier": ("auto", "default"),
        "web_search_options": (),
        "prompt_cache_key": (),
        "safety_identifier": (),
        "chat_template": (),
    }
    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    chat_template_kwargs: TemplateVariables | None = None
    """vLLM's: variables of the model's own chat template, such as `enable_thinking`."""
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    """Have the log-probability of each token of the answer."""
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_LOGPROBS)] | None = None
    """And of so many of the likeliest at its place."""

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise refusal("max_tokens", "max_tokens and max_completion_tokens mean the same: send one")
        return self

    @model_validator(mode="after")
    def _top_logprobs_need_logprobs(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise refusal("top_logprobs", "top_logprobs is only for logprobs=true")
        return self

    @property
    def wanted_tokens(self) -> int | None:
        """By either of its names."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens

    @property
    def num_logprobs(self) -> int | None:
        """As asked for."""
        return (self.top_logprobs or 0) if self.logprobs else None
