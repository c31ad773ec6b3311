"""Messages between a holder, or an elastic engine, and what connects to its socket.

A message is JSON in one packet of a Unix socket, with file descriptors beside it. The holder speaks first: it welcomes engines
of its user. Then the engine asks, and each request but `release` is answered. It reads an answer before it asks again.

    {"do": "own"}                          {}, or {"error": ...}         once; one engine owns at a time
    {"do": "borrow"}                       {}                            or this, once
    {"do": "create", "size_bytes": n}      {"serials": [s]}              and its descriptor; the owner's alone
    {"do": "open", "serials": [...]}       {"serials": [those known], "sizes_bytes": [...]}    and theirs
    {"do": "list", "after": serial}        the same of the next ones that the holder has, without descriptors; the owner's
    {"do": "release", "serials": [...]}
    {"do": "count"}                        {"held_bytes": n}
    {"do": "state"}                        the budget, what is held, and the shares
    {"do": "share", "floor_bytes": n, "most_bytes": m}     instead of "own"; see sharing
    {"do": "report", "number": n, "mapped_bytes": ...}     {"budget_bytes": n, ...}, now and later

Each side checks the fields of what it reads, and hangs up on the other one if they are not what can be.
"""

import errno
import fcntl
import json
import os
import reprlib
import socket
import termios
import weakref
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple

from vmmkv.errors import HolderUnavailable

VERSION: Final = 3

MOST_DESCRIPTORS: Final = 128
"""Most descriptors in one message; Linux takes 253."""
MOST_LISTED: Final = 1024
"""Handles in one message without descriptors."""

_MESSAGE_BYTES: Final = 64 * 1024


class Message(dict[str, Any]):
    """A message of the other side. Its fields are checked as they are read. Raises: OSError for what they cannot be."""

    def whole(self, name: str) -> int:
        """The field of this name, a whole number from 0 on."""
        return self._checked(name, self.get(name))

    def wholes(self, name: str, most: int) -> list[int]:
        """The field of this name, a list of at most so many whole numbers from 0 on."""
        values = self.get(name)
        if not isinstance(values, list) or len(values) > most:
            raise OSError(errno.EPROTO, f"{name} of {reprlib.repr(values)}")
        return [self._checked(name, value) for value in values]

    def text(self, name: str) -> str:
        """The field of this name, a text."""
        value = self.get(name)
        if not isinstance(value, str):
            raise OSError(errno.EPROTO, f"{name} of {reprlib.repr(value)}")
        return value

    def _checked(self, name: str, value: object) -> int:
        if type(value) is not int or not 0 <= value < 1 << 63:
            raise OSError(errno.EPROTO, f"{name} of {reprlib.repr(value)}")
        return value

    def sizes(self) -> dict[int, int]:
        """Sizes of handles in bytes, by serial."""
        serials, sizes_bytes = self.wholes("serials", MOST_LISTED), self.wholes("sizes_bytes", MOST_LISTED)
        if not len(set(serials)) == len(serials) == len(sizes_bytes):
            raise OSError(errno.EPROTO, f"{len(sizes_bytes)} sizes of handles {reprlib.repr(serials)}")
        return dict(zip(serials, sizes_bytes, strict=True))


class CutShort(OSError):
    """Error of a message that came without its descriptors."""

    def __init__(self, message: Message) -> None:
        super().__init__(errno.EMFILE, "this process has as many file descriptors as `ulimit -n` allows; raise that")
        self.message: Final = message


def send(connection: socket.socket, message: Mapping[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises: OSError."""
    packet = json.dumps(message).encode()
    assert len(packet) <= _MESSAGE_BYTES, "a message is one packet"
    if fds:
        socket.send_fds(connection, [packet], list(fds))
    else:
        connection.send(packet)


def receive(connection: socket.socket) -> tuple[Message, list[int]] | None:
    """The next message and its descriptors, the caller's to close; None if the other side has gone. Raises: OSError."""
    packet, fds, flags, _ = socket.recv_fds(connection, _MESSAGE_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not packet:
            return None
        read = json.loads(packet)
        if not isinstance(read, dict):
            raise OSError(errno.EPROTO, f"a message of type {type(read).__name__}")
        message = Message(read)
        if flags & socket.MSG_CTRUNC:
            raise CutShort(message)
        return message, fds
    except BaseException as error:
        close_all(fds)
        if isinstance(error, (ValueError, RecursionError)):
            raise OSError(errno.EPROTO, "a message that is no JSON") from error
        raise


def has_unread(connection: socket.socket) -> bool:
    """Has the other side of a Unix socket still to read something that was sent?"""
    return any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4)))


def close_all(fds: Sequence[int]) -> None:
    """Close file descriptors that this process owns."""
    for fd in fds:
        os.close(fd)


def peer(connection: socket.socket) -> tuple[int, int]:
    """Process and user id of the other side of a Unix socket, as the kernel knows them."""
    credentials = connection.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, 12)
    pid, uid, _ = (int.from_bytes(credentials[at : at + 4], "little", signed=True) for at in (0, 4, 8))
    return pid, uid


class Connected(NamedTuple):
    """A connection whose other side has spoken first."""

    connection: socket.socket
    pid: int
    """Process id of the other side."""
    welcome: Message
    fds: list[int]
    """File descriptors that came with the welcome, the caller's to close."""

    def close(self) -> None:
        """Close the connection and the descriptors."""
        self.connection.close()
        close_all(self.fds)


def connected(path: Path, timeout_s: float) -> Connected:
    """Connect to a process of this user, and wait for its welcome; a child made by fork() closes the connection.

    Raises: HolderUnavailable if it is of another user, or refuses; OSError if nothing answers there.
    """
    connection, fds = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET), list[int]()
    close_in_children(connection)
    try:
        connection.settimeout(timeout_s)
        connection.connect(str(path))
        pid, uid = peer(connection)
        welcome, fds = answered(connection)
        if uid != os.getuid():
            raise HolderUnavailable(f"the process at {path} is of user {uid}, and this one of {os.getuid()}")
        check_taken(path, pid, welcome)
    except BaseException:
        connection.close()
        close_all(fds)
        raise
    return Connected(connection, pid, welcome, fds)


def answered(connection: socket.socket) -> tuple[Message, list[int]]:
    """Receive what the other side must send. Raises: OSError; ConnectionResetError if it has gone."""
    heard = receive(connection)
    if heard is None:
        raise ConnectionResetError("it closed the connection")
    return heard


def check_taken(path: Path, pid: int, answer: Message) -> None:
    """Check that an answer is no refusal. Raises: HolderUnavailable."""
    if "error" in answer:
        raise HolderUnavailable(f"the holder at {path} (process {pid}) refuses: {answer.text('error')}")


_connections: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def close_in_children(connection: socket.socket) -> None:
    """Close a connection in children made by fork()."""
    _connections.add(connection)


def _close_in_child() -> None:
    """Close connections after fork(): a child with one open would keep the holder, also when its parent is gone."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
