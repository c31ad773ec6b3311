"""Checks of what users hand in."""

import contextlib
import json
import operator
from collections.abc import Hashable
from pathlib import Path
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vmmkv.errors import LayoutError

MAX_LAYERS: Final = 65_536
"""Most layers of a model; a wrong number would fill the memory with lists of layers."""


def whole(name: str, value: Any, *, error: type[Exception] = TypeError) -> int:
    """`value` as an int, if it is one: of Python, numpy or torch.

    Raises: `error`, naming the argument, for True, for 2.5 and also for 2.0: a fraction would be cut off somewhere inside.
    """
    if not isinstance(value, bool):
        with contextlib.suppress(TypeError):
            return operator.index(value)
    such = "64 * vmmkv.MIB" if name.endswith("bytes") else "int(...) of it" if isinstance(value, float) else "1000"
    raise error(f"{name}={value!r} is not a whole number; give an int, such as {such}")


def instance(name: str, value: Any, wanted: type, words: str) -> None:
    """Raises TypeError, naming the argument and what is wanted in `words`, unless `value` is of that type."""
    if not isinstance(value, wanted):
        raise TypeError(f"{name}={value!r} is a {type(value).__name__}; give {words}")


def checked_name(name: str, value: Hashable) -> Hashable:
    """`value`, if it names a tenant or a namespace: text, bytes, an int, None, or a tuple of these.

    Two such names are equal only if they are the same, in this process and in any other; 1, 1.0 and True are equal in Python.
    Raises: ValueError naming the argument and the type.
    """
    if type(value) is tuple:
        for part in value:
            checked_name(name, part)
    elif value is not None and type(value) not in (str, bytes, int):
        raise ValueError(f"{name}={value!r} is a {type(value).__name__}; give a str, bytes, an int, None, or a tuple of these")
    return value


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file. Raises: ValueError naming the file if it holds another thing or is damaged; OSError."""
    try:
        read = json.loads(path.read_bytes())
    except RecursionError as error:
        raise ValueError(f"{path} is damaged: its JSON is nested too deep to be read; copy or download it again") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; copy or download it again") from error
    if not isinstance(read, dict):
        raise ValueError(f"{path} holds no JSON object but a {type(read).__name__}; copy or download it again")
    return read


def wholes(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """`values`, one number or an array of them, as int64.

    Raises: TypeError naming the argument, if some are not whole numbers.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}={values!r} are not whole numbers but {array.dtype}; give ints")
    return array.astype(np.int64, copy=False)


def check_num_layers(num_layers: Any) -> None:
    """Check a number of layers before anything is made for each. Raises: LayoutError."""
    if isinstance(num_layers, int) and not 1 <= num_layers <= MAX_LAYERS:
        raise LayoutError(f"layers={num_layers}; a model has at least 1 layer, and at most {MAX_LAYERS}")
