"""The name of a request, by which its client and the log speak of the same one: `X-Request-Id`."""

import re
import uuid
from contextvars import ContextVar
from typing import Final

HEADER: Final = b"x-request-id"
_GIVEN: Final = re.compile(rb"[A-Za-z0-9._:/+=@-]{1,128}")
"""What a client may choose: nothing that could end a header or a log line."""

current: Final[ContextVar[str]] = ContextVar("request_id", default="-")
"""Of the request that this task works on; `-` outside of one."""


def choose(given: bytes | None) -> str:
    """The client's own, if it can be one, else a new one."""
    return given.decode() if given is not None and _GIVEN.fullmatch(given) else f"req-{uuid.uuid4().hex}"
