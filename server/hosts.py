"""By which names a server may be called: a page of another site must not reach it through a browser of this machine.

A name that its owner points at 127.0.0.1 once the page is loaded makes that page one of this server's own, for the browser (DNS
rebinding). The name is still in the Host header: it is looked at where a server listens to this machine alone, and wherever
names are given. Who calls by an address was led here by no name.
"""

import ipaddress
import re
from collections.abc import Iterable
from typing import Final

_NAME: Final = re.compile(r"(?!-)[a-z0-9-]{1,63}(\.[a-z0-9-]{1,63})*\.?")
_HOST: Final = re.compile(rb"(\[[0-9A-Fa-f:.]+\]|[^\[\]:@/\s]+)(:[0-9]*)?")


def check_name(name: str) -> None:
    """Raises: ValueError if it is none that a Host header could have, without a port."""
    if not _NAME.fullmatch(name.lower()):
        raise ValueError(f"--allowed-host {name!r} is no host's name; write it as llm.example.org, without a port")


class Hosts:
    """The names of one server. `listens_here`: only this machine reaches it. `own` is what it was told to listen to."""

    def __init__(self, names: Iterable[str] = (), *, own: str = "localhost", listens_here: bool = True) -> None:
        given = {_plain(name) for name in names}
        self._names = given | {_plain(own)}
        self._any = not listens_here and not given

    def allow(self, header: bytes | None) -> bool:
        """May who sent this Host header be answered? Who sent none is no browser."""
        if self._any or header is None:
            return True
        if (found := _HOST.fullmatch(header)) is None:
            return False
        host = _plain(found[1].decode("latin-1"))
        return host == "localhost" or host.endswith(".localhost") or host in self._names or _is_address(host)


def _plain(host: str) -> str:
    return host.lower().removesuffix(".")


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host.removeprefix("[").removesuffix("]"))
    except ValueError:
        return False
    return True
