"""An engine's connection to a holder, and the messages between them.

A message is JSON in one packet of a Unix socket, with file descriptors beside it. The holder speaks first: it welcomes engines
of its user. Then the engine asks, and each request but `release` is answered. It reads an answer before it asks again.

    {"do": "own"}                          {}, or {"error": ...}         once; one engine owns at a time
    {"do": "borrow"}                       {}                            or this, once
    {"do": "create", "size_bytes": n}      {"serials": [s]}              and its descriptor; the owner's alone
    {"do": "open", "serials": [...]}       {"serials": [those known]}    and theirs
    {"do": "release", "serials": [...]}
    {"do": "count"}                        {"held_bytes": n}
"""

import contextlib
import errno
import fcntl
import json
import logging
import os
import select
import socket
import termios
import weakref
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import Any, Final

import torch

from vmmkv.errors import DriverError, HolderGone, HolderUnavailable, LogDamaged, OutOfDeviceMemory
from vmmkv.holder.sealed_log import SealedLog

log = logging.getLogger(__name__)

VERSION: Final = 2

MOST_DESCRIPTORS: Final = 128
"""In one message; Linux takes 253."""

_MESSAGE_BYTES: Final = 64 * 1024
_TIMEOUT_S: Final = 30.0
"""A holder that does not answer for so long is gone."""


class CutShort(OSError):
    """A message came without its descriptors."""

    def __init__(self, message: dict[str, Any]) -> None:
        super().__init__(errno.EMFILE, "this process has as many file descriptors as `ulimit -n` allows; raise that")
        self.message: Final = message


def send(connection: socket.socket, message: dict[str, Any], fds: Sequence[int] = ()) -> None:
    """Send one message. Raises: OSError."""
    packet = json.dumps(message).encode()
    assert len(packet) <= _MESSAGE_BYTES, "a message is one packet"
    if fds:
        socket.send_fds(connection, [packet], list(fds))
    else:
        connection.send(packet)


def receive(connection: socket.socket) -> tuple[dict[str, Any], list[int]] | None:
    """The next message and its descriptors, the caller's to close; None if the other side has gone. Raises: OSError."""
    packet, fds, flags, _ = socket.recv_fds(connection, _MESSAGE_BYTES, MOST_DESCRIPTORS, socket.MSG_CMSG_CLOEXEC)
    try:
        if not packet:
            return None
        message = json.loads(packet)
        if not isinstance(message, dict):
            raise OSError(errno.EPROTO, f"a message of type {type(message).__name__}")
        if flags & socket.MSG_CTRUNC:
            raise CutShort(message)
        return message, fds
    except BaseException as error:
        close_all(fds)
        if isinstance(error, ValueError):
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


def device_identity(device: torch.device) -> str:
    """The name of a device in every process: a GPU's index depends on CUDA_VISIBLE_DEVICES, its UUID does not."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "host memory"


def check_reach(device: torch.device, identity: str) -> None:
    """Raises: HolderUnavailable, if a device cannot read the memory of another one, without its being copied."""
    if device_identity(device) == identity:
        return
    if device.type == "cuda":
        others = [torch.device("cuda", index) for index in range(torch.cuda.device_count())]
        other = next((other for other in others if device_identity(other) == identity), None)
        if other is not None and torch.cuda.can_device_access_peer(device, other):
            return
        if other is not None:
            raise HolderUnavailable(f"{device} cannot read the memory of {other}, where the prefixes are: no NVLink joins them")
    raise HolderUnavailable(
        f"{device} cannot map memory of {identity}: this process sees no such device; widen CUDA_VISIBLE_DEVICES, or take "
        "the same device for both"
    )


def check_there(path: str | os.PathLike[str]) -> None:
    """Raises: HolderUnavailable, if there is no socket at the path. Does not connect, which would claim the holder."""
    if not Path(path).is_socket():
        raise _no_holder(path, "there is no such socket")


def _no_holder(path: str | os.PathLike[str], why: object) -> HolderUnavailable:
    return HolderUnavailable(f"no holder answers at {path}: {why}; start one: vmmkv hold --socket {path} --budget SIZE")


class HolderClient:
    """An engine of a holder: the one that owns what it creates, or one that `borrows` what that has sealed.

    The caller holds the pool's lock.
    Raises: HolderUnavailable if there is no holder at the path, or it has another device, user or owner.
    """

    def __init__(self, path: str | os.PathLike[str], device: torch.device, *, borrows: bool = False) -> None:
        self.path: Final = Path(path)
        self.borrows: Final = borrows
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        _connections.add(self._connection)
        try:
            self._connection.settimeout(_TIMEOUT_S)
            try:
                self._connection.connect(str(self.path))
                self.pid, uid = peer(self._connection)
                answer = receive(self._connection)
            except OSError as error:
                raise _no_holder(self.path, error.strerror or error) from error
            self._is_gone = False
            self.budget_bytes, self.log = self._welcomed(answer, uid, device)
            try:
                self._join()
            except BaseException:
                self.log.close()
                raise
        except BaseException:
            self._connection.close()
            raise
        self.has_prefixes = False
        """Does a prefix cache use the log? One does at a time."""

    def _welcomed(
        self, answer: tuple[dict[str, Any], list[int]] | None, uid: int, device: torch.device
    ) -> tuple[int, SealedLog]:
        """The budget and the log of a holder that takes this engine."""
        welcome, fds = answer or ({"error": "it closed the connection"}, [])
        with contextlib.ExitStack() as closing:
            closing.callback(close_all, fds)
            if uid != os.getuid():
                raise HolderUnavailable(f"the holder at {self.path} is of user {uid}, and this process of {os.getuid()}")
            if "error" in welcome:
                raise HolderUnavailable(f"the holder at {self.path} (process {self.pid}) refuses: {welcome['error']}")
            if welcome["version"] != VERSION:
                raise HolderUnavailable(
                    f"the holder at {self.path} speaks version {welcome['version']} and this process {VERSION}; restart the "
                    "holder with this vmmkv, and what it holds is computed again"
                )
            if self.borrows:
                check_reach(device, welcome["device"])
            elif (wanted := device_identity(device)) != welcome["device"]:
                raise HolderUnavailable(f"the holder at {self.path} has memory of {welcome['device']}; wanted {wanted}")
            try:
                return int(welcome["budget_bytes"]), SealedLog(fds[0])
            except LogDamaged as error:
                raise HolderUnavailable(f"the holder at {self.path}: {error}; restart it") from error

    def _join(self) -> None:
        answer, _ = self._ask("join", {"do": "borrow" if self.borrows else "own"})
        if "error" in answer:
            raise HolderUnavailable(f"the holder at {self.path} (process {self.pid}) refuses: {answer['error']}")

    def create(self, size_bytes: int) -> tuple[int, int]:
        """A new handle: its serial, and a file descriptor that is the caller's. Cost: a round trip of some 50 us on the host.

        Raises: OutOfDeviceMemory past the holder's budget or the device's memory; DriverError; HolderGone.
        """
        answer, fds = self._ask("create", {"do": "create", "size_bytes": size_bytes})
        if "error" in answer:
            close_all(fds)
            message = f"create: the holder at {self.path} (process {self.pid}): {answer['error']}"
            kind = OutOfDeviceMemory if answer["is_full"] else DriverError
            raise kind(message, call="create", code=str(answer["code"]))
        return answer["serials"][0], fds[0]

    def open(self, serials: Sequence[int]) -> Generator[tuple[int, int]]:
        """Serial and file descriptor, the caller's to close, of those of these handles that the holder has.

        Cost: a round trip for each `MOST_DESCRIPTORS`. Raises: HolderGone.
        """
        for first in range(0, len(serials), MOST_DESCRIPTORS):
            answer, fds = self._ask("import_fd", {"do": "open", "serials": serials[first : first + MOST_DESCRIPTORS]})
            opened = list(zip(answer["serials"], fds, strict=True))
            try:
                while opened:
                    yield opened.pop()
            finally:
                close_all([fd for _, fd in opened])

    def release(self, serials: Sequence[int]) -> None:
        """The holder gives these handles up. Does not wait for it. A holder that is gone has none any more."""
        for first in range(0, len(serials), MOST_DESCRIPTORS):
            with contextlib.suppress(HolderGone):
                self._send("release", {"do": "release", "serials": serials[first : first + MOST_DESCRIPTORS]})

    def held_bytes(self) -> int:
        """What it holds now. Raises: HolderGone."""
        return int(self._ask("count", {"do": "count"})[0]["held_bytes"])

    def is_gone(self) -> bool:
        """Has it ended? The log says so once. Cost: some microseconds; does not wait for the holder."""
        if not self._is_gone:
            hung_up = select.poll()
            hung_up.register(self._connection, 0)
            if hung_up.poll(0):
                self._gone("poll", "its process has ended")
        return self._is_gone

    @property
    def text_if_gone(self) -> str:
        """What that means for this process, and what works."""
        if self.borrows:
            return (
                f"the holder at {self.path} (process {self.pid}) is gone; what this process has borrowed stays usable, and "
                "further prompts are computed here: start the holder again, then its engine, and then this process"
            )
        return (
            f"the holder of this memory at {self.path} (process {self.pid}) is gone; what this process has stays usable, it "
            "gets no more, and nothing outlives it: start a holder again, and then this process"
        )

    def close(self) -> None:
        """End the connection: the holder frees what no seal names, and the next engine may come. Idempotent."""
        if self._connection.fileno() >= 0:
            with contextlib.suppress(OSError):  # the holder may be gone
                self._connection.shutdown(socket.SHUT_RDWR)  # ends it too where a child made by fork() has yet to close it
            self._connection.close()
            self.log.close()

    def _ask(self, call: str, message: dict[str, Any]) -> tuple[dict[str, Any], list[int]]:
        self._send(call, message)
        try:
            answer = receive(self._connection)
        except CutShort as error:
            if call == "create":
                self.release(error.message["serials"])  # which nothing here knows
            raise DriverError(f"{call}: {error.strerror}", call=call, code="EMFILE") from error
        except OSError as error:
            raise self._gone(call, str(error)) from error
        if answer is None:
            raise self._gone(call, "its process has ended")
        return answer

    def _send(self, call: str, message: dict[str, Any]) -> None:
        if self._is_gone:
            raise self._gone(call, "it was gone before")
        try:
            send(self._connection, message)
        except OSError as error:
            raise self._gone(call, error.strerror or str(error)) from error

    def _gone(self, call: str, why: str) -> HolderGone:
        if not self._is_gone:
            log.error("%s (%s)", self.text_if_gone, why)
        self._is_gone = True  # a late answer would be taken for the next one's
        return HolderGone(f"{call}: {self.text_if_gone} ({why})", call=call, code="HOLDER_GONE")


_connections: Final[weakref.WeakSet[socket.socket]] = weakref.WeakSet()


def _close_in_child() -> None:
    """After fork(): a child that kept a connection open would keep the holder, also when its parent is gone."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
