"""What the tests of pool, cache and prefix cache share: layouts, sequences with tokens, launches, counts of driver calls."""

from collections.abc import Sequence as Seq
from typing import Any

import torch

from vmmkv import KVCache, KVLayout, Sequence
from vmmkv.testing.fake_driver import FakeDriver, Launch

LAYOUT = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
"""128 KiB a row: 16 tokens a page."""
ROW_BYTES = 128 * 1024
TOKENS_PER_PAGE = 16

STRADDLING = KVLayout.uniform(layers=4, kv_heads=7, head_dim=512, dtype=torch.float32)
"""112 KiB a row, so that rows straddle pages."""

WINDOWED = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32, windows=[None, 40, None, 40])
"""Two groups of 64 KiB a row, 32 tokens a page; layers 1 and 3 see the last 40 tokens."""


def grown(cache: KVCache, num_tokens: int, **options: Any) -> Sequence:
    """A sequence with so many tokens."""
    sequence = cache.open(**options)
    sequence.grow(num_tokens)
    sequence.advance(num_tokens)
    return sequence


def assert_reads(sequence: Sequence, tokens: Seq[int]) -> None:
    """It has these tokens, and the rows of token t are full of t + 1, negative in V."""
    assert sequence.length == len(tokens)
    for layer, group in sequence.live.slots.layout.group_of.items():
        start = sequence.start(group)
        k, v = (view[: len(tokens) - start] for view in (sequence.k(layer), sequence.v(layer)))
        rows = torch.tensor(tokens[start:], dtype=k.dtype).view(-1, 1, 1) + 1
        assert torch.equal(k, rows.expand_as(k))
        assert torch.equal(v, -rows.expand_as(v))


def launch_over(driver: FakeDriver, cache: KVCache, sequence: Sequence) -> Launch:
    """A kernel that touches a sequence's first row."""
    base = cache.k(0)[sequence.slot].data_ptr()
    return driver.launch([(base, base + 1)])


class Calls:
    """The driver calls since it was made, by name."""

    def __init__(self, driver: FakeDriver) -> None:
        self.driver, self.before = driver, driver.calls.copy()

    def made(self) -> dict[str, int]:
        return dict(self.driver.calls - self.before)


PROMPT = [7 * token % 251 for token in range(100)]


def write(sequence, tokens):
    """Token t's rows are full of t + 1."""
    sequence.grow(len(tokens))
    start = sequence.length
    rows = torch.tensor(tokens[start:], dtype=torch.float32).view(-1, 1, 1) + 1
    for layer in sequence.live.slots.layout.group_of:
        first = start - sequence.start(sequence.live.slots.layout.group_of[layer])
        sequence.k(layer)[first : first + len(rows)] = rows
        sequence.v(layer)[first : first + len(rows)] = -rows
    sequence.advance(len(tokens) - start)
