"""Run as a child process: kernels on CUDA addresses of which only some are mapped; a stray access loses the context.

    python -m tests.gpu.guarded_kernels (within|decode-past|window-before|append-past)

A row (K and V of one token, 2 heads of 128, bf16) is 1 KiB, so 2048 rows are a page. Exit status 3 says that the
context was lost.
"""

import sys

import torch

from vmmkv.dlpack import wrap
from vmmkv.driver import open_driver
from vmmkv.driver.base import Access
from vmmkv.kernels import reference
from vmmkv.kernels.append import append
from vmmkv.kernels.decode import decode
from vmmkv.units import PAGE_BYTES

NUM_PAGES, PAGE_ROWS = 8, 2048
DEVICE = torch.device("cuda", 0)
CONTEXT_LOST = 3

driver = open_driver(DEVICE)


class Slot:
    """Addresses for NUM_PAGES pages of which [start_page, end_page) are mapped, and hold random rows.

    It is slot 1 of the views. Slot 0 has its first page mapped, as a cache's pad: Triton refuses other views.
    """

    def __init__(self, start_page: int, end_page: int) -> None:
        base = driver.reserve(2 * NUM_PAGES * PAGE_BYTES)
        for page in (0, *range(NUM_PAGES + start_page, NUM_PAGES + end_page)):
            address = base + page * PAGE_BYTES
            driver.map(address, driver.create(PAGE_BYTES), PAGE_BYTES)
            driver.set_access(address, PAGE_BYTES, Access.READ_WRITE)
        memory = wrap(base, 2 * NUM_PAGES * PAGE_BYTES, DEVICE).view(torch.bfloat16)
        rows = memory.view(2, NUM_PAGES * PAGE_ROWS, 2, 2, 128)
        rows[1, start_page * PAGE_ROWS : end_page * PAGE_ROWS].normal_()
        self.k_STKD, self.v_STKD = rows[:, :, 0], rows[:, :, 1]
        torch.cuda.synchronize()


def attend(slot: Slot, q_BHD: torch.Tensor, length: int, window: int | None = None) -> torch.Tensor:
    """Decode at that length."""
    lengths_B, slots_B = torch.tensor([length], device=DEVICE), torch.tensor([1], device=DEVICE)
    return decode(q_BHD, slot.k_STKD, slot.v_STKD, lengths_B, slots_B, window=window)


def attend_and_compare(slot: Slot, length: int, window: int | None = None) -> None:
    """Decode at that length and compare with plain torch over the same rows."""
    q_BHD = torch.randn(1, 8, 128, device=DEVICE).bfloat16()
    out = attend(slot, q_BHD, length, window)
    start = max(0, length - window) if window else 0
    k_TKD, v_TKD = slot.k_STKD[1, start:length], slot.v_STKD[1, start:length]
    truth = reference.attend(q_BHD, k_TKD, v_TKD, torch.tensor([length - start - 1], device=DEVICE))
    torch.testing.assert_close(out.float(), truth, rtol=2e-2, atol=2e-3)


def write(slot: Slot, position: int, limit: int) -> None:
    """Append one token of sevens."""
    token_NKD = torch.full((1, 2, 128), 7.0, dtype=torch.bfloat16, device=DEVICE)
    limit_S = torch.tensor([0, limit], dtype=torch.int32, device=DEVICE)
    slots_N, positions_N = torch.tensor([1], device=DEVICE), torch.tensor([position], device=DEVICE)
    append(token_NKD, token_NKD, slot.k_STKD, slot.v_STKD, slots_N, positions_N, limit_S)


def main(what: str) -> None:
    """`within` must end well; in the others a kernel is told to touch what it may not, and nothing else is."""
    q_BHD = torch.randn(1, 8, 128, device=DEVICE).bfloat16()
    if what == "within":
        slot = Slot(0, 2)
        for length in (0, 1, 63, 2048, 4095, 4096):
            if length:
                attend_and_compare(slot, length)
            else:
                assert attend(slot, q_BHD, 0).eq(0.0).all()
        write(slot, 4095, 4096)
        write(slot, 4096, 4096)
        assert slot.k_STKD[1, 4095].eq(7.0).all() and slot.v_STKD[1, 4095].eq(7.0).all()
        windowed = Slot(2, 3)
        attend_and_compare(windowed, 6144, window=2048)
        attend_and_compare(windowed, 6111, window=2015)
    elif what == "decode-past":
        attend(Slot(0, 2), q_BHD, 4097)
    elif what == "window-before":
        attend(Slot(2, 3), q_BHD, 6144, window=2049)
    elif what == "append-past":
        write(Slot(0, 2), 4096, 4097)
    torch.cuda.synchronize()
    print("done", flush=True)


if __name__ == "__main__":
    try:
        main(sys.argv[1])
    except RuntimeError as error:
        print(error, file=sys.stderr, flush=True)
        sys.exit(CONTEXT_LOST if "illegal memory access" in str(error) else 1)
