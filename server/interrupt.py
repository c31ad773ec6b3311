"""Ctrl-C in the middle of work that must not stop anywhere."""

import signal
import threading
from collections.abc import Callable
from types import FrameType, TracebackType
from typing import Any, Self


class DeferredInterrupt:
    """Within the `with` block a Ctrl-C waits for the next `check`, which raises KeyboardInterrupt; a second one does not wait.

    That is so in the main thread, where Python's signal handlers run; in others nothing changes.
    """

    def __init__(self) -> None:
        self._previous: Callable[[int, FrameType | None], Any] | None = None
        self._came = False

    def __enter__(self) -> Self:
        handler = signal.getsignal(signal.SIGINT)
        # One that is ignored, or that ends the process at once, stays so.
        if threading.current_thread() is threading.main_thread() and callable(handler):
            self._previous = handler
            signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
            if error is None:
                self.check()

    def check(self) -> None:
        """Do what the Ctrl-C was for, if one came: call the handler that was there before, by default Python's own.

        Raises: KeyboardInterrupt, from that handler.
        """
        if self._came:
            self._came = False
            assert self._previous is not None
            self._previous(signal.SIGINT, None)

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._came:
            assert self._previous is not None
            self._previous(number, frame)
        self._came = True
