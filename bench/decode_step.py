"""The device's part of a decode step without a model: rows are appended and attended to, weights are read.

Legend: B rows of the batch (-1 in slots_B: empty), S slots, K kv heads, D head dim.
"""

import time
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from bench.harness import HBM_BYTES_PER_S, Settings, Shape, WrongNumbers, capture, device_sleep, now_us, sleep_cycles
from vmmkv import KVCache
from vmmkv_kernels import reference

SLACK_SHARE: Final = 0.75
"""The share of the device's working time in which memory is mapped. The rest is for the last call, which is not cut short."""

Indices = npt.NDArray[np.int64]

_CPU_SLACK_US: Final = 3_000.0


class StepWork:
    """Work of a decode step on the device: append a row for each sequence, attend to its rows, read the weights.

    Rows name their slot and position, in integers that every dtype holds exactly. On a CPU rows are appended when a step is
    launched, in plain torch; then the device counts as busy for 3 ms.
    """

    _until_us = 0.0

    def __init__(self, cache: KVCache, shape: Shape) -> None:
        self._cache, self._shape = cache, shape

    def launch(self, slots_B: Indices, lengths_B: Indices) -> None:
        """Queue a step: row `lengths_B[b]` of slot `slots_B[b]` is written, then rows up to and with it are read."""
        here = slots_B >= 0
        slots, lengths = torch.from_numpy(slots_B[here]), torch.from_numpy(lengths_B[here])
        new = self._new(slots, lengths)
        for layer in range(self._shape.layers):
            reference.append(new, new, self._cache.k(layer), self._cache.v(layer), slots, lengths, self._cache.limit)
        self._until_us = now_us() + _CPU_SLACK_US

    def done(self) -> bool:
        """Whether the device has finished, and idles."""
        return now_us() >= self._until_us

    def wait(self) -> None:
        """Until it has."""
        time.sleep(max(0.0, self._until_us - now_us()) / 1e6)

    def check(self, slot: int, start: int, end: int) -> None:
        """Are the rows [start, end) of a slot what was appended there? Raises: WrongNumbers."""
        positions = torch.arange(start, end, device=self._cache.device)
        wanted = self._new(torch.full_like(positions, slot), positions)
        for layer in {0, self._shape.layers - 1}:
            for plane in (self._cache.k(layer), self._cache.v(layer)):
                if not torch.equal(plane[slot, start:end], wanted):
                    raise WrongNumbers(f"rows [{start}, {end}) of slot {slot} in layer {layer} are not what was appended there")

    def _new(self, slots: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[B, K, D]"""
        marks, shape = (slots * 31 + positions) % 127, self._shape
        return marks[:, None, None].expand(-1, shape.kv_heads, shape.head_dim).to(shape.dtype).contiguous()


def open_work(cache: KVCache, settings: Settings, num_rows: int, shape: Shape | None = None) -> StepWork:
    """The work of this device, of a shape or of the settings'. On CUDA kernels are compiled and a graph captured."""
    shape = shape or settings.shape
    return _CudaWork(cache, shape, num_rows) if settings.on_gpu else StepWork(cache, shape)


class _CudaWork(StepWork):
    """The project's own kernels as one graph, and a sleep for as long as the weights take to be read.

    Slots and lengths are tensors on the device: the same graph serves every step.
    """

    def __init__(self, cache: KVCache, shape: Shape, num_rows: int) -> None:
        super().__init__(cache, shape)
        self._device = cache.device
        self._cycles = sleep_cycles(self._device, shape.weight_bytes / HBM_BYTES_PER_S * 1e6)
        # [2, B]: slots, lengths. Pinned, and written again only when the step that reads it is over.
        self._staged = torch.full((2, num_rows), -1, dtype=torch.int32).pin_memory()
        self._staged_view = self._staged.numpy()
        self._index = self._staged.to(self._device)
        self._q_BHD = torch.ones((num_rows, shape.heads, shape.head_dim), dtype=shape.dtype, device=self._device)
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Every slot is -1 while this runs and is captured: no sequence has memory yet, and nothing is touched.
        self._graph = capture(self._layers, self._device)

    def launch(self, slots_B: Indices, lengths_B: Indices) -> None:
        """Cost: one copy, one graph launch, one event."""
        self._staged_view[0], self._staged_view[1] = slots_B, lengths_B
        self._index.copy_(self._staged, non_blocking=True)
        self._graph.replay()
        self._done.record(torch.cuda.current_stream(self._device))

    def done(self) -> bool:
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        self._done.synchronize()

    def _layers(self) -> None:
        from vmmkv_kernels.attention.append import append
        from vmmkv_kernels.attention.decode import decode

        slots, lengths = self._index[0], self._index[1]
        new, ends = self._new(slots, lengths), lengths + 1
        for layer in range(self._shape.layers):
            k, v = self._cache.k(layer), self._cache.v(layer)
            append(new, new, k, v, slots, lengths, self._cache.limit)
            decode(self._q_BHD, k, v, ends, slots, limit_S=self._cache.limit)
        device_sleep(self._cycles)
