"""The end of a process, without the interpreter's last look at a million objects: that takes seconds, and frees nothing."""

import asyncio
import contextlib
import logging
import os
import sys
import threading
from collections.abc import Callable
from typing import NoReturn, TypeVar

T = TypeVar("T")


def end(code: int) -> NoReturn:
    """End this process now; what was written and logged is on its way. Its children and files are its caller's business."""
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except (OSError, ValueError):  # whoever read it is gone
            code = code or 1
    os._exit(code)


async def in_daemon(function: Callable[[], T]) -> T:
    """As asyncio.to_thread, in a thread that nobody waits for at the end: asyncio.run waits for all of its own."""
    loop = asyncio.get_running_loop()
    ended: asyncio.Future[T] = loop.create_future()

    def tell(value: T | None, error: BaseException | None) -> None:
        if ended.done():
            return
        if error is not None:
            ended.set_exception(error)
        else:
            ended.set_result(value)  # type: ignore[arg-type]  # it is the function's

    def work() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = function(), None
        except BaseException as error:
            outcome = None, error
        with contextlib.suppress(RuntimeError):  # the loop is closed
            loop.call_soon_threadsafe(tell, *outcome)

    threading.Thread(target=work, daemon=True).start()
    return await ended
