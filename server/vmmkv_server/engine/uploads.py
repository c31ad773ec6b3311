"""Copies from the host to the device that never wait for it: they go through pinned memory.

Small ones go in order on the current stream, large ones on a stream beside it.
"""

import itertools
from collections.abc import Sequence
from types import ModuleType
from typing import Final, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.units import round_up
from vmmkv_kernels import reference

ALIGNED_ELEMENTS: Final = 4
"""16 bytes of int32: kernels are compiled anew for pointers that are not aligned so."""


Array = TypeVar("Array", torch.Tensor, npt.NDArray[np.int32])


def packed_size(sizes: Sequence[int]) -> int:
    """Elements of parts of these sizes, one behind the other, each of which begins aligned."""
    return sum(round_up(size, ALIGNED_ELEMENTS) for size in sizes)


def aligned_parts(packed: Array, sizes: Sequence[int]) -> list[Array]:
    """Views of those parts."""
    begins = itertools.accumulate((round_up(size, ALIGNED_ELEMENTS) for size in sizes), initial=0)
    return [packed[begin : begin + size] for begin, size in zip(begins, sizes, strict=False)]


class Uploads:
    """Copies to one device, and their number, which stands still in steady decode."""

    def __init__(self, device: torch.device) -> None:
        self.device: Final = device
        self._beside: torch.cuda.Stream | None = None
        self.count = 0

    def into(self, target: torch.Tensor, values: npt.NDArray[np.int32]) -> None:
        """Copy into a tensor of the device."""
        self.count += 1
        target.copy_(self._staged(torch.from_numpy(values)), non_blocking=True)

    def pack(self, parts: Sequence[npt.ArrayLike]) -> list[torch.Tensor]:
        """Each as int32 on the device, aligned, all in one copy."""
        self.count += 1
        arrays = [np.asarray(part, np.int32) for part in parts]
        sizes = [len(array) for array in arrays]
        packed = np.zeros(packed_size(sizes), np.int32)
        for place, array in zip(aligned_parts(packed, sizes), arrays, strict=True):
            place[:] = array
        return aligned_parts(self._staged(torch.from_numpy(packed)).to(self.device, non_blocking=True), sizes)

    def blank(self, *shape: int) -> torch.Tensor:
        """Uninitialised int32 on the host, to be written and then sent without another copy."""
        return torch.empty(shape, dtype=torch.int32, pin_memory=self.device.type == "cuda")

    def send(self, blank: torch.Tensor) -> torch.Tensor:
        """Copy a blank to the device, beside the current stream, which then waits for it.

        Later writes to the blank may or may not arrive.
        """
        self.count += 1
        if self.device.type != "cuda":
            return blank
        self._beside = self._beside or torch.cuda.Stream(self.device)  # type: ignore[no-untyped-call]
        current = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._beside):
            sent = blank.to(self.device, non_blocking=True)
        current.wait_stream(self._beside)
        sent.record_stream(current)
        return sent

    def _staged(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.pin_memory() if self.device.type == "cuda" else tensor


def to_host(tensor: torch.Tensor) -> torch.Tensor:
    """A copy for the host; from a GPU it is pinned, and not there yet."""
    if not tensor.is_cuda:
        return tensor.clone()
    return torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=True).copy_(tensor, non_blocking=True)


class TokenMasks(NamedTuple):
    """Masks of the tokens that may come next in some rows of a step; on the host, to be sent in one piece."""

    rows: list[int]
    words_GW: torch.Tensor
    """int32, to be written to: a view of `packed`."""
    packed: torch.Tensor
    """Masks, and behind them, aligned, their rows; from `Uploads.blank`."""

    @classmethod
    def of(cls, rows: list[int], num_words: int, uploads: Uploads) -> "TokenMasks":
        """Uninitialised masks for these rows."""
        num_elements = len(rows) * num_words
        begin = round_up(num_elements, ALIGNED_ELEMENTS)
        packed = uploads.blank(begin + len(rows))
        packed.numpy()[begin:] = rows
        return cls(rows, packed[:num_elements].view(len(rows), num_words), packed)


def apply_masks(logits_BV: torch.Tensor, masks: TokenMasks, uploads: Uploads) -> None:
    """Set the logits of tokens that may not come next to -inf, in place. One copy and one launch; waits for nothing."""
    operations: ModuleType = reference
    if logits_BV.is_cuda:
        from vmmkv_kernels.sampling import logits as operations
    sent = uploads.send(masks.packed)
    num_rows, num_words = masks.words_GW.shape
    operations.apply_token_mask(logits_BV, sent[len(sent) - num_rows :], sent[: num_rows * num_words].view(num_rows, num_words))
