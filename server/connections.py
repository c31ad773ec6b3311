"""Connections, before there is a request on them: headers of a limited size, in a limited time.

uvicorn closes a connection that is idle between two requests, but waits for ever for the first one, or for the rest of a
header that comes byte by byte.
"""

import asyncio
from typing import Any, Final

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from vmmkv.server.guard import MAX_HEADER_BYTES

HEADER_S: Final = 30.0
"""How long a client may take to send a request's headers, from the connection or from their first byte on."""
SPARE_CONNECTIONS: Final = 4096
"""Beyond those of requests in flight: who only asks, or is only connected."""


class PatientProtocol(H11Protocol):
    """uvicorn's, of limited patience."""

    header_s: float = HEADER_S
    _header_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """See asyncio.Protocol."""
        super().connection_made(transport)
        self._await_header()

    def data_received(self, data: bytes) -> None:
        """See asyncio.Protocol."""
        super().data_received(data)
        if self.conn.their_state is h11.IDLE:
            self._await_header()
        else:
            self._forget_header()

    def connection_lost(self, exc: Exception | None) -> None:
        """See asyncio.Protocol."""
        self._forget_header()
        super().connection_lost(exc)

    def _await_header(self) -> None:
        if self._header_timer is None:
            self._header_timer = self.loop.call_later(self.header_s, self.transport.close)

    def _forget_header(self) -> None:
        if self._header_timer is not None:
            self._header_timer.cancel()
            self._header_timer = None


def uvicorn_options(num_in_flight: int) -> dict[str, Any]:
    """Of a server with so many sequences in flight at most. httptools, which uvicorn would take, has no limit on headers."""
    return {
        "http": PatientProtocol,
        "h11_max_incomplete_event_size": 4 * MAX_HEADER_BYTES,
        "limit_concurrency": num_in_flight + SPARE_CONNECTIONS,
    }
