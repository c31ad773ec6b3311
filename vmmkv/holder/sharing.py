"""SharedBudget: an engine's connection to the holder process by which it shares a budget with others."""

import contextlib
import os
import socket
from pathlib import Path
from typing import Final

import torch

from vmmkv.errors import HolderUnavailable
from vmmkv.holder.client import VERSION, Message, close_all, close_in_children, device_identity, peer, receive, send
from vmmkv.units import format_bytes

_ANSWER_S: Final = 30.0


class SharedBudget:
    """The budget of an engine that maps memory of its own, as the holder's arbiter sets it. Not thread-safe.

    Raises: HolderUnavailable if no holder answers, has another device or user, or cannot keep the floor.
    """

    def __init__(self, path: Path, device: torch.device, *, floor_bytes: int, most_bytes: int) -> None:
        self.path: Final = path
        self.budget_bytes = 0
        self.is_coming = False
        """Does this engine wait for memory that another one is giving up?"""
        self.num_reports = 0
        self.num_answered = 0
        """The last report that the budget takes into account."""
        self.is_gone = False
        self.connection: Final = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        close_in_children(self.connection)
        self.connection.settimeout(_ANSWER_S)
        try:
            try:
                self.connection.connect(str(path))
                pid, uid = peer(self.connection)
                welcome = self._received()
                if uid != os.getuid():
                    raise HolderUnavailable(f"the holder at {path} is of user {uid}, and this process of {os.getuid()}")
                if "error" not in welcome and (version := welcome.whole("version")) != VERSION:
                    raise HolderUnavailable(f"the holder at {path} speaks version {version} and this process {VERSION}")
                if "error" not in welcome and (wanted := device_identity(device)) != welcome.text("device"):
                    raise HolderUnavailable(f"the holder at {path} has memory of {welcome.text('device')}; wanted {wanted}")
                if "error" not in welcome:
                    send(self.connection, {"do": "share", "floor_bytes": floor_bytes, "most_bytes": most_bytes})
                    welcome = self._received()
                if "error" in welcome:
                    raise HolderUnavailable(f"the holder at {path} (process {pid}) refuses: {welcome.text('error')}")
                self._note(welcome)
            except OSError as error:
                why = f"no holder answers at {path}: {error.strerror or error}"
                raise HolderUnavailable(f"{why}; start one: vmmkv hold --socket {path} --budget SIZE") from error
        except BaseException:
            self.connection.close()
            raise

    def report(self, *, mapped_bytes: int, needed_bytes: int, wanted_bytes: int) -> None:
        """Tell what is mapped, needed for requests (0 while there are none), and wanted. The answer is a budget."""
        self.num_reports += 1
        sizes = {"mapped_bytes": mapped_bytes, "needed_bytes": needed_bytes, "wanted_bytes": wanted_bytes}
        try:
            send(self.connection, {"do": "report", "number": self.num_reports, **sizes})
        except OSError:
            self.is_gone = True

    def receive(self) -> None:
        """Wait for the next budget. A holder that is gone leaves the engine the last one."""
        try:
            self._note(self._received())
        except OSError:
            self.is_gone = True

    def wait_for(self, budget_bytes: int) -> None:
        """Wait for a budget, 30 s at most for each answer. Raises: HolderUnavailable."""
        while self.budget_bytes < budget_bytes:
            self.receive()
            if self.is_gone:
                raise HolderUnavailable(
                    f"the holder at {self.path} has not found {format_bytes(budget_bytes)}, the floor of this engine, in time: "
                    "engines that share the budget need all of it now"
                )

    def close(self) -> None:
        """End the connection: the share is free. Idempotent."""
        with contextlib.suppress(OSError):
            self.connection.shutdown(socket.SHUT_RDWR)
        self.connection.close()

    def _received(self) -> Message:
        heard = receive(self.connection)
        if heard is None:
            raise ConnectionResetError("it closed the connection")
        message, fds = heard
        close_all(fds)
        return message

    def _note(self, message: Message) -> None:
        self.budget_bytes, self.num_answered = message.whole("budget_bytes"), message.whole("number")
        self.is_coming = message.get("is_coming") is True
