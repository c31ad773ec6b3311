"""What a caller gives `Engine.generate`, brought into one form: a list of prompts, and for each its params and priority."""

from collections.abc import Iterable, Mapping, Sequence, Set
from numbers import Integral, Number
from reprlib import repr as shortened
from typing import Any, Final, TypeAlias

import numpy as np
import torch

from vmmkv.server.sampling import SamplingParams
from vmmkv.server.tokenizer import PromptError

AnyPrompt: TypeAlias = str | Sequence[int]
"""A text, or token ids."""

MAX_PRIORITY: Final = 1 << 31
"""Priorities lie in [-MAX_PRIORITY, MAX_PRIORITY), over HTTP too."""

_UNORDERED: Final = (str, bytes, bytearray, memoryview, Mapping, Set)
"""What can be iterated over, and is no list of prompts, of token ids or of anything else that is asked for."""


def each_prompt(prompts: Any) -> list[Any]:
    """One after the other: a text is one prompt, and so is whatever begins with a number. Raises: ValueError."""
    if isinstance(prompts, str):
        return [prompts]
    if isinstance(prompts, np.ndarray | torch.Tensor):
        prompts = list(prompts) if prompts.ndim == 2 else prompts.tolist()
    listed = _listed("prompts", prompts, "a text, token ids, or a list of those")
    return [listed] if listed and isinstance(listed[0], Number) else listed


def each_params(params: SamplingParams | Iterable[SamplingParams] | None, count: int) -> list[SamplingParams]:
    """Those of each of `count` prompts. Raises: ValueError."""
    if params is None or isinstance(params, SamplingParams):
        return [SamplingParams() if params is None else params] * count
    wanted = "SamplingParams, or a list with one for each prompt"
    listed = _counted("params", _listed("params", params, wanted), count)
    for index, each in enumerate(listed):
        if not isinstance(each, SamplingParams):
            raise ValueError(f"prompt {index}: its params are {shortened(each)}; wanted SamplingParams")
    return listed


def each_priority(priorities: Iterable[int] | None, count: int) -> list[int]:
    """That of each of `count` prompts. Raises: ValueError."""
    if priorities is None:
        return [0] * count
    if isinstance(priorities, np.ndarray | torch.Tensor):
        priorities = priorities.tolist()
    listed = _counted("priorities", _listed("priorities", priorities, "a list with a number for each prompt"), count)
    for index, each in enumerate(listed):
        if not _is_whole(each) or not -MAX_PRIORITY <= each < MAX_PRIORITY:
            raise ValueError(f"prompt {index}: its priority is {shortened(each)}; wanted an integer from -2**31 to 2**31 - 1")
    return list(map(int, listed))


def token_ids_of(prompt: Any) -> list[int]:
    """The numbers of a prompt that is no text; whether the model has them is not looked at. Raises: PromptError."""
    if isinstance(prompt, np.ndarray | torch.Tensor):
        if prompt.ndim != 1:
            raise PromptError(f"its shape is {tuple(prompt.shape)}; wanted one dimension of token ids")
        ids = prompt.tolist()
    elif isinstance(prompt, Iterable) and not isinstance(prompt, _UNORDERED):
        ids = list(prompt)
    else:
        raise PromptError(f"{shortened(prompt)} is neither a text nor a list of token ids")
    # A step of Python for each of some 100,000 ids would take longer than to admit their prompts.
    if set(map(type, ids)) <= {int}:
        return ids
    for each in ids:
        if not _is_whole(each):
            raise PromptError(f"{shortened(each)} is not a token id: these are integers")
    return list(map(int, ids))


def _listed(name: str, value: Any, wanted: str) -> list[Any]:
    if isinstance(value, _UNORDERED) or not isinstance(value, Iterable):
        raise ValueError(f"{name}={shortened(value)}: wanted {wanted}")
    return list(value)


def _counted(name: str, listed: list[Any], count: int) -> list[Any]:
    if len(listed) != count:
        raise ValueError(f"{len(listed)} {name} for {count} prompts: give one for each")
    return listed


def _is_whole(value: object) -> bool:
    return isinstance(value, Integral) and not isinstance(value, bool)
