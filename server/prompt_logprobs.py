"""The log-probabilities of a prompt as arrays of bytes, and back: there can be hundreds of thousands in a message.

Legend: W tokens of a prompt, T likeliest ones at the place of each.
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

from vmmkv.server.protocol import PromptLogprobs

LOGPROB_BYTES: Final = np.dtype(np.float32).itemsize


def packed(
    request_id: str,
    chosen_W: npt.NDArray[np.float32],
    values_WT: npt.NDArray[np.float32],
    ids_WT: npt.NDArray[np.int32 | np.int64],
) -> PromptLogprobs:
    """As a message."""
    return PromptLogprobs(
        request_id=request_id,
        logprobs=chosen_W.tobytes(),
        top_logprobs=values_WT.tobytes(),
        top_ids=ids_WT.astype(np.int32).tobytes(),
    )


def unpacked(message: PromptLogprobs) -> tuple[list[float], list[Sequence[tuple[int, float]]]]:
    """Of each token its log-probability; and the likeliest at its place, with theirs, the likeliest first."""
    chosen: list[float] = np.frombuffer(message.logprobs, np.float32).tolist()
    values_WT = np.frombuffer(message.top_logprobs, np.float32).reshape(len(chosen), -1)
    ids_WT = np.frombuffer(message.top_ids, np.int32).reshape(values_WT.shape)
    likeliest: list[Sequence[tuple[int, float]]] = [
        tuple(zip(ids, values, strict=True)) for ids, values in zip(ids_WT.tolist(), values_WT.tolist(), strict=True)
    ]
    return chosen, likeliest
