"""What vmmkv takes from the environment, read in one function that rejects what it does not know.

    VMMKV_CACHE_DIR   where fetched models are kept; default $XDG_CACHE_HOME/vmmkv, else ~/.cache/vmmkv

The library itself is configured by arguments alone; only the command line and the server read it. The command line's own
variables, one for each option of `vmmkv serve`, are in `vmmkv.server.config`.
"""

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "VMMKV_"
KNOWN_VARIABLES: Final = ("VMMKV_CACHE_DIR",)
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings that come from the environment, validated. An empty variable counts as one that is not set."""

    cache_dir: Path
    """An absolute path; it need not exist yet."""

    def __post_init__(self) -> None:
        if not self.cache_dir.is_absolute():
            raise ValueError(
                f"VMMKV_CACHE_DIR={str(self.cache_dir)!r} is not an absolute path; write {self.cache_dir.absolute()}"
            )


def read_environment(variables: Mapping[str, str] | None = None, *, others: Iterable[str] = ()) -> Environment:
    """Read the environment, by default that of the process. `others` are variables that are read elsewhere.

    Raises: ValueError for a VMMKV_ variable that does not exist (a misspelt one would otherwise do nothing, silently)
    or a value that cannot be used.
    """
    values = os.environ if variables is None else variables
    known = (*KNOWN_VARIABLES, *others)
    unknown = sorted(name for name in values if name.startswith(PREFIX) and name not in known)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}; vmmkv knows {', '.join(known)}")
    return Environment(cache_dir=_cache_dir(values))


def _cache_dir(values: Mapping[str, str]) -> Path:
    own = values.get("VMMKV_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = Path(values.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "vmmkv"
