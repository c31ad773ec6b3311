"""Run as a child process: cascade under a table of which only some entries are readable, where a stray load is SIGSEGV.

    python -m tests.kernels.guarded_cascade

A follower attends to its leader's rows of the prefix, through the leader's entries, and to its own behind those. The two rows
of the table lie so that what either may read ends, or begins, at the border of a page.
"""

import functools
import mmap
import signal

import torch

from tests.kernels.guarded import Guarded, signal_of
from vmmkv.kernels import reference
from vmmkv.kernels.attention.cascade import cascade

BLOCK, HEAD_DIM, LENGTH, COLUMNS = 16, 64, 90, 6
LEADER, FOLLOWER = 0, 1
PAGE_ENTRIES = mmap.PAGESIZE // 4


def index(*values: int) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Guard:
    """The blocks of a prefix are the leader's, and the others the follower's. `border`: the column that begins a page.

    Of the leader's entries those from there on are unreadable, and of the follower's those before. With border 0 it is
    whatever is before the leader's first.
    """

    def __init__(self, prefix_rows: int, border: int) -> None:
        pages = (0, 5) if border else (1, 5)
        guarded = Guarded(7 * mmap.PAGESIZE, *((page * mmap.PAGESIZE, (page + 1) * mmap.PAGESIZE) for page in pages))
        words = guarded.bytes_E.view(torch.int32)
        tables_SC = words.as_strided((2, COLUMNS), (4 * PAGE_ENTRIES, 1), PAGE_ENTRIES - border)
        prefix_blocks = prefix_rows // BLOCK
        tables_SC[LEADER, :prefix_blocks] = torch.arange(prefix_blocks)
        tables_SC[FOLLOWER, prefix_blocks:] = torch.arange(prefix_blocks, COLUMNS)
        self.tables_SC, self.prefix_rows = tables_SC, prefix_rows
        self.q_BHD = torch.randn(1, 2, HEAD_DIM).half()
        self.kv = torch.randn(2, COLUMNS, BLOCK, 1, HEAD_DIM).half().unbind()

    def attend(self, prefix_rows: int, first: int) -> torch.Tensor:
        """By the kernels, told that so many rows are the leader's, and that the follower's own begin there."""
        where = index(LENGTH), index(FOLLOWER), index(0, 1), index(LEADER), index(prefix_rows)
        return cascade(self.q_BHD, *self.kv, *where, tables_SC=self.tables_SC, firsts_B=index(first))

    def stay_within(self) -> None:
        """Up to the edge of what may be read, and not over it."""
        rows = (plane.flatten(0, 1)[:LENGTH].float() for plane in self.kv)
        truth = reference.attend(self.q_BHD, *rows, torch.tensor([LENGTH - 1]))
        out = self.attend(self.prefix_rows, self.prefix_rows)
        torch.testing.assert_close(out.float(), truth, rtol=2e-2, atol=5e-3)


def main() -> None:
    """What must end well does, and what strays does not."""
    torch.set_num_threads(1)
    Guard(16, border=0).stay_within()  # less than a tile, which is moved back to end with it
    guard = Guard(80, border=5)
    guard.stay_within()
    for prefix_rows, first in ((81, 80), (80, 79)):
        assert signal_of(functools.partial(guard.attend, prefix_rows, first)) == signal.SIGSEGV


if __name__ == "__main__":
    main()
    print("done")
