"""What a caller in this process asks of a generation; HTTP has the same options (`sampling_schemas.py`)."""

import difflib
import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import Any, Final, Literal, NoReturn, TypeVar

from vmmkv.units import counted, format_bytes

# -------- sampling params

T = TypeVar("T")

MAX_PENALTY: Final = 2.0
"""Presence and frequency penalties, either way; OpenAI's limit."""
MAX_REPETITION_PENALTY: Final = 100.0
"""And its inverse: logits times more leave what floats hold."""
MAX_BIAS: Final = 100.0
"""Either way; OpenAI's limit. It as good as forces or forbids a token."""
MAX_LENGTH_PENALTY: Final = 10.0
"""Either way, of a beam search; a length to the power of more leaves what floats hold."""
MAX_CHOICES: Final = 128
"""Sequences of the engine that one request, or one prompt in this process, may be continued by."""
MAX_INDEX: Final = 2**31
"""Token ids and counts of them are below it."""

HTTP_ALONE: Final = (
    "best_of", "beam_width", "cache_salt", "chat_template_kwargs", "length_penalty", "response_format", "stream",
    "stream_options", "structured_outputs", "timeout", "use_beam_search", "user",
)  # fmt: skip
"""Options of a request that there are not in this process."""
ELSEWHERE: Final = {
    **dict.fromkeys(HTTP_ALONE, "HTTP alone has it: see `vmmkv serve`"),
    "echo": "prompt_logprobs says how likely a prompt is, and HTTP alone repeats it",
    "max_completion_tokens": "did you mean max_tokens?",
    "priority": "give Engine.generate priorities",
    "top_logprobs": "logprobs is how many of the likeliest there are at each place",
}
"""What a request over HTTP has and SamplingParams has not, and what there is in its place."""


def unknown_option(owner: str, name: str, options: Sequence[str], elsewhere: Mapping[str, str] | None = None) -> str:
    """What to say of an option that there is not: what is `elsewhere` in its place, the nearest that there is, or else all."""
    near = difflib.get_close_matches(name, options)
    remedy = f"did you mean {' or '.join(near)}?" if near else f"it has {', '.join(options)}"
    return f"{owner} has no option {name}; {(elsewhere or {}).get(name, remedy)}"


def _names_what_there_is(cls: type[T]) -> type[T]:
    """The dataclass, which says of an argument that it has not what there is instead."""
    init, options = cls.__init__, list(cls.__dataclass_fields__)  # type: ignore[attr-defined]

    @functools.wraps(init)
    def checked(self: T, *args: Any, **given: Any) -> None:
        for name in given:
            if name not in options:
                raise TypeError(unknown_option(cls.__name__, name, options, ELSEWHERE))
        init(self, *args, **given)

    cls.__init__ = checked  # type: ignore[assignment, method-assign]
    return cls


@_names_what_there_is
@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. Validated once; the same object may serve any number of prompts.

    What changes the logits or the choice among them is applied in this order: penalties, `logit_bias`, temperature, `top_k`,
    `top_p` of what `top_k` left, `min_p`. Tokens that are equally likely are kept or dropped together.

    Log-probabilities are the model's own, in answers and prompts: of its logits before all of this.

    Numbers may also be numpy's; stops may come in any order that a list has. They are kept as Python's own numbers, in tuples.

    Raises: ValueError naming the option, what it was and what it may be; TypeError for an option that there is not.
    """

    max_tokens: int = 16
    """New tokens, at most. 0 only with `prompt_logprobs`, which can be all that is asked for."""
    min_tokens: int = 0
    """And at least: before so many neither an end token nor one of `stop_token_ids` is sampled, and no text of `stop` ends the
    answer."""
    temperature: float = 1.0
    """0 takes the likeliest token; so does anything below 1e-5."""
    top_p: float = 1.0
    """The least likely tokens go, as long as this much probability is left; the likeliest always stays."""
    top_k: int = 0
    """Only the likeliest so many can be drawn; 0 or -1 for all, which is kept as 0."""
    min_p: float = 0.0
    """Only tokens with at least this share of the likeliest one's probability can be drawn."""
    presence_penalty: float = 0.0
    """Taken from the logit of each token generated before."""
    frequency_penalty: float = 0.0
    """Taken from the logit of a token for each time that it was generated before."""
    repetition_penalty: float = 1.0
    """What logits of tokens of the prompt and the answer are divided by, or multiplied with if they are negative."""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    """Added to the logits of these token ids."""
    seed: int | None = None
    """Of the random stream, which depends on nothing else but the position; None for one that differs every time."""
    n: int = 1
    """Answers for each prompt, MAX_CHOICES at most."""
    stop: Sequence[str] = ()
    """Texts that end the answer, and are no part of it; or one such text."""
    stop_token_ids: Sequence[int] = ()
    """Token ids that end the answer, in addition to the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """None for none; else of each token chosen, and of so many of the likeliest beside it."""
    prompt_logprobs: int | None = None
    """The same of the prompt's tokens. Its rows are all computed then, whatever the prefix cache has of them."""

    def __post_init__(self) -> None:
        wanted = "at least 1" if self.prompt_logprobs is None else "0 or more"
        self._whole("max_tokens", int(self.prompt_logprobs is None), MAX_INDEX, wanted)
        self._whole("min_tokens", 0, self.max_tokens + 1, f"0 to max_tokens, which is {self.max_tokens}")
        self._number("temperature", 0.0, math.inf, "0 for the likeliest token, or a positive, finite number")
        self._number("top_p", 0.0, 1.0, "above 0 and at most 1, which keeps all tokens", above=True)
        self._whole("top_k", -1, MAX_INDEX, "at least 1, or 0 to keep all tokens")
        self._keep("top_k", max(0, self.top_k))
        self._number("min_p", 0.0, 1.0, "from 0, which keeps all tokens, to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            self._number(name, -MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        least = 1 / MAX_REPETITION_PENALTY
        wanted = f"from {least:g} to {MAX_REPETITION_PENALTY:g}; 1 asks for nothing"
        self._number("repetition_penalty", least, MAX_REPETITION_PENALTY, wanted)
        self._keep("logit_bias", _biases(self.logit_bias))
        if self.seed is not None:
            self._whole("seed", -(2**63), 2**63, "an integer of 64 bits, or None")
        self._whole("n", 1, MAX_CHOICES + 1, f"at least 1 and at most {MAX_CHOICES}: give the prompt again for more")
        self._keep("stop", _texts(self.stop))
        self._keep("stop_token_ids", _token_ids(self.stop_token_ids))
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                self._whole(name, 0, MAX_INDEX, "None for none, or how many of the likeliest, 0 or more")

    def _keep(self, name: str, value: object) -> None:
        object.__setattr__(self, name, value)  # it is frozen for everybody else

    def _whole(self, name: str, least: int, end: int, wanted: str) -> None:
        self._keep(name, _whole(name, getattr(self, name), least, end, wanted))

    def _number(self, name: str, least: float, most: float, wanted: str, *, above: bool = False) -> None:
        self._keep(name, _number(name, getattr(self, name), least, most, wanted, above=above))


def _biases(bias: Any) -> dict[int, float]:
    if not isinstance(bias, Mapping):
        _refuse("logit_bias", bias, "a mapping from token ids to numbers, such as {50256: -100.0}")
    wanted = f"from {-MAX_BIAS:g} to {MAX_BIAS:g}"
    return {
        _whole("logit_bias", token_id, 0, MAX_INDEX, "a token id, 0 or more, as each key"): _number(
            f"logit_bias[{token_id}]", value, -MAX_BIAS, MAX_BIAS, wanted
        )
        for token_id, value in bias.items()
    }


def _texts(stop: Any) -> tuple[str, ...]:
    texts = (stop,) if isinstance(stop, str) else _listed("stop", stop, "a text, or a list of texts, such as ['###']")
    if not all(isinstance(text, str) and text for text in texts):
        _refuse("stop", stop, "texts that are not empty, such as ['###']")
    return texts


def _token_ids(ids: Any) -> tuple[int, ...]:
    listed = _listed("stop_token_ids", ids, "a list of token ids, such as [2]")
    return tuple(_whole("stop_token_ids", token_id, 0, MAX_INDEX, "token ids, 0 or more") for token_id in listed)


def _listed(name: str, value: Any, wanted: str) -> tuple[Any, ...]:
    if isinstance(value, str | bytes | Mapping) or not isinstance(value, Iterable):
        _refuse(name, value, wanted)
    return tuple(value)


def _whole(name: str, value: Any, least: int, end: int, wanted: str) -> int:
    if isinstance(value, bool) or not isinstance(value, Integral) or not least <= int(value) < end:
        _refuse(name, value, wanted)
    return int(value)


def _number(name: str, value: Any, least: float, most: float, wanted: str, *, above: bool = False) -> float:
    """`above` leaves `least` itself out."""
    is_number = not isinstance(value, bool) and isinstance(value, Real) and math.isfinite(value)
    if not is_number or not least <= value <= most or (above and value == least):
        _refuse(name, value, wanted)
    return float(value)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise ValueError(f"{name} is {value!r}; wanted {wanted}")


# -------- admission limits
# Whether a request can ever fit, however little else runs: said the same way over HTTP and to callers in this process.


class DoesNotFit(ValueError):
    """A request that could never run; `at_fault` says what must change, its words say how."""

    def __init__(self, message: str, *, at_fault: Literal["prompt", "max_tokens"], empty: bool = False) -> None:
        super().__init__(message)
        self.at_fault = at_fault
        self.empty = empty
        """It has no tokens at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request can have; `of_model` is the tokens that the model's positions or a slot reach."""

    model: str
    """The name that whoever asks knows."""
    of_model: int
    of_pool: int
    """Tokens of one sequence that the whole KV budget holds."""
    budget_bytes: int

    @property
    def tokens(self) -> int:
        """Of a prompt and its answer together."""
        return min(self.of_model, self.of_pool)

    def fit(self, num_prompt_tokens: int, wanted: int | None, *, default: int | None = None) -> int:
        """How many new tokens a request may have: what it `wanted`, else `default`, else whatever fits.

        Raises: DoesNotFit if the prompt is empty or the request could never fit, whatever else runs.
        """
        if num_prompt_tokens == 0:
            raise DoesNotFit("The prompt has no tokens; send at least one.", at_fault="prompt", empty=True)
        room = self.tokens - num_prompt_tokens
        if wanted is not None and wanted <= room:
            return wanted
        if wanted is None and room > 0:
            return room if default is None else min(default, room)
        raise DoesNotFit(self._too_long(num_prompt_tokens, wanted, room), at_fault="prompt" if room <= 0 else "max_tokens")

    def _too_long(self, num_prompt_tokens: int, wanted: int | None, room: int) -> str:
        limit = self.tokens
        if self.of_pool < self.of_model:
            reason = f"all that the KV budget of {format_bytes(self.budget_bytes)} can hold; a larger budget would hold more"
        else:
            reason = f"the most that {self.model} takes here"
        given = f"{counted(num_prompt_tokens, 'token')} of prompt"
        if wanted is not None:
            given = f"{num_prompt_tokens + wanted} tokens, {num_prompt_tokens} of prompt and {wanted} new"
        num_new = 1 if wanted is None else wanted
        remedy = f"shorten the prompt to {counted(limit - num_new, 'token')}" if limit > num_new else ""
        if wanted is not None and room > 0:
            remedy = f"lower max_tokens to {room}" + (f" or {remedy}" if remedy else "")
        remedy = remedy or f"shorten the prompt and lower max_tokens to {limit} together at most"
        return f"This request is for {given}, but one request can have {limit} ({reason}): {remedy}."
