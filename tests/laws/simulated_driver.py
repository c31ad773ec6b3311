"""A device whose work is queued on streams and runs in any order that streams and fences allow.

It has no memory: of every byte it knows what was written there last, as a label. What is launched is queued. It runs when the
host waits for it, or at any moment before, in an order drawn from a seed; on a stream in turn, across streams as ordered.

Work finds the mappings, the accesses and the limits that stand when it *runs*. The host may unmap what work touches only once
a fence behind that work was seen to be done: work that has finished unseen might as well still run.
"""

import contextlib
import random
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, TypeVar

import torch

from vmmkv.driver.base import Access, Fence, Handle, span_text
from vmmkv.testing.fake_driver import FakeDriver, LawBroken, write_to
from vmmkv.units import PAGE_BYTES

T = TypeVar("T")

CONTROL = torch.Stream(stream_id=1_000_000, device_index=-1, device_type=0)
"""The driver's own stream: zeroes and raised limits."""


class Run(NamedTuple):
    """Bytes [start, start + size) of an allocation hold bytes `at` and following of what `label` names."""

    start: int
    size_bytes: int
    label: object
    at: int


class Contents:
    """What each byte of an allocation holds."""

    def __init__(self, size_bytes: int, label: object) -> None:
        self._runs = [Run(0, size_bytes, label, 0)]

    def read(self, start: int, size_bytes: int) -> list[Run]:
        """The runs of [start, start + size_bytes), counted from its start."""
        first, end = self._cut(start), self._cut(start + size_bytes)
        return [run._replace(start=run.start - start) for run in self._runs[first:end]]

    def write(self, start: int, size_bytes: int, runs: Sequence[Run]) -> None:
        """Replace them, by runs counted from its start."""
        first, end = self._cut(start), self._cut(start + size_bytes)
        self._runs[first:end] = [run._replace(start=run.start + start) for run in runs]

    def _cut(self, at: int) -> int:
        """The index of the run that begins there."""
        index = bisect_left(self._runs, at, key=lambda run: run.start)
        if index == len(self._runs) or self._runs[index].start != at:
            run = self._runs[index - 1]
            done = at - run.start
            if done < run.size_bytes:
                self._runs[index - 1 : index] = [
                    run._replace(size_bytes=done),
                    Run(at, run.size_bytes - done, run.label, run.at + done),
                ]
        return index


ZERO = "zero"
UNDEFINED = "undefined"
"""What fresh memory holds: anything, as another process's bytes."""


@dataclass(eq=False, slots=True)
class Work:
    """Something launched: a kernel, a copy, zeroes, or limits that are written."""

    act: Callable[[], None]
    after: list["Work"]
    """It runs behind these."""
    ranges: list[tuple[int, int]]
    """The addresses [start, end) that it touches, which must stay mapped."""
    stream: torch.Stream
    done: bool = False
    seen: bool = False
    """Does the host know that it is done?"""


@dataclass(eq=False, slots=True)
class _Fence:
    driver: "SimulatedDriver"
    work: list[Work]

    def done(self) -> bool:
        self.driver.advance()
        return self.driver.see(self.work)

    def wait(self) -> None:
        self.driver.num_waits += not all(work.done for work in self.work)
        self.driver.finish(self.work)

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        for stream in (self.driver.current, *streams):
            self.driver.put_behind(stream, self.work)


@dataclass
class SimulatedDriver(FakeDriver):
    """The laws of FakeDriver, and streams. `seed` decides in which order, and how late, work runs."""

    seed: int = 0
    haste: float | None = None
    """How likely work is to run before the host waits for it: 0 is never; drawn from the seed if None."""
    num_waits: int = field(default=0, init=False)
    """How often the host waited for a fence."""
    broken: LawBroken | None = field(default=None, init=False)
    """The first law that work has broken while it ran, for callers that suppress errors."""

    def __post_init__(self) -> None:
        super().__post_init__()
        assert self.over is None, "its memory is simulated"
        self._random = random.Random(self.seed)
        self._haste = self._random.choice([0.0, 0.1, 0.5]) if self.haste is None else self.haste
        self._weights: dict[torch.Stream, int] = {}
        self._contents: dict[Handle, Contents] = {}
        self._staged: dict[tuple[torch.Stream | None, int], list[Run]] = {}
        """What tensors of torch hold, by the stream that uses them, and address; under None what was written there last, for
        streams that only read it: host memory of tiers."""
        self._last: dict[torch.Stream, list[Work]] = {}
        """Behind what the next work on a stream comes."""
        self._unseen: list[Work] = []
        self._stream_ids = iter(range(1, 1_000_000))
        self.main = self.new_stream()
        self.current = self.main

    # what a test does

    def new_stream(self) -> torch.Stream:
        """A stream of this device; some are much slower than others."""
        return torch.Stream(stream_id=next(self._stream_ids), device_index=-1, device_type=0)

    @contextlib.contextmanager
    def on(self, stream: torch.Stream) -> Iterator[None]:
        """It is the caller's current stream."""
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def launch_kernel(self, act: Callable[[], None], ranges: Sequence[tuple[int, int]]) -> Work:
        """Queue a kernel on the current stream. `act` is what it does, by `read` and `write`; it touches `ranges`."""
        return self._enqueue(act, [self.current], ranges)

    def read(self, address: int, size_bytes: int) -> list[Run]:
        """What bytes hold, for work that runs; [address, address + size_bytes) must be readable."""
        runs: list[Run] = []
        for handle, offset, at, size in self._pieces(address, size_bytes, {Access.READ, Access.READ_WRITE}):
            runs += [run._replace(start=run.start + at) for run in self._contents[handle].read(offset, size)]
        return runs

    def write_bytes(self, address: int, size_bytes: int, runs: Sequence[Run]) -> None:
        """Write bytes, for work that runs; they must be writable."""
        for handle, offset, at, size in self._pieces(address, size_bytes, {Access.READ_WRITE}):
            part = Contents(size_bytes, None)
            part._runs = list(runs)
            self._contents[handle].write(offset, size, part.read(at, size))

    def synchronize_stream(self, stream: torch.Stream) -> None:
        """The host waits for all that is on a stream."""
        self.finish(self._behind(stream))

    def finish_all(self) -> None:
        """The host waits for everything."""
        self.finish([work for works in self._last.values() for work in works])
        assert not self._unseen

    def advance(self) -> None:
        """Time passes: perhaps some work runs."""
        while self._random.random() < self._haste and (ready := self.ready()):
            self.run(self._chosen(ready))

    def ready(self) -> list[Work]:
        """Work that may run now."""
        return [work for work in self._unseen if not work.done and all(before.done for before in work.after)]

    def run(self, work: Work) -> None:
        """Some ready work runs."""
        work.done = True
        work.act()

    def finish(self, works: Sequence[Work]) -> None:
        """The host waits for some work; other work may run meanwhile."""
        while not all(work.done for work in works):
            self.run(self._chosen(self.ready()))
        self.see(works)

    def see(self, works: Sequence[Work]) -> bool:
        """Is that work done? If so the host now knows it, of what comes before it too."""
        if not all(work.done for work in works):
            return False
        known = list(works)
        while known:
            work = known.pop()
            if not work.seen:
                work.seen = True
                known += work.after
        self._unseen = [work for work in self._unseen if not work.seen]
        return True

    def put_behind(self, stream: torch.Stream, works: Sequence[Work]) -> None:
        """What is launched next on a stream comes behind some work, as by an event."""
        last = self._last.setdefault(stream, [])
        last += [work for work in works if work not in last]

    def last_on(self, stream: torch.Stream) -> Work:
        """What was launched last on a stream."""
        return self._last[stream][0]

    def wait_stream(self, stream: torch.Stream, other: torch.Stream) -> None:
        """What is launched next on a stream comes behind what is on another by now."""
        self.put_behind(stream, self._behind(other))

    # the protocol, where it has to do with streams or bytes

    def create(self, size_bytes: int) -> Handle:
        """See Driver.create."""
        handle = super().create(size_bytes)
        self._contents[handle] = Contents(size_bytes, ZERO if self.creates_zeroed else UNDEFINED)
        return handle

    def unmap(self, address: int, size_bytes: int) -> None:
        """See Driver.unmap. Law 4: not before all work that touches it was seen to be done."""
        for work in self._unseen:
            if any(start < address + size_bytes and address < end for start, end in work.ranges):
                raise self.law_broken(f"{span_text(address, size_bytes)} is unmapped while work may touch it")
        super().unmap(address, size_bytes)

    def zero(self, address: int, size_bytes: int) -> None:
        """See Driver.zero."""
        super().zero(address, size_bytes)
        zeroes = [Run(0, size_bytes, ZERO, 0)]
        span = (address, address + size_bytes)
        self._enqueue(lambda: self.write_bytes(address, size_bytes, zeroes), [CONTROL], [span])

    def copy(self, target: int, source: int, size_bytes: int) -> None:
        """See Driver.copy."""
        super().copy(target, source, size_bytes)
        stream = self.current
        spans = [(at, at + size_bytes) for at in (target, source) if self._is_reserved(at, size_bytes)]

        def act() -> None:
            reserved = self._is_reserved(source, size_bytes)
            runs = self.read(source, size_bytes) if reserved else self._unstaged(stream, source, size_bytes)
            if self._is_reserved(target, size_bytes):
                self.write_bytes(target, size_bytes, runs)
            else:
                for by in (stream, None):
                    self._stage(by, target, size_bytes, runs)

        self._enqueue(act, [stream], spans)

    def _stage(self, stream: torch.Stream | None, address: int, size_bytes: int, runs: Sequence[Run]) -> None:
        """Write to memory that is not the driver's, as pieces of a page: a copy may read some of them."""
        contents = Contents(size_bytes, UNDEFINED)
        contents.write(0, size_bytes, runs)
        for at in range(0, size_bytes, PAGE_BYTES):
            self._staged[stream, address + at] = contents.read(at, min(PAGE_BYTES, size_bytes - at))

    def _unstaged(self, stream: torch.Stream, address: int, size_bytes: int) -> list[Run]:
        """What a stream finds there: what it wrote itself, else what any has."""
        by = stream if (stream, address) in self._staged else None
        pieces = range(0, size_bytes, PAGE_BYTES)
        return [run._replace(start=run.start + at) for at in pieces for run in self._staged[by, address + at]]

    def gather(self, target_TE: torch.Tensor, source_SE: torch.Tensor, rows_T: torch.Tensor) -> None:
        """See Driver.gather. The target is no memory of the driver's."""
        super().gather(target_TE, source_SE, rows_T)
        stream, row_bytes = self.current, source_SE.shape[1] * source_SE.itemsize
        first, target = source_SE.data_ptr(), target_TE.data_ptr()
        addresses = [first + row * row_bytes for row in rows_T.tolist()]

        def act() -> None:
            runs = [
                run._replace(start=run.start + index * row_bytes)
                for index, address in enumerate(addresses)
                for run in self.read(address, row_bytes)
            ]
            self._stage(stream, target, len(addresses) * row_bytes, runs)

        self._enqueue(act, [stream], [(address, address + row_bytes) for address in addresses])

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        """See Driver.write."""
        values = dict(values)
        self._call("write", lambda: self._enqueue(lambda: write_to(tensor, values), [CONTROL]))

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        """See Driver.write_behind."""
        values = dict(values)
        self._call("write", lambda: self._enqueue(lambda: write_to(tensor, values), [self.current, *streams]))
        return self._fence(streams)

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """See Driver.order."""
        for stream in (self.current, *streams):
            self.wait_stream(stream, CONTROL)

    def synchronize(self) -> None:
        """See Driver.synchronize."""
        self.finish(self._behind(CONTROL))

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        """See Driver.fence."""
        return self._call("fence", lambda: self._fence(streams))

    # within

    def _fence(self, streams: Sequence[torch.Stream]) -> Fence:
        behind = [work for stream in (self.current, CONTROL, *streams) for work in self._behind(stream)]
        return _Fence(self, list(dict.fromkeys(behind)))

    def _behind(self, stream: torch.Stream) -> list[Work]:
        return [work for work in self._last.get(stream, []) if not work.seen]

    def _enqueue(
        self, act: Callable[[], None], streams: Sequence[torch.Stream], ranges: Sequence[tuple[int, int]] = ()
    ) -> Work:
        """On the first of these streams, behind what is on all of them; what comes next on any of them is behind it."""
        after = list(dict.fromkeys(work for stream in streams for work in self._behind(stream)))
        work = Work(act, after, list(ranges), streams[0])
        for stream in streams:
            self._last[stream] = [work]
        self._unseen.append(work)
        self.advance()
        return work

    def _chosen(self, ready: Sequence[Work]) -> Work:
        for work in ready:
            if work.stream not in self._weights:
                self._weights[work.stream] = self._random.choice([1, 20, 400])
        (work,) = self._random.choices(ready, [self._weights[work.stream] for work in ready])
        return work

    def _pieces(self, address: int, size_bytes: int, allowed: set[Access]) -> Iterator[tuple[Handle, int, int, int]]:
        """The parts of [address, address + size_bytes) by mapping: handle, offset in it, offset in the range, size."""
        at = 0
        while at < size_bytes:
            place = address + at
            start = self._pages.get(place // PAGE_BYTES * PAGE_BYTES)
            mapped = None if start is None else self._mapped[start]
            if start is None or mapped is None or mapped.access not in allowed:
                raise self.law_broken(f"work touches {place:#x}, which it may not: {mapped.access if mapped else 'not mapped'}")
            size = min(size_bytes - at, start + mapped.size_bytes - place)
            yield mapped.handle, place - start, at, size
            at += size

    def _idle(self, address: int, size_bytes: int, what: str) -> None:
        """Order is checked when work runs, and by `unmap`."""

    def law_broken(self, message: str) -> LawBroken:
        """An error that is kept, for work that runs."""
        error = LawBroken(message)
        self.broken = self.broken or error
        return error

    def _forget_if_gone(self, handle: Handle) -> None:
        super()._forget_if_gone(handle)
        if handle not in self._handles:
            self._contents.pop(handle, None)
