"""`vmmkv resize`: memory of an engine under vLLM, and how much it may have."""

import time
from pathlib import Path
from typing import Annotated

import typer

SUMMARY = "show or change the memory that an elastic engine under vLLM may map"

EXAMPLES = """\
examples:
  vmmkv resize /run/kv.sock            what is mapped, used and allowed
  vmmkv resize /run/kv.sock 8GiB       allow that much from now on
  vmmkv resize /run/kv.sock 8GiB --wait
                                       and return when no more is mapped

The socket is that of the engine's option "control". Blocks of running requests
stay until these end. That of `vmmkv hold` shows how engines share its budget.
"""


def run(
    socket: Annotated[Path, typer.Argument(metavar="SOCKET", help="where the engine listens", show_default=False)],
    size: Annotated[str | None, typer.Argument(metavar="[SIZE]", help="most memory to map, such as 8GiB")] = None,
    wait: Annotated[bool, typer.Option("--wait", help="return when no more than that is mapped")] = False,
) -> int:
    """Print an engine's memory; with a size, change its budget."""
    from vmmkv.holder.control import BudgetClient, state_lines
    from vmmkv.units import parse_bytes

    budget_bytes = None if size is None else parse_bytes(size)
    client = BudgetClient(socket)
    state = client.state() if budget_bytes is None else client.resize(budget_bytes)
    while wait and state.get("is_settled") is False:
        time.sleep(0.05)
        state = client.state()
    for line in state_lines(state):
        print(line)
    return 0
