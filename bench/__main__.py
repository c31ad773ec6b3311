"""`python -m bench`: see cli. Ctrl-C and SIGTERM end a run in the same way; a closed pipe ends it quietly."""

import os
import signal
import sys
from typing import Final

_INTERRUPTED: Final = 130
_PIPE_CLOSED: Final = 141
"""Exit statuses after Ctrl-C and SIGPIPE, as shells have them."""


def _run() -> int:
    try:
        # Imports torch, which takes seconds.
        from bench.cli import main

        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt as interrupt:
        print(f"stopped by {interrupt or 'Ctrl-C'}", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # The reader, such as `head`, is gone. At exit Python flushes again: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _PIPE_CLOSED
    return status


def _interrupt(number: int, frame: object) -> None:
    # `timeout` sends a second SIGTERM, to the group, which would break off the ending.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    raise KeyboardInterrupt("SIGTERM")


if __name__ == "__main__":
    # Before torch is imported, which reads it. Idle OpenMP threads that spin take the cores from what is measured: on two
    # cores, beside another process, small models took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    signal.signal(signal.SIGTERM, _interrupt)
    status = _run()

    from vmmkv_server.console import end

    end(status)  # not in the order in which Python forgets what NCCL waits for
