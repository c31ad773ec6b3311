"""Environment variables of vmmkv, read in one function that refuses unknown ones.

    VMMKV_CACHE_DIR   where fetched models are kept; default $XDG_CACHE_HOME/vmmkv, else ~/.cache/vmmkv

The library itself is configured by arguments alone; only the command line and the server read it. The command line's own
variables, one for each option of `vmmkv serve`, are in `vmmkv_server.config`.
"""

import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Final

from vmmkv.errors import did_you_mean

PREFIX: Final = "VMMKV_"
KNOWN_VARIABLES: Final = ("VMMKV_CACHE_DIR",)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


def read_environment(variables: Mapping[str, str] | None = None, *, others: Iterable[str] = ()) -> Path:
    """VMMKV_CACHE_DIR of the environment, by default that of the process: an absolute path, which need not exist yet.

    An empty variable counts as one that is not set. `others` are variables that are read elsewhere.
    Raises: ValueError for a VMMKV_ variable that does not exist (a misspelt one would otherwise do nothing, silently)
    or a value that cannot be used.
    """
    values = os.environ if variables is None else variables
    known = (*KNOWN_VARIABLES, *others)
    unknown = sorted(name for name in values if name.startswith(PREFIX) and name not in known)
    if unknown:
        remedy = did_you_mean(unknown[0], known) or f"vmmkv knows {', '.join(known)}"
        raise ValueError(f"unknown environment variable {', '.join(unknown)}; {remedy}")
    if own := values.get("VMMKV_CACHE_DIR"):
        path = Path(own).expanduser()
        if not path.is_absolute():
            raise ValueError(f"VMMKV_CACHE_DIR={str(path)!r} is not an absolute path; write {path.absolute()}")
        return path
    shared = Path(values.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "vmmkv"
