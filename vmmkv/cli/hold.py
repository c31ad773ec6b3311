"""`vmmkv hold`: own KV memory for engines that come and go."""

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

SUMMARY = "own KV memory that outlives the engine"

EXAMPLES = """\
examples:
  vmmkv hold --socket ./kv.sock --budget 64GiB
                                       of the first GPU, or of the host without one
  vmmkv hold --socket ./kv.sock --budget 1GiB --device cpu

An engine that is given the socket (vmmkv serve --kv-holder PATH; in the
library Pool(..., holder=PATH)) takes its memory from here, one engine at a
time and of the same user only. When the engine ends or is killed, the prefixes
that it had finished stay, and the next engine with the same layout and
fingerprint attaches them. All other memory is freed. SIGTERM ends the holder
and frees everything.
"""


def run(
    socket: Annotated[Path, typer.Option("--socket", metavar="PATH", help="where engines connect", show_default=False)],
    budget: Annotated[
        str, typer.Option("--budget", metavar="SIZE", help="most memory to own, such as 64GiB", show_default=False)
    ],
    device: Annotated[
        str, typer.Option("--device", metavar="NAME", help="auto (a GPU if there is one), cpu, cuda or cuda:INDEX")
    ] = "auto",
) -> int:
    """Hold memory until SIGTERM or Ctrl-C. Each event is a line on stderr."""
    from vmmkv.units import parse_bytes

    budget_bytes = parse_bytes(budget)
    import torch

    from vmmkv.driver import open_driver
    from vmmkv.holder.process import run as hold

    if device == "auto":
        device = "cuda:0" if torch.cuda.is_available() else "cpu"
    hold(socket.absolute(), budget_bytes, open_driver(device), _tell)
    return 0


def _tell(line: str) -> None:
    with contextlib.suppress(OSError):  # memory is held on though nothing reads stderr any more
        print(f"vmmkv hold: {line}", file=sys.stderr, flush=True)
