"""A batch over a memory: its queries and index tensors, and the check that what a system makes of them is right.

Legend: B sequences, N queries, H query heads, K kv heads, D head dim.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from bench.kernels.cases import Case
from bench.kernels.memories import Memory, Planes, rows_of
from bench.timing import WrongNumbers
from vmmkv.kernels import reference

TOLERANCE: Final = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 1e-4}
"""The length of the error over the length of what is wanted. Both shrink alike with the number of rows attended to."""

_CHECKED_SEQUENCES: Final = 4
_CHECKED_QUERIES: Final = 3

Pass = Callable[[], list[torch.Tensor]]
"""Attention of every layer of every copy of a batch. Returns its outputs, [N, H, D] each, copy by copy."""


class Batch:
    """The queries of a case, the same for every copy and layer, and where its sequences are in a memory."""

    def __init__(self, case: Case, copies: int, memory: Memory, seed: int) -> None:
        self.case, self.copies, self.memory = case, copies, memory
        self.shape = shape = memory.form.shape
        self.device = device = memory.layers[0].k.device
        generator = torch.Generator(device).manual_seed(seed)
        size = (sum(case.queries), shape.heads, shape.head_dim)
        self.q_NHD = torch.randn(size, device=device, generator=generator, dtype=torch.float32).to(shape.dtype)
        self.lengths_B = torch.tensor(case.lengths, dtype=torch.int32, device=device)
        self.starts = np.cumsum([0, *case.queries])
        """[B + 1] on the host: sequence b's queries are [starts[b], starts[b + 1])."""
        self.query_starts = torch.tensor(self.starts, dtype=torch.int32, device=device)
        self._wanted: list[tuple[int, torch.Tensor, torch.Tensor]] | None = None

    def slots(self, copy: int) -> list[int]:
        """Slots of a copy, by sequence."""
        size = len(self.case.lengths)
        return self.memory.slots[copy * size : (copy + 1) * size]

    def slots_B(self, copy: int) -> torch.Tensor:
        """The same on the device, int32."""
        return torch.tensor(self.slots(copy), dtype=torch.int32, device=self.device)

    def passes(self, bind: "Callable[[Batch, int], Attend]") -> Pass:
        """A pass from what binds a system to one copy. Its outputs are allocated once, if the system writes to them."""
        attends = [bind(self, copy) for copy in range(self.copies)]
        outs = [torch.empty_like(self.q_NHD) for _ in range(self.copies * len(self.memory.layers))]

        def run_pass() -> list[torch.Tensor]:
            layers = [(attend, planes) for attend in attends for planes in self.memory.layers]
            return [attend(planes, out) for (attend, planes), out in zip(layers, outs, strict=True)]

        return run_pass

    def check(self, outputs: list[torch.Tensor]) -> None:
        """Hold some queries of the first and the last output against the reference. Raises WrongNumbers."""
        for index, picked_N, wanted in self._expected():
            given = outputs[index][picked_N].float()
            error = ((given - wanted).norm() / wanted.norm()).item()
            if not error <= TOLERANCE[self.shape.dtype]:  # NaN is not
                raise WrongNumbers(f"output {index} of {len(outputs)} is off by {error:.3g} of its length")

    def _expected(self) -> list[tuple[int, torch.Tensor, torch.Tensor]]:
        """Index of an output, queries, and what they should give; computed once, for all systems."""
        if self._wanted is None:
            last = self.copies * len(self.memory.layers) - 1
            self._wanted = [(index, *self._reference(index)) for index in sorted({0, last})]
        return self._wanted

    def _reference(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        copy, layer = divmod(index, len(self.memory.layers))
        picked_N, wanted = [], []
        for b in self._spread(len(self.case.lengths), _CHECKED_SEQUENCES) | {int(np.argmax(self.case.lengths))}:
            length, count = self.case.lengths[b], self.case.queries[b]
            k_TKD, v_TKD = rows_of(self.memory, layer, copy * len(self.case.lengths) + b, length)
            for query in self._spread(count, _CHECKED_QUERIES):
                row = int(self.starts[b]) + query
                position = torch.tensor([length - count + query], device=self.device)
                # Rows behind the query's own are masked: leave them out, for memory's sake.
                seen = length - count + query + 1
                picked_N.append(row)
                wanted.append(reference.attend(self.q_NHD[row : row + 1], k_TKD[:seen], v_TKD[:seen], position))
        return torch.tensor(picked_N, device=self.device), torch.cat(wanted)

    @staticmethod
    def _spread(count: int, picked: int) -> set[int]:
        return {round(index) for index in np.linspace(0, count - 1, picked)}


Attend = Callable[[Planes, torch.Tensor], torch.Tensor]
"""One layer of one copy: given its planes and memory for the output; gives the output, there or elsewhere."""
