"""Promotion: the pages of a prefix that is hit again and again are copied into large extents, for those who come later.

An alias costs by the handle: 4096 tokens of Llama-3.1-8B are 256 pages or 16 large extents. Prompts are laid in large extents
from the start where they fill them; what came token by token, or was cut where prompts part, is in pages, and is promoted when
it proves to be hot. Sequences that have the pages keep them: live mappings are never laid anew, as none is exchanged at once.
"""

from typing import Final

from vmmkv.errors import OutOfPages
from vmmkv.memory.pool import LARGE_PAGES
from vmmkv.memory.sharing import Windows
from vmmkv.memory.slot_memory import SlotMemory
from vmmkv.prefix.index import Placed
from vmmkv.prefix.radix_tree import Node, Piece, RadixTree
from vmmkv.units import PAGE_BYTES

HOT: Final = 2
"""Hits after which a prefix is promoted: whoever comes a third time gains."""


def promote_some(tree: RadixTree[Placed], memory: SlotMemory, windows: Windows, node: Node[Placed]) -> int:
    """Promote one run of pages on the path of a node, all in large extents; the bytes. 0 if there is no more to do.

    It takes only memory that nobody holds. It copies from `resident_of(node)`: if that slot is parked, the caller renews its
    fence, behind which it may be evicted (law 4).
    Cost: a create if no large extent is free, a map, an access call, a copy of 32 MiB on the caller's current stream, a fence;
    an unmap later. Raises: DriverError, and then nothing has changed.
    """
    slot = resident_of(node)
    if slot is None or memory.pool.spare_pages < LARGE_PAGES:
        return 0
    run = _next_run(memory, node)
    if run is None:
        return 0
    group, pieces = run
    page = pieces[0].value.page
    arena = memory.arenas[group]
    tree.lock(node)  # the device can have less memory than the budget, and then the pool makes room: not here
    try:
        (extent,) = memory.pool.acquire(1, LARGE_PAGES, wait=False)
    except OutOfPages:
        return 0
    finally:
        tree.unlock(node)
    if slot not in node.residents:
        memory.pool.drop(extent)
        return 0
    try:
        windows.fill(extent, arena.spans[slot].address + page * PAGE_BYTES)
    except BaseException:
        memory.pool.unuse(extent)  # a window may hold it still
        memory.pool.drop(extent)
        raise
    memory.pool.unuse(extent)
    extent.tenant, extent.zeroed = memory.tenant_in(slot, group)(page), False
    promoted = Piece(pieces[-1].end_token, Placed(page, extent), group)
    for each in node.path():
        gone = [piece for piece in each.pieces if piece in pieces]
        if gone:
            left = [piece for piece in each.pieces if piece not in pieces]
            if each.start < promoted.end_token <= each.end:
                left = sorted([*left, promoted], key=lambda piece: (piece.end_token, piece.group))
            tree.replace(each, left)
            for piece in gone:
                memory.pool.drop(piece.value.extent)
    return extent.size_bytes


def resident_of(node: Node[Placed]) -> int | None:
    """The slot that a node's rows are copied from; None if none has them."""
    return next((slot for slot in node.residents if isinstance(slot, int)), None) if node.has_residents else None


def _next_run(memory: SlotMemory, node: Node[Placed]) -> tuple[int, list[Piece[Placed]]] | None:
    """The group and the pages, all on the path, that fill one large extent; and no prompt parts from the path among them, for
    others would lose the pages before."""
    parts: list[list[Node[Placed]]] = [[]]
    for each in node.path():
        parts[-1].append(each)
        if each.num_children > 1:
            parts.append([])
    for group, arena in enumerate(memory.arenas):
        if arena.group.window is not None:
            continue
        for nodes in parts:
            pages = {
                piece.value.page: piece
                for each in nodes
                for piece in each.pieces
                if piece.group == group and piece.value.extent.num_pages == 1
            }
            for first in range(min(pages, default=0) // LARGE_PAGES * LARGE_PAGES, max(pages, default=0) + 1, LARGE_PAGES):
                run = [pages[page] for page in range(first, first + LARGE_PAGES) if page in pages]
                if len(run) == LARGE_PAGES:
                    return group, run
    return None
