"""What a caller in this process asks of a generation; HTTP has the same options (`sampling_schemas.py`)."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Final, NoReturn

MAX_PENALTY: Final = 2.0
"""Presence and frequency penalties, either way; OpenAI's limit."""
MAX_REPETITION_PENALTY: Final = 100.0
"""And its inverse: logits times more leave what floats hold."""
MAX_BIAS: Final = 100.0
"""Either way; OpenAI's limit. It as good as forces or forbids a token."""
MAX_INDEX: Final = 2**31
"""Token ids and counts of them are below it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingParams:
    """How tokens are chosen, and when to stop. Validated once; the same object may serve any number of prompts.

    What changes the logits or the choice among them is applied in this order: penalties, `logit_bias`, temperature, `top_k`,
    `top_p` of what `top_k` left, `min_p`. Tokens that are equally likely are kept or dropped together.

    Raises: ValueError naming the option, what it was and what it may be.
    """

    max_tokens: int = 16
    """New tokens, at most."""
    temperature: float = 1.0
    """0 takes the likeliest token; so does anything below 1e-5."""
    top_p: float = 1.0
    """The least likely tokens go, as long as this much probability is left; the likeliest always stays."""
    top_k: int = 0
    """Only the likeliest so many can be drawn; 0 for all."""
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
    """Answers for each prompt."""
    stop: tuple[str, ...] = ()
    """Texts that end the answer, and are no part of it."""
    stop_token_ids: tuple[int, ...] = ()
    """Token ids that end the answer, in addition to the model's own end tokens."""
    ignore_eos: bool = False
    """Go on past the model's end tokens."""
    logprobs: int | None = None
    """None for none; else of each token chosen, and of so many of the likeliest beside it."""

    def __post_init__(self) -> None:
        _whole("max_tokens", self.max_tokens, 1, MAX_INDEX, "at least 1")
        _number("temperature", self.temperature, 0.0, math.inf, "0 for the likeliest token, or a positive, finite number")
        _number("top_p", self.top_p, 0.0, 1.0, "above 0 and at most 1, which keeps all tokens", above=True)
        _whole("top_k", self.top_k, 0, MAX_INDEX, "at least 1, or 0 to keep all tokens")
        _number("min_p", self.min_p, 0.0, 1.0, "from 0, which keeps all tokens, to 1")
        for name in ("presence_penalty", "frequency_penalty"):
            _number(name, getattr(self, name), -MAX_PENALTY, MAX_PENALTY, f"from {-MAX_PENALTY:g} to {MAX_PENALTY:g}")
        least = 1 / MAX_REPETITION_PENALTY
        wanted = f"from {least:g} to {MAX_REPETITION_PENALTY:g}; 1 asks for nothing"
        _number("repetition_penalty", self.repetition_penalty, least, MAX_REPETITION_PENALTY, wanted)
        _check_bias(self.logit_bias)
        if self.seed is not None:
            _whole("seed", self.seed, -(2**63), 2**63, "an integer of 64 bits, or None")
        _whole("n", self.n, 1, MAX_INDEX, "at least 1")
        _check_stops(self.stop, self.stop_token_ids)
        if not isinstance(self.ignore_eos, bool):
            _refuse("ignore_eos", self.ignore_eos, "True or False")
        if self.logprobs is not None:
            _whole("logprobs", self.logprobs, 0, MAX_INDEX, "None for none, or how many of the likeliest, 0 or more")


def _check_bias(bias: object) -> None:
    if not isinstance(bias, Mapping):
        _refuse("logit_bias", bias, "a mapping from token ids to numbers, such as {50256: -100.0}")
    for token_id, value in bias.items():
        _whole("logit_bias", token_id, 0, MAX_INDEX, "a token id, 0 or more, as each key")
        name = f"logit_bias[{token_id}]"
        _number(name, value, -MAX_BIAS, MAX_BIAS, f"from {-MAX_BIAS:g} to {MAX_BIAS:g}")


def _check_stops(stop: object, stop_token_ids: object) -> None:
    if not isinstance(stop, tuple) or not all(isinstance(text, str) and text for text in stop):
        _refuse("stop", stop, "a tuple of texts that are not empty, such as ('###',)")
    if not isinstance(stop_token_ids, tuple):
        _refuse("stop_token_ids", stop_token_ids, "a tuple of token ids, such as (2,)")
    for token_id in stop_token_ids:
        _whole("stop_token_ids", token_id, 0, MAX_INDEX, "token ids, 0 or more")


def _whole(name: str, value: object, least: int, end: int, wanted: str) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or not least <= value < end:
        _refuse(name, value, wanted)


def _number(name: str, value: object, least: float, most: float, wanted: str, *, above: bool = False) -> None:
    """`above` leaves `least` itself out."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)
    if not is_number or not least <= value <= most or (above and value == least):  # type: ignore[operator]
        _refuse(name, value, wanted)


def _refuse(name: str, value: object, wanted: str) -> NoReturn:
    raise ValueError(f"{name} is {value!r}; wanted {wanted}")
