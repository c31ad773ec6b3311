"""Whether the engine makes steps while it has work: a kernel that hangs ends nothing by itself, and nobody would be told.

The HTTP process sees it from outside: it has asked, and for a while there has been no answer of any kind.
"""

import asyncio
import logging
from collections.abc import Callable

log = logging.getLogger(__name__)


class Watchdog:
    """Says that an engine is stuck once it has been silent for `after_s`, and that it goes on when it does.

    `silent_s` is for how long the engine has had work and made no step.
    """

    def __init__(self, silent_s: Callable[[], float], after_s: float) -> None:
        self.after_s = after_s
        self._silent_s = silent_s

    def complaint(self) -> str | None:
        """What is wrong; None if nothing is."""
        silent_s = self._silent_s()
        if silent_s < self.after_s:
            return None
        return f"The engine has work and has made no step for {silent_s:.0f} s; its device may hang."

    async def watch(self) -> None:
        """Log it when it begins and when it ends. Runs until it is cancelled."""
        was_stuck = False
        while True:
            await asyncio.sleep(min(1.0, self.after_s / 4))
            complaint = self.complaint()
            if complaint is not None and not was_stuck:
                log.error("%s /health says so, until it goes on or the process is ended.", complaint)
            elif complaint is None and was_stuck:
                log.warning("The engine makes steps again.")
            was_stuck = complaint is not None
