"""What a decode step does on the device: append a row for each sequence, attend to all of its rows, read the weights.

    launch(slots_B, lengths_B)  ──>  queued  ──>  wait()
                                       └── done()?

Rows are appended and attended to with the project's own kernels over the cache's own memory, captured as one graph; the
time that the weights' bytes would take is slept through. On a CPU rows are appended in plain torch and nothing attends.

Legend: B rows of the batch (-1 in slots_B: nobody there), S slots, K kv heads, D head dim.
"""

import time
from typing import Final, Protocol

import numpy as np
import numpy.typing as npt
import torch

from bench.settings import Settings, Shape
from bench.timing import WrongNumbers, capture, device_sleep, now_us, sleep_cycles
from vmmkv import KVCache
from vmmkv.kernels import reference

HBM_BYTES_PER_S: Final = 4.5e12
"""What an H200 reads at best: the bound of the design."""

_CPU_SLACK_US: Final = 3_000.0
_SLEEP_SHARE: Final = 4_400.0
"""What attention takes of a step, in place of which `--work sleep` sleeps: 20 GB of KV at the bound."""

Indices = npt.NDArray[np.int64]


class StepWork(Protocol):
    """The device's part of a step."""

    def launch(self, slots_B: Indices, lengths_B: Indices) -> None:
        """Queue a step: row `lengths_B[b]` of slot `slots_B[b]` is written, then rows up to and with it are read."""
        ...

    def done(self) -> bool:
        """Has the device finished? Then it idles."""
        ...

    def wait(self) -> None:
        """Until it has."""
        ...

    def check(self, slot: int, start: int, end: int) -> None:
        """Are the rows [start, end) of a slot what was appended there? Raises WrongNumbers."""
        ...


def open_work(cache: KVCache, settings: Settings, num_rows: int) -> StepWork:
    """The work of this device. On CUDA kernels are compiled and a graph captured."""
    if settings.on_gpu:
        return CudaWork(cache, settings, num_rows)
    return HostWork(cache, settings)


class HostWork:
    """Rows are appended when a step is launched; then the device pretends to be busy, so that there is slack to pump in."""

    def __init__(self, cache: KVCache, settings: Settings) -> None:
        self._cache, self._shape = cache, settings.shape
        self._appends = settings.work == "attention"
        self._until_us = 0.0

    def launch(self, slots_B: Indices, lengths_B: Indices) -> None:
        """See StepWork.launch."""
        if self._appends:
            here = slots_B >= 0
            slots, lengths = torch.from_numpy(slots_B[here]), torch.from_numpy(lengths_B[here])
            new = _marks(slots, lengths, self._shape)
            for layer in range(self._shape.layers):
                reference.append(new, new, self._cache.k(layer), self._cache.v(layer), slots, lengths, self._cache.limit)
        self._until_us = now_us() + _CPU_SLACK_US

    def done(self) -> bool:
        """See StepWork.done."""
        return now_us() >= self._until_us

    def wait(self) -> None:
        """See StepWork.wait."""
        time.sleep(max(0.0, self._until_us - now_us()) / 1e6)

    def check(self, slot: int, start: int, end: int) -> None:
        """See StepWork.check."""
        if self._appends:
            _check_rows(self._cache, self._shape, slot, start, end)


class CudaWork:
    """One graph: slots and lengths are tensors on the device, so the same one serves every step."""

    def __init__(self, cache: KVCache, settings: Settings, num_rows: int) -> None:
        self._cache, self._shape = cache, settings.shape
        self._device = settings.device
        self._attends = settings.work == "attention"
        sleep_us = settings.shape.weight_bytes / HBM_BYTES_PER_S * 1e6 + (0.0 if self._attends else _SLEEP_SHARE)
        self._cycles = sleep_cycles(self._device, sleep_us)
        # [2, B]: slots, lengths. Pinned, and written again only when the step that reads it is over.
        self._staged = torch.full((2, num_rows), -1, dtype=torch.int32).pin_memory()
        self._staged_view = self._staged.numpy()
        self._index = self._staged.to(self._device)
        self._queries = torch.ones(
            num_rows, self._shape.heads, self._shape.head_dim, dtype=self._shape.dtype, device=self._device
        )
        self._done = torch.cuda.Event()  # type: ignore[no-untyped-call]
        # Every slot is -1 while this runs and is captured: no sequence has memory yet, and nothing is touched.
        self._graph = capture(self._layers, self._device)

    def launch(self, slots_B: Indices, lengths_B: Indices) -> None:
        """See StepWork.launch. Cost: one copy, one graph launch, one event."""
        self._staged_view[0], self._staged_view[1] = slots_B, lengths_B
        self._index.copy_(self._staged, non_blocking=True)
        self._graph.replay()
        self._done.record(torch.cuda.current_stream(self._device))

    def done(self) -> bool:
        """See StepWork.done."""
        return bool(self._done.query())  # type: ignore[no-untyped-call]

    def wait(self) -> None:
        """See StepWork.wait."""
        self._done.synchronize()

    def check(self, slot: int, start: int, end: int) -> None:
        """See StepWork.check."""
        if self._attends:
            _check_rows(self._cache, self._shape, slot, start, end)

    def _layers(self) -> None:
        if self._attends:
            from vmmkv.kernels.attention.append import append
            from vmmkv.kernels.attention.decode import decode

            slots, lengths = self._index[0], self._index[1]
            new = _marks(slots, lengths, self._shape)
            ends = lengths + 1
            for layer in range(self._shape.layers):
                k, v = self._cache.k(layer), self._cache.v(layer)
                append(new, new, k, v, slots, lengths, self._cache.limit)
                decode(self._queries, k, v, ends, slots, limit_S=self._cache.limit)
        device_sleep(self._cycles)


def _marks(slots: torch.Tensor, positions: torch.Tensor, shape: Shape) -> torch.Tensor:
    """[B, K, D]: a row that says whose it is, in integers that every dtype holds exactly."""
    marks = (slots * 31 + positions) % 127
    return marks[:, None, None].expand(-1, shape.kv_heads, shape.head_dim).to(shape.dtype).contiguous()


def _check_rows(cache: KVCache, shape: Shape, slot: int, start: int, end: int) -> None:
    positions = torch.arange(start, end, device=cache.device)
    wanted = _marks(torch.full_like(positions, slot), positions, shape)
    for layer in {0, shape.layers - 1}:
        for plane in (cache.k(layer), cache.v(layer)):
            if not torch.equal(plane[slot, start:end], wanted):
                raise WrongNumbers(f"rows [{start}, {end}) of slot {slot} in layer {layer} are not what was appended there")
