"""The engine's own steps, timed from inside while it generates: when their results came, and what they cost the host."""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from bench.timing import now_us
from vmmkv.server.engine.engine import Engine
from vmmkv.server.engine.scheduler import Plan


class Read(NamedTuple):
    """The results of a step have come."""

    at_us: float
    num_decoding: int
    num_rows: int
    """Of all that decode, with the new ones."""
    has_chunks: bool


class Hosted(NamedTuple):
    """A call of `Engine.step` that has launched something."""

    num_decoding: int
    has_chunks: bool
    host_us: float
    """Without waiting for the device."""
    pump_us: float
    """Of it, mapping and unmapping while the device works."""


@dataclass(slots=True)
class Steps:
    """All steps of some calls of `generate`, in order."""

    reads: list[Read] = field(default_factory=list)
    hosted: list[Hosted] = field(default_factory=list)

    def between_us(self, batch: int, rows: range) -> list[tuple[float, float]]:
        """Of decode steps of so many sequences, with a mean of rows in the range: the time since the read before, the mean."""
        found = []
        for before, read in itertools.pairwise(self.reads):
            steady = not (before.has_chunks or read.has_chunks) and before.num_decoding == read.num_decoding == batch
            if steady and rows.start <= (mean := read.num_rows / batch) < rows.stop:
                found.append((read.at_us - before.at_us, mean))
        return found

    def host_us(self, batch: int) -> list[Hosted]:
        """Of decode steps of so many sequences, and nothing else."""
        return [each for each in self.hosted if each.num_decoding == batch and not each.has_chunks]


@contextmanager
def timed(core: Engine, on_step: Callable[[Plan], None] | None = None) -> Iterator[Steps]:
    """Time the steps of the engine within the `with` block; `on_step` is called behind each launch, with what it was.

    Its methods are wrapped, on this object alone.
    """
    steps = Steps()
    wrapped = _Wrapped(core, steps, on_step)
    names = {"step": wrapped.step, "read": wrapped.read, "map_ahead": wrapped.map_ahead, "launch": wrapped.launch}
    for name, method in names.items():
        setattr(core, name, method)
    try:
        yield steps
    finally:
        for name in names:
            delattr(core, name)


class _Wrapped:
    """What is called instead of an engine's methods."""

    def __init__(self, core: Engine, steps: Steps, on_step: Callable[[Plan], None] | None) -> None:
        self._core: Any = core
        self._steps = steps
        self._on_step = on_step
        self._waited_us = self._pumped_us = 0.0
        self._plans: list[Plan] = []
        """Of the step that runs: one, or none if nothing was launched."""
        kind = type(core)
        self._step, self._read, self._map_ahead, self._launch = kind.step, kind.read, kind.map_ahead, kind.launch

    def step(self) -> None:
        self._waited_us = self._pumped_us = 0.0
        self._plans.clear()
        began_us = now_us()
        self._step(self._core)
        host_us = now_us() - began_us - self._waited_us
        for plan in self._plans:
            self._steps.hosted.append(Hosted(len(plan.decoding), bool(plan.chunks), host_us, self._pumped_us))
            if self._on_step is not None:
                self._on_step(plan)

    def read(self) -> None:
        launched = self._core.in_flight[0]
        assert launched.readback is not None, "all of it is launched"
        began_us = now_us()
        launched.readback.wait()  # a second time costs nothing
        at_us = now_us()
        self._waited_us += at_us - began_us
        read = Read(at_us, len(launched.slots), int(launched.ends.sum()), bool(launched.chunks))
        self._steps.reads.append(read)
        self._read(self._core)

    def map_ahead(self) -> None:
        began_us = now_us()
        self._map_ahead(self._core)
        self._pumped_us += now_us() - began_us

    def launch(self, plan: Plan) -> None:
        self._plans.append(plan)
        self._launch(self._core, plan)
