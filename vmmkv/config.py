"""What vmmkv takes from the environment, read in one function that rejects what it does not know.

    VMMKV_CACHE_DIR   where fetched models are kept; default $XDG_CACHE_HOME/vmmkv, else ~/.cache/vmmkv
    VMMKV_LOG_LEVEL   what the server logs: debug, info, warning or error; default info

The library itself is configured by arguments alone; only the command line and the server read these.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

PREFIX: Final = "VMMKV_"
KNOWN_VARIABLES: Final = ("VMMKV_CACHE_DIR", "VMMKV_LOG_LEVEL")
LOG_LEVELS: Final = ("debug", "info", "warning", "error")


@dataclass(frozen=True, slots=True, kw_only=True)
class Environment:
    """The settings that come from the environment, validated. An empty variable counts as one that is not set."""

    cache_dir: Path
    """An absolute path; it need not exist yet."""
    log_level: str = "info"

    def __post_init__(self) -> None:
        if not self.cache_dir.is_absolute():
            raise ValueError(
                f"VMMKV_CACHE_DIR={str(self.cache_dir)!r} is not an absolute path; write {self.cache_dir.absolute()}"
            )
        if self.log_level not in LOG_LEVELS:
            raise ValueError(f"VMMKV_LOG_LEVEL={self.log_level!r} is no log level; use one of {', '.join(LOG_LEVELS)}")


def read_environment(variables: Mapping[str, str] | None = None) -> Environment:
    """Read the environment, by default that of the process.

    Raises: ValueError for a VMMKV_ variable that does not exist (a misspelt one would otherwise do nothing, silently)
    or a value that cannot be used.
    """
    values = os.environ if variables is None else variables
    unknown = sorted(name for name in values if name.startswith(PREFIX) and name not in KNOWN_VARIABLES)
    if unknown:
        raise ValueError(f"unknown environment variable {', '.join(unknown)}; vmmkv knows {', '.join(KNOWN_VARIABLES)}")
    return Environment(
        cache_dir=_cache_dir(values),
        log_level=(values.get("VMMKV_LOG_LEVEL") or "info").lower(),
    )


def _cache_dir(values: Mapping[str, str]) -> Path:
    own = values.get("VMMKV_CACHE_DIR")
    if own:
        return Path(own).expanduser()
    shared = Path(values.get("XDG_CACHE_HOME") or "~/.cache").expanduser()
    # The XDG base directory specification: a relative path is invalid and to be ignored.
    return (shared if shared.is_absolute() else Path.home() / ".cache") / "vmmkv"
