"""Run as a child process: kernels on host memory with unreadable pages around it, where a stray access is SIGSEGV.

    python -m tests.kernels.guarded (within|decode-past|window-before|append-past)

A row (K and V of one token, 1 head of 64, fp16) is 256 bytes, so 16 rows are a page of 4 KiB, and a length that is a
multiple of 16 ends where the readable memory ends.
"""

import ctypes
import mmap
import sys

import torch

from vmmkv.kernels import reference
from vmmkv.kernels.append import append
from vmmkv.kernels.decode import decode

ROWS, ROW_BYTES = 1024, 256
PROT_NONE = 0

libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class Slot:
    """Addresses for ROWS rows of which only [start, end) may be touched."""

    def __init__(self, start: int, end: int) -> None:
        self.memory = mmap.mmap(-1, ROWS * ROW_BYTES)
        rows = torch.frombuffer(self.memory, dtype=torch.float16).view(1, ROWS, 2, 1, 64)
        rows.copy_(torch.randn(rows.shape))
        self.k_STKD, self.v_STKD = rows[:, :, 0], rows[:, :, 1]
        for first, last in ((0, start), (end, ROWS)):
            if first < last:
                address = rows.data_ptr() + first * ROW_BYTES
                if libc.mprotect(address, (last - first) * ROW_BYTES, PROT_NONE) != 0:
                    raise OSError(ctypes.get_errno(), "mprotect refused")


def attend(slot: Slot, q_BHD: torch.Tensor, length: int, window: int | None = None) -> torch.Tensor:
    """Decode at that length."""
    return decode(q_BHD, slot.k_STKD, slot.v_STKD, torch.tensor([length]), torch.tensor([0]), window=window)


def attend_and_compare(start: int, length: int, window: int | None = None) -> None:
    """Decode over rows [start, length), with nothing readable around them, and compare with plain torch."""
    slot, q_BHD = Slot(start, length), torch.randn(1, 2, 64).half()
    out = attend(slot, q_BHD, length, window)
    k_TKD, v_TKD = slot.k_STKD[0, start:length], slot.v_STKD[0, start:length]
    truth = reference.attend(q_BHD, k_TKD, v_TKD, torch.tensor([length - start - 1]))
    torch.testing.assert_close(out.float(), truth, rtol=1e-2, atol=1e-3)


def write(slot: Slot, position: int, limit: int) -> None:
    """Append one token of sevens."""
    token_NKD = torch.full((1, 1, 64), 7.0).half()
    limit_S = torch.tensor([limit], dtype=torch.int32)
    append(token_NKD, token_NKD, slot.k_STKD, slot.v_STKD, torch.tensor([0]), torch.tensor([position]), limit_S)


def main(what: str) -> None:
    """`within` must end well; in the others a kernel is told to touch what it may not, and nothing else is."""
    q_BHD = torch.randn(1, 2, 64).half()
    if what == "within":
        for length in (0, 16, 48, 112, 128, 272, 1008):
            attend_and_compare(0, length)
        attend_and_compare(128, 432, window=304)
        for limit in (16, 48):
            slot = Slot(0, limit)
            write(slot, limit - 1, limit)
            write(slot, limit, limit)
            assert slot.k_STKD[0, limit - 1].eq(7.0).all()
            assert slot.v_STKD[0, limit - 1].eq(7.0).all()
    elif what == "decode-past":
        attend(Slot(0, 48), q_BHD, 49)
    elif what == "window-before":
        attend(Slot(128, 432), q_BHD, 432, window=305)
    elif what == "append-past":
        write(Slot(0, 48), 48, 49)
    print("done")


if __name__ == "__main__":
    main(sys.argv[1])
