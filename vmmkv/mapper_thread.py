"""The mapper's work in a thread, for users who have no loop of their own to pump it from."""

import threading
import time
from collections.abc import Callable


class MapperThread:
    """Calls `work` until it returns False, then sleeps until `wake`. Ends at the first exception and keeps it."""

    def __init__(self, work: Callable[[], bool], *, name: str) -> None:
        self._work = work
        self._event = threading.Event()
        self._stopping = False
        self._failure: BaseException | None = None
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def wake(self) -> None:
        """There may be work to do. Cheap when it knows that already."""
        if not self._event.is_set():
            self._event.set()

    @property
    def failed(self) -> bool:
        """Has it ended by an exception, which `stop` will raise?"""
        return self._failure is not None

    def stop(self) -> None:
        """End the thread and wait for it. Raises what it failed with, once."""
        self._stopping = True
        self._event.set()
        self._thread.join()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    def _run(self) -> None:
        try:
            while not self._stopping:
                self._event.wait(timeout=_POLL_S)
                self._event.clear()
                while not self._stopping and self._work():
                    time.sleep(_PAUSE_S)
        except BaseException as failure:
            self._failure = failure


_POLL_S = 0.05
"""How often fences are looked at when nobody calls `wake`."""

_PAUSE_S = 0.00005
"""Between two pieces of work, for whoever waits for the lock that `work` takes: a lock knows no queue."""
