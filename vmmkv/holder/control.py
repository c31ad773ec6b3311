"""BudgetClient: asks a socket of an elastic engine, or of a holder, for its state, and for another budget."""

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vmmkv.errors import BudgetError, HolderUnavailable
from vmmkv.holder.client import Message, close_all, peer, receive, send
from vmmkv.units import format_bytes

_ANSWER_S: Final = 10.0


class BudgetClient:
    """A connection for one command. Raises: HolderUnavailable if nothing answers at the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._connection.settimeout(_ANSWER_S)
        try:
            self._connection.connect(str(path))
            _, uid = peer(self._connection)
            if uid != os.getuid():
                raise OSError(f"it is of user {uid}, and this process of {os.getuid()}")
            self._received()
        except OSError as error:
            self._connection.close()
            raise self._silent(error) from error

    def state(self) -> Message:
        """Ask for the state. Raises: HolderUnavailable."""
        return self._ask({"do": "state"})

    def resize(self, budget_bytes: int) -> Message:
        """Change the budget of an engine. Raises: BudgetError, HolderUnavailable."""
        answer = self._ask({"do": "resize", "budget_bytes": budget_bytes})
        if "error" in answer:
            raise BudgetError(answer.text("error"))
        return answer

    def _ask(self, message: dict[str, Any]) -> Message:
        try:
            send(self._connection, message)
            return self._received()
        except OSError as error:
            raise self._silent(error) from error

    def _received(self) -> Message:
        heard = receive(self._connection)
        if heard is None:
            raise ConnectionResetError("it closed the connection")
        message, fds = heard
        close_all(fds)
        return message

    def _silent(self, error: OSError) -> HolderUnavailable:
        return HolderUnavailable(f"no elastic engine, and no holder, answers at {self._path}: {error.strerror or error}")


def state_lines(state: Message) -> Iterator[str]:
    """A state in words: of an engine, or of a holder with the engines that share its budget."""
    if "shares" not in state:
        sizes = {name: format_bytes(state.whole(f"{name}_bytes")) for name in ("budget", "mapped", "used", "reserved", "group")}
        yield (
            f"budget {sizes['budget']}, mapped {sizes['mapped']}, used by requests {sizes['used']}, reserved "
            f"{sizes['reserved']}; {sizes['group']} at a time"
        )
        if state.get("is_settled") is False:
            yield "more is mapped than the budget: it goes when requests end"
        return
    yield f"budget {format_bytes(state.whole('budget_bytes'))}, of which handles {format_bytes(state.whole('held_bytes'))}"
    for each in state["shares"]:
        share = Message(each)
        sizes = {name: format_bytes(share.whole(f"{name}_bytes")) for name in ("budget", "mapped", "needed", "floor")}
        yield (
            f"process {share.whole('pid')}: budget {sizes['budget']}, mapped {sizes['mapped']}, needed {sizes['needed']}, "
            f"floor {sizes['floor']}"
        )
