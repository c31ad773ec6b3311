"""Which rows of a batch are the same prompt, so that it is kept once: beams and `num_return_sequences` begin with such rows.

transformers repeats the prompt before the cache sees it, and hands over keys and values only. In the first layer these follow
from each token and its position alone. Two rows are taken for the same prompt if all their numbers agree to the last bits, of K
as of V: they do but for the order in which a matrix product adds up, which may depend on the place in the batch. At another
position the same token has other keys only where a rotary embedding turns them, and rounding may hide its slow turns; the fast
ones change a key by much: so every number must agree. In half precision rounding hides that order, and nearly all numbers must
be equal to the bit.

Not seen: what differs past the first layer or in the attention mask alone; where positions leave no trace in the keys (ALiBi),
other positions too.

    B rows of the batch, P pairs of them, K kv heads, T tokens, D head dim
"""

from collections.abc import Sequence

import torch

from vmmkv.units import MIB

_MOST_BYTES = 64 * MIB
"""Of temporary memory: what a batch of long prompts would take at once is more than its keys and values."""

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
    same = _compare(k_BKTD[:, :, -1:], v_BKTD[:, :, -1:], pairs)  # different prompts mostly end differently
    alike = [pair for pair, is_same in zip(pairs, same, strict=True) if is_same]
    if not alike:
        return same
    wholly = dict(zip(alike, _compare(k_BKTD, v_BKTD, alike), strict=True))
    return [wholly.get(pair, False) for pair in pairs]


def _compare(k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, pairs: list[tuple[int, int]]) -> list[bool]:
    left, right = torch.tensor(pairs, device=k_BKTD.device).unbind(1)
    same_P = torch.ones(len(pairs), dtype=torch.bool, device=k_BKTD.device)
    for states in (k_BKTD, v_BKTD):
        num_pairs, num_tokens = _at_a_time(states, len(pairs))
        for some, one, other in zip(*(torch.split(each, num_pairs) for each in (same_P, left, right)), strict=True):
            for block in torch.split(states, num_tokens, dim=2):
                some &= _agree_in(block.index_select(0, one), block.index_select(0, other))
    answer: list[bool] = same_P.tolist()
    return answer


def _at_a_time(states_BKTD: torch.Tensor, num_pairs: int) -> tuple[int, int]:
    """How many pairs, and how many tokens of each, are compared in `_MOST_BYTES`."""
    wide_bytes = torch.promote_types(states_BKTD.dtype, torch.float32).itemsize
    number_bytes = 2 * states_BKTD.itemsize + 4 * wide_bytes + 1  # the two, up to four of `_agree_in`, and whether they agree
    token_bytes = states_BKTD.shape[1] * states_BKTD.shape[3] * number_bytes
    num_pairs = min(num_pairs, max(1, _MOST_BYTES // token_bytes))
    return num_pairs, max(1, _MOST_BYTES // (num_pairs * token_bytes))


def _agree_in(one_PKTD: torch.Tensor, other_PKTD: torch.Tensor) -> torch.Tensor:
    """[P]: do the two agree in all numbers?"""
    dtype = one_PKTD.dtype
    is_half = dtype.itemsize <= 2
    wide = torch.promote_types(dtype, torch.float32)
    size_PKTD = one_PKTD.to(wide, copy=True).abs_()
    size_PKTD += size_PKTD.mean(3, keepdim=True)  # a sum near 0 is as inexact as what was added
    size_PKTD *= torch.finfo(dtype).eps * (2 if is_half else 64)
    same_P = ((one_PKTD.to(wide) - other_PKTD.to(wide)).abs_() <= size_PKTD).all(3).all(2).all(1)
    if is_half:
        same_P &= ((one_PKTD == other_PKTD).float().mean((1, 3)) >= _HALF_EQUAL).all(1)
    return same_P
