"""Compaction: rows of running requests with a `kv_policy` are dropped, and their memory goes back.

    rows of a request   | prompt ................... |              all of them, while it is computed
                        | kept ...... |                             compacted to the budget
                        | kept ...... | `every` more |              compacted again, as it generates

A request is compacted at fixed numbers of rows. So one that was preempted and is computed again goes through the same
compactions: it gives the same tokens, and needs no more memory. It has no step in flight then, while others may: it waits until
its last one has been read. That step has also ranked the rows, and the host has the numbers of those to keep.

Keys that have moved are turned back to the positions of their rows. From then on the sequence is like any other of that length
to the model and the sampler: steps know rows alone, and nothing but `num_dropped` tells them from tokens. If the policy keeps
positions, keys stay as they are, and the model's positions are rows plus `num_dropped`: see `DeviceState.shifts_S`.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

import vmmkv
from vmmkv.memory.sharing import num_unmoved
from vmmkv_server.engine.attention import RotaryKeys
from vmmkv_server.engine.kv_backend import EngineCache, KVSequence
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.ranking import KeptRows
from vmmkv_server.engine.uploads import Uploads
from vmmkv_server.protocol import Compacted

ROUNDED_ANEW: Final = (
    "compacts as requests generate, and quantised keys would be rounded anew each time they are turned: use "
    '"positions": "original", or snapkv, or leave it out'
)
"""Why a policy that turns keys again and again is not for quantised rows. In fp8, turned 32 times, perplexity was 24.0 instead
of 15.6."""


def refusal(cache: EngineCache, model: EngineModel, *, is_split: bool) -> str:
    """Why no request can have a policy with this model and this memory; empty if it can. `is_split`: over several devices."""
    groups = cache.layout.groups
    if is_split:
        return "is for a model on one device (tensor_parallel_size=1), and this one is split over several"
    if not isinstance(cache, vmmkv.KVCache):
        return "needs memory that can be compacted"
    if any(group.window is not None for group in groups):
        return "is for full attention, and this model has sliding windows, which give memory back by themselves"
    if len(groups) > 1:
        return "is for models of which a token's rows fit in a page"
    if model.keys is None:
        return (
            "needs a model whose rotary positions vmmkv knows, and this one runs by transformers' own code: "
            "model_impl='vmmkv' says what it lacks"
        )
    return ""


class Compactor:
    """Compacts the sequences of one engine, and counts what it keeps and drops."""

    def __init__(
        self,
        keys: RotaryKeys | None,
        lengths_S: torch.Tensor,
        shifts_S: torch.Tensor,
        uploads: Uploads,
        send: Callable[[Compacted], None],
    ) -> None:
        """`lengths_S` and `shifts_S` are those of `DeviceState`."""
        self.num_compactions = self.num_rows_kept = self.num_rows_dropped = 0
        self._keys, self._lengths_S, self._shifts_S, self._uploads = keys, lengths_S, shifts_S, uploads
        self._send = send

    @torch.inference_mode()
    def compact(self, request_id: str, kept: KeptRows, sequence: KVSequence) -> None:
        """Drop rows of a sequence that has no step in flight, by its policy.

        Cost: as Sequence.compact, and two launches; waits for nothing unless shared pages are exchanged.
        Raises: OutOfPages, DriverError; then nothing has changed. After an interrupt the request cannot go on.
        """
        assert isinstance(sequence, vmmkv.Sequence) and self._keys is not None, "else it is refused"
        length = sequence.length
        rows_T = kept.eviction.policy.keep(length) if kept.chosen is None else kept.chosen
        rows = rows_T.numpy()
        num_dropped = length - len(rows)
        kept.num_dropped += num_dropped  # first: a request whose rows are fewer than this says cannot be parked
        try:
            sequence.compact(rows)
        except BaseException:
            kept.num_dropped -= sequence.length - len(rows)  # 0 if an interrupt came behind it
            raise
        if kept.eviction.keeps_positions:
            self._shifts_S[sequence.slot].fill_(kept.num_dropped)  # to assign it would wait for the device
        elif (first := num_unmoved(rows)) < len(rows):
            (back_T,) = self._uploads.pack([rows[first:] - np.arange(first, len(rows))])
            self._keys.turn(sequence.slot, first, back_T)
        self._lengths_S[sequence.slot].fill_(len(rows))
        kept.chosen = None
        self.num_compactions += 1
        self.num_rows_kept += len(rows)
        self.num_rows_dropped += num_dropped
        self._send(Compacted(request_id=request_id, kept_rows=len(rows), dropped_rows=kept.num_dropped))

    def release(self, slot: int) -> None:
        """A compacted request has left this slot: positions are rows there. One launch."""
        self._shifts_S[slot].fill_(0)
