"""Sampling: from logits to token ids, with each sequence's own parameters, in two launches that need nothing from the host.

`reference.sample` says what is computed, and gives the same tokens. A *key* is a float's order as an int32.

1. `draw_parts` reads all logits once, spread over the vocabulary. Each program finds the largest logits / temperature + noise
   of its part. Ties go to the lower id, so it does not matter how a row is cut.
2. `pick_tokens`, one program a row, takes the largest of the parts and applies the filters.

Nothing is sorted, and no threshold of top-p is looked for. If the filters keep the token drawn from all, it is the largest over
what they keep too. If they do not, they keep no less likely token either, and the draw goes on among the more likely ones with
the same noise. So the token is the one that a sort would have led to. A token that top-p drops comes up with a probability of
at most 1 - p, and each draw halves, on average, what is left.

- top-p keeps a token if the weights of the more likely tokens come to less than p of the weights that top-k left.
- top-k's threshold is found by counting tokens in 8 bins of keys, then in 8 bins of the one that has the k-th, and so on.

The largest logits of the groups, left by the first launch, say which groups a pass over the row has to read.

Legend: B rows of the batch, V vocabulary, S slots; in kernels G groups of a row, R groups of a tile. Prefixes: p_ pointer, i_
index, m_ mask.
"""

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from vmmkv.units import ceil_div
from vmmkv_kernels import checks, reference
from vmmkv_kernels.sampling import noise

# The twins of noise.py, operation by operation; launched without fused multiply-adds.

GROUP = tl.constexpr(noise.GROUP)
QUARTER = tl.constexpr(noise.QUARTER)
LEAST_KEY = tl.constexpr(-(2**31))
NO_TOKEN = tl.constexpr(2**31 - 1)

_MULTIPLIERS = tl.constexpr(noise.MULTIPLIERS)
_KEY_STEPS = tl.constexpr(noise.KEY_STEPS)
_NUM_ROUNDS = tl.constexpr(noise.NUM_ROUNDS)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_LN_2 = tl.constexpr(noise.LN_2)
_LOG = tl.constexpr(noise.LOG)
_LOG_SIZE = tl.constexpr(len(noise.LOG))
_LOG2_E = tl.constexpr(noise.LOG2_E)
_LN_2_HIGH = tl.constexpr(noise.LN_2_HIGH)
_LN_2_LOW = tl.constexpr(noise.LN_2_LOW)
_EXP = tl.constexpr(noise.EXP)
_EXP_SIZE = tl.constexpr(len(noise.EXP))
_COLDEST_EXPONENT = tl.constexpr(noise.COLDEST_EXPONENT)
_WEIGHT_BITS = tl.constexpr(noise.WEIGHT_BITS)


@triton.jit
def philox(counters, position, seed):
    """Four uint32 words for each counter (uint32), at a position (int32), under a seed (int64)."""
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    word_0 = counters
    word_1 = tl.zeros_like(counters) + position.to(tl.uint32)
    word_2 = tl.zeros_like(counters)
    word_3 = tl.zeros_like(counters)
    for _ in tl.static_range(_NUM_ROUNDS):
        product_0 = word_0.to(tl.uint64) * _MULTIPLIERS[0]
        product_1 = word_2.to(tl.uint64) * _MULTIPLIERS[1]
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_1.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + _KEY_STEPS[0]).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + _KEY_STEPS[1]).to(tl.uint32)
    return word_0, word_1, word_2, word_3


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, SIZE: tl.constexpr):
    total = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, SIZE):
        total = total * x + COEFFICIENTS[i]
    return total


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent.to(tl.float32)


@triton.jit
def _log1p(fraction, exponent):
    return (fraction + (fraction * fraction) * _polynomial(fraction, _LOG, _LOG_SIZE)) + exponent * _LN_2


@triton.jit
def log(x):
    """Natural logarithm of positive, normal float32."""
    fraction, exponent = _split(x)
    return _log1p(fraction, exponent)


@triton.jit
def gumbel(words):
    """-log(-log(u)) of uint32 words; see `noise.gumbel`."""
    below = (words.to(tl.float32) + 0.5) * (2.0**-32)
    above = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (2.0**-32)
    fraction, exponent = _split(above)
    near = below < 0.25
    return -log(-_log1p(tl.where(near, -below, fraction), tl.where(near, 0.0, exponent)))


@triton.jit
def weights(logits, peak, inverse_temperature):
    """int64 weights; see `noise.weights`. Past the vocabulary logits are -inf, of weight 0."""
    x = tl.where(logits == peak, 0.0, (logits - peak) * inverse_temperature)
    x = tl.maximum(x, _COLDEST_EXPONENT)
    exponent = tl.floor(x * _LOG2_E + 0.5)
    rest = (x - exponent * _LN_2_HIGH) - exponent * _LN_2_LOW
    power = ((exponent.to(tl.int32) + (127 + _WEIGHT_BITS)) << 23).to(tl.float32, bitcast=True)
    return ((1.0 + (rest + (rest * rest) * _polynomial(rest, _EXP, _EXP_SIZE))) * power).to(tl.int64)


@triton.jit
def key_of(x):
    """int32 in the order of float32; the same for both zeros."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def first_of_largest(values, tokens):
    """The largest value of a tile, and the lowest of its token ids; no value is NaN."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, tokens, NO_TOKEN))


COLDEST = tl.constexpr(reference.COLDEST)
_NOT_A_NUMBER = tl.constexpr(reference.NOT_A_NUMBER)


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
        # Groups of the next program are included: the largest of all is the same.
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
    """First launch. Program (p, b): the largest sum of part p of row b, its id, and the largest logit of each of its groups."""
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
def argmax_parts(
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


_LEAST_NORMAL = tl.constexpr(reference.LEAST_NORMAL)

_BIN_BITS = tl.constexpr(3)
_NUM_BINS = tl.constexpr(8)
_COUNT_BITS = tl.constexpr(8)
"""Bits of one bin's count: a place of the tile has the counts of all bins in one int64."""
_COUNT_MASK = tl.constexpr(2**8 - 1)
MAX_TILES = 2**8 - 1
"""Most tiles that one place of the tile can count."""


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
    # Sums below float32 are no draw: then token 0 stands, and the search ends.
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
    """The token drawn from those that top-k, top-p and min-p keep, given the `token` drawn from all."""
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
def pick_tokens(
    p_logits, p_slots, p_positions, p_temperature, p_top_k, p_top_p, p_min_p, p_seed, p_maxima, p_sums, p_ids, p_list, p_out,
    num_slots, num_tokens, num_groups, num_parts, stride,
    PARTS_PAD: tl.constexpr, G_PAD: tl.constexpr, ROWS: tl.constexpr, FILTERS: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Second launch. Program b: the token of row b."""
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


MAX_VOCABULARY = 2**20
"""Most token ids: the second launch keeps a number for each 1024 ids in registers."""

PROGRAMS = 1024
"""Programs of the first launch, about: 8 for each multiprocessor of an H200."""
_DRAW_ROWS, _DRAW_WARPS = 4, 4
_ARGMAX_TILE, _ARGMAX_WARPS = 4096, 8
_PICK_ROWS, _PICK_WARPS = 8, 16

assert MAX_VOCABULARY <= MAX_TILES * _PICK_ROWS * noise.GROUP


def argmax(logits_BV: torch.Tensor, *, out: torch.Tensor | None = None) -> torch.Tensor:
    """[B] int32: the lowest id of each row's largest logit; NOT_A_NUMBER (-1) for a row with a NaN.

    logits_BV: fp16, bf16 or fp32; rows of any stride, elements contiguous.

    Cost: two launches, no synchronisation; allocates scratch; safe while a graph is captured.
    Raises: ValueError naming the argument.
    """
    num_rows, num_tokens, out = _check(logits_BV, out)
    if num_rows == 0:
        return out
    device = logits_BV.device
    # Small tiles for few rows, so that there are programs enough for the whole device.
    tile = noise.GROUP if PROGRAMS // num_rows * _ARGMAX_TILE > num_tokens else _ARGMAX_TILE
    part_tiles, num_parts = _parts(num_rows, ceil_div(num_tokens, tile))
    sums_BP = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    ids_BP = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    with checks.on_device(device):
        argmax_parts[(num_parts, num_rows)](
            logits_BV, sums_BP, ids_BP, num_tokens, part_tiles, num_parts, logits_BV.stride(0),
            TILE=tile, num_warps=4 if tile == noise.GROUP else _ARGMAX_WARPS, **checks.overlap(device),
        )  # fmt: skip
        pick_tokens[(num_rows,)](
            None, None, None, None, None, None, None, None, None, sums_BP, ids_BP, None, out,
            0, num_tokens, 0, num_parts, 0,
            PARTS_PAD=checks.padded(num_parts), G_PAD=16, ROWS=1, FILTERS=False, num_warps=1, **checks.overlap(device),
        )  # fmt: skip
    return out


def sample(
    logits_BV: torch.Tensor,
    slots_B: torch.Tensor,
    positions_B: torch.Tensor,
    *,
    temperature_S: torch.Tensor,
    top_k_S: torch.Tensor,
    top_p_S: torch.Tensor,
    min_p_S: torch.Tensor,
    seed_S: torch.Tensor,
    out: torch.Tensor | None = None,
) -> torch.Tensor:
    """[B] int32 token ids: of row b with the parameters of slot slots_B[b], behind positions_B[b] tokens.

    The token of `reference.sample`, whatever the other rows are. A row whose slot is not in [0, S) is greedy. A row with a NaN
    gives NOT_A_NUMBER (-1).

    logits_BV: fp16, bf16 or fp32; rows of any stride, elements contiguous. slots_B, positions_B: int32 or int64. temperature_S:
    float32; below COLDEST the row is greedy. top_k_S: int32; 0, or V and more, keep all. top_p_S: float32; 1 keeps all.
    min_p_S: float32; 0 keeps all. seed_S: int64. All contiguous and on the logits' device.

    Cost: two launches, no synchronisation; allocates scratch; safe while a graph is captured, and the graph serves any
    parameters. The first launch reads all logits. The second reads, in filtered rows, the groups of 1024 that may matter, some
    times over.
    Raises: ValueError naming the argument.
    """
    num_rows, num_tokens, out = _check(logits_BV, out)
    device = logits_BV.device
    checks.index("slots_B", slots_B, num_rows, device)
    checks.index("positions_B", positions_B, num_rows, device)
    num_slots = temperature_S.shape[0]
    checks.exactly("temperature_S", temperature_S, torch.float32, (num_slots,), device)
    checks.exactly("top_k_S", top_k_S, torch.int32, (num_slots,), device)
    checks.exactly("top_p_S", top_p_S, torch.float32, (num_slots,), device)
    checks.exactly("min_p_S", min_p_S, torch.float32, (num_slots,), device)
    checks.exactly("seed_S", seed_S, torch.int64, (num_slots,), device)
    if num_rows == 0:
        return out
    num_groups = ceil_div(num_tokens, noise.GROUP)
    part_groups, num_parts = _parts(num_rows, num_groups)
    maxima_BG = torch.empty((num_rows, num_groups), dtype=torch.float32, device=device)
    list_BG = torch.empty((num_rows, num_groups), dtype=torch.int32, device=device)
    sums_BP = torch.empty((num_rows, num_parts), dtype=torch.float32, device=device)
    ids_BP = torch.empty((num_rows, num_parts), dtype=torch.int32, device=device)
    # Each multiplication and addition is rounded alone, as in torch: then the noise has the same bits.
    options = {"enable_fp_fusion": False} | checks.overlap(device)
    sizes = (num_slots, num_tokens, num_groups)
    with checks.on_device(device):
        draw_parts[(num_parts, num_rows)](
            logits_BV, slots_B, positions_B, temperature_S, seed_S, maxima_BG, sums_BP, ids_BP,
            *sizes, part_groups, num_parts, logits_BV.stride(0),
            ROWS=min(triton.next_power_of_2(part_groups), _DRAW_ROWS), num_warps=_DRAW_WARPS, **options,
        )  # fmt: skip
        pick_tokens[(num_rows,)](
            logits_BV, slots_B, positions_B, temperature_S, top_k_S, top_p_S, min_p_S, seed_S,
            maxima_BG, sums_BP, ids_BP, list_BG, out, *sizes, num_parts, logits_BV.stride(0),
            # Parts are no more than groups: padded alike, the kernel is compiled once for all batch sizes.
            PARTS_PAD=checks.padded(num_groups), G_PAD=checks.padded(num_groups), ROWS=_PICK_ROWS, FILTERS=True,
            num_warps=_PICK_WARPS, **options,
        )  # fmt: skip
    return out


def _parts(num_rows: int, num_units: int) -> tuple[int, int]:
    """Split of a row: units of a program, and number of programs."""
    part_units = ceil_div(num_units, max(1, min(PROGRAMS // num_rows, num_units)))
    return part_units, ceil_div(num_units, part_units)


def _check(logits_BV: torch.Tensor, out: torch.Tensor | None) -> tuple[int, int, torch.Tensor]:
    """Check the tensors of a launch. Returns B, V and the output."""
    num_rows, num_tokens = checks.logits(logits_BV)
    checks.floats("logits_BV", logits_BV.dtype)
    if not 0 < num_tokens <= MAX_VOCABULARY:
        wanted = f"2 dimensions, [rows, vocabulary], the second of 1 to {MAX_VOCABULARY}"
        checks.refuse("logits_BV", f"of shape {tuple(logits_BV.shape)}", wanted)
    if out is None:
        return num_rows, num_tokens, torch.empty(num_rows, dtype=torch.int32, device=logits_BV.device)
    checks.exactly("out", out, torch.int32, (num_rows,), logits_BV.device)
    return num_rows, num_tokens, out
