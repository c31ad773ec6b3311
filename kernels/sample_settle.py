"""Inside `sample`: the launch that settles each row, a program a row: which token is drawn, and whether the filters keep it.

Nothing is sorted, and no threshold of top-p is looked for. The largest sum over all tokens is drawn first; if the filters keep
its token, it is the largest over what they keep too. If they do not, no less likely token is kept either, and the draw goes
on among those more likely, with the same noise: so that the token is just the one that a sort would have led to. A token
that top-p drops comes up with a probability of at most 1 - p, and each draw halves, on average, what is left.

    top-p keeps it     if the weights of the more likely tokens come to less than p of the weights that top-k left
    top-k's threshold  by counting tokens in 8 bins of keys, then in 8 bins of the one that has the k-th, and so on

The largest logits of the groups, which `draw_parts` left, say which groups a pass over the row has to read.

Legend: G groups of a row, R groups of a tile. Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.kernels import sample_reference
from vmmkv.kernels.sample_draw import COLDEST, draw_groups
from vmmkv.kernels.sample_math import GROUP, LEAST_KEY, NO_TOKEN, QUARTER, first_of_largest, key_of, log, weights

_NOT_A_NUMBER = tl.constexpr(sample_reference.NOT_A_NUMBER)
_LEAST_NORMAL = tl.constexpr(sample_reference.LEAST_NORMAL)

_BIN_BITS = tl.constexpr(3)
_NUM_BINS = tl.constexpr(8)
_COUNT_BITS = tl.constexpr(8)
"""Of a bin's count in a lane of the tile: the counts of all bins are one int64."""
_COUNT_MASK = tl.constexpr(2**8 - 1)
MAX_TILES = 2**8 - 1
"""That a lane can count."""


@triton.jit
def _gather_groups(p_list, group_keys, i_g, cut):
    """Write the groups with a key of at least `cut` to `p_list`, in order. Returns their number."""
    tl.debug_barrier()  # the list before has been read
    m_g = group_keys >= cut
    tl.store(p_list + tl.cumsum(m_g.to(tl.int32), 0) - 1, i_g, mask=m_g)
    tl.debug_barrier()
    return tl.sum(m_g.to(tl.int32), 0)


@triton.jit
def _load_tile(p_row, p_list, first, num_listed, num_groups, num_tokens, ROWS: tl.constexpr):
    """Logits [R, GROUP] of some listed groups; past their end -inf."""
    i_r = first + tl.arange(0, ROWS)
    i_g = tl.load(p_list + i_r, mask=i_r < num_listed, other=num_groups)
    i_v = i_g[:, None] * GROUP + tl.arange(0, GROUP)[None, :]
    return tl.load(p_row + i_v, mask=i_v < num_tokens, other=float("-inf")).to(tl.float32)


@triton.jit
def _weight_from(
    p_row, p_list, group_keys, i_g, cut, peak, inverse_temperature, num_groups, num_tokens, ROWS: tl.constexpr,
):  # fmt: skip
    """The summed weights of all tokens whose key is at least `cut`."""
    num_listed = _gather_groups(p_list, group_keys, i_g, cut)
    total = tl.zeros([ROWS, GROUP], tl.int64)
    for first in range(0, num_listed, ROWS):
        logits = _load_tile(p_row, p_list, first, num_listed, num_groups, num_tokens, ROWS)
        total += tl.where(key_of(logits) >= cut, weights(logits, peak, inverse_temperature), 0)
    return tl.sum(total)


@triton.jit
def _draw_from(
    p_row, p_list, group_keys, i_g, cut, peak_key, inverse_temperature, position, seed, num_groups, num_tokens,
    ROWS: tl.constexpr,
):  # fmt: skip
    """The token with the largest sum of those whose key is at least `cut`, and its key."""
    num_listed = _gather_groups(p_list, group_keys, i_g, cut)
    best = tl.full([ROWS, QUARTER], float("-inf"), tl.float32)
    best_ids = tl.full([ROWS, QUARTER], NO_TOKEN, tl.int32)
    m_nan = tl.full([ROWS, QUARTER], 0, tl.int1)
    for first in range(0, num_listed, ROWS):
        i_r = first + tl.arange(0, ROWS)
        i_listed = tl.load(p_list + i_r, mask=i_r < num_listed, other=num_groups)
        best, best_ids, m_nan, _ = draw_groups(
            p_row, i_listed, num_tokens, inverse_temperature, position, seed, cut, best, best_ids, m_nan, True
        )
    _, token = first_of_largest(best, best_ids)
    # Sums that have left float32 at the bottom are no draw: then token 0 stands, and nothing is looked for any more.
    key = key_of(tl.load(p_row + token, mask=token != NO_TOKEN, other=0.0).to(tl.float32))
    return tl.where(token == NO_TOKEN, 0, token), tl.where(token == NO_TOKEN, peak_key, key)


@triton.jit
def _kth_key(p_row, p_list, group_keys, i_g, peak_key, k, num_groups, num_tokens, ROWS: tl.constexpr):
    """A key that the k likeliest tokens, and those as likely as the last of them, have or exceed, and no others."""
    # There are k tokens in k groups at least as large as the smallest of the groups' largest.
    one = tl.full([], 1, tl.int64)
    wide_keys = group_keys.to(tl.int64)
    bound = tl.full([], LEAST_KEY, tl.int64)
    for i_bit in range(32):
        trial = bound + (one << (31 - i_bit))
        bound = tl.where(tl.sum((wide_keys >= trial).to(tl.int32), 0) >= k, trial, bound)
    bound = tl.maximum(bound, LEAST_KEY + 1)
    num_listed = _gather_groups(p_list, group_keys, i_g, bound.to(tl.int32))

    top = peak_key.to(tl.int64)  # the largest key of the bins
    num_above = 0
    shift = tl.full([], 0, tl.int32)
    while (top - bound) >> shift >= _NUM_BINS:
        shift += 1
    cut = bound
    searching = 1
    while searching > 0:
        counts = tl.zeros([ROWS, GROUP], tl.int64)
        for first in range(0, num_listed, ROWS):
            keys = key_of(_load_tile(p_row, p_list, first, num_listed, num_groups, num_tokens, ROWS))
            i_bin = (top.to(tl.int32) - keys).to(tl.uint32) >> shift.to(tl.uint32)
            m_bin = (keys <= top) & (i_bin < _NUM_BINS)
            counts += tl.where(m_bin, one << (tl.minimum(i_bin, _NUM_BINS - 1).to(tl.int64) * _COUNT_BITS), 0)
        chosen = _NUM_BINS - 1
        num_reached = 0
        for i in tl.static_range(_NUM_BINS):
            num_next = num_above + tl.sum(((counts >> (i * _COUNT_BITS)) & _COUNT_MASK).to(tl.int32))
            is_chosen = (num_reached == 0) & (num_next >= k)
            chosen = tl.where(is_chosen, i, chosen)
            num_reached = tl.where(is_chosen, num_next, num_reached)
            num_above = tl.where(num_reached == 0, num_next, num_above)
        top -= chosen.to(tl.int64) << shift
        cut = tl.maximum(top - (one << shift) + 1, bound)
        searching = tl.where((shift > 0) & (num_reached != k), 1, 0)
        shift = tl.maximum(shift - _BIN_BITS, 0)
    return cut.to(tl.int32)


@triton.jit
def _filter(
    p_row, p_list, p_maxima, token, temperature, top_k, top_p, min_p, position, seed, num_groups, num_tokens,
    G_PAD: tl.constexpr, ROWS: tl.constexpr,
):  # fmt: skip
    """The token drawn from what top-k, top-p and min-p keep, if `token` is drawn from all."""
    i_g = tl.arange(0, G_PAD)
    m_g = i_g < num_groups
    maxima = tl.load(p_maxima + i_g, mask=m_g, other=float("-inf"))
    group_keys = tl.where(m_g, key_of(maxima), LEAST_KEY)
    peak = tl.max(maxima, 0)
    peak_key = key_of(peak)
    inverse = tl.div_rn(1.0, temperature)

    kth_key = tl.full([], LEAST_KEY + 1, tl.int32)
    if (top_k > 0) & (top_k < num_tokens):
        kth_key = _kth_key(p_row, p_list, group_keys, i_g, peak_key, top_k, num_groups, num_tokens, ROWS)
    cut = kth_key
    if min_p >= _LEAST_NORMAL:
        cut = tl.maximum(cut, key_of(peak + temperature * log(min_p)))
    key = key_of(tl.load(p_row + token).to(tl.float32))
    if key < cut:
        token, key = _draw_from(
            p_row, p_list, group_keys, i_g, cut, peak_key, inverse, position, seed, num_groups, num_tokens, ROWS
        )
    if top_p < 1.0:
        kept = _weight_from(p_row, p_list, group_keys, i_g, kth_key, peak, inverse, num_groups, num_tokens, ROWS)
        enough = top_p.to(tl.float64) * kept.to(tl.float64)
        above = _weight_from(p_row, p_list, group_keys, i_g, key + 1, peak, inverse, num_groups, num_tokens, ROWS)
        while (key < peak_key) & (above.to(tl.float64) >= enough):
            token, key = _draw_from(
                p_row, p_list, group_keys, i_g, tl.maximum(cut, key + 1), peak_key, inverse, position, seed,
                num_groups, num_tokens, ROWS,
            )  # fmt: skip
            above = _weight_from(p_row, p_list, group_keys, i_g, key + 1, peak, inverse, num_groups, num_tokens, ROWS)
    return token


@triton.jit(do_not_specialize=["num_slots", "num_groups", "num_parts"])
def settle(
    p_logits, p_slots, p_positions, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_maxima, p_sums, p_ids, p_list, p_out,
    num_slots, num_tokens, num_groups, num_parts, stride,
    PARTS_PAD: tl.constexpr, G_PAD: tl.constexpr, ROWS: tl.constexpr, FILTERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Program b: the token of row b."""
    if PDL:
        gdc_wait()
        gdc_launch_dependents()
    b = tl.program_id(0).to(tl.int64)
    i_part = tl.arange(0, PARTS_PAD)
    m_part = i_part < num_parts
    ids = tl.load(p_ids + b * num_parts + i_part, mask=m_part, other=NO_TOKEN)
    sums = tl.load(p_sums + b * num_parts + i_part, mask=m_part, other=float("-inf"))
    _, token = first_of_largest(sums, ids)
    is_number = tl.min(ids, 0) != _NOT_A_NUMBER
    token = tl.where(is_number, tl.where(token == NO_TOKEN, 0, token), _NOT_A_NUMBER)
    if FILTERS:
        slot = tl.load(p_slots + b).to(tl.int64)
        m_slot = (slot >= 0) & (slot < num_slots)
        temperature = tl.load(p_temperature + slot, mask=m_slot, other=0.0)
        top_k = tl.load(p_top_k + slot, mask=m_slot, other=0)
        top_p = tl.load(p_top_p + slot, mask=m_slot, other=1.0)
        min_p = tl.load(p_min_p + slot, mask=m_slot, other=0.0)
        is_filtered = ((top_k > 0) & (top_k < num_tokens)) | (top_p < 1.0) | (min_p >= _LEAST_NORMAL)
        if is_number & (temperature >= COLDEST) & is_filtered:
            position = tl.load(p_positions + b).to(tl.int32)
            seed = tl.load(p_seed + slot)
            token = _filter(
                p_logits + b * stride, p_list + b * num_groups, p_maxima + b * num_groups, token,
                temperature, top_k, top_p, min_p, position, seed, num_groups, num_tokens, G_PAD, ROWS,
            )  # fmt: skip
    tl.store(p_out + b, token)
