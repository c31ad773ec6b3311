"""The block-table system: blocks of 16 rows with reference counts, the same tree over them, and tables on the device.

It differs from vmmkv in addressing only. A prefix is shared in whole blocks; the rest of the match is computed again. Memory is
one tensor, made at once, so no driver is called; tables go to the device when they change, which is at block borders.

Legend: S slots, P blocks, U rows of a block, C columns of the tables, L layers, K kv heads, D head dim.
"""

from collections.abc import Mapping
from typing import Final

import numpy as np
import torch

from bench.baselines.blocks import BLOCK_ROWS, BlockPool
from bench.prefix.addressing import Addressing, Blocks, HostBlocks
from bench.prefix.systems import Attachment, Indices, TokenIds
from bench.settings import Shape
from vmmkv.prefix.radix_tree import Node, Piece
from vmmkv.units import ceil_div

_NO_BLOCK: Final = -1
"""An entry of a table that stands for nothing: kernels write nowhere."""


class Paged:
    """See systems.System."""

    def __init__(self, shape: Shape, device: torch.device, *, num_blocks: int, slots: int, max_tokens: int) -> None:
        self.name: Final = f"paged {BLOCK_ROWS}"
        self.num_slots: Final = slots
        self._pool = BlockPool(num_blocks)
        self._block_bytes = BLOCK_ROWS * shape.layout.row_bytes
        size = (shape.layers, 2, num_blocks, BLOCK_ROWS, shape.kv_heads, shape.head_dim)
        self._memory_L2PUKD = torch.empty(size, dtype=shape.dtype, device=device)
        num_columns = ceil_div(max_tokens, BLOCK_ROWS)
        self._host_tables_SC = np.full((1 + slots, num_columns), _NO_BLOCK, np.int32)
        self.tables_SC = torch.full((1 + slots, num_columns), _NO_BLOCK, dtype=torch.int32, device=device)
        self._num_blocks_S = np.zeros(1 + slots, np.int64)
        self._num_tables_P = np.zeros(num_blocks, np.int32)
        """In how many tables a block stands."""
        self._nodes: dict[int, Node[int]] = {}
        """Locked by the sequence in a slot."""
        self._free_slots = list(range(slots, 0, -1))
        self.planes = [(self._memory_L2PUKD[layer, 0], self._memory_L2PUKD[layer, 1]) for layer in range(shape.layers)]
        limit_S = torch.full((1 + slots,), num_columns * BLOCK_ROWS, dtype=torch.int32, device=device)
        self.addressing: Final[Addressing] = (
            Blocks(self.planes, self.tables_SC, limit_S, slots)
            if device.type == "cuda"
            else HostBlocks(self.planes, self.tables_SC)
        )

    def attach(self, tokens: TokenIds, max_tokens: int) -> Attachment:
        """See System.attach."""
        tree, slot = self._pool.tree, self._free_slots.pop()
        match = tree.match(None, tokens[:-1])
        blocks = [piece.value for node in match.path for piece in node.pieces if piece.end_token <= match.num_tokens]
        if match.deepest is not None:
            tree.touch(match.deepest)
            tree.lock(match.deepest)
            self._nodes[slot] = match.deepest
        self._pool.hold(blocks)
        if blocks:
            self._extend({slot: blocks})
        return Attachment(slot, len(blocks) * BLOCK_ROWS, "blocks" if blocks else "compute")

    def reserve(self, slots: Indices, num_tokens: Indices) -> None:
        """See System.reserve. Cost: nothing but at block borders; there an upload for all slots together."""
        missing = -(-num_tokens // BLOCK_ROWS) - self._num_blocks_S[slots]
        lacking = np.flatnonzero(missing > 0)
        if len(lacking):
            blocks = iter(self._pool.acquire(int(missing[lacking].sum())))
            self._extend({int(slots[i]): [next(blocks) for _ in range(missing[i])] for i in lacking})

    def advance(self, slots: Indices, num_tokens: Indices) -> None:
        """See System.advance. The loop knows the lengths."""

    def insert(self, slot: int, tokens: TokenIds) -> None:
        """See System.insert. Whole blocks only."""
        count = len(tokens) // BLOCK_ROWS
        if not count:
            return
        tree, blocks = self._pool.tree, self._host_tables_SC[slot, :count].tolist()
        pieces = [Piece(BLOCK_ROWS * (index + 1), block) for index, block in enumerate(blocks)]
        inserted = tree.insert(None, tokens[: count * BLOCK_ROWS], pieces)
        duplicates = {piece.end_token for piece in inserted.duplicates}
        self._pool.hold([piece.value for piece in pieces if piece.end_token not in duplicates])
        self._unlock(slot)
        tree.lock(inserted.node)
        self._nodes[slot] = inserted.node

    def finish(self, slot: int, tokens: TokenIds) -> None:
        """See System.finish."""
        self.insert(slot, tokens)
        self._unlock(slot)
        blocks = self._host_tables_SC[slot, : self._num_blocks_S[slot]].tolist()
        self._num_tables_P[blocks] -= 1
        self._pool.release(blocks)
        self._num_blocks_S[slot] = 0  # what its table says is overwritten by the next, and read by nobody before
        self._free_slots.append(slot)

    def map_ahead(self, budget_us: float, step_us: float) -> None:
        """See System.map_ahead. There is nothing to do ahead."""

    def memory(self) -> tuple[int, int]:
        """See System.memory."""
        used = int(np.count_nonzero(self._num_tables_P))
        return self._pool.num_held * self._block_bytes, used * self._block_bytes

    def driver_us(self) -> float:
        """See System.driver_us."""
        return 0.0

    def driver_calls(self) -> Mapping[str, int]:
        """See System.driver_calls."""
        return {}

    def rows(self, layer: int, slot: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a slot's first rows, gathered: [num_tokens, K, D] each."""
        blocks = self.tables_SC[slot, : ceil_div(num_tokens, BLOCK_ROWS)].long()
        k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[:num_tokens] for plane in self.planes[layer])
        return k_TKD, v_TKD

    def write(self, layer: int, slot: int, k_TKD: torch.Tensor, v_TKD: torch.Tensor) -> None:
        """Fill a slot's first rows."""
        positions_T = torch.arange(len(k_TKD), device=k_TKD.device)
        rows_T = self.tables_SC[slot].long()[positions_T // BLOCK_ROWS] * BLOCK_ROWS + positions_T % BLOCK_ROWS
        for plane_PUKD, values_TKD in zip(self.planes[layer], (k_TKD, v_TKD), strict=True):
            plane_PUKD.flatten(0, 1)[rows_T] = values_TKD

    def close(self) -> None:
        """See System.close."""
        self.planes.clear()
        self._memory_L2PUKD = torch.empty(0)

    def _unlock(self, slot: int) -> None:
        node = self._nodes.pop(slot, None)
        if node is not None:
            self._pool.tree.unlock(node)

    def _extend(self, blocks_by_slot: dict[int, list[int]]) -> None:
        """More blocks behind those that slots have; their tables go to the device, in order on the current stream."""
        for slot, blocks in blocks_by_slot.items():
            first = int(self._num_blocks_S[slot])
            self._host_tables_SC[slot, first : first + len(blocks)] = blocks
            self._num_blocks_S[slot] = first + len(blocks)
            self._num_tables_P[blocks] += 1
        slots = list(blocks_by_slot)
        changed, rows = torch.tensor(slots), torch.from_numpy(self._host_tables_SC[slots])
        if self.tables_SC.is_cuda:  # pinned, lest the copy wait for what is running
            changed, rows = changed.pin_memory(), rows.pin_memory()
        device = self.tables_SC.device
        self.tables_SC.index_copy_(0, changed.to(device, non_blocking=True), rows.to(device, non_blocking=True))
