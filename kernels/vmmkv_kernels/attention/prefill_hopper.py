"""Prefill attention on Hopper: plain bf16 slots, or blocks of whole tiles, with heads of 128; no window or softcap. In Gluon.

After FlashAttention-3 (Shah et al., 2024). A program takes *pieces*: 128 queries of a sequence under one query head. Three
parts of it run side by side: a loading warp, and two groups of four warps that multiply. The loading warp walks the same tiles
as the groups, and keeps rings of K and V full through the tensor memory accelerator (TMA). Each group has 64 of the queries. It
orders its products so that the tensor cores have work while it takes exponentials: the scores of the next tile of keys are
asked for before this tile's weights are multiplied with V, and the groups take turns at asking.

The parts talk through barriers in shared memory, a pair of `ready` and `free` for every place of a ring:

- q: two places, each of a piece's 128 queries and its note (which piece it is), so that the next piece is loaded ahead. Ready
  by two arrivals: one that expects the bytes, and one when the note is written.
- k, v: two places each, of a tile of keys or values. Ready when the bytes have come.
- free: two arrivals, one of each group when it has done with the place. K is free before V, as soon as there are scores.
- turn: one for each group. The other group arrives at it when it has asked for its products.

The n-th use of a place waits for phase n of its `ready`, of parity n & 1. To fill the place, the loader waits for phase n - 1
of its `free`, of parity (n & 1) ^ 1, which in a new barrier counts as passed. Each part counts for itself, since all walk the
same tiles.

K and V have two descriptors each. One is the slots as they are, for whole tiles. The other ends where the tile's sequence does:
rows past it are not read, since their pages may be unmapped, and come as zeros, since 0 * NaN is NaN. It takes the last of
2**30 virtual rows. Two more dimensions move them to the right place: a step of one is 2**34 - a row, of which 2**30 steps wrap
around all 2**64 elements (as in Triton's ragged descriptors), and a step of the other is a row. A block is described like a
slot: a tile lies in one block, which the slot's table names.

Legend: B sequences, N queries, S slots (or blocks), T rows of a slot, H query heads, K kv heads, G = H / K, D = 128 head dim.
Prefixes: p_ pointer, i_ index, m_ mask. Logarithms are to base 2: log2(e) is folded into the scale.
"""

import functools

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from vmmkv_kernels import checks
from vmmkv_kernels.attention.kv_memory import LayerKV

TOKENS: gl.constexpr = gl.constexpr(128)  # queries of a program's tile
GROUP_TOKENS: gl.constexpr = gl.constexpr(64)  # queries of one group
TILE: gl.constexpr = gl.constexpr(128)  # keys in one step
HEAD_DIM: gl.constexpr = gl.constexpr(128)
Q_STAGES: gl.constexpr = gl.constexpr(2)  # pieces whose queries are in shared memory
STAGES: gl.constexpr = gl.constexpr(2)  # tiles of K, and as many of V
SEQUENCES: gl.constexpr = gl.constexpr(128)  # sequences whose starts the loading warp reads together
RAGGED_ROWS: gl.constexpr = gl.constexpr(2**30)  # virtual rows of the descriptors that end where a sequence does
EMPTY: gl.constexpr = gl.constexpr(float("-inf"))
_ask = tma.async_load if hasattr(tma, "async_load") else tma.async_copy_global_to_shared  # in Triton 3.6


@gluon.jit
def _uniform(x):
    """The same number, by a reduction: the compiler then knows that it is the same in all threads of a warp."""
    everywhere: gl.constexpr = gl.BlockedLayout([1], [32], [gl.num_warps()], [0])
    return gl.max(x + gl.zeros([32], gl.int32, everywhere), 0)


@gluon.jit
def _tiles_in_use(p_starts, num_sequences, num_queries):
    """The first tile that a sequence of two queries or more has, and the end of the last one.

    Before them lie the tiles of decode rows, and behind them those of sequences without queries, which pad a step. To find
    an empty piece takes a program as long as to find one with queries.
    """
    everywhere: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    i_b = gl.arange(0, SEQUENCES, layout=everywhere)
    first = gl.full([SEQUENCES], 2147483647, gl.int32, everywhere)
    end = gl.zeros([SEQUENCES], gl.int32, everywhere)
    for _ in range(0, num_sequences, SEQUENCES):
        starts = gl.load(p_starts + i_b, mask=i_b < num_sequences, other=0).to(gl.int32)
        counts = gl.load(p_starts + i_b + 1, mask=i_b < num_sequences, other=0).to(gl.int32) - starts
        tiles = starts // TOKENS + i_b
        first = gl.where(counts > 1, gl.minimum(first, tiles), first)
        end = gl.where(counts > 1, gl.maximum(end, tiles + gl.cdiv(counts, TOKENS)), end)
        i_b += SEQUENCES
    end_of_all = gl.minimum(gl.max(end, 0), num_queries // TOKENS + num_sequences)
    return gl.maximum(gl.minimum(gl.min(first, 0), end_of_all), 0), end_of_all


@gluon.jit
def _piece_of(
    i_work, p_starts, p_lengths, p_slots, p_limits, num_sequences, num_queries, tiles_end, num_slots, num_rows,
    H: gl.constexpr, HAS_LIMIT: gl.constexpr,
):  # fmt: skip
    """A piece: (query head, slot, first query's row in q, queries left, its position, end of keys, end of those all see).

    Queries left are 0 or less if the piece has no sequence, or one of a single query, which is decode's. The order is that of
    prefill.py: late tiles, which see the most keys, come first, and neighbouring pieces are the heads of one tile.
    """
    i_tile = tiles_end - 1 - i_work // H
    everywhere: gl.constexpr = gl.BlockedLayout([SEQUENCES // 32], [32], [gl.num_warps()], [0])
    i_b = gl.arange(0, SEQUENCES, layout=everywhere)
    begun = gl.zeros([SEQUENCES], gl.int32, everywhere)
    for _ in range(0, num_sequences, SEQUENCES):
        starts = gl.load(p_starts + i_b, mask=i_b < num_sequences, other=0)
        begun += ((starts // TOKENS + i_b <= i_tile) & (i_b < num_sequences)).to(gl.int32)
        i_b += SEQUENCES
    b = gl.sum(begun, 0) - 1
    has_sequence = b >= 0
    b = gl.maximum(b, 0)
    start = gl.load(p_starts + b)
    count = gl.load(p_starts + b + 1) - start
    length = gl.load(p_lengths + b).to(gl.int64)
    slot = gl.load(p_slots + b).to(gl.int64)
    i_first = (i_tile - (start // TOKENS + b)) * TOKENS
    is_ours = has_sequence & (i_first < count) & (count != 1) & (start >= 0)
    count = gl.minimum(count, num_queries - start)
    left = gl.where(is_ours, count - i_first, 0)
    m_slot = (slot >= 0) & (slot < num_slots)
    length = gl.minimum(gl.maximum(length, 0), 2147483647).to(gl.int32)
    end = gl.where(m_slot, gl.minimum(length, num_rows), 0)
    if HAS_LIMIT:
        end = gl.minimum(end, gl.load(p_limits + slot, mask=m_slot, other=0))
    slot = gl.where(m_slot, slot, 0).to(gl.int32)
    position = length - count + i_first
    stop = gl.maximum(position + gl.minimum(TOKENS, left), 0)
    end = gl.maximum(gl.minimum(end, stop), 0)
    full_end = gl.minimum(gl.maximum(position + 1, 0), end) // TILE * TILE
    i_row = _uniform(start + i_first)
    return i_work % H, _uniform(slot), i_row, _uniform(left), _uniform(position), _uniform(end), _uniform(full_end)


@gluon.jit
def _post(note, i_head, i_row, left, position, end, full_end):
    """Write a piece's note for the groups."""
    i = gl.arange(0, 32, layout=gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    words = gl.where(i == 0, i_head, gl.where(i == 1, i_row, gl.where(i == 2, left, 0)))
    words = gl.where(i == 3, position, gl.where(i == 4, end, gl.where(i == 5, full_end, words)))
    note.store(words)


@gluon.jit
def _word(words, i: gl.constexpr):
    i_word = gl.arange(0, 32, layout=words.type.layout)
    return gl.sum(gl.where(i_word == i, words, 0), 0)


@gluon.jit
def _read(note):
    """Read the note of `_post`."""
    words = note.load(gl.BlockedLayout([1], [32], [gl.num_warps()], [0]))
    return _word(words, 0), _word(words, 1), _word(words, 2), _word(words, 3), _word(words, 4), _word(words, 5)


@gluon.jit
def _load_tile(desc, desc_end, bar, tile, slot, row, end, column):
    """Load the rows [row, row + TILE) of a head by TMA; those at and past `end` become zeros, and are not read."""
    mbarrier.expect(bar, TILE * HEAD_DIM * 2)
    is_whole = row + TILE <= end
    _ask(desc, [slot, row, column], bar, tile.reshape([1, TILE, HEAD_DIM]), pred=is_whole)
    _ask(
        desc_end, [slot, RAGGED_ROWS, end, RAGGED_ROWS - (end - row), column], bar,
        tile.reshape([1, 1, 1, TILE, HEAD_DIM]), pred=row + TILE > end,
    )  # fmt: skip


@gluon.jit
def load_part(
    descs, batch, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, p_taken, p_tables, stride_qh, stride_kk, stride_vk,
    stride_table, H: gl.constexpr, G: gl.constexpr, HAS_LIMIT: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """The loading warp: takes pieces, posts each to the groups, and loads its keys from the last tile to the first.

    A program's first piece is its own. Then it takes the next from a common count, so that long and short ones even out. The
    warp is as far ahead as the rings have room. In the end it posts a piece without queries.
    """
    desc_q, desc_k, desc_v, desc_k_end, desc_v_end = descs
    p_starts, p_lengths, p_slots, p_limits, num_sequences, num_queries, num_slots, num_rows = batch
    q_ready, q_free = q_bars
    k_ready, k_free = k_bars
    v_ready, v_free = v_bars
    tiles_first, tiles_end = _tiles_in_use(p_starts, num_sequences, num_queries)
    i_work = gl.program_id(0)
    i_q = 0
    i_kv = 0
    while i_work < (tiles_end - tiles_first) * H:
        i_head, slot, i_row, left, position, end, full_end = _piece_of(
            i_work, p_starts, p_lengths, p_slots, p_limits, num_sequences, num_queries, tiles_end, num_slots, num_rows,
            H, HAS_LIMIT,
        )  # fmt: skip
        if left > 0:
            s = i_q % Q_STAGES
            mbarrier.wait(q_free.index(s), (i_q // Q_STAGES & 1) ^ 1)
            _post(notes.index(s), i_head, i_row, left, position, end, full_end)
            mbarrier.expect(q_ready.index(s), TOKENS * HEAD_DIM * 2)
            for half in gl.static_range(2):
                _ask(desc_q, [i_row + half * GROUP_TOKENS, i_head * stride_qh], q_ready.index(s), q_smem.index(s * 2 + half))
            # Not before: until the note is written the bytes alone must not make the place ready.
            mbarrier.arrive(q_ready.index(s), count=1)
            i_q += 1
            column_k = i_head // G * stride_kk
            column_v = i_head // G * stride_vk
            # Queries that see nothing have a tile without rows, which reads nothing.
            num_steps = gl.maximum(gl.cdiv(end, TILE), 1)
            for i in range(num_steps):
                row = (num_steps - 1 - i) * TILE
                place = slot
                row_in = row
                if BLOCK > 0:
                    # Before the ring has room: the look-up is over by then.
                    place = _uniform(gl.load(p_tables + slot.to(gl.int64) * stride_table + row // BLOCK))
                    row_in = row % BLOCK
                end_in = end - row + row_in
                s = i_kv % STAGES
                parity = (i_kv // STAGES & 1) ^ 1
                mbarrier.wait(k_free.index(s), parity)
                _load_tile(desc_k, desc_k_end, k_ready.index(s), k_smem.index(s), place, row_in, end_in, column_k)
                mbarrier.wait(v_free.index(s), parity)
                _load_tile(desc_v, desc_v_end, v_ready.index(s), v_smem.index(s), place, row_in, end_in, column_v)
                i_kv += 1
        i_work = gl.num_programs(0) + _uniform(gl.atomic_add(p_taken, 1))
    s = i_q % Q_STAGES
    mbarrier.wait(q_free.index(s), (i_q // Q_STAGES & 1) ^ 1)
    _post(notes.index(s), 0, 0, 0, 0, 0, 0)
    mbarrier.arrive(q_ready.index(s), count=2)


@gluon.jit
def _softmax(scores, peak, totals, newest_seen, row, scale_log2, layout: gl.constexpr, MASKED: gl.constexpr):
    """One step of the online softmax (Milakov & Gimelshein, 2018): (weights, rescale of the sums before, peak, totals)."""
    if MASKED:
        i_t = gl.arange(0, TILE, layout=gl.SliceLayout(0, layout))
        scores = gl.where(i_t[None, :] <= (newest_seen - row)[:, None], scores, EMPTY)
    new_peak = gl.maximum(peak, gl.max(scores, 1) * scale_log2)
    # Before the first row that it sees a query's peak is -inf, and -inf - -inf is NaN.
    shift = gl.where(new_peak == EMPTY, 0.0, new_peak) if MASKED else new_peak
    weights = gl.exp2(scores * scale_log2 - shift[:, None])
    rescale = gl.exp2(peak - shift)
    # Each total over every eighth key: the part of a row that one thread holds, so that threads exchange nothing before the
    # end.
    parts = gl.sum(gl.reshape(weights, [GROUP_TOKENS, TILE // 8, 8]), 1)
    totals = totals * gl.convert_layout(rescale, gl.SliceLayout(1, totals.type.layout))[:, None] + parts
    return weights, rescale, new_peak, totals


@gluon.jit
def _step(
    q, k_smem, v_smem, k_bars, v_bars, turns, acc, weights, peak, totals, newest_seen, row, scale_log2, i_kv, turn, has_next,
    layout: gl.constexpr, GROUP: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """The tile of keys at `row`: its scores and weights, while the weights of the tile before are multiplied with V."""
    k_ready, k_free = k_bars
    v_ready, v_free = v_bars
    mine, other = turns
    s = i_kv % STAGES
    # Group 0 goes first: its turn 0 waits for nothing, and group 1's for the products of group 0's. The tensor cores then have
    # the products of one group while the other takes exponentials, rather than both at once and then neither.
    mbarrier.wait(mine, (turn & 1) ^ (1 - GROUP))
    zeros = gl.zeros([GROUP_TOKENS, TILE], gl.float32, layout)
    scores = warpgroup_mma(q, k_smem.index(s).permute((1, 0)), zeros, use_acc=False, is_async=True)
    s_v = (i_kv - 1) % STAGES
    mbarrier.wait(v_ready.index(s_v), (i_kv - 1) // STAGES & 1)
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    weights = gl.convert_layout(weights.to(gl.bfloat16), operand)
    acc = warpgroup_mma(weights, v_smem.index(s_v), acc, is_async=True)
    mbarrier.arrive(other, count=1)
    # The older of the two products, the scores; that with V goes on beside the softmax.
    scores = warpgroup_mma_wait(1, deps=[scores])
    mbarrier.arrive(k_free.index(s), count=1)
    new_weights, rescale, peak, totals = _softmax(scores, peak, totals, newest_seen, row, scale_log2, layout, MASKED)
    # The keys of the next step are waited for here already: a wait is a loop, over which the compiler moves nothing. Without
    # one it waits for the product before it takes the exponentials that were to run beside it.
    mbarrier.wait(k_ready.index((i_kv + 1) % STAGES), (i_kv + 1) // STAGES & 1, pred=has_next)
    acc, weights = warpgroup_mma_wait(0, deps=[acc, weights])
    mbarrier.arrive(v_free.index(s_v), count=1)
    acc = acc * rescale[:, None]
    return acc, new_weights, peak, totals


@gluon.jit
def multiply_part(
    p_out, p_lse, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, turns, scale_log2, stride_on, stride_oh,
    H: gl.constexpr, HAS_LSE: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    """A group of four warps: queries [64 * GROUP, 64 * GROUP + 64) of each piece of this program."""
    layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 128, 16])
    operand: gl.constexpr = gl.DotOperandLayout(0, layout, 2)
    rows: gl.constexpr = gl.SliceLayout(1, layout)
    q_ready, q_free = q_bars
    k_ready, k_free = k_bars
    v_ready, v_free = v_bars
    i_q = 0
    i_kv = 0
    turn = 0
    mbarrier.wait(q_ready.index(0), 0)
    i_head, i_row, left, position, end, full_end = _read(notes.index(0))
    while left > 0:
        i_s = i_q % Q_STAGES
        q = q_smem.index(i_s * 2 + GROUP)
        i_token = GROUP * GROUP_TOKENS + gl.arange(0, GROUP_TOKENS, layout=rows)
        newest_seen = gl.minimum(position + i_token, end - 1)
        num_steps = gl.maximum(gl.cdiv(end, TILE), 1)
        num_masked = gl.maximum(num_steps - full_end // TILE, 1)
        acc = gl.zeros([GROUP_TOKENS, HEAD_DIM], gl.float32, layout)
        peak = gl.full([GROUP_TOKENS], EMPTY, gl.float32, rows)
        totals = gl.sum(gl.reshape(acc, [GROUP_TOKENS, TILE // 8, 8]), 1)
        # The last tile, which alone has no other's weights to multiply beside it.
        s = i_kv % STAGES
        mbarrier.wait(k_ready.index(s), i_kv // STAGES & 1)
        scores = warpgroup_mma(q, k_smem.index(s).permute((1, 0)), acc, use_acc=False, is_async=True)
        scores = warpgroup_mma_wait(0, deps=[scores])
        mbarrier.arrive(k_free.index(s), count=1)
        row = (num_steps - 1) * TILE
        weights, _, peak, totals = _softmax(scores, peak, totals, newest_seen, row, scale_log2, layout, True)
        i_kv += 1
        # `_step` finds its keys waited for.
        mbarrier.wait(k_ready.index(i_kv % STAGES), i_kv // STAGES & 1, pred=num_steps > 1)
        # First the tiles that the diagonal cuts, then those that all queries see.
        for part in gl.static_range(2):
            for i in range(1 if part == 0 else num_masked, num_masked if part == 0 else num_steps):
                row -= TILE
                acc, weights, peak, totals = _step(
                    q, k_smem, v_smem, k_bars, v_bars, turns, acc, weights, peak, totals, newest_seen, row, scale_log2,
                    i_kv, turn, i + 1 < num_steps, layout, GROUP, part == 0,
                )  # fmt: skip
                i_kv += 1
                turn += 1
        s_v = (i_kv - 1) % STAGES
        mbarrier.wait(v_ready.index(s_v), (i_kv - 1) // STAGES & 1)
        acc = warpgroup_mma(gl.convert_layout(weights.to(gl.bfloat16), operand), v_smem.index(s_v), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(v_free.index(s_v), count=1)
        # Its note was read at the top, and its queries by products that have ended.
        mbarrier.arrive(q_free.index(i_s), count=1)

        total = gl.convert_layout(gl.sum(totals, 1), rows)
        # A query that sees nothing gives zeros.
        share = 1.0 / gl.where(total == 0.0, 1.0, total)
        out = (acc * share[:, None]).to(p_out.dtype.element_ty)
        i_d = gl.arange(0, HEAD_DIM, layout=gl.SliceLayout(0, layout))
        p_tile = p_out + i_row.to(gl.int64) * stride_on + i_head.to(gl.int64) * stride_oh
        gl.store(p_tile + (i_token * stride_on)[:, None] + i_d[None, :], out, mask=(i_token < left)[:, None])
        if HAS_LSE:
            gl.store(p_lse + i_row.to(gl.int64) * H + i_head + i_token * H, peak + gl.log2(total), mask=i_token < left)

        i_q += 1
        mbarrier.wait(q_ready.index(i_q % Q_STAGES), i_q // Q_STAGES & 1)
        i_head, i_row, left, position, end, full_end = _read(notes.index(i_q % Q_STAGES))


_ENDLESS = 0x7FFF0000  # steps of the two dimensions that place the virtual rows
_WRAP = 2**34  # elements: 2**30 steps of so many are a whole number of times around
_MAX_STRIDE_BYTES = 2**40
_MAX_COLUMNS = 2**31
_REGISTERS = gl.constexpr(240)  # of a thread that multiplies; with those of the loading warp, all of an SM's
_LOAD_REGISTERS = gl.constexpr(24)


@gluon.jit
def _barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    bars = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(bars.index(i), count=ARRIVALS)
    return bars


@gluon.jit(do_not_specialize=["num_sequences", "num_queries", "num_slots", "num_rows"])
def prefill_kernel(
    desc_q, desc_k, desc_v, desc_k_end, desc_v_end, p_out, p_lse, p_starts, p_lengths, p_slots, p_limits, p_taken, p_tables,
    scale_log2, num_sequences, num_queries, num_slots, num_rows,
    stride_qh, stride_kk, stride_vk, stride_on, stride_oh, stride_table,
    H: gl.constexpr, G: gl.constexpr, HAS_LIMIT: gl.constexpr, HAS_LSE: gl.constexpr, BLOCK: gl.constexpr,
):  # fmt: skip
    """Each program takes pieces until none is left: a tile of 128 queries of a sequence under one query head each."""
    q_smem = gl.allocate_shared_memory(gl.bfloat16, [Q_STAGES * 2, GROUP_TOKENS, HEAD_DIM], desc_q.layout)
    k_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD_DIM], desc_q.layout)
    v_smem = gl.allocate_shared_memory(gl.bfloat16, [STAGES, TILE, HEAD_DIM], desc_q.layout)
    notes = gl.allocate_shared_memory(gl.int32, [Q_STAGES, 32], gl.SwizzledSharedLayout(1, 1, 1, [0]))
    # Ready when the bytes have come, and queries when their note has too; free when both groups have arrived.
    q_bars = _barriers(Q_STAGES, 2), _barriers(Q_STAGES, 2)
    k_bars = _barriers(STAGES, 1), _barriers(STAGES, 2)
    v_bars = _barriers(STAGES, 1), _barriers(STAGES, 2)
    turn_0, turn_1 = _barriers(1, 1).index(0), _barriers(1, 1).index(0)
    descs = desc_q, desc_k, desc_v, desc_k_end, desc_v_end
    batch = p_starts, p_lengths, p_slots, p_limits, num_sequences, num_queries, num_slots, num_rows
    gl.warp_specialize(
        [
            (multiply_part, (
                p_out, p_lse, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_0, turn_1), scale_log2,
                stride_on, stride_oh, H, HAS_LSE, 0,
            )),
            (multiply_part, (
                p_out, p_lse, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, (turn_1, turn_0), scale_log2,
                stride_on, stride_oh, H, HAS_LSE, 1,
            )),
            (load_part, (
                descs, batch, notes, q_smem, k_smem, v_smem, q_bars, k_bars, v_bars, p_taken, p_tables,
                stride_qh, stride_kk, stride_vk, stride_table, H, G, HAS_LIMIT, BLOCK,
            )),
        ],
        [4, 1], [_REGISTERS, _LOAD_REGISTERS],
    )  # fmt: skip


@functools.cache
def num_multiprocessors(device: torch.device) -> int:
    """Multiprocessors of a GPU: one program runs on each."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def applies(q_NHD: torch.Tensor, memory: LayerKV, options: checks.AttentionOptions) -> bool:
    """Can this kernel attend, on compute capability 9.0? Never by batch or lengths, since a query's bits depend on it."""
    is_plain = memory.kind is None and q_NHD.dtype == torch.bfloat16 and memory.head_dim == HEAD_DIM.value
    is_plain = is_plain and memory.block % TILE.value == 0
    is_open = options.softcap_log2 == 0.0 and options.rows_seen == checks.NO_WINDOW
    return is_plain and is_open and memory.num_rows < RAGGED_ROWS.value and all(map(_fits, (q_NHD, memory.k, memory.v)))


def _fits(x: torch.Tensor) -> bool:
    """Can a descriptor take these strides? Heads are columns, counted in 32 bits; the last two dimensions are [heads, D]."""
    strides = (stride for size, stride in zip(x.shape[:-2], x.stride()[:-2], strict=True) if size > 1)
    return _width(x) < _MAX_COLUMNS and all(2 * stride < _MAX_STRIDE_BYTES for stride in strides)


def _head_stride(x: torch.Tensor) -> int:
    """Columns from one head to the next. Torch leaves any number where there is one head."""
    return x.stride(-2) if x.shape[-2] > 1 else 0


def _width(x: torch.Tensor) -> int:
    """Columns of a row with all its heads."""
    return (x.shape[-2] - 1) * _head_stride(x) + int(HEAD_DIM.value)


def _descriptor(base: torch.Tensor, shape: list[int], strides: list[int], box: list[int]) -> TensorDescriptor:
    return TensorDescriptor(base, shape, strides, box, gl.NVMMASharedLayout(128, 16, len(box)))


def _rows_descriptor(q_NHD: torch.Tensor) -> TensorDescriptor:
    """Queries: rows of all heads, in boxes of one group's rows of a head."""
    row = q_NHD.stride(0) if q_NHD.shape[0] > 1 else checks.ALIGNMENT_BYTES
    return _descriptor(q_NHD, [q_NHD.shape[0], _width(q_NHD)], [row, 1], [GROUP_TOKENS.value, HEAD_DIM.value])


def _plane_descriptors(x_STKD: torch.Tensor) -> tuple[TensorDescriptor, TensorDescriptor]:
    """K or V of all slots, in boxes of a tile of a head: the slots as they are, and to end anywhere.

    The stride of a dimension of size 1, which is never followed, is made what a descriptor takes.
    """
    slots, num_rows, _, _ = x_STKD.shape
    slot = x_STKD.stride(0) if slots > 1 else checks.ALIGNMENT_BYTES
    row = x_STKD.stride(1) if num_rows > 1 else checks.ALIGNMENT_BYTES
    width, box = _width(x_STKD), [TILE.value, HEAD_DIM.value]
    whole = _descriptor(x_STKD, [slots, num_rows, width], [slot, row, 1], [1, *box])
    shape = [slots, _ENDLESS, _ENDLESS, RAGGED_ROWS.value, width]
    return whole, _descriptor(x_STKD, shape, [slot, _WRAP - row, row, row, 1], [1, 1, 1, *box])


def launch_prefill_hopper(
    q_NHD: torch.Tensor,
    memory: LayerKV,
    query_starts: torch.Tensor,
    lengths_B: torch.Tensor,
    slots_B: torch.Tensor,
    limit_S: torch.Tensor | None,
    options: checks.AttentionOptions,
    out_NHD: torch.Tensor,
    lse_NH: torch.Tensor | None,
) -> None:
    """`launch_prefill` where `applies`, of checked arguments, into `out_NHD` and `lse_NH`; not the sequences of one query.

    Cost: two launches, one of which zeroes the count of pieces. Safe while a graph is captured: the count is then the graph's
    own, and zeroed on every replay.
    """
    device = q_NHD.device
    num_sequences = lengths_B.shape[0]
    num_queries, num_heads, _ = q_NHD.shape
    num_work = (num_queries // TOKENS.value + num_sequences) * num_heads  # at most
    desc_k, desc_k_end = _plane_descriptors(memory.k)
    desc_v, desc_v_end = _plane_descriptors(memory.v)
    with checks.on_device(device):
        prefill_kernel[(min(num_work, num_multiprocessors(device)),)](
            _rows_descriptor(q_NHD), desc_k, desc_v, desc_k_end, desc_v_end, out_NHD, lse_NH,
            query_starts, lengths_B, slots_B, limit_S, torch.zeros(1, dtype=torch.int32, device=device), memory.tables_SC,
            options.scale_log2, num_sequences, num_queries, memory.num_slots, memory.num_rows,
            _head_stride(q_NHD), _head_stride(memory.k), _head_stride(memory.v), out_NHD.stride(0), out_NHD.stride(1),
            memory.stride_table, H=num_heads, G=num_heads // memory.num_kv_heads, HAS_LIMIT=limit_S is not None,
            HAS_LSE=lse_NH is not None, BLOCK=memory.block, num_warps=4,
        )  # fmt: skip
