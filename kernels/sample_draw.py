"""Inside `sample`: the launch that reads all logits once, spread over the vocabulary, and the tile that it works on.

Program (p, b) finds the largest of its part of row b: of the logits, or with noise, of logits / temperature + noise. Which of
equal ones is first is settled by their ids, so that it does not matter how a row is cut.

Legend: R groups of a tile. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels import sample_reference
from vmmkv.kernels.sample_math import (
    GROUP,
    LEAST_KEY,
    NO_TOKEN,
    QUARTER,
    first_of_largest,
    gumbel,
    key_of,
    philox,
)

COLDEST = tl.constexpr(sample_reference.COLDEST)
_NOT_A_NUMBER = tl.constexpr(sample_reference.NOT_A_NUMBER)


@triton.jit
def draw_groups(
    p_row, i_g, num_tokens, inverse_temperature, position, seed, cut, best, best_ids, m_nan, NOISE: tl.constexpr,
):  # fmt: skip
    """Take the tokens of groups `i_g` [R], those whose key is at least `cut`, into the largest sums [R, QUARTER] so far.

    Returns the sums and their ids, where there was a NaN, and the largest logit of each group.
    """
    i_q = tl.arange(0, QUARTER)[None, :]
    maxima = tl.full(i_g.shape, float("-inf"), tl.float32)
    if NOISE:
        words = philox((i_g[:, None] * QUARTER + i_q).to(tl.uint32), position, seed)
    for i_word in tl.static_range(4):
        i_v = i_g[:, None] * GROUP + i_word * QUARTER + i_q
        logits = tl.load(p_row + i_v, mask=i_v < num_tokens, other=float("-inf")).to(tl.float32)
        m_nan |= logits != logits
        maxima = tl.maximum(maxima, tl.max(logits, 1))
        sums = logits
        if NOISE:
            sums = logits * inverse_temperature + gumbel(words[i_word])
        m_better = (sums > best) & (key_of(logits) >= cut)
        best = tl.where(m_better, sums, best)
        best_ids = tl.where(m_better, i_v, best_ids)
    return best, best_ids, m_nan, maxima


@triton.jit
def _draw_part(
    p_row, p_maxima, first, end, num_tokens, inverse_temperature, position, seed, ROWS: tl.constexpr, NOISE: tl.constexpr,
):  # fmt: skip
    best = tl.full([ROWS, QUARTER], float("-inf"), tl.float32)
    best_ids = tl.full([ROWS, QUARTER], NO_TOKEN, tl.int32)
    m_nan = tl.full([ROWS, QUARTER], 0, tl.int1)
    for i_first in range(first, end, ROWS):
        i_g = i_first + tl.arange(0, ROWS)
        # Groups of the next program are taken as well: whoever has the largest, it is the same.
        best, best_ids, m_nan, maxima = draw_groups(
            p_row, i_g, num_tokens, inverse_temperature, position, seed, LEAST_KEY, best, best_ids, m_nan, NOISE
        )
        tl.store(p_maxima + i_g, maxima, mask=i_g < end)
    largest, token = first_of_largest(best, best_ids)
    return largest, tl.where(tl.max(m_nan.to(tl.int32)) > 0, _NOT_A_NUMBER, token)


@triton.jit(do_not_specialize=["num_slots", "num_groups", "part_groups", "num_parts"])
def draw_parts(
    p_logits, p_slots, p_positions, p_temperature, p_seed, p_maxima, p_sums, p_ids,
    num_slots, num_tokens, num_groups, part_groups, num_parts, stride,
    ROWS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, b): the largest sum of groups [p, p + 1) * part_groups of row b, its id, and the groups' largest logits."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i_part = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    slot = tl.load(p_slots + b).to(tl.int64)
    m_slot = (slot >= 0) & (slot < num_slots)
    temperature = tl.load(p_temperature + slot, mask=m_slot, other=0.0)
    first = i_part * part_groups
    end = tl.minimum(first + part_groups, num_groups)
    p_row = p_logits + b * stride
    p_row_maxima = p_maxima + b * num_groups
    if temperature >= COLDEST:
        seed = tl.load(p_seed + slot, mask=m_slot, other=0)
        position = tl.load(p_positions + b).to(tl.int32)
        inverse = tl.div_rn(1.0, temperature)
        largest, token = _draw_part(p_row, p_row_maxima, first, end, num_tokens, inverse, position, seed, ROWS, True)
    else:
        largest, token = _draw_part(p_row, p_row_maxima, first, end, num_tokens, 1.0, 0, 0, ROWS, False)
    tl.store(p_sums + b * num_parts + i_part, largest)
    tl.store(p_ids + b * num_parts + i_part, token)


@triton.jit(do_not_specialize=["part_tiles", "num_parts"])
def likeliest_parts(
    p_logits, p_largest, p_ids, num_tokens, part_tiles, num_parts, stride, TILE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program (p, b): the largest logit of tiles [p, p + 1) * part_tiles of row b, and the lowest of its ids."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    i_part = tl.program_id(0)
    b = tl.program_id(1).to(tl.int64)
    first = i_part * part_tiles
    i_t = tl.arange(0, TILE)
    best = tl.full([TILE], float("-inf"), tl.float32)
    best_tiles = tl.full([TILE], 0, tl.int32) + first
    m_nan = tl.full([TILE], 0, tl.int1)
    for i_tile in range(first, tl.minimum(first + part_tiles, tl.cdiv(num_tokens, TILE))):
        i_v = i_tile * TILE + i_t
        logits = tl.load(p_logits + b * stride + i_v, mask=i_v < num_tokens, other=float("-inf")).to(tl.float32)
        m_nan |= logits != logits
        m_better = logits > best
        best = tl.where(m_better, logits, best)
        best_tiles = tl.where(m_better, i_tile, best_tiles)
    largest, token = first_of_largest(best, best_tiles * TILE + i_t)
    token = tl.where(tl.max(m_nan.to(tl.int32)) > 0, _NOT_A_NUMBER, token)
    tl.store(p_largest + b * num_parts + i_part, largest)
    tl.store(p_ids + b * num_parts + i_part, token)
