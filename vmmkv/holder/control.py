"""BudgetClient: asks a socket of an elastic engine, or of a holder, for its state, and for another budget."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Final

from vmmkv.errors import BudgetError, HolderUnavailable
from vmmkv.holder.messages import Message, answered, close_all, connected, send
from vmmkv.units import format_bytes

_ANSWER_S: Final = 10.0


class BudgetClient:
    """A connection for one command. Raises: HolderUnavailable if nothing answers at the path."""

    def __init__(self, path: Path) -> None:
        self._path = path
        try:
            self._connection, _, _, fds = connected(path, _ANSWER_S)
        except OSError as error:
            raise self._silent(error) from error
        close_all(fds)

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
            answer, fds = answered(self._connection)
        except OSError as error:
            raise self._silent(error) from error
        close_all(fds)
        return answer

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
