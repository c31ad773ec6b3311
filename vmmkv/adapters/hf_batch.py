"""One batch through its forward passes: what each writes and sees, and how the batch is cut, repeated and reordered.

    begin of a pass     memory follows what the batch has become; windows give back what they have passed; memory for new rows
    each layer          its new rows are written behind the others, and it is given views of all that it sees
    end, its last layer the new tokens count

Between passes nothing is copied: a batch changes its parents (see hf_lineage). A pass that is not finished counts for nothing.

    B rows of the batch, K kv heads, T tokens, D head dim
"""

import functools
from collections.abc import Sequence
from typing import Final

import torch

from vmmkv.adapters import hf_twins
from vmmkv.adapters.hf_lineage import Lineage
from vmmkv.adapters.hf_rows import BatchRows
from vmmkv.errors import LayoutError, OutOfPages
from vmmkv.units import counted

_UNFINISHED = "the last forward pass was not finished: it failed, or the model leaves out layers that its configuration has; "
_REMEDY = "crop(0) takes back what it wrote"
_MORE_ROOM = "give the model fewer rows in a batch, or reset() another cache of this pool"


class _Indices:
    """What a lineage says, on the device: every layer of every pass asks for it."""

    def __init__(self, lineage: Lineage, device: torch.device) -> None:
        self.lineage: Final = lineage
        self._device = device

    @functools.cached_property
    def leaders(self) -> torch.Tensor:
        return self._send(self.lineage.leaders)

    @functools.cached_property
    def parents(self) -> torch.Tensor:
        return self._send(self.lineage.parents)

    def _send(self, rows: Sequence[int]) -> torch.Tensor:
        with torch.inference_mode(False):  # it may outlive the mode of this pass
            return torch.tensor(rows, device=self._device)


class Batch:
    """The tokens of a batch in all layers; `groups` are the rows of the layers of each window.

    `share_prompts`: are equal prompts side by side kept once?
    """

    def __init__(self, groups: list[BatchRows], *, share_prompts: bool) -> None:
        self.groups = groups
        self._share_prompts = share_prompts
        self.num_tokens = 0
        """Of each sequence, in all layers."""
        self.num_new = 0
        """Of the pass that is under way, if one is."""
        self.written: set[int] = set()
        """Layers that it has written."""
        self.record_past = False
        """Do windows keep what they have passed until `crop`?"""
        self._lineage: Lineage | None = None
        """None as long as there are no sequences."""
        self._indices: _Indices | None = None
        self._stream: torch.Stream | None = None
        """The one that was current when the cache was last used, on CUDA."""

    @property
    def size(self) -> int | None:
        """Rows of the model's batch, if there is one."""
        return None if self._lineage is None else len(self._lineage.parents)

    @property
    def groups(self) -> list[BatchRows]:
        """The rows of the layers of each window."""
        return self._groups

    @groups.setter
    def groups(self, groups: list[BatchRows]) -> None:
        self._groups = groups
        self._rows_of = {layer: rows for rows in groups for layer in rows.layers}

    def rows_of(self, layer: int) -> BatchRows:
        """The rows with this layer. Raises: ValueError naming the layers there are."""
        rows = self._rows_of.get(layer)
        if rows is None:
            raise ValueError(f"layer {layer} keeps no keys and values by the configuration; layers {[*self._rows_of]} do")
        return rows

    # a pass

    def append(self, layer: int, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Write a layer's keys and values of the new tokens; all that these see. The first layer of a pass begins it."""
        rows = self.rows_of(layer)
        if layer in self.written:
            raise RuntimeError(f"layer {layer} is written again. {_UNFINISHED}{_REMEDY}")
        self._check_shapes(layer, k_BKTD.shape, v_BKTD.shape)
        if not self.written:
            self._begin(k_BKTD, v_BKTD)
            rows = self.rows_of(layer)  # they are others if the batch was forked
        lineage = self._lineage
        assert lineage is not None, "a pass has begun"
        if not rows.sequences:
            self._open(rows, k_BKTD, v_BKTD, lineage.num_sequences)
        if lineage.settled:
            rows.write(layer, self.num_tokens, k_BKTD, v_BKTD)
        else:
            leaders = self._indices_of(lineage, k_BKTD.device).leaders
            rows.write(layer, self.num_tokens, k_BKTD.index_select(0, leaders), v_BKTD.index_select(0, leaders))
        self.written.add(layer)
        seen = self._seen(rows, layer, self.num_new) if self.num_tokens else (k_BKTD, v_BKTD)
        if len(self.written) == len(self._rows_of):
            self._finish()
        return seen

    def _check_shapes(self, layer: int, of_keys: torch.Size, of_values: torch.Size) -> None:
        """Are these of the rows and the tokens of the pass that is under way, or of one that can begin? Else LayoutError."""
        num_rows, num_tokens = of_keys[0], of_keys[2]
        wanted = (self.size, self.num_new) if self.written else (num_rows, num_tokens)
        if not (num_rows, num_tokens) == (of_values[0], of_values[2]) == wanted:
            raise LayoutError(
                f"layer {layer} gives keys of {num_rows} rows with {num_tokens} tokens and values of {of_values[0]} with "
                f"{of_values[2]}, and this pass is one of {wanted[0]} with {wanted[1]}: a VmmCache is for models whose layers "
                f"all keep the same tokens; use DynamicCache(config=model.config) here"
            )

    def _begin(self, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> None:
        self._follow_stream()
        size, self.num_new = k_BKTD.shape[0], k_BKTD.shape[2]
        if self._lineage is None or not self.num_tokens:
            self.reset()  # a first pass may have failed
            may_share = self._share_prompts and size > 1 and self.num_new > 1
            self._lineage = Lineage.of_prompts(hf_twins.prompts(k_BKTD, v_BKTD) if may_share else range(size))
            return
        if len(self._lineage.parents) != size:
            raise ValueError(
                f"the cache has a batch of {self.size}, and the model computes one of {size}: reset() begins anew, "
                f"batch_repeat_interleave and batch_select_indices change it"
            )
        if not self._lineage.settled and not self._goes_on_together(k_BKTD, v_BKTD, self._lineage):
            self._settle(self._lineage)
        if not self.record_past:
            for rows in self.groups:
                rows.slide(self.num_tokens)
        self._grow(self.groups, self.num_tokens + self.num_new)

    def _goes_on_together(self, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, lineage: Lineage) -> bool:
        """Are equal prompts still equal? A prompt may come in chunks; with single tokens the answers have begun."""
        return self.num_new > 1 and lineage.compact and hf_twins.agree(k_BKTD, v_BKTD, lineage.parents)

    def _open(self, rows: BatchRows, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, num_sequences: int) -> None:
        later_pages = sum(
            num_sequences * later.pages_like(k_BKTD, v_BKTD, self.num_new - self._dropped(later))
            for later in self.groups
            if later is not rows and not later.sequences
        )
        try:
            rows.open(k_BKTD, v_BKTD, num_sequences, dropped=self._dropped(rows))
            self._grow([rows], self.num_new, later_pages=later_pages)
        except BaseException:
            self.reset()  # as before the first pass
            raise

    def _dropped(self, rows: BatchRows) -> int:
        """Of a first prompt that is longer than the window the first tokens are seen in this pass alone."""
        return 0 if self.record_past else rows.first_token(self.num_new)

    def _grow(self, groups: Sequence[BatchRows], num_tokens: int, *, later_pages: int = 0) -> None:
        """Have memory for `num_tokens` tokens of each row in these groups; none grows if there is too little for all.

        `later_pages` are for groups that this pass opens later. If another thread takes from the pool between the check and
        the growth, some rows may have grown when this raises; they keep that.
        """
        self._check_room(sum(rows.missing_pages(num_tokens) for rows in groups), f"grow to {num_tokens} tokens", later_pages)
        for rows in groups:
            rows.grow(num_tokens)

    def _check_room(self, num_pages: int, what: str, later_pages: int = 0) -> None:
        """Can the whole batch have so many pages now? Else OutOfPages."""
        if not num_pages:
            return
        try:
            self.groups[0].pool.check_room(num_pages, _MORE_ROOM, later_pages=later_pages)
        except OutOfPages as error:
            raise OutOfPages(f"a batch of {counted(self.size or 0, 'row')} cannot {what}: {error}") from None

    def _finish(self) -> None:
        self.num_tokens += self.num_new
        for rows in self.groups:
            rows.advance(self.num_tokens)
        self.written.clear()

    def states(self, layer: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer that the next token sees, [B, K, T, D]: views, unless several rows have one sequence."""
        self._follow_stream()
        return self._seen(self.rows_of(layer), layer, 0)

    def _seen(self, rows: BatchRows, layer: int, num_new: int) -> tuple[torch.Tensor, torch.Tensor]:
        assert self._lineage is not None, "there are tokens"
        k_BKTD, v_BKTD = rows.view(layer, self.num_tokens, self.num_tokens + num_new)
        if self._lineage.settled:
            return k_BKTD, v_BKTD
        parents = self._indices_of(self._lineage, k_BKTD.device).parents
        return k_BKTD.index_select(0, parents), v_BKTD.index_select(0, parents)

    def _indices_of(self, lineage: Lineage, device: torch.device) -> _Indices:
        known = self._indices
        if known is None or known.lineage is not lineage:
            known = self._indices = _Indices(lineage, device)
        return known

    def _follow_stream(self) -> None:
        """If another stream is current than at the last use: memory that goes back waits for both; indices are made anew."""
        current = _current_stream(self.groups[0].device)
        if self._stream is not None and current != self._stream:
            self._indices = None
            for rows in self.groups:
                rows.change_streams(self._stream, current)
        self._stream = current

    # between passes

    def crop(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of each sequence; see VmmCache.crop."""
        self._follow_stream()
        if not num_tokens:
            self.reset()
            return
        assert self._lineage is not None, "there are tokens"
        for rows in self.groups:
            rows.check_kept(num_tokens)
        for rows in self.groups:
            rows.own_from(num_tokens)  # all that can fail, before anything is cut
        self.written.clear()
        for rows in self.groups:
            rows.truncate(num_tokens)
            rows.slide(num_tokens)
        self.num_tokens, self._lineage = num_tokens, self._lineage.cut(num_tokens)

    def reset(self) -> None:
        """End all sequences."""
        self._follow_stream()
        for rows in self.groups:
            rows.end()
        self.num_tokens, self._lineage = 0, None
        self.written.clear()

    def select(self, rows: Sequence[int]) -> None:
        """The batch is to be of these of its rows, in this order. Memory follows in the next pass."""
        self._check_finished()
        if self._lineage is None:
            return
        if not rows or not all(0 <= row < len(self._lineage.parents) for row in rows):
            raise ValueError(f"rows {list(rows)} of a batch of {self.size}: they are from 0 on, and at least one")
        self._lineage = self._lineage.select(rows)

    def fork(self) -> "Batch":
        """Another batch that has all tokens of this one. Raises: as KVCache.fork_batch."""
        self._check_finished()
        self._follow_stream()
        forked = self._fork(range(0 if self._lineage is None else self._lineage.num_sequences))
        other = Batch(forked, share_prompts=self._share_prompts)
        other.num_tokens, other.record_past, other._stream = self.num_tokens, self.record_past, self._stream
        if self._lineage is not None:
            self._lineage = other._lineage = self._lineage.share(self.num_tokens)
        return other

    def close(self) -> None:
        """End all sequences, and close the caches that nobody else has slots in. Idempotent."""
        self._follow_stream()
        self.num_tokens, self._lineage = 0, None
        self.written.clear()
        for rows in self.groups:
            rows.close()

    def _settle(self, lineage: Lineage) -> None:
        """Let memory follow the batch. All or none, but for copies, which can be made again."""
        moves = lineage.moves()
        if moves is not None:
            for rows in self.groups:
                rows.copy(moves.sources, moves.targets, moves.first_token, self.num_tokens)
        else:
            forked = self._fork(lineage.parents)
            for rows in self.groups:
                rows.close()
            self.groups = forked
        self._lineage = lineage.settle(self.num_tokens, forked=moves is None)

    def _fork(self, parents: Sequence[int]) -> list[BatchRows]:
        self._check_room(sum(rows.fork_pages(parents) for rows in self.groups), "be forked, so that each goes its own way")
        forked: list[BatchRows] = []
        try:
            for rows in self.groups:
                forked.append(rows.fork(parents))
        except BaseException:
            for rows in forked:
                rows.close()
            raise
        return forked

    def _check_finished(self) -> None:
        if self.written:
            raise RuntimeError(_UNFINISHED + _REMEDY)


def _current_stream(device: torch.device) -> torch.Stream | None:
    return torch.cuda.current_stream(device) if device.type == "cuda" else None
