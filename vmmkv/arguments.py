"""What users hand in where a whole number is wanted."""

import operator
from typing import Any

import numpy as np
import numpy.typing as npt


def whole(name: str, value: Any) -> int:
    """`value` as an int, if it is one: of Python, numpy or torch.

    Raises: TypeError naming the argument, for 2.5 and also for 2.0: a fraction would be cut off somewhere inside.
    """
    try:
        return operator.index(value)
    except TypeError:
        such = "64 * vmmkv.MIB" if name.endswith("bytes") else "int(...) of it" if isinstance(value, float) else "1000"
        raise TypeError(f"{name}={value!r} is not a whole number; give an int, such as {such}") from None


def wholes(name: str, values: npt.ArrayLike) -> npt.NDArray[np.int64]:
    """`values`, one number or an array of them, as int64.

    Raises: TypeError naming the argument, if some are not whole numbers.
    """
    array = np.asarray(values)
    if array.dtype.kind not in "iu" and array.size:
        raise TypeError(f"{name}={values!r} are not whole numbers but {array.dtype}; give ints")
    return array.astype(np.int64, copy=False)
