"""Which rows of a batch are the same prompt, so that it is kept once: beams and `num_return_sequences` begin with such rows.

transformers repeats the prompt before the cache sees it, and hands over keys and values only. In the first layer these follow
from each token and its position alone. Two rows are taken for the same prompt if all their numbers agree to the last bits, of K
as of V: they do but for the order in which a matrix product adds up, which may depend on the place in the batch. At another
position the same token has other keys only where a rotary embedding turns them, and rounding may hide its slow turns; the fast
ones change a key by much: so every number must agree. In half precision rounding hides that order, and nearly all numbers must
be equal to the bit.

Not seen: what differs past the first layer or in the attention mask alone; where positions leave no trace in the keys (ALiBi),
other positions too.

    B rows of the batch, K kv heads, T tokens, D head dim
"""

from collections.abc import Sequence

import torch

_BLOCK_TOKENS = 1024
"""Compared at a time, so that the difference takes little memory."""

_HALF_EQUAL = 0.9
"""Of a token's numbers in half precision, those that are equal to the bit in the same prompt."""


def prompts(k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> list[int]:
    """For each row the number of its prompt, from 0 on: the next number where it differs from the row before it.

    Cost: a copy to the host, which waits for the device; two if neighbours agree in their last tokens.
    """
    pairs = [(row - 1, row) for row in range(1, len(k_BKTD))]
    parents = [0]
    for same in _are_same(k_BKTD, v_BKTD, pairs):
        parents.append(parents[-1] + (not same))
    return parents


def agree(k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, parents: Sequence[int]) -> bool:
    """Do rows of the same parent have the same tokens here too?"""
    pairs = [(parents.index(parent), row) for row, parent in enumerate(parents) if parents.index(parent) != row]
    return all(_are_same(k_BKTD, v_BKTD, pairs))


def _are_same(k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, pairs: list[tuple[int, int]]) -> list[bool]:
    num_tokens = k_BKTD.shape[2]
    same = _compare(k_BKTD, v_BKTD, pairs, [(num_tokens - 1, num_tokens)])  # different prompts mostly end differently
    alike = [pair for pair, is_same in zip(pairs, same, strict=True) if is_same]
    if not alike:
        return same
    blocks = [(start, min(start + _BLOCK_TOKENS, num_tokens)) for start in range(0, num_tokens, _BLOCK_TOKENS)]
    wholly = dict(zip(alike, _compare(k_BKTD, v_BKTD, alike, blocks), strict=True))
    return [wholly.get(pair, False) for pair in pairs]


def _compare(
    k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, pairs: list[tuple[int, int]], blocks: list[tuple[int, int]]
) -> list[bool]:
    left, right = torch.tensor(pairs, device=k_BKTD.device).unbind(1)
    same_P = torch.ones(len(pairs), dtype=torch.bool, device=k_BKTD.device)
    for states in (k_BKTD, v_BKTD):
        is_half = states.dtype.itemsize <= 2
        wide = torch.promote_types(states.dtype, torch.float32)
        tolerance = torch.finfo(states.dtype).eps * (2 if is_half else 64)
        for start, end in blocks:
            block = states[:, :, start:end]
            one, other = block.index_select(0, left), block.index_select(0, right)
            size_PKTD = one.to(wide).abs()
            size_PKTD += size_PKTD.mean(3, keepdim=True)  # a sum near 0 is as inexact as what was added
            same_P &= ((one.to(wide) - other.to(wide)).abs_() <= size_PKTD.mul_(tolerance)).all(3).all(2).all(1)
            if is_half:
                same_P &= ((one == other).float().mean((1, 3)) >= _HALF_EQUAL).all(1)
    answer: list[bool] = same_P.tolist()
    return answer
