"""Kernels read addresses, and it does not matter which physical pages are mapped there."""

import pytest
import torch

from tests.kernels.pages import assert_shuffled_pages_give_the_same_bits
from vmmkv.layout import KVType


@pytest.mark.parametrize("kind", [None, "int4"])
def test_shuffled_physical_pages_give_the_bits_of_ordered_ones(kind: str | None, device: torch.device) -> None:
    assert_shuffled_pages_give_the_same_bits(device, torch.float16, KVType(kind) if kind else None)
