"""HolderClient: an engine's connection to a holder, which owns its memory or lends it another engine's."""

import contextlib
import errno
import logging
import os
import select
import socket
from collections.abc import Callable, Generator, Mapping, Sequence
from pathlib import Path
from typing import Any, Final, TypeVar

import torch

from vmmkv.errors import DriverError, HolderGone, HolderUnavailable, LogDamaged, OutOfDescriptors, OutOfDeviceMemory
from vmmkv.holder.log import SealedLog
from vmmkv.holder.messages import (
    MOST_DESCRIPTORS,
    VERSION,
    Connected,
    CutShort,
    Message,
    check_taken,
    close_all,
    connected,
    receive,
    send,
)

log = logging.getLogger(__name__)

_TIMEOUT_S: Final = 30.0
"""A holder that does not answer for so long is gone."""


T = TypeVar("T")


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


def greeted(path: Path, device: torch.device, *, borrows: bool = False) -> Connected:
    """Connect to a holder that speaks our version, and has memory of the device, or with `borrows` memory that it reads.

    Raises: HolderUnavailable.
    """
    try:
        holder = connected(path, _TIMEOUT_S)
    except OSError as error:
        raise _no_holder(path, error.strerror or error) from error
    try:
        if (version := holder.welcome.whole("version")) != VERSION:
            raise HolderUnavailable(
                f"the holder at {path} speaks version {version} and this process {VERSION}; restart the "
                "holder with this vmmkv, and what it holds is computed again"
            )
        its_device = holder.welcome.text("device")
        if borrows:
            check_reach(device, its_device)
        elif (wanted := device_identity(device)) != its_device:
            raise HolderUnavailable(f"the holder at {path} has memory of {its_device}; wanted {wanted}")
    except BaseException as error:
        holder.close()
        if isinstance(error, OSError):
            raise _no_holder(path, error.strerror or error) from error
        raise
    return holder


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
        holder = greeted(self.path, device, borrows=borrows)
        self._connection, self.pid = holder.connection, holder.pid
        self._is_gone = self._is_damaged = False
        try:
            try:
                self.budget_bytes = holder.welcome.whole("budget_bytes")
                _check_count(holder.fds, 1)
                self.log: Final = SealedLog(holder.fds[0])
            except LogDamaged as error:
                raise HolderUnavailable(f"the holder at {self.path}: {error}; restart it") from error
            except OSError as error:
                raise _no_holder(self.path, error.strerror or error) from error
            finally:
                close_all(holder.fds)
            try:
                self._ask("join", {"do": "borrow" if borrows else "own"}, self._joined)
            except BaseException:
                self.log.close()
                raise
        except BaseException:
            self._connection.close()
            raise
        self.has_prefixes = False
        """Does a prefix cache use the log? One does at a time."""

    def _joined(self, answer: Message, _: list[int]) -> None:
        check_taken(self.path, self.pid, answer)

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
