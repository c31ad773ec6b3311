"""Who shares a prefix with whom, and which lane attends to what of it. For use inside kernels; see cascade.py.

    groups      |               0               | 1 |         2         | ...
    problems    |     0     |     1     |   2   | 0 |    0    |    1    |        SHARERS sequences each, or what is left
    tiles       |0 1 2 3 4 5|0 1 2 3 4 5|0 1 ...| 0 |0 1 2 3 4|0 1 2 3 4|        of the group's prefix, for each problem again
    lanes       |    0    |    1    |    2    |    3    |    4    | ...

A *problem* is a run of a group's sequences whose queries, of one kv head, are the rows of one dot. The tiles of all problems,
one behind the other, are dealt to the lanes in equal runs, and what a lane sums up of a problem is a *part* of it. The part
that begins a problem is kept where its sequences are. Of the others a lane has at most one, its first, which is kept where
the lane is. So whoever merges them tells from the same few numbers where they are.

Prefixes: p_ pointer, i_ index, m_ mask.
"""

import triton
import triton.language as tl


@triton.jit
def problems(
    p_group_starts, p_leaders, p_prefix_rows, p_limits, num_groups, num_sequences, num_slots, num_rows,
    GROUPS_PAD: tl.constexpr, SHARERS: tl.constexpr, TILE: tl.constexpr, HAS_LIMIT: tl.constexpr,
):  # fmt: skip
    """Of each group: its first sequence and where they end, leader, rows of the prefix, tiles of those, tiles of all problems.

    A group without sequences, or whose leader is no slot, has no rows and no tiles.
    """
    i_group = tl.arange(0, GROUPS_PAD)
    m_group = i_group < num_groups
    starts = tl.load(p_group_starts + i_group, mask=m_group, other=0)
    ends = tl.load(p_group_starts + i_group + 1, mask=m_group, other=0)
    starts = tl.minimum(tl.maximum(starts, 0), num_sequences)
    ends = tl.maximum(tl.minimum(ends, num_sequences), starts)
    leaders = tl.load(p_leaders + i_group, mask=m_group, other=-1)
    m_group = (ends > starts) & (leaders >= 0) & (leaders < num_slots)
    rows = tl.minimum(tl.load(p_prefix_rows + i_group, mask=m_group, other=0), num_rows)
    if HAS_LIMIT:
        rows = tl.minimum(rows, tl.load(p_limits + leaders, mask=m_group, other=0))
    rows = tl.maximum(rows, 0)
    steps = tl.cdiv(rows, TILE)
    return starts, ends, leaders, rows, steps, tl.cdiv(ends - starts, SHARERS) * steps


@triton.jit
def only(values, m_one):
    """The value where the mask is on; 0 if it is nowhere."""
    return tl.sum(tl.where(m_one, values, 0), 0)


@triton.jit
def share_of(num_tiles, num_lanes, LEAST_TILES: tl.constexpr):
    """Tiles of each lane (the last ones may have fewer, or none)."""
    return tl.maximum(tl.cdiv(num_tiles, num_lanes), LEAST_TILES)


@triton.jit
def first_part(b, num_heads):
    """Where the heads of a sequence begin in the parts that begin problems."""
    return tl.cast(b, tl.int64) * num_heads


@triton.jit
def later_part(lane, i_sharer, num_sequences, num_heads, SHARERS: tl.constexpr):
    """Where the heads of the problem's sequence `i_sharer` begin in the part that this lane continues."""
    return (tl.cast(lane, tl.int64) * SHARERS + i_sharer + num_sequences) * num_heads
