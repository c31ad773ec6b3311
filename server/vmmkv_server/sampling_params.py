"""Sampling parameters, and the limits of requests: one declaration for LLM, HTTP and the engine.

SamplingParams is what a caller asks for, validated when it is made, and part of the message to the engine.
Limits is what a model and its memory allow; every process refuses a request by `Limits.check`.
"""

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from reprlib import repr as shortened
from typing import Any, Final, NoReturn, TypeVar

from vmmkv.errors import did_you_mean
from vmmkv.units import counted, format_bytes
from vmmkv_server.kv_policy import Eviction, KVPolicyLike

T = TypeVar("T")

MAX_PENALTY: Final = 2.0
"""Bound of presence and frequency penalties, either way; OpenAI's limit."""
MAX_REPETITION_PENALTY: Final = 100.0
"""Bound of the repetition penalty and of its inverse; beyond it logits leave the range of floats."""
MAX_BIAS: Final = 100.0
"""Bound of a logit bias, either way; OpenAI's limit."""
MAX_LENGTH_PENALTY: Final = 10.0
"""Bound of a beam search's length penalty, either way."""
MAX_CHOICES: Final = 128
"""Sequences that one HTTP request, or one prompt of an LLM, may have."""
MAX_INDEX: Final = 2**31
"""Token ids and counts of tokens are below it."""
SEED_MASK: Final = (1 << 63) - 1
"""The engine's seeds are non-negative numbers of 63 bits."""
KV_POLICY_REACH: Final = 4
"""A request whose `kv_policy` bounds its rows may have so many times the tokens that the model takes otherwise."""
MAX_PROMPT_TOP_LOGPROBS: Final = 1024
"""Likeliest tokens at each place of a prompt: a step of 8192 places takes 100 MiB of the device."""

HTTP_ALONE: Final = (
    "cache_salt", "chat_template_kwargs", "kv_transfer_params", "metadata", "prompt_cache_key", "prompt_cache_retention",
    "response_format", "safety_identifier", "service_tier", "stream", "stream_options", "timeout", "user",
)  # fmt: skip
"""Options of an HTTP request without a counterpart in SamplingParams."""
ELSEWHERE: Final = {
    **dict.fromkeys(HTTP_ALONE, "HTTP alone has it: see `vmmkv serve`"),
    "echo": "prompt_logprobs says how likely a prompt is, and HTTP alone repeats it",
    "max_completion_tokens": "did you mean max_tokens?",
    **dict.fromkeys(("tools", "tool_choice", "parallel_tool_calls"), "give it to LLM.chat"),
    "priority": "give LLM.generate priorities",
    "reasoning_effort": 'give LLM.chat chat_template_kwargs={"enable_thinking": False}',
    "top_logprobs": "logprobs is how many of the likeliest there are at each place",
    "use_beam_search": "give beam_width",
}
"""Options of an HTTP request that SamplingParams lacks, and what to use instead."""


class InvalidParam(ValueError):
    """A sampling parameter that cannot be; `param` is its name, `reason` the text without the name."""

    def __init__(self, param: str, reason: str) -> None:
        super().__init__(f"{param} {reason}")
        self.param = param
        self.reason = reason


class RequestRefused(ValueError):
    """A request that this model or its memory can never serve.

    `param` is the parameter at fault (`prompt` for the prompt), `code` a word for machines.
    """

    def __init__(self, message: str, *, param: str, code: str = "invalid_value") -> None:
        super().__init__(message)
        self.param = param
        self.code = code


def unknown_option(owner: str, name: str, options: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """The error text for an option that does not exist: what to use instead, the nearest name, or all names."""
    remedy = (elsewhere or {}).get(name) or did_you_mean(name, options) or f"it has {', '.join(options)}"
    return f"{owner} has no option {name}; {remedy}"


def _explains_unknown_options(cls: type[T]) -> type[T]:
    """Class decorator: the TypeError for an unknown keyword says what exists instead."""
    init, options = cls.__init__, list(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in options:
                raise TypeError(unknown_option(cls.__name__, name, options, ELSEWHERE))
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@dataclass(frozen=True, slots=True)
class Interval:
    """The numbers that a parameter may be: `[least, end)` for integers, else `[least, end]`, or `(least, end]` if open."""

    kind: type[int] | type[float]
    least: float
    end: float
    wanted: str
    """Words for the values that a refusal asks for."""
    is_open: bool = False

    def checked(self, name: str, value: Any) -> int | float:
        """The value as one of Python's numbers. Raises: InvalidParam."""
        if self.kind is int:
            is_inside = isinstance(value, Integral) and self.least <= int(value) < self.end
        else:
            is_inside = isinstance(value, Real) and self.least <= float(value) <= self.end and value < math.inf
            is_inside = is_inside and not (self.is_open and value == self.least)
        if isinstance(value, bool) or not is_inside:
            _refuse(name, value, self.wanted)
        return self.kind(value)


def _integer(default: int | None, least: int, end: int, wanted: str) -> Any:
    return field(default=default, metadata={"interval": Interval(int, least, end, wanted)})


def _number(default: float, least: float, most: float, wanted: str, *, is_open: bool = False) -> Any:
    return field(default=default, metadata={"interval": Interval(float, least, most, wanted, is_open)})


def _about_zero(default: float, most: float) -> Any:
    return _number(default, -most, most, f"from {-most:g} to {most:g}")


_LIKELIEST: Final = "None for none, or how many of the likeliest, 0 or more"


@_explains_unknown_options
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """Choice of tokens and the ends of an answer. Validated once; can be used for any number of prompts.

    Names and meanings are vLLM's. Logits are changed in this order: penalties, `logit_bias`, temperature, `top_k`, `top_p`,
    `min_p`. Tokens of equal probability are kept or dropped together. Log-probabilities are those of the model's logits before
    all of this.

    numpy's numbers and any list are accepted; they are kept as Python's numbers and tuples.
    Requests over HTTP get each field that is declared here, see `http.schemas`.

    Raises: InvalidParam (a ValueError) naming the option, its value and what it may be; TypeError for an unknown option.
    """

    max_tokens: int = 16
    """Most new tokens. 0 only with `prompt_logprobs`."""
    min_tokens: int = _integer(0, 0, MAX_INDEX, "0 to max_tokens")
    """Fewest new tokens: until then no end token, no `stop_token_ids` and no `stop` ends the answer."""
    temperature: float = _number(1.0, 0.0, math.inf, "0 for the likeliest token, or a positive, finite number")
    """0 takes the likeliest token; so does anything below 1e-5."""
    top_p: float = _number(1.0, 0.0, 1.0, "above 0 and at most 1, which keeps all tokens", is_open=True)
    """Keep the fewest likeliest tokens whose probabilities sum up to this; at least one is kept."""
    top_k: int = _integer(0, -1, MAX_INDEX, "at least 1, or 0 to keep all tokens")
    """Keep this many of the likeliest tokens; 0 or -1 keeps all."""
    min_p: float = _number(0.0, 0.0, 1.0, "from 0, which keeps all tokens, to 1")
    """Keep tokens with at least this share of the likeliest token's probability."""
    presence_penalty: float = _about_zero(0.0, MAX_PENALTY)
    """Subtracted from the logit of each token generated before."""
    frequency_penalty: float = _about_zero(0.0, MAX_PENALTY)
    """Subtracted from the logit of a token for each time that it was generated before."""
    repetition_penalty: float = _number(
        1.0,
        1 / MAX_REPETITION_PENALTY,
        MAX_REPETITION_PENALTY,
        f"from {1 / MAX_REPETITION_PENALTY:g} to {MAX_REPETITION_PENALTY:g}; 1 asks for nothing",
    )
    """Divides positive logits, and multiplies negative ones, of tokens in the prompt and the answer."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Amounts to add to the logits of these token ids."""
    seed: int | None = _integer(None, -(2**63), 2**63, "an integer of 64 bits, or None")
    """Seed of the random numbers, which depend only on it and the position; None for a new one each time."""
    n: int = _integer(1, 1, MAX_CHOICES + 1, f"at least 1 and at most {MAX_CHOICES}: give the prompt again for more")
    """Answers for each prompt."""
    stop: Sequence[str] = ()
    """Texts that end the answer and are not part of it; or one such text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, beside the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = _integer(None, 0, MAX_INDEX, _LIKELIEST)
    """Likeliest tokens with log-probabilities at each place, beside each chosen token's own; None for no log-probabilities."""
    prompt_logprobs: int | None = _integer(None, 0, MAX_INDEX, _LIKELIEST)
    """`logprobs` for the prompt's tokens. The whole prompt is computed then, cached or not."""
    beam_width: int = _integer(0, 0, MAX_INDEX, "0 to sample, or the width of a beam search")
    """Width of a beam search, which needs `temperature=0` and whose `n` best are the answers; 0 to sample."""
    length_penalty: float = _about_zero(1.0, MAX_LENGTH_PENALTY)
    """Beams compare by log-probability / (number of tokens) ** length_penalty."""
    structured_outputs: Mapping[str, Any] | None = None
    """Form of the answer: one of `json` (a schema, or its text), `regex`, `choice` (a list of texts), `grammar` (GBNF) or
    `json_object` (true). The other fields of vLLM's may have their defaults."""
    kv_policy: KVPolicyLike | None = None
    """Rows of the KV cache to keep, such as {"type": "streaming_llm", "window": 2048}; None for the server's default."""

    def __post_init__(self) -> None:
        least, wanted = (1, "at least 1") if self.prompt_logprobs is None else (0, "0 or more")
        self._keep("max_tokens", Interval(int, least, MAX_INDEX, wanted).checked("max_tokens", self.max_tokens))
        upto = Interval(int, 0, self.max_tokens + 1, f"0 to max_tokens, which is {self.max_tokens}")
        self._keep("min_tokens", upto.checked("min_tokens", self.min_tokens))
        for name, interval in _INTERVALS.items():
            if (value := getattr(self, name)) is not None or name not in _OPTIONAL:
                self._keep(name, interval.checked(name, value))
        self._keep("top_k", max(0, self.top_k))
        self._keep("logit_bias", _biases(self.logit_bias))
        self._keep("stop", _texts(self.stop))
        self._keep("stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.beam_width:
            self._check_beams()
        elif self.length_penalty != 1.0:
            raise InvalidParam("length_penalty", "is only for a beam search: give beam_width, or leave it out")
        if self.structured_outputs is not None:
            self._check_structured_outputs()
        if self.kv_policy is not None:
            eviction_of(self.kv_policy)

    @property
    def is_search(self) -> bool:
        """Is this a beam search? All its answers come from one request of the engine."""
        return self.beam_width > 0

    @property
    def num_sequences(self) -> int:
        """Sequences of the engine for each prompt."""
        return self.beam_width or self.n

    def _check_beams(self) -> None:
        if self.temperature:
            raise InvalidParam("temperature", "must be 0 for a beam search, which samples nothing: send 0")
        default = SamplingParams()
        for name in _CHANGE_PROBABILITIES:
            if getattr(self, name) != getattr(default, name):
                reason = f"changes probabilities, and a beam search compares the model's own: leave {name} out"
                raise InvalidParam(name, reason)
        for name, reason in (
            ("min_tokens", "is not for a beam search, which ends where its beams do: leave min_tokens out, or the beam search"),
            ("structured_outputs", "is not for a beam search, which samples nothing"),
        ):
            if getattr(self, name):
                raise InvalidParam(name, reason)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                raise InvalidParam(name, "is not for a beam search, which has none of single tokens: leave logprobs out")
        if self.n > self.beam_width:
            raise InvalidParam(
                "n",
                f"is {self.n}, and so many answers cannot come from {self.beam_width} beams: "
                f"raise beam_width to {self.n} or lower n to {self.beam_width}",
            )

    def _check_structured_outputs(self) -> None:
        asked = self.structured_outputs
        named: dict[str, Any] = {}
        for name, value in asked.items() if isinstance(asked, Mapping) else ():
            if name not in _STRUCTURES and name not in STRUCTURE_DEFAULTS:
                raise InvalidParam("structured_outputs", unknown_option("", str(name), list(_STRUCTURES)).lstrip())
            if value is None or value in STRUCTURE_DEFAULTS.get(name, ()):
                continue
            if name not in _STRUCTURES:
                raise InvalidParam(f"structured_outputs.{name}", f"is {shortened(value)}, which is not served: leave it out")
            named[name] = value
        if len(named) != 1:
            _refuse("structured_outputs", asked, f'one of {", ".join(_STRUCTURES)}, such as {{"regex": "[0-9]+"}}')
        self._keep("structured_outputs", named)
        ((name, value),) = named.items()
        kinds, wanted = _STRUCTURES[name]
        if not isinstance(value, kinds) or (name == "choice" and not all(isinstance(text, str) for text in value)):
            given = "a class" if isinstance(value, type) else shortened(value)
            raise InvalidParam(f"structured_outputs.{name}", f"is {given}; wanted {wanted}")
        for name in ("ignore_eos", "min_tokens"):
            if getattr(self, name):
                raise InvalidParam(name, "is not for structured outputs, which end where the grammar does")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)


_INTERVALS: Final[Mapping[str, Interval]] = {
    one.name: one.metadata["interval"] for one in fields(SamplingParams) if "interval" in one.metadata
}
_OPTIONAL: Final = frozenset(one.name for one in fields(SamplingParams) if one.default is None)
_CHANGE_PROBABILITIES: Final = (
    "top_p", "top_k", "min_p", "presence_penalty", "frequency_penalty", "repetition_penalty", "logit_bias",
)  # fmt: skip
"""Parameters that change probabilities unless they have their defaults."""

_STRUCTURES: Final[Mapping[str, tuple[Any, str]]] = {
    "json": ((dict, bool, str), "a schema, such as MyModel.model_json_schema()"),
    "regex": ((str,), "a text, such as '[0-9]+'"),
    "choice": ((list, tuple), "a list of texts, such as ['yes', 'no']"),
    "grammar": ((str,), "a text in GBNF, such as 'root ::= \"a\"'"),
    "json_object": ((bool,), "true"),
}
"""The types of each kind of `structured_outputs`, and what a refusal asks for."""
STRUCTURE_DEFAULTS: Final[Mapping[str, tuple[Any, ...]]] = {
    "json_object": (False,),
    "disable_any_whitespace": (False, True),  # answers have none
    "disable_fallback": (False, True),  # there is no other compiler
    "disable_additional_properties": (False,),
    **dict.fromkeys(("whitespace_pattern", "structural_tag", "_backend"), ()),
    "_backend_was_auto": (False,),
}
"""Fields of vLLM's `structured_outputs` that a dump of it has, each with the values that ask for nothing, besides None."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """Limits of one request, by the model and by the memory of its engine."""

    model: str = "this model"
    """The name that the caller knows."""
    model_tokens: int
    """Prompt and answer together, as the model's positions or a slot allow."""
    pool_tokens: int
    """Tokens of one sequence that the whole KV budget holds."""
    budget_bytes: int
    max_sequences: int
    vocabulary_size: int
    """Vocabulary size of the logits."""
    kv_policy: str | None = None
    """Policy of requests that name none; None to keep all rows."""
    kv_policy_refusal: str = ""
    """Reason that no request can have a `kv_policy` here; empty if it can."""
    kv_policy_again_refusal: str = ""
    """Reason that none can have one that turns keys as it generates; empty if it can."""

    @property
    def max_tokens(self) -> int:
        """Prompt and answer together."""
        return min(self.model_tokens, self.pool_tokens)

    def fit(
        self, num_prompt_tokens: int, wanted: int | None, *, default: int | None = None, eviction: Eviction | None = None
    ) -> int:
        """New tokens that a request may have: what it `wanted`, else `default`, else as many as fit.

        The wanted tokens may go past the model's positions where its `eviction` keeps its rows within them, and turns keys.

        Raises: RequestRefused if the prompt is empty or the request could never fit.
        """
        if num_prompt_tokens == 0:
            raise RequestRefused("The prompt has no tokens; send at least one.", param="prompt", code="empty_prompt")
        room = self.max_tokens - num_prompt_tokens
        if wanted is None and room > 0:
            return room if default is None else min(default, room)
        if wanted is not None and wanted <= room:
            return wanted
        message = _too_long(num_prompt_tokens, wanted, self.max_tokens, self._reason)
        if wanted is not None and eviction is not None:
            num_tokens, reach = num_prompt_tokens + wanted, KV_POLICY_REACH * self.model_tokens
            fits = eviction.most_rows(num_prompt_tokens, min(num_tokens, reach)) <= self.max_tokens
            if fits and num_tokens <= (self.model_tokens if eviction.keeps_positions else reach):
                return wanted
            if fits and not eviction.keeps_positions:
                message = _too_long(num_prompt_tokens, wanted, reach, "the most with its kv_policy")
            elif fits and num_tokens <= reach:
                message += ' Or have "positions": "rerotated" in its kv_policy: it may go past the model\'s positions.'
        raise RequestRefused(message, param="prompt" if room <= 0 else "max_tokens", code="context_length_exceeded")

    def check_least(self, least_tokens: int, wanted: int | None = None) -> None:
        """Raises: RequestRefused for a prompt of so many tokens or more, if it can never fit; no `kv_policy` changes that.

        `wanted`: as of `fit`.
        """
        if least_tokens > self.max_tokens:
            message = (
                f"The prompt has {least_tokens} tokens or more, but one request can have {self.max_tokens} ({self._reason}): "
                f"{_shorter(wanted, self.max_tokens)}."
            )
            raise RequestRefused(message, param="prompt", code="context_length_exceeded")

    @property
    def _reason(self) -> str:
        """Reason that a request can have `max_tokens`."""
        if self.pool_tokens < self.model_tokens:
            return f"all that the KV budget of {format_bytes(self.budget_bytes)} can hold; a larger budget would hold more"
        return f"the most that {self.model} takes here"

    def eviction(self, params: SamplingParams) -> Eviction | None:
        """Eviction by the `kv_policy` of a request, or else by the default; None to keep all rows."""
        given = self.kv_policy if params.kv_policy is None else params.kv_policy
        return None if given is None else eviction_of(given)

    def check(self, prompt: Sequence[int], params: SamplingParams, *, follows_grammar: bool = False) -> None:
        """Can this request ever run here? The prompt, each token id, the answer's length and the beams are checked.

        Raises: RequestRefused, InvalidParam.
        """
        self.fit(len(prompt), params.max_tokens, eviction=self.eviction(params))
        if params.max_tokens == 0 and follows_grammar:
            raise InvalidParam("max_tokens", "is 0, which leaves nothing that could follow the grammar: raise it")
        size = self.vocabulary_size
        for param, ids in (("prompt", prompt), ("logit_bias", params.logit_bias), ("stop_token_ids", params.stop_token_ids)):
            if ids and not 0 <= min(ids) <= max(ids) < size:
                unknown = next(token_id for token_id in ids if not 0 <= token_id < size)
                message = f"{unknown} is not a token id of this model: they go from 0 to {size - 1}."
                raise RequestRefused(f"Invalid {param}: {message}", param=param)
        if params.prompt_logprobs is not None and params.prompt_logprobs > MAX_PROMPT_TOP_LOGPROBS:
            raise InvalidParam("prompt_logprobs", f"is {params.prompt_logprobs}; {MAX_PROMPT_TOP_LOGPROBS} is the most")
        if params.beam_width > self.max_sequences:
            message = (
                f"A search of {params.beam_width} beams needs as many slots, and this server has {self.max_sequences}: "
                f"lower beam_width to {self.max_sequences}."
            )
            raise RequestRefused(message, param="beam_width", code="too_many_beams")
        if follows_grammar and (params.beam_width or params.ignore_eos or params.min_tokens):
            name = next(name for name in ("beam_width", "ignore_eos", "min_tokens") if getattr(params, name))
            raise InvalidParam(name, "is not for an answer that follows a grammar, which ends where the grammar does")
        if (self.kv_policy or params.kv_policy) and (eviction := self.eviction(params)) is not None:
            self.check_policy(eviction)
            if params.beam_width:
                raise InvalidParam("kv_policy", 'is not for a beam search, whose beams share rows: send "none"')

    def check_policy(self, eviction: Eviction) -> None:
        """Can any request have this policy here? Raises: InvalidParam."""
        if self.kv_policy_refusal:
            raise InvalidParam("kv_policy", f"{self.kv_policy_refusal}: leave it out")
        if self.kv_policy_again_refusal and eviction.every is not None and not eviction.keeps_positions:
            raise InvalidParam("kv_policy", f"is of type {eviction.name}, which {self.kv_policy_again_refusal}")


def _too_long(num_prompt_tokens: int, wanted: int | None, limit: int, reason: str) -> str:
    given = f"{counted(num_prompt_tokens, 'token')} of prompt"
    if wanted is not None:
        given = f"{num_prompt_tokens + wanted} tokens, {num_prompt_tokens} of prompt and {wanted} new"
    remedies = [_shorter(wanted, limit)]
    if wanted is not None and (room := limit - num_prompt_tokens) > 0:
        remedies = [f"lower max_tokens to {room}", *(remedies if limit > wanted else ())]
    return f"This request is for {given}, but one request can have {limit} ({reason}): {' or '.join(remedies)}."


def _shorter(wanted: int | None, limit: int) -> str:
    """Advice about a prompt that leaves no room for the tokens that are `wanted`, or for one."""
    if (room := limit - (1 if wanted is None else wanted)) > 0:
        return f"shorten the prompt to {counted(room, 'token')}"
    return f"shorten the prompt and lower max_tokens to {limit} together at most"


def eviction_of(given: Any) -> Eviction | None:
    """Read a `kv_policy`. Raises: InvalidParam."""
    if not isinstance(given, Mapping | str):
        _refuse("kv_policy", given, 'an object such as {"type": "streaming_llm", "window": 2048}')
    try:
        return Eviction.of(given)
    except ValueError as error:
        raise InvalidParam("kv_policy", str(error)) from error


def _biases(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        _refuse("logit_bias", bias, "a mapping from token ids to numbers, such as {50256: -100.0}")
    ids = Interval(int, 0, MAX_INDEX, "a token id, 0 or more, as each key")
    values = Interval(float, -MAX_BIAS, MAX_BIAS, f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")
    return {
        int(ids.checked("logit_bias", token_id)): values.checked(f"logit_bias[{token_id}]", value)
        for token_id, value in bias.items()
    }


def _texts(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else _listed("stop", stop, "a text, or a list of texts, such as ['###']")
    if not all(isinstance(text, str) and text for text in texts):
        _refuse("stop", stop, "texts that are not empty, such as ['###']")
    return texts


def _token_ids(ids: Any) -> tuple[int, ...]:
    listed = _listed("stop_token_ids", ids, "a list of token ids, such as [2]")
    interval = Interval(int, 0, MAX_INDEX, "token ids, 0 or more")
    return tuple(int(interval.checked("stop_token_ids", token_id)) for token_id in listed)


def _listed(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, wanted)
    return tuple(value)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise InvalidParam(name, f"is {value!r}; wanted {wanted}")
