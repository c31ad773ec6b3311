"""The holder: a process that owns handles of one device for one engine at a time, and lends what that has sealed to others.

    connect ──welcome──> own ────> create, open, release ... ──it ends──> free what no seal names
                 │        └─ there is one already: refused
                 ├─────> borrow ──> open, release ... ────────it ends──> free what the engine has given up meanwhile
                 └─────> share ───> report ... ───────────────it ends──> its share of the budget is free

What the engine gives up and a borrower has stays, and counts, until the borrower gives it back or ends.
A process that asks again before it has read the answer, or sends what is no request, loses its connection: no answer waits for
room, and no more than one to be read.
Engines that *share* map memory of their own: they report what they have and need, and are told their budgets (see arbiter).
It never maps or writes the memory. The kernel tells it that an engine has ended, whichever way: the connection is closed.
"""

import contextlib
import itertools
import os
import resource
import selectors
import signal
import socket
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from vmmkv.driver.base import Driver, Handle, check_budget
from vmmkv.driver.host import SPARE_DESCRIPTORS, most_descriptors
from vmmkv.errors import BudgetError, DriverError, LogDamaged, OutOfDescriptors, OutOfDeviceMemory
from vmmkv.holder.arbiter import Share, check_floor, settle
from vmmkv.holder.client import device_identity
from vmmkv.holder.listening import listen, lock
from vmmkv.holder.log import SealedLog
from vmmkv.holder.messages import MOST_DESCRIPTORS, MOST_LISTED, VERSION, Message, close_all, has_unread, peer, receive, send
from vmmkv.units import PAGE_BYTES, counted, format_bytes


@dataclass(frozen=True, slots=True)
class _Held:
    """One handle, and the descriptor that engines import it by. Exporting costs 0.8 ms on CUDA, so it is done once."""

    handle: Handle
    fd: int
    size_bytes: int


@dataclass(eq=False, slots=True)
class _Engine:
    connection: socket.socket
    pid: int
    borrowed: set[int] | None = None
    """Serials that a borrower has of the owner's handles; None for others."""
    share: Share | None = None
    """Share of the budget, of an engine that maps memory of its own."""
    report: int = 0
    """Number of its last report."""
    is_told: bool = True
    """Does it know its budget?"""


class Holder:
    """Handles of one device up to a budget, and the socket at which an engine gets them.

    `report` is told in a line what happens. `run` serves until `stop`, which signal handlers may call.
    Raises: BudgetError for less than a page, or more than the device has; HolderUnavailable if the socket is in use, or cannot
    be made.
    """

    def __init__(self, path: Path, budget_bytes: int, driver: Driver, report: Callable[[str], None]) -> None:
        if budget_bytes < PAGE_BYTES:
            raise BudgetError(f"a budget of {budget_bytes} bytes is below one page of {format_bytes(PAGE_BYTES)}")
        check_budget(budget_bytes, driver, "lower it")
        self.path: Final = path
        self.budget_bytes: Final = budget_bytes
        self._driver = driver
        self._report = report
        self._held: dict[int, _Held] = {}
        self._held_bytes = 0
        self._given_up: set[int] = set()
        """Serials that the engine has released and borrowers have."""
        self._last_serial = 0
        self._engines: dict[socket.socket, _Engine] = {}
        self._owner: _Engine | None = None
        with contextlib.ExitStack() as undo:
            self._lock_fd = lock(path)
            undo.callback(os.close, self._lock_fd)
            self._spare_fd = os.dup(self._lock_fd)
            """Given up for a moment to hang up on what cannot be accepted."""
            undo.callback(lambda: os.close(self._spare_fd))
            self._log_fd = SealedLog.create(budget_bytes)
            undo.callback(os.close, self._log_fd)
            self._log = undo.enter_context(contextlib.closing(SealedLog(self._log_fd)))
            self._wake_fds = os.pipe()
            for fd in self._wake_fds:
                undo.callback(os.close, fd)
            self._listener = undo.enter_context(listen(path))
            undo.callback(path.unlink, missing_ok=True)
            self._undo = undo.pop_all()

    def run(self) -> None:
        """Serve until `stop`."""
        with selectors.DefaultSelector() as selector:
            for source in (self._listener, self._wake_fds[0]):
                selector.register(source, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._wake_fds[0] in ready:
                    return
                heard = [engine for engine in self._engines.values() if engine.connection in ready]
                if self._owner in heard:
                    heard = [self._owner]  # to the end, before another one that wants to own because this one has ended
                for engine in heard:
                    if not self._hear(engine):
                        selector.unregister(engine.connection)
                        self._leave(engine)
                if self._listener in ready and (new := self._greet()) is not None:
                    selector.register(new.connection, selectors.EVENT_READ)

    def stop(self) -> None:
        """Make `run` return. Safe in a signal handler."""
        os.write(self._wake_fds[1], b"x")

    def close(self) -> None:
        """Free everything, and remove the socket. What an engine has imported stays its own. Idempotent."""
        for connection in self._engines:
            connection.close()
        self._engines, self._owner = {}, None
        self._free(list(self._held))
        self._undo.close()

    # engines

    def _greet(self) -> _Engine | None:
        try:
            connection, _ = self._listener.accept()
        except OSError as none_left:
            os.close(self._spare_fd)
            with contextlib.suppress(OSError):
                self._listener.accept()[0].close()
            self._spare_fd = os.dup(self._lock_fd)
            self._report(f"refused a process: {none_left.strerror}")
            return None
        pid, uid = peer(connection)
        error = f"it belongs to user {os.getuid()}, and process {pid} to {uid}" if uid != os.getuid() else ""
        try:
            if error:
                send(connection, {"error": error})
            else:
                device = device_identity(self._driver.device)
                send(connection, {"version": VERSION, "device": device, "budget_bytes": self.budget_bytes}, [self._log_fd])
        except OSError as broken:
            error = str(broken)
        if error:
            self._report(f"refused process {pid}: {error}")
            connection.close()
            return None
        engine = self._engines[connection] = _Engine(connection, pid)
        return engine

    def _hear(self, engine: _Engine) -> bool:
        """Answer an engine; False if it has ended, or is to be."""
        try:
            heard = receive(engine.connection)
            if heard is None:
                return False
            message, fds = heard
            close_all(fds)
            if engine.share is None and has_unread(engine.connection):
                raise OSError("it asked again before it had read the answer")
            self._answer(engine, message)
            return True
        except ConnectionError:  # it was killed before it had read an answer
            return False
        except Exception as error:
            self._report(f"hung up on process {engine.pid}, which does not speak as an engine does: {error!r}")
            return False

    def _leave(self, engine: _Engine) -> None:
        """Forget an engine that has ended."""
        engine.connection.close()
        del self._engines[engine.connection]
        before = self._held_bytes
        if engine.share is not None:
            self._report(f"process {engine.pid} has ended, which had {format_bytes(engine.share.held_bytes)}")
            self._settle()
            return
        if engine is self._owner:
            self._owner = None
            self._sweep()
        elif engine.borrowed is not None:
            self._give_back(engine.borrowed, list(engine.borrowed))
            self._count_borrowers()
        else:
            return
        self._report(f"process {engine.pid} has ended; {format_bytes(before - self._held_bytes)} freed, {self._text()}")

    def _answer(self, engine: _Engine, message: Message) -> None:
        connection, borrowed = engine.connection, engine.borrowed
        match message.get("do"):
            case "own" if borrowed is None:
                send(connection, self._own(engine))
            case "borrow" if borrowed is None and engine is not self._owner:
                engine.borrowed = set()
                self._count_borrowers()  # before it reads the log
                self._report(f"process {engine.pid} has come to borrow; {self._text()}")
                send(connection, {})
            case "share" if borrowed is None and engine is not self._owner and engine.share is None:
                self._share(engine, message.whole("floor_bytes"), message.whole("most_bytes"))
            case "report" if engine.share is not None:
                share, engine.report, engine.is_told = engine.share, message.whole("number"), False
                share.mapped_bytes, share.needed_bytes = message.whole("mapped_bytes"), message.whole("needed_bytes")
                share.wanted_bytes = message.whole("wanted_bytes")
                if share.needed_bytes:
                    share.busy_s = time.monotonic()
                self._settle()
            case "state":
                send(connection, self._state())
            case "open":
                known = [serial for serial in message.wholes("serials", MOST_DESCRIPTORS) if serial in self._held]
                if borrowed is not None:
                    borrowed.update(known)
                send(connection, self._sizes(known), [self._held[serial].fd for serial in known])
            case "release" if borrowed is not None:
                self._give_back(borrowed, message.wholes("serials", MOST_DESCRIPTORS))
            case "create" if engine is self._owner:
                answer, fds = self._create(message.whole("size_bytes"))
                send(connection, answer, fds)
            case "release" if engine is self._owner:
                self._free(serial for serial in message.wholes("serials", MOST_DESCRIPTORS) if serial in self._held)
            case "list" if engine is self._owner:
                after = message.whole("after")
                kept = (serial for serial in self._held if serial > after and serial not in self._given_up)
                send(connection, self._sizes(list(itertools.islice(kept, MOST_LISTED))))
            case "count":
                given_up_bytes = sum(self._held[serial].size_bytes for serial in self._given_up)
                send(connection, {"held_bytes": self._held_bytes - given_up_bytes})
            case unknown:
                raise ValueError(f"unknown request {unknown!r}")

    def _sizes(self, serials: list[int]) -> dict[str, Any]:
        return {"serials": serials, "sizes_bytes": [self._held[serial].size_bytes for serial in serials]}

    def _count_borrowers(self) -> None:
        """Write to the log how many there are. What stands there is not read: others can write to it."""
        self._log.num_borrowers = sum(engine.borrowed is not None for engine in self._engines.values())

    def _own(self, engine: _Engine) -> dict[str, Any]:
        if self._owner is not None:
            error = f"process {self._owner.pid} has it, and one engine has it at a time; end that one first"
            self._report(f"refused process {engine.pid}: {error}")
            return {"error": error}
        self._owner = engine
        self._report(f"process {engine.pid} has come; {self._text()}")
        return {}

    # engines that share the budget

    @property
    def _shares(self) -> list[Share]:
        return [engine.share for engine in self._engines.values() if engine.share is not None]

    @property
    def _shared_bytes(self) -> int:
        """Bytes that engines which share may map, or have mapped."""
        return sum(share.held_bytes for share in self._shares)

    def _share(self, engine: _Engine, floor_bytes: int, most_bytes: int) -> None:
        try:
            check_floor(self._shares, floor_bytes, self.budget_bytes - self._held_bytes)
        except BudgetError as error:
            self._report(f"refused process {engine.pid}: {error}")
            send(engine.connection, {"error": str(error)})
            return
        engine.share, engine.is_told = Share(floor_bytes, most_bytes, busy_s=time.monotonic()), False
        self._report(f"process {engine.pid} shares the budget, with a floor of {format_bytes(floor_bytes)}")
        self._settle()

    def _settle(self) -> None:
        """Set the budgets of engines that share, and tell those that do not know theirs. None is waited for."""
        before = {engine.connection: engine.share.budget_bytes for engine in self._engines.values() if engine.share}
        settle(self._shares, self.budget_bytes - self._held_bytes)
        is_coming = any(share.mapped_bytes > share.budget_bytes for share in self._shares)
        for engine in self._engines.values():
            if (share := engine.share) is None:
                continue
            engine.is_told &= before[engine.connection] == share.budget_bytes
            if not engine.is_told:
                with contextlib.suppress(BlockingIOError, ConnectionError):  # it is told later, or has ended
                    engine.connection.setblocking(False)
                    answer = {"budget_bytes": share.budget_bytes, "is_coming": is_coming and share.short_bytes > 0}
                    send(engine.connection, {**answer, "number": engine.report})
                    engine.is_told = True

    def _state(self) -> dict[str, Any]:
        shares = [
            {
                "pid": engine.pid,
                "budget_bytes": engine.share.budget_bytes,
                "mapped_bytes": engine.share.mapped_bytes,
                "needed_bytes": engine.share.needed_bytes,
                "floor_bytes": engine.share.floor_bytes,
            }
            for engine in self._engines.values()
            if engine.share is not None
        ]
        return {"budget_bytes": self.budget_bytes, "held_bytes": self._held_bytes, "shares": shares}

    def _give_back(self, borrowed: set[int], serials: Iterable[int]) -> None:
        """Take handles back from a borrower. Handles that the owner has given up are freed."""
        borrowed.difference_update(serials)
        self._free([serial for serial in serials if serial in self._given_up])

    # handles

    def _create(self, size_bytes: int) -> tuple[dict[str, Any], list[int]]:
        left_bytes = self.budget_bytes - self._held_bytes - self._shared_bytes
        if size_bytes > left_bytes:
            error = (
                f"{format_bytes(size_bytes)} do not fit: {format_bytes(left_bytes)} of its budget of "
                f"{format_bytes(self.budget_bytes)} are left"
            )
            return {"error": error, "is_full": True, "code": "HOLDER_BUDGET"}, []
        try:
            handle = self._driver.create(size_bytes)
            try:
                fd = self._driver.export_fd(handle)
            except BaseException:
                self._driver.release(handle)
                raise
            if fd >= most_descriptors() - SPARE_DESCRIPTORS:
                os.close(fd)
                self._driver.release(handle)
                handles = counted(len(self._held), "handle", ",")
                error = f"it has {handles} and may open no more files: start it with a higher `ulimit -n`"
                return {"error": error, "is_full": True, "code": "EMFILE"}, []
        except DriverError as error:
            is_full = isinstance(error, (OutOfDeviceMemory, OutOfDescriptors))
            return {"error": str(error), "is_full": is_full, "code": error.code}, []
        self._last_serial += 1
        self._held[self._last_serial] = _Held(handle, fd, size_bytes)
        self._held_bytes += size_bytes
        return {"serials": [self._last_serial]}, [fd]

    def _free(self, serials: Iterable[int]) -> None:
        """Give handles back to the device. One whose release fails stays held; the next sweep tries it again.

        One that a borrower has stays until it is given back: its memory would stay too, and not be counted.
        """
        lent = set[int]().union(*(engine.borrowed or () for engine in self._engines.values()))
        for serial in serials:
            held = self._held[serial]
            if serial in lent:
                self._given_up.add(serial)
                continue
            try:
                self._driver.release(held.handle)
            except DriverError as error:
                self._report(f"{format_bytes(held.size_bytes)} cannot be freed now: {error}")
                continue
            del self._held[serial]
            self._given_up.discard(serial)
            self._held_bytes -= held.size_bytes
            os.close(held.fd)

    def _sweep(self) -> None:
        """Free what no seal names. If the log cannot be read, everything is freed."""
        try:
            named = self._log.read().live.keys()
        except LogDamaged as error:
            self._report(f"the log of sealed extents is damaged, and the next engine starts cold: {error}")
            self._log.rewrite(b"", ())
            named = {}.keys()
        self._free([serial for serial in self._held if serial not in named])

    def _text(self) -> str:
        handles = counted(len(self._held), "handle", ",")
        return f"{handles} held, {format_bytes(self._held_bytes)} of {format_bytes(self.budget_bytes)}"


def run(path: Path, budget_bytes: int, driver: Driver, report: Callable[[str], None]) -> None:
    """Hold memory until SIGTERM or SIGINT. Raises: see Holder."""
    holder = Holder(path, budget_bytes, driver, report)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (resource.getrlimit(resource.RLIMIT_NOFILE)[1],) * 2)  # one for each handle
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, lambda *_: holder.stop())
        report(f"{format_bytes(budget_bytes)} of {device_identity(driver.device)} at {path}, process {os.getpid()}")
        if budget_bytes // PAGE_BYTES > (most := most_descriptors() - SPARE_DESCRIPTORS):
            report(f"may open {most + SPARE_DESCRIPTORS:,} files, and so has at most {most:,} handles: raise `ulimit -n`")
        holder.run()
    finally:
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, signal.SIG_IGN)  # it is ending, and what `stop` writes to is closed
        holder.close()
    report("ended")
