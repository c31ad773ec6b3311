"""Answering: whether what is behind a tier answers. If not, it is left alone, and a thread finds out when it does again."""

import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import Any, Final

from vmmkv.errors import TierUnavailable

log = logging.getLogger(__name__)

FIRST_PAUSE_S: Final = 1.0
"""Time for which a store that does not answer is left alone at first. It doubles each time, up to the longest."""

LONGEST_PAUSE_S: Final = 30.0


class Answering:
    """Does a store, or a disk, answer? One that does not is left alone for a second, then for twice as long each time.

    Calls of it run within `call`. `check` finds those that take longer than `timeout_s`, which means that it does not answer.
    """

    def __init__(
        self,
        where: str,
        timeout_s: float,
        *,
        probe: Callable[[], object],
        failed: Callable[[], None],
        left_alone: Callable[[Exception], str | None] = lambda error: None,
    ) -> None:
        """`where`: its name, without passwords. `probe`: a call of it, to learn whether it answers; `failed`: it has failed.

        `left_alone` is called when a pause begins, and may return what the log says instead of "does not answer".
        """
        self.where: Final = where
        self.timeout_s: Final = timeout_s
        self._probe, self._failed, self._left_alone = probe, failed, left_alone
        self._lock = threading.Lock()
        self._calls: dict[object, float] = {}
        """Start of each call under way, of time.monotonic."""
        self._pause_s = 0.0
        """Time for which it is left alone, in seconds; 0 while it answers."""
        self._again_s = 0.0
        """End of that pause, of time.monotonic."""
        self._is_probing = False
        self.asker: ThreadPoolExecutor | None = None
        """Thread that asks: questions do not wait behind records."""

    @property
    def is_left_alone(self) -> bool:
        """Is it left alone now?"""
        return self._pause_s > 0

    def begin(self, name: str) -> bool:
        """Start the thread that asks; False if it runs. `name`: of the tier."""
        with self._lock:
            if self.asker is not None:
                return False
            self.asker = ThreadPoolExecutor(1, thread_name_prefix=f"vmmkv-{name}-ask")
            return True

    def end(self) -> None:
        """End the thread that asks. Waits for the question that it asks now. Idempotent."""
        with self._lock:
            asker, self.asker = self.asker, None
        if asker is not None:
            asker.shutdown(wait=True, cancel_futures=True)

    @property
    def can_ask(self) -> bool:
        """Does the thread that asks run?"""
        return self.asker is not None

    def submit(self, question: Callable[..., object], *arguments: Any) -> None:
        """Have the thread ask a question, unless it has ended."""
        with self._lock:
            if self.asker is not None:
                self.asker.submit(question, *arguments)

    def probe(self) -> None:
        """Have the thread find out whether it answers, unless it does so now."""
        with self._lock:
            if not self._is_probing and self.asker is not None:
                self._is_probing = True
                self.asker.submit(self._ask)

    def check(self) -> None:
        """Raise TierUnavailable while it is left alone. When the pause is over, the thread finds out whether it answers."""
        now_s = time.monotonic()
        with self._lock:
            is_late = now_s - min(self._calls.values(), default=now_s) > self.timeout_s
        if is_late:
            self.leave_alone(TimeoutError())
        if self._pause_s:
            if now_s >= self._again_s:
                self.probe()
            raise TierUnavailable(f"{self.where} does not answer")

    @contextmanager
    def call(self, *, left_alone: bool = True) -> Iterator[None]:
        """Run a call. Raises TierUnavailable while it is left alone, unless the call finds out whether it answers."""
        if self._pause_s and left_alone:
            raise TierUnavailable(f"{self.where} does not answer")
        call = object()
        with self._lock:
            self._calls[call] = time.monotonic()
        try:
            yield
        finally:
            with self._lock:
                began_s = self._calls.pop(call, None)
        if self._pause_s and began_s is not None:  # a call that began before it was left alone says nothing of now
            self._pause_s = self._again_s = 0.0
            log.warning("%s answers again", self.where)

    def leave_alone(self, error: Exception) -> None:
        """Begin a pause, since a call has failed, or is late."""
        now_s = time.monotonic()
        with self._lock:
            self._calls.clear()
            if now_s < self._again_s:
                return  # another call of the same time has found it out
            self._pause_s = min(max(2 * self._pause_s, FIRST_PAUSE_S), LONGEST_PAUSE_S)
            self._again_s = now_s + self._pause_s
        complaint = self._left_alone(error) or f"does not answer ({type(error).__name__})"
        log.warning("%s %s; asked again in %g s", self.where, complaint, self._pause_s)

    def _ask(self) -> None:
        try:
            with self.call(left_alone=False):
                self._probe()
        except Exception as error:
            self.leave_alone(error)
            self._failed()
        finally:
            self._is_probing = False
