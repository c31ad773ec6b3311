"""The rows of a batch, for the layers of one window, in adjacent slots of one cache: each layer is one strided tensor.

    slot first     | p | p | p | p | new |            all sequences have the same number of rows, as a batch of transformers
    slot first + 1 | p | p | p | p | new |            has, which is padded on the left

Row numbers are token numbers, but that the window's first rows may never have been written: row 0 is token `dropped`.

    B sequences, K kv heads, T tokens, D head dim
"""

from collections.abc import Sequence as Seq
from typing import Final

import torch

from vmmkv.adapters.hf_planes import LayerRows, Planes
from vmmkv.cache import KVCache, Sequence
from vmmkv.errors import DriverError, RowsUnmapped
from vmmkv.layout import Group, KVLayout, Plane
from vmmkv.memory import sharing
from vmmkv.memory.pool import Pool
from vmmkv.units import PAGE_BYTES, TIB, ceil_div, format_bytes


class SharedCache:
    """A cache whose slots several batches have: it is closed by the last that leaves."""

    def __init__(self, cache: KVCache) -> None:
        self.cache: Final = cache
        self.used = False
        """Has a whole pass been written to it? Then the model gives such keys and values."""
        self._num_users = 1

    def join(self) -> "SharedCache":
        """One user more."""
        self._num_users += 1
        return self

    def leave(self) -> None:
        """One less."""
        self._num_users -= 1
        if not self._num_users:
            self.cache.close()


class BatchRows:
    """The rows of all sequences of a batch, for layers of one window (None for all tokens) and one shape.

    It has no cache until `open` sees keys and values, for only they tell the shape and the type.
    """

    def __init__(self, layers: tuple[int, ...], window: int | None, pool: Pool, *, slots: int, max_tokens: int) -> None:
        self.layers: Final = layers
        self.window: Final = window
        self.sequences: list[Sequence] = []
        self.pool: Final = pool
        self._slots = slots
        self._max_tokens = max_tokens
        self._shared: SharedCache | None = None
        self._dropped = 0
        """The first token that has a row."""
        self._planes: Planes | None = None
        """None as long as nobody has asked for rows of these sequences."""
        self._places: LayerRows | None = None
        """Where the layers of a pass write."""
        self._seen: LayerRows | None = None
        """What they see."""

    # in and out

    def open(self, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, num_sequences: int, *, dropped: int) -> None:
        """Give `num_sequences` new sequences their slots, in a cache for keys and values such as these."""
        layout = _layout(self.layers, self.window, k_BKTD, v_BKTD)
        if self._shared is not None and not self._shared.used and self.cache.layout != layout:
            self.close()  # it was made for a pass that failed, perhaps for its shapes
        if self._shared is None:
            # A batch that is arranged anew is forked to as many slots more, which need not be free in one run.
            slots = max(self._slots, 3 * k_BKTD.shape[0])
            with torch.inference_mode(False):  # else no tensor of it could be written under another mode
                self._shared = SharedCache(self._make(layout, slots))
        self._take(self.cache.open_batch(num_sequences), dropped)

    def fork(self, parents: Seq[int]) -> "BatchRows":
        """Other rows in the same cache: a fork of the sequence that each entry names."""
        other = BatchRows(self.layers, self.window, self.pool, slots=self._slots, max_tokens=self._max_tokens)
        if self._shared is not None:
            sequences = self.cache.fork_batch([self.sequences[parent] for parent in parents]) if parents else []
            other._shared = self._shared.join()
            other._take(sequences, self._dropped)
        return other

    def fork_pages(self, parents: Seq[int]) -> int:
        """Pages that `fork` will ask for."""
        if self._shared is None:
            return 0
        memory, forked = self.cache._memory, [self.sequences[parent] for parent in parents]
        with self.pool.lock:
            return sum(sharing.fork_pages(memory, sequence.slot, sequence.length) for sequence in forked)

    def end(self) -> None:
        """Close the sequences; the cache stays, for others. Idempotent."""
        for sequence in self.sequences:
            sequence.close()
        self._take([], 0)

    def close(self) -> None:
        """Close the sequences, and the cache too if nobody else has slots in it. Idempotent."""
        if self._shared is not None and not self.cache.closed:
            self.end()
        shared, self._shared = self._shared, None
        if shared is not None:
            shared.leave()

    @property
    def device(self) -> torch.device:
        """The pool's."""
        return self.pool.device

    @property
    def closed(self) -> bool:
        """Is there no cache that is to be closed?"""
        return self._shared is None or self.cache.closed

    @property
    def cache(self) -> KVCache:
        """Where the slots are."""
        assert self._shared is not None, "no keys and values have been seen"
        return self._shared.cache

    def check(self) -> None:
        """Recount the laws of the cache. See KVCache.check."""
        if self._shared is not None:
            self.cache.check()

    # each forward pass

    def slide(self, num_tokens: int) -> None:
        """Give back what the window has passed, with so many tokens written: whole pages, once no launch can read them."""
        if self.window is None or not self.sequences:
            return
        start = num_tokens - self.window + 1 - self._dropped
        kept, (group, *_) = self.sequences[0].start(), self.cache.layout.groups
        if start > 0 and start * group.row_bytes // PAGE_BYTES > kept * group.row_bytes // PAGE_BYTES:
            for sequence in self.sequences:
                for index in range(len(self.cache.layout.groups)):
                    sequence.advance_start(index, start)

    def missing_pages(self, num_tokens: int) -> int:
        """Pages that `grow` will ask for, for all sequences; none for more tokens than they may have, which it refuses."""
        num_rows = num_tokens - self._dropped
        if not self._is_short(num_rows) or num_rows > self._max_tokens:
            return 0
        with self.pool.lock:
            return sum(self.cache._memory.missing_pages(sequence.slot, num_rows) for sequence in self.sequences)

    def pages_like(self, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor, num_rows: int) -> int:
        """Pages of one sequence of so many rows, if these layers' keys and values are as those of another layer."""
        groups = _layout(self.layers, self.window, k_BKTD, v_BKTD).groups
        return sum(ceil_div(num_rows * group.row_bytes, PAGE_BYTES) for group in groups)

    def grow(self, num_tokens: int) -> None:
        """Have memory for `num_tokens` tokens of each sequence. Raises: see Sequence.grow; what has grown by then stays."""
        num_rows = num_tokens - self._dropped
        if self._is_short(num_rows):
            if self.window is not None:
                self.cache.map_ahead(lookahead_tokens=0)  # the pages that the window has left are the next ones
            for sequence in self.sequences:
                sequence.grow(num_rows)

    def _is_short(self, num_rows: int) -> bool:
        if not self.sequences:
            return False
        first = self.sequences[0].slot
        return bool(num_rows > self.cache.limits[first : first + len(self.sequences)].min())

    def write(self, layer: int, num_tokens: int, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> None:
        """Keys and values of a layer for the tokens from `num_tokens` on; those before the first row are left out."""
        left_out, num_new = max(0, self._dropped - num_tokens), k_BKTD.shape[2]
        if left_out:
            k_BKTD, v_BKTD = (states.narrow(2, left_out, num_new - left_out) for states in (k_BKTD, v_BKTD))
        bounds = num_tokens - self._dropped + left_out, num_new - left_out
        if self._places is None or self._places.bounds != bounds:
            self._places = self._planes_of_the_batch().rows(*bounds)
        self._places.write(layer, k_BKTD, v_BKTD)

    def view(self, layer: int, num_past: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """What a token sees of a layer that has `num_past` before it, up to `num_tokens`: keys and values, [B, K, T, D]."""
        first = self.first_token(num_past) - self._dropped
        bounds = first, num_tokens - self._dropped - first
        if self._seen is None or self._seen.bounds != bounds:
            self._seen = self._planes_of_the_batch().rows(*bounds)
        return self._seen.of_layer[layer]

    def first_token(self, num_past: int) -> int:
        """The first that a token sees that has `num_past` before it."""
        return 0 if self.window is None else max(0, num_past - self.window + 1)

    def advance(self, num_tokens: int) -> None:
        """All layers have been written up to `num_tokens` tokens."""
        slots = [sequence.slot for sequence in self.sequences]
        self.cache.advance(slots, num_tokens - self._dropped - self.sequences[0].length)
        assert self._shared is not None, "there are sequences"
        self._shared.used = True

    def change_streams(self, *streams: torch.Stream | None) -> None:
        """Work on all of these touches the rows (see KVCache.record_stream); what was made on one is made anew on the next.

        Where a copy is split, writing takes an index on the device: another stream might read it before it is there, or torch's
        allocator give its memory away on the first while the other still reads.
        """
        self._planes = self._places = self._seen = None
        if not self.closed:
            for stream in streams:
                if stream is not None:
                    self.cache.record_stream(stream)

    # the batch

    def copy(self, sources: Seq[int], targets: Seq[int], first_token: int, num_tokens: int) -> None:
        """Of each pair of sequences the target takes the source's rows from `first_token` on.

        All are read before one is written. What is written must be in pages that nobody else holds. Cost: two kernels for each
        group of the layout.
        """
        first = max(first_token - self._dropped, self.sequences[0].start())
        count = num_tokens - self._dropped - first
        if count <= 0:
            return
        device = self.cache.device
        from_, to = torch.tensor(sources, device=device), torch.tensor(targets, device=device)
        for rows in self._whole_rows():
            part = rows.narrow(1, first, count)
            part.index_copy_(0, to, part.index_select(0, from_))

    def check_kept(self, num_tokens: int) -> None:
        """Can it be truncated to so many tokens? Raises RowsUnmapped if the window has passed what the next one sees."""
        if self.sequences and num_tokens:
            kept = self._dropped + max(sequence.start() for sequence in self.sequences)
            if self.first_token(num_tokens) < kept:
                raise RowsUnmapped(
                    f"with {num_tokens} tokens a window of {self.window} begins at token {self.first_token(num_tokens)}, and "
                    f"what was before {kept} is gone; call activate_past_recording() before the tokens that may be cropped"
                )

    def own_from(self, num_tokens: int) -> None:
        """Give each sequence pages of its own for what `truncate` leaves of a shared page, so that it cannot fail.

        On failure all tokens are as before. Cost and errors: see Sequence.own_from.
        """
        for sequence in self.sequences:
            sequence.own_from(max(0, num_tokens - self._dropped))

    def truncate(self, num_tokens: int) -> None:
        """Keep the first `num_tokens` tokens of each sequence, after `own_from`. See Sequence.truncate."""
        for sequence in self.sequences:
            sequence.truncate(max(0, num_tokens - self._dropped))

    # within

    def _make(self, layout: KVLayout, slots: int) -> KVCache:
        try:
            return KVCache(layout, self.pool, slots=slots, max_tokens=self._max_tokens)
        except DriverError as error:
            if error.call != "reserve":
                raise
            wanted_bytes = slots * self._max_tokens * sum(group.row_bytes for group in layout.groups)
            divisor = max(4, ceil_div(wanted_bytes, 16 * TIB))
            raise type(error)(
                f"{slots} slots of max_tokens={self._max_tokens} take {format_bytes(wanted_bytes)} of addresses, and the "
                f"driver has none: {error}. VmmCache(..., max_tokens={ceil_div(self._max_tokens, divisor)}) takes "
                f"{format_bytes(wanted_bytes / divisor)}; fewer slots take less too, down to three for each row of a batch",
                call=error.call,
                code=error.code,
            ) from error

    def _take(self, sequences: list[Sequence], dropped: int) -> None:
        self.sequences, self._dropped = sequences, dropped
        self._planes = self._places = self._seen = None

    def _planes_of_the_batch(self) -> Planes:
        if self._planes is None:
            self._planes = Planes(self.cache, self.sequences[0].slot, len(self.sequences))
        return self._planes

    def _whole_rows(self) -> list[torch.Tensor]:
        """Of each group of the layout all layers' rows as they lie: [B, slot_tokens, elements of a row]."""
        first, count = self.sequences[0].slot, len(self.sequences)
        whole = []
        for group in self.cache.layout.groups:
            plane = self.cache.k(group.layers[0])  # over the arena's whole storage, from its first byte on
            size = (*plane.shape[:2], group.row_bytes // plane.itemsize)
            whole.append(plane.as_strided(size, (*plane.stride()[:2], 1), 0)[first : first + count])
        return whole


def _layout(layers: tuple[int, ...], window: int | None, k_BKTD: torch.Tensor, v_BKTD: torch.Tensor) -> KVLayout:
    """All layers in one row if a page holds that, else in as few rows as it takes."""
    planes = tuple(
        Plane(name=name, heads=states.shape[1], dim=states.shape[3], dtype=states.dtype)
        for name, states in (("k", k_BKTD), ("v", v_BKTD))
    )
    fitting = max(1, PAGE_BYTES // Group(layers=(0,), planes=planes).layer_bytes)
    per_group = ceil_div(len(layers), ceil_div(len(layers), fitting))
    parts = (layers[start : start + per_group] for start in range(0, len(layers), per_group))
    return KVLayout(groups=tuple(Group(layers=part, planes=planes, window=window) for part in parts))
