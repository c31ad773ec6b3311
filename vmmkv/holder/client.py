"""An engine's connection to a holder, and the messages between them.

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

import contextlib
import errno
import fcntl
import json
import logging
import os
import reprlib
import select
import socket
import termios
import weakref
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from vmmkv.errors import DriverError, HolderGone, HolderUnavailable, LogDamaged, OutOfDescriptors, OutOfDeviceMemory
from vmmkv.holder.log import SealedLog

log = logging.getLogger(__name__)

VERSION: Final = 3

MOST_DESCRIPTORS: Final = 128
"""Most descriptors in one message; Linux takes 253."""
MOST_LISTED: Final = 1024
"""Handles in one message without descriptors."""

_MESSAGE_BYTES: Final = 64 * 1024
_TIMEOUT_S: Final = 30.0
"""A holder that does not answer for so long is gone."""


T = TypeVar("T")


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


def device_identity(device: torch.device) -> str:
    """The name of a device in every process: a GPU's index depends on CUDA_VISIBLE_DEVICES, its UUID does not."""
    return f"GPU {torch.cuda.get_device_properties(device).uuid}" if device.type == "cuda" else "host memory"


def check_reach(device: torch.device, identity: str) -> None:
    """Check that a device can read the memory of another one without its being copied. Raises: HolderUnavailable if not."""
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
    """Check, without connecting, which would claim the holder, that the path is a socket. Raises: HolderUnavailable."""
    if not Path(path).is_socket():
        raise _no_holder(path, "there is no such socket")


def _check_count(values: Sequence[int], wanted: int) -> None:
    if len(values) != wanted:
        raise OSError(errno.EPROTO, f"{len(values)} handles or descriptors, not {wanted}")


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
        close_in_children(self._connection)
        try:
            self._connection.settimeout(_TIMEOUT_S)
            try:
                self._connection.connect(str(self.path))
                self.pid, uid = peer(self._connection)
                self.budget_bytes, self.log = self._welcomed(receive(self._connection), uid, device)
            except OSError as error:
                raise _no_holder(self.path, error.strerror or error) from error
            self._is_gone = self._is_damaged = False
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

    def _welcomed(self, answer: tuple[Message, list[int]] | None, uid: int, device: torch.device) -> tuple[int, SealedLog]:
        """The budget and the log of a holder that takes this engine. Raises: HolderUnavailable; OSError."""
        welcome, fds = answer or (Message(error="it closed the connection"), [])
        with contextlib.ExitStack() as closing:
            closing.callback(close_all, fds)
            if uid != os.getuid():
                raise HolderUnavailable(f"the holder at {self.path} is of user {uid}, and this process of {os.getuid()}")
            if "error" in welcome:
                raise HolderUnavailable(f"the holder at {self.path} (process {self.pid}) refuses: {welcome.text('error')}")
            if (version := welcome.whole("version")) != VERSION:
                raise HolderUnavailable(
                    f"the holder at {self.path} speaks version {version} and this process {VERSION}; restart the "
                    "holder with this vmmkv, and what it holds is computed again"
                )
            its_device, budget_bytes = welcome.text("device"), welcome.whole("budget_bytes")
            if self.borrows:
                check_reach(device, its_device)
            elif (wanted := device_identity(device)) != its_device:
                raise HolderUnavailable(f"the holder at {self.path} has memory of {its_device}; wanted {wanted}")
            try:
                _check_count(fds, 1)
                return budget_bytes, SealedLog(fds[0])
            except LogDamaged as error:
                raise HolderUnavailable(f"the holder at {self.path}: {error}; restart it") from error

    def _join(self) -> None:
        def joined(answer: Message, _: list[int]) -> None:
            if "error" in answer:
                raise HolderUnavailable(f"the holder at {self.path} (process {self.pid}) refuses: {answer.text('error')}")

        self._ask("join", {"do": "borrow" if self.borrows else "own"}, joined)

    def create(self, size_bytes: int) -> tuple[int, int]:
        """A new handle: its serial, and a file descriptor that is the caller's. Cost: a round trip of some 50 us on the host.

        Raises: OutOfDeviceMemory past the holder's budget or the device's memory; DriverError; HolderGone.
        """

        def created(answer: Message, fds: list[int]) -> tuple[int, int]:
            if "error" in answer:
                message = f"create: the holder at {self.path} (process {self.pid}): {answer.text('error')}"
                kind = OutOfDeviceMemory if answer.get("is_full") is True else DriverError
                raise kind(message, call="create", code=answer.text("code"))
            serials = answer.wholes("serials", 1)
            _check_count(serials, 1)
            _check_count(fds, 1)
            return serials[0], fds[0]

        return self._ask("create", {"do": "create", "size_bytes": size_bytes}, created)

    def open(self, sizes_bytes: Mapping[int, int]) -> Generator[tuple[int, int]]:
        """Serial and file descriptor, the caller's to close, of those of these handles that the holder has with that size.

        Cost: a round trip for each `MOST_DESCRIPTORS`. Raises: HolderGone.
        """

        def opened(answer: Message, fds: list[int]) -> list[tuple[int, int, int]]:
            sizes = answer.sizes()
            _check_count(fds, len(sizes))
            return [(serial, size_bytes, fd) for (serial, size_bytes), fd in zip(sizes.items(), fds, strict=True)]

        serials = list(sizes_bytes)
        for first in range(0, len(serials), MOST_DESCRIPTORS):
            asked = serials[first : first + MOST_DESCRIPTORS]
            left = self._ask("import_fd", {"do": "open", "serials": asked}, opened)
            try:
                while left:
                    serial, size_bytes, fd = left.pop()
                    if sizes_bytes.get(serial) == size_bytes:
                        yield serial, fd
                    else:
                        os.close(fd)
                        self.say_damaged(f"handle {serial} has {size_bytes} bytes, and its seal {sizes_bytes.get(serial)}")
            finally:
                close_all([fd for *_, fd in left])

    def handles(self) -> dict[int, int]:
        """The handles that the holder keeps for its owner, this engine: bytes by serial.

        Cost: a round trip for each `MOST_LISTED`. Raises: HolderGone.
        """

        def listed(answer: Message, _: list[int]) -> dict[int, int]:
            sizes = answer.sizes()
            if min(sizes, default=last + 1) <= last:
                raise OSError(errno.EPROTO, "handles that it has named before")
            return sizes

        sizes_bytes, last = dict[int, int](), 0
        while some := self._ask("list", {"do": "list", "after": last}, listed):
            sizes_bytes |= some
            last = max(some)
        return sizes_bytes

    def say_damaged(self, why: object) -> None:
        """Log, once, that what earlier or other engines wrote is not what an engine writes, and is not used."""
        if not self._is_damaged:
            log.warning("starting cold: the log of the holder at %s is damaged: %s", self.path, why)
        self._is_damaged = True

    def release(self, serials: Sequence[int]) -> None:
        """Ask the holder to give these handles up, without waiting for it. A holder that is gone has none any more."""
        for first in range(0, len(serials), MOST_DESCRIPTORS):
            with contextlib.suppress(HolderGone):
                self._send("release", {"do": "release", "serials": serials[first : first + MOST_DESCRIPTORS]})

    def held_bytes(self) -> int:
        """Bytes that the holder holds now. Raises: HolderGone."""
        return self._ask("count", {"do": "count"}, lambda answer, _: answer.whole("held_bytes"))

    def is_gone(self) -> bool:
        """Has the holder ended? The log says so once. Cost: some microseconds; does not wait for the holder."""
        if not self._is_gone:
            hung_up = select.poll()
            hung_up.register(self._connection, 0)
            if hung_up.poll(0):
                self._gone("poll", "its process has ended")
        return self._is_gone

    @property
    def text_if_gone(self) -> str:
        """Consequence of a gone holder for this process, and the way out; part of the messages that name it."""
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

    def _ask(self, call: str, message: Mapping[str, Any], read: Callable[[Message, list[int]], T]) -> T:
        """Send a request and return what `read` makes of the answer and its descriptors, which are closed if it raises.

        An invalid answer counts as the end of the holder. Raises: HolderGone, OutOfDescriptors, and what `read` raises.
        """
        self._send(call, message)
        try:
            answer = receive(self._connection)
            if answer is None:
                raise self._gone(call, "its process has ended")
            try:
                return read(*answer)
            except BaseException:
                close_all(answer[1])
                raise
        except CutShort as error:
            if call == "create":
                with contextlib.suppress(OSError):
                    self.release(error.message.wholes("serials", 1))  # which nothing here knows
            raise OutOfDescriptors(f"{call}: {error.strerror}", call=call, code="EMFILE") from error
        except OSError as error:
            raise self._gone(call, str(error)) from error

    def _send(self, call: str, message: Mapping[str, Any]) -> None:
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


def close_in_children(connection: socket.socket) -> None:
    """Close a connection in children made by fork()."""
    _connections.add(connection)


def _close_in_child() -> None:
    """Close connections after fork(): a child with one open would keep the holder, also when its parent is gone."""
    for connection in list(_connections):
        connection.close()


os.register_at_fork(after_in_child=_close_in_child)
