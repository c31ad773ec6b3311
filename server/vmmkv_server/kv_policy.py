"""`kv_policy`: which rows of its KV cache a request keeps. One declaration for SamplingParams, HTTP, `--kv-policy`, the engine.

{"type": "streaming_llm", "sinks": 4, "window": 2048, "every": 256}         or in short  streaming_llm:sinks=4,window=2048
"""

import contextlib
import json
from collections.abc import Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Final, TypeAlias

from vmmkv.arguments import whole
from vmmkv.errors import did_you_mean
from vmmkv.eviction import H2O, TOVA, SnapKV, StreamingLLM
from vmmkv.kv_policy import MARGIN, KVPolicy

KVPolicyLike: TypeAlias = Mapping[str, Any] | str
"""A policy as an object, as its JSON, or in short."""

_TYPES: Final = {
    "streaming_llm": (StreamingLLM, "sinks=4,window=2048", True),
    "h2o": (H2O, "budget=256,recent=128", True),
    "snapkv": (SnapKV, "budget=256", False),
    "tova": (TOVA, "budget=256", True),
}
"""The policies by name, each with an example of its options, and whether a request is compacted as it generates. It is not by
one that scores several queries: the generated rows are scored by the last one alone."""
_NONE: Final = "none"
_POSITIONS: Final = ("rerotated", "original")
_MAX_ROWS: Final = 2**31
_LEAST_EVERY: Final = 128


@dataclass(frozen=True, slots=True, kw_only=True)
class Eviction:
    """A policy, and when a request is compacted by it: behind its prompt, and then whenever it has `every` rows too many."""

    policy: KVPolicy
    every: int | None
    """Rows over the budget at which a request is compacted again; None: behind the prompt alone."""
    share_prompt: bool
    """Does the prefix cache keep the rows of the prompt as they were?"""
    keeps_positions: bool
    """Do tokens keep their positions in the text? Else keys that move are turned to the positions of their rows."""

    @classmethod
    def of(cls, given: KVPolicyLike) -> "Eviction | None":
        """Read a policy; None for `none`. Raises: ValueError that says what is wrong with it, and what would work."""
        options = dict(_options(given) if isinstance(given, str) else given)
        name = options.pop("type", None)
        if name == _NONE and not options:
            return None
        if not isinstance(name, str) or name not in _TYPES:
            raise ValueError(f"is of type {name!r}; the types are {', '.join((*_TYPES, _NONE))}")
        policy_type, example, has_every = _TYPES[name]
        share_prompt = options.pop("share_prompt", True)
        if not isinstance(share_prompt, bool):
            raise ValueError(f"has share_prompt={share_prompt!r}; wanted true or false")
        positions = options.pop("positions", _POSITIONS[0])
        if positions not in _POSITIONS:
            raise ValueError(f"has positions={positions!r}; wanted {' or '.join(_POSITIONS)}")
        own = {field.name: field for field in fields(policy_type)}
        names = [*own, *(["every"] if has_every else []), "positions", "share_prompt"]
        for option in options:
            if option not in names:
                remedy = did_you_mean(str(option), names) or f"it has {', '.join(names)}"
                raise ValueError(f"is of type {name}, which has no option {option}; {remedy}")
        if missing := [each for each, field in own.items() if field.default is MISSING and each not in options]:
            wanted = f"{missing[0]} too" if options else " and ".join(missing)
            raise ValueError(f"is of type {name}, which needs {wanted}, in rows, as in {name}:{example}")
        try:
            numbers = {option: whole(option, value) for option, value in options.items()}
            if too_large := [option for option, value in numbers.items() if value >= _MAX_ROWS]:
                raise ValueError(f"{too_large[0]} is {numbers[too_large[0]]}: less than {_MAX_ROWS}")
            if (every := options.pop("every", None)) is not None and every < 1:
                raise ValueError(f"every={every}: give 1 or more")
            policy = policy_type(**options)
        except (TypeError, ValueError) as error:
            raise ValueError(f"is of type {name}: {error}") from error
        if every is None and has_every:
            every = max(_LEAST_EVERY, policy.budget // MARGIN)
        return cls(policy=policy, every=every, share_prompt=share_prompt, keeps_positions=positions != _POSITIONS[0])

    @property
    def name(self) -> str:
        """The `type` that it was given by."""
        return next(name for name, (policy_type, *_) in _TYPES.items() if isinstance(self.policy, policy_type))

    @property
    def budget(self) -> int:
        """Rows that a compaction leaves."""
        return self.policy.budget

    def most_rows(self, num_prompt: int, num_tokens: int) -> int:
        """The most rows that a request with such a prompt has at once, until it has so many tokens."""
        if self.every is not None:
            return min(num_tokens, max(num_prompt, self.budget + self.every))
        return max(num_prompt, num_tokens - max(0, num_prompt - self.budget))


def _options(text: str) -> Mapping[str, Any]:
    if text.lstrip().startswith("{"):
        try:
            return dict(json.loads(text))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"is not JSON: {error}") from error
    name, _, rest = text.partition(":")
    name = name.strip()
    options: dict[str, Any] = {"type": name}
    for part in filter(None, rest.split(",")):
        option, equals, value = (each.strip() for each in part.partition("="))
        if not equals and name in _TYPES:  # else `Eviction.of` names the types
            raise ValueError(f"has {option!r}; wanted NAME=VALUE, as in {name}:{_TYPES[name][1]}")
        options[option] = {"true": True, "false": False}.get(value, value)
        with contextlib.suppress(ValueError):
            options[option] = int(value)
    return options
