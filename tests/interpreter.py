"""Triton's interpreter, without what it repeats in every call of a function in a kernel: a third of the time of such tests."""

import functools
import inspect
from typing import Any

import triton.language as tl
from triton.runtime import interpreter


@functools.cache
def a_builtin(package: Any) -> str:
    """The name of one function that the interpreter replaces."""
    return next(name for name, member in inspect.getmembers(package) if tl.core.is_builtin(member))


def patch_once(package: Any, *arguments: Any, patch: Any = interpreter._patch_builtin) -> None:
    """Of a package that is patched no other name is looked at: a launch patches it, and puts back what was there."""
    if tl.core.is_builtin(getattr(package, a_builtin(package))):
        patch(package, *arguments)


def known_np_dtype(dtype: Any, get: Any = interpreter._get_np_dtype, known: dict[str, Any] = {}) -> Any:  # noqa: B006
    """A type of numpy is looked up once for each of Triton's, which have no hash."""
    if dtype.name not in known:
        known[dtype.name] = get(dtype)
    return known[dtype.name]


def hasten() -> None:
    """From now on, in this process."""
    interpreter._patch_builtin = patch_once
    interpreter._get_np_dtype = known_np_dtype
