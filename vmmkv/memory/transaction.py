"""The lock of a pool and its caches, or of a store: `with pool.lock:` stands around every operation.

The books and the driver are out of step in the middle of an operation. So until it ends

- another thread waits;
- a signal handler of the main thread waits: Ctrl-C raises KeyboardInterrupt behind the operation, and a handler that closes
  the pool runs there;
- a call from within, by a finalizer or the handler of another signal, raises Reentered;
- a child made by fork() raises ForkedProcess: of all threads it has only the one that forked, so it would wait for ever for
  a lock that another thread held.
"""

import _signal  # type: ignore[import-not-found]  # what the public module wraps, which takes ten times as long: it makes enums
import os
import signal
import threading
from collections.abc import Callable
from types import FrameType
from typing import Any, Final

from vmmkv.errors import ForkedProcess, Reentered

_HELD_BACK: Final = tuple(map(int, (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGALRM)))
"""Signals whose handlers often raise, or end what runs. One that has no Python handler costs 0.1 us."""

_Handler = Callable[[int, FrameType | None], Any]


class TransactionLock:
    """Used by `with`. Cost: 1.5 us; in the main thread 1 us more for each of these signals that has a Python handler.

    `owner` and `others` name what it guards, for messages.

    A handler or finalizer can run between any two lines here, and use the pool. So the lock knows its owner as soon as it is
    taken, and a transaction gives back only the handlers that it held back itself.

    Python sets a handler and `signal.siginterrupt` together and does not tell the latter: these signals always interrupt.
    """

    __slots__ = ("_arrived", "_first", "_handlers", "_lock", "_main_thread", "_others", "_owner", "_pid")

    def __init__(self, owner: str = "pool", others: str = "caches") -> None:
        self._owner, self._others = owner, others
        self._lock = threading.RLock()
        self._pid = os.getpid()
        self._main_thread = threading.main_thread().ident
        """Main thread of this process: the child of a fork() in another thread has another one."""
        self._handlers: list[tuple[int, _Handler]] = []
        """The handlers that are held back now, by signal. Only the main thread uses this."""
        self._first: int | None = None
        """Index of the running transaction's first handler in `_handlers`; None if the transaction is another thread's."""
        self._arrived: list[tuple[int, FrameType | None]] = []

    def check_process(self) -> None:
        """Check that this process made the lock. Raises: ForkedProcess in a child. Cost: under 0.1 us."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this {self._owner} and its {self._others} belong to process {self._pid}, and this is {os.getpid()}, a child "
                "made by fork(), which has none of their memory; start the child with spawn or forkserver",
                call="lock",
                code="EPERM",
            )

    def __enter__(self) -> None:
        self.check_process()
        if self._lock._is_owned():  # type: ignore[attr-defined]
            raise Reentered(
                f"this {self._owner} is in the middle of another operation of the same thread, which a finalizer or a signal "
                f"handler interrupted; let it set a flag, and call the {self._owner} or its {self._others} when the operation "
                "is over"
            )
        first = None
        if threading.get_ident() == self._main_thread:
            first = len(self._handlers)
            self._hold_back(first)
        self._lock.acquire()
        self._first = first

    def __exit__(self, *exc: object) -> None:
        first = self._first
        self._lock.release()
        if first is not None:
            self._let_go(first)

    def _hold_back(self, first: int) -> None:
        try:
            for number in _HELD_BACK:
                handler = _signal.getsignal(number)
                if callable(handler):
                    self._handlers.append((number, handler))
                    _signal.signal(number, self._arrive)
        except BaseException:  # of a handler that is not held back yet
            self._let_go(first)
            raise

    def _arrive(self, number: int, frame: FrameType | None) -> None:
        self._arrived.append((number, frame))

    def _let_go(self, first: int) -> None:
        """Give the handlers from `first` on back, and call those whose signal has arrived, unless some are still held back."""
        try:
            while len(self._handlers) > first:
                _signal.signal(*self._handlers[-1])
                self._handlers.pop()
            while self._arrived and not first:
                try:
                    number, frame = self._arrived.pop(0)
                except IndexError:  # a handler that used the pool has called them meanwhile
                    break
                handler = _signal.getsignal(number)
                if callable(handler):
                    handler(number, frame)
        except BaseException:
            if len(self._handlers) > first or (self._arrived and not first):
                self._let_go(first)
            raise
