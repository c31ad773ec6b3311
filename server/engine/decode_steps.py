"""Decode steps that the device carries on by itself: a token for each row of a batch, two CUDA graphs a step.

    forward: where each row stands ──> embed, append, attend ──> logits
    sample:  logits ──> a token each ──> where each row stands, and what the host reads

Between two steps nothing comes from the host but the launches, unless the batch has other rows than before. Batches are
filled up to the next size that was captured. On a CPU the same is called without graphs.

Legend: B rows of the batch, V vocabulary.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import torch

from vmmkv.server.engine.batch import Batch, Run
from vmmkv.server.engine.ledger import Slots
from vmmkv.server.engine.model import Model
from vmmkv.server.engine.sampler import Sampler
from vmmkv.server.engine.sharers import Group, Sharers
from vmmkv.server.engine.step_state import StepState
from vmmkv.server.engine.uploads import ALIGNED_ELEMENTS, Uploads
from vmmkv.units import round_up

_LEAST_SHARERS: Final = 8
"""Rows of the smallest batch that is captured for shared prefixes too."""


def batch_sizes(max_rows: int) -> list[int]:
    """Rows of the steps that are captured: powers of two up to 32, then multiples of 32, from 256 on of 64.

    A step costs by its rows mostly where the device is busy with them; below it costs its weights.
    """
    sizes = [1, 2, 4, 8, 16, *range(32, 257, 32), *range(320, max_rows + 64, 64)]
    return [size for size in sizes if size < max_rows] + [max_rows]


@dataclass(frozen=True, slots=True)
class _Captured:
    logits_BV: torch.Tensor
    forward: Callable[[], None]
    samples: Mapping[bool, Callable[[], None]]
    """Of batches that are all greedy, and of others."""


class DecodeSteps:
    """All decode steps of one engine; `capture` makes its graphs once memory is there. One step is launched at a time."""

    def __init__(self, model: Model, sampler: Sampler, state: StepState, uploads: Uploads, *, max_rows: int) -> None:
        self._model, self._sampler, self._state, self._uploads = model, sampler, state, uploads
        device = state.tokens_S.device
        self._sizes = batch_sizes(max_rows)
        buffers = torch.zeros(5, round_up(max_rows, ALIGNED_ELEMENTS), dtype=torch.int32, device=device).unbind()
        self._slots_B, self._ids_B, self._positions_B, self._ends_B, self._out_B = buffers
        self._sharers = Sharers(max_rows, device)
        self._graphs: dict[tuple[int, bool], _Captured] = {}
        self._launched: _Captured | None = None
        """What the step that was launched last was replayed from."""
        self._shares = False
        """Are there groups of sharers among the rows?"""
        self._now: Slots | None = None
        """The rows' slots, as the device has them; None if it has others."""

    def capture(self, pool: Any) -> None:
        """Make the graphs in a pool of memory, the largest first, for the others use what it leaves. Compiles kernels at first.

        Cost: some 100 ms a size. The slots are nobody's meanwhile, so that no sequence is touched.
        """
        self._now = None
        self._slots_B.zero_()
        self._sharers.clear()
        for size in reversed(self._sizes):
            for shares in (False, True) if size >= _LEAST_SHARERS else (False,):
                self._graphs[size, shares] = self._captured(size, shares, pool)

    def _captured(self, size: int, shares: bool, pool: Any) -> _Captured:
        logits_BV = self._forward(size, None, shares)  # compiles what is not compiled yet

        def forward() -> None:
            nonlocal logits_BV
            logits_BV = self._forward(size, None, shares)

        replay = capture(forward, pool)
        samples = {}
        for greedy in (True, False):
            self._sample(size, logits_BV, greedy=greedy)
            samples[greedy] = capture(functools.partial(self._sample, size, logits_BV, greedy=greedy), pool)
        return _Captured(logits_BV, replay, samples)

    @property
    def shares(self) -> bool:
        """Are there steps for rows that share a prefix?"""
        return any(shares for _, shares in self._graphs)

    def share(self, slots: Slots, groups: Sequence[Group]) -> None:
        """From the next step on the first rows are the members of these groups, one behind the other."""
        self._shares = bool(groups)
        if groups:
            self._sharers.place(slots, groups, self._uploads)

    def forward(self, slots: Slots, lengths: Slots) -> torch.Tensor:
        """Launch the forward half for these slots, whose rows so far are `lengths`; [B, V] logits, padded rows among them.

        Which slots they are is uploaded if they are others than last time; nothing else ever is.
        """
        num_rows = len(slots)
        size = next(size for size in self._sizes if size >= num_rows) if self._graphs else num_rows
        self._place(slots, size)
        self._launched = self._graphs.get((size, self._shares and size >= _LEAST_SHARERS))
        if self._launched is None:
            return self._forward(size, (slots, lengths), False)
        self._launched.forward()
        return self._launched.logits_BV

    def sample(self, num_rows: int, logits_BV: torch.Tensor, *, greedy: bool) -> torch.Tensor:
        """Launch the other half of the step; [B] int32 tokens, to be copied before the next one is launched."""
        if self._launched is not None:
            self._launched.samples[greedy]()
        else:
            self._sample(len(logits_BV), logits_BV, greedy=greedy)
        return self._out_B[:num_rows]

    def finish(self, num_rows: int, sampled_B: torch.Tensor) -> torch.Tensor:
        """Instead of `sample`, if the tokens have been sampled by the caller."""
        self._state.end(self._slots_B[:num_rows], sampled_B[:num_rows], self._ends_B[:num_rows], self._out_B[:num_rows])
        return self._out_B[:num_rows]

    @property
    def slots_B(self) -> torch.Tensor:
        """int32: of the rows of the step that was launched last, on the device."""
        return self._slots_B

    @property
    def ends_B(self) -> torch.Tensor:
        """int32: the rows that each has behind it."""
        return self._ends_B

    def _place(self, slots: Slots, size: int) -> None:
        """Have the device know the rows, if it does not."""
        if self._now is not None and np.array_equal(self._now, slots):
            return
        padded = np.zeros(size, np.int32)
        padded[: len(slots)] = slots
        self._uploads.into(self._slots_B[:size], padded)
        self._now = slots.copy()

    def _forward(self, size: int, known: tuple[Slots, Slots] | None, shares: bool) -> torch.Tensor:
        slots_B, ids_B, positions_B, ends_B = (
            tensor[:size] for tensor in (self._slots_B, self._ids_B, self._positions_B, self._ends_B)
        )
        self._state.begin(slots_B, ids_B, positions_B, ends_B)
        runs = None
        if known is not None and not slots_B.is_cuda:
            runs = tuple(
                Run(slot=slot, start=start, count=1, column=row)
                for row, (slot, start) in enumerate(zip(known[0].tolist(), known[1].tolist(), strict=True))
            )
        batch = Batch(
            slots_N=slots_B, positions_N=positions_B, slots_B=slots_B, lengths_B=ends_B, query_starts=None, runs=runs,
            shared=self._sharers.tensors(size) if shares else None,
        )  # fmt: skip
        return self._model.forward(ids_B, batch, None)

    def _sample(self, size: int, logits_BV: torch.Tensor, *, greedy: bool) -> None:
        slots_B, ends_B = self._slots_B[:size], self._ends_B[:size]
        sampled_B = self._sampler.sample(logits_BV, slots_B, ends_B, greedy=greedy)
        self._state.end(slots_B, sampled_B, ends_B, self._out_B[:size])


def capture(step: Callable[[], None], pool: Any) -> Callable[[], None]:
    """A step as a graph: what replays it. `pool` is the memory of graphs of which one is replayed at a time."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, capture_error_mode="thread_local"):
        step()
    return graph.replay
