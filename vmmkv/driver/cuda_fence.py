"""Fences over CUDA events, which are used again: making one costs more than recording it."""

import threading
from collections.abc import Iterable, Sequence

import torch


class EventPool:
    """Events of one device that no fence holds."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.lock = threading.Lock()
        """Held while a fence looks at its events or gives them back: two threads may ask one fence at once."""
        self._idle: list[torch.cuda.Event] = []

    def record(self, stream: torch.cuda.Stream) -> torch.cuda.Event:
        """An event behind all work so far on a stream of this device."""
        try:
            event = self._idle.pop()
        except IndexError:
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(stream)
        return event

    def give(self, event: torch.cuda.Event) -> None:
        """Take back an event that has passed; a stream that was told to wait for it waits for what it was then."""
        self._idle.append(event)


class CudaFence:
    """All work launched on some streams of one device by the time it was made. See Fence."""

    __slots__ = ("_events", "_pool")

    def __init__(self, pool: EventPool, streams: Iterable[torch.cuda.Stream]) -> None:
        self._pool = pool
        self._events = [pool.record(stream) for stream in streams]

    def done(self) -> bool:
        """See Fence.done. Cost: a query of the events that had not passed when last asked; none once all have."""
        with self._pool.lock:
            while self._events and self._events[-1].query():  # type: ignore[no-untyped-call]
                self._pool.give(self._events.pop())
            return not self._events

    def wait(self) -> None:
        """See Fence.wait. Blocks the thread, not the interpreter."""
        with self._pool.lock:
            events = list(self._events)
        # An event that another thread gave back meanwhile may be in use anew: then this waits a little too long.
        for event in events:
            event.synchronize()

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """See Fence.order."""
        if self.done():
            return
        with self._pool.lock:
            for stream in (torch.cuda.current_stream(self._pool.device), *streams):
                for event in self._events:
                    stream.wait_event(event)
