"""The prefill that slots and blocks have in common gives `prefill`'s bits where that has no kernel of its own."""

import torch

from bench.baselines.common_prefill import prefill_as_over_blocks
from vmmkv.kernels.attention.prefill import prefill


def test_it_is_prefill() -> None:
    torch.manual_seed(0)
    k, v = torch.randn(2, 3, 40, 2, 16).unbind()
    q = torch.randn(14, 4, 16)
    starts, lengths, slots = (torch.tensor(values, dtype=torch.int32) for values in ([0, 9, 14], [20, 33], [2, 1]))
    limit = torch.full((3,), 40, dtype=torch.int32)
    for options in ({}, {"limit_S": limit}, {"window": 7, "scale": 0.3}):
        wanted = prefill(q, k, v, starts, lengths, slots, **options)
        assert torch.equal(prefill_as_over_blocks(q, k, v, starts, lengths, slots, **options), wanted)
