"""`python -m bench`: see run."""

import os
import sys
from typing import Final

_INTERRUPTED: Final = 130
_NO_READER: Final = 141
"""The exit statuses of what Ctrl-C and SIGPIPE have ended, as shells have them."""


def _run() -> int:
    try:
        # Loads torch, which takes seconds: in them one may think better of it.
        from bench.run import main

        status = main()
        sys.stdout.flush()
    except KeyboardInterrupt:
        print("stopped by Ctrl-C", file=sys.stderr)
        return _INTERRUPTED
    except BrokenPipeError:
        # Whoever read, such as `head`, has seen enough. At exit Python flushes again: into nothing.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _NO_READER
    return status


if __name__ == "__main__":
    # Before torch is loaded, which reads it. Idle OpenMP threads that spin take the cores from what is measured: on two cores,
    # beside something else that ran, small models took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    sys.exit(_run())
