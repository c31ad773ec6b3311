"""SharedBudget: an engine's connection to the holder process by which it shares a budget with others."""

import contextlib
import socket
from pathlib import Path
from typing import Final

import torch

from vmmkv.errors import HolderUnavailable
from vmmkv.holder.client import greeted
from vmmkv.holder.messages import Message, answered, check_taken, close_all, send
from vmmkv.units import format_bytes


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
        holder = greeted(path, device)
        close_all(holder.fds)
        self.connection: Final = holder.connection
        try:
            send(self.connection, {"do": "share", "floor_bytes": floor_bytes, "most_bytes": most_bytes})
            answer = self._received()
            check_taken(path, holder.pid, answer)
            self._note(answer)
        except OSError as error:
            self.connection.close()
            raise HolderUnavailable(f"the holder at {path} has gone: {error.strerror or error}") from error
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
        message, fds = answered(self.connection)
        close_all(fds)
        return message

    def _note(self, message: Message) -> None:
        self.budget_bytes, self.num_answered = message.whole("budget_bytes"), message.whole("number")
        self.is_coming = message.get("is_coming") is True
