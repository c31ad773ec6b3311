"""Blocks that lie in many runs, in one piece and back."""

import pytest
import torch

from vmmkv_kernels.gather import gather_blocks, scatter_blocks


def memory(num_blocks, words, *, layers=3):
    """Layers apart, keys and values apart in each; addresses and strides of the runs, and the tensors."""
    tensors = [torch.randint(1 << 60, (2, num_blocks, words)) for _ in range(layers)]
    addresses = torch.tensor([half.data_ptr() for tensor in tensors for half in tensor])
    return tensors, addresses, torch.full_like(addresses, 8 * words)


@pytest.mark.parametrize("words", [2, 1024, 1030, 4096])
def test_blocks_are_gathered_and_scattered_and_no_others_are_touched(words):
    tensors, addresses, strides = memory(7, words)
    before = [tensor.clone() for tensor in tensors]
    piece = torch.zeros(4, len(addresses), words, dtype=torch.int64)
    gather_blocks(addresses, strides, torch.tensor([3, -1, 6]), piece[:3])
    for place, block in ((0, 3), (2, 6)):
        assert torch.equal(piece[place], torch.cat([tensor[:, block] for tensor in tensors]))
    assert not piece[1].any() and not piece[3].any()
    assert all(map(torch.equal, before, tensors))
    scatter_blocks(addresses, strides, torch.tensor([1, -1, 0]), piece[:3])
    for tensor, old in zip(tensors, before, strict=True):
        old[:, [1, 0]] = old[:, [3, 6]]
        assert torch.equal(tensor, old)


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda addresses, strides, blocks, piece: (addresses.int(), strides, blocks, piece), "addresses_R"),
        (lambda addresses, strides, blocks, piece: (addresses, strides[1:], blocks, piece), "strides_R"),
        (lambda addresses, strides, blocks, piece: (addresses, strides, blocks.int(), piece), "blocks_N"),
        (lambda addresses, strides, blocks, piece: (addresses, strides, blocks, piece[:-1]), "piece_NRW"),
        (lambda addresses, strides, blocks, piece: (addresses, strides, blocks, piece[..., ::2]), "piece_NRW"),
        (lambda addresses, strides, blocks, piece: (addresses, strides, blocks, piece[..., :3].contiguous()), "an even number"),
    ],
)
def test_other_arguments_are_refused_by_name(change, named):
    _, addresses, strides = memory(4, 8)
    given = change(addresses, strides, torch.tensor([0, 2]), torch.zeros(2, len(addresses), 8, dtype=torch.int64))
    with pytest.raises(ValueError, match=named):
        gather_blocks(*given)
