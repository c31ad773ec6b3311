"""The lock of a pool: re-entrant, and of one process.

fork() copies a lock in the state that it is in, and of all threads only the one that forked: a lock that another held
would be waited for in the child for ever. So a child never gets as far as the lock.
"""

import os
import threading

from vmmkv.errors import ForkedProcess


class ProcessLock:
    """A re-entrant lock that raises ForkedProcess in a child made by fork(). Used by `with`."""

    __slots__ = ("_lock", "_pid")

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._pid = os.getpid()

    def check_process(self) -> None:
        """Raises ForkedProcess in a child. Cost: under 0.1 us."""
        if os.getpid() != self._pid:
            raise ForkedProcess(
                f"this pool and its caches belong to process {self._pid}, and this is {os.getpid()}, a child made by fork(), "
                "which has none of their memory; make a pool in the child, or start it with spawn or forkserver",
                call="lock",
                code="EPERM",
            )

    def __enter__(self) -> None:
        self.check_process()
        self._lock.acquire()

    def __exit__(self, *exc: object) -> None:
        self._lock.release()
