"""What the HTTP process alone is to know: who may ask, and for how much. The engine's process never sees a key."""

import math
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final

from vmmkv.server.hosts import check_name
from vmmkv.units import KIB, MIB, counted, format_bytes

LEAST_KEY_CHARS: Final = 8
_KEY: Final = re.compile(r"[\x21-\x7e]+")
"""Visible ASCII, which a header carries as it is."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FrontConfig:
    """The limits and keys of one HTTP server.

    Raises: ValueError naming the option, what it was and what it may be. A key is in no message.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    """Who has none of them gets 401 on every route but /health. Empty: everybody may ask."""
    api_key_file: str | None = None
    """A file with more of them, one a line. None once it is read."""
    admin_key: str | None = field(default=None, repr=False)
    """Opens /kv/reset and /kv/resize, which are not there without it, and all else."""
    admin_key_file: str | None = None
    """A file with this key alone. None once it is read."""
    allowed_hosts: tuple[str, ...] = ()
    """Names in the Host header that are answered, beside addresses and localhost, where only this machine can reach the server;
    once there are any, only these everywhere."""
    max_tokens_per_key: int | None = None
    """Tokens, of prompts and of answers at their longest, that the requests of one key may have in flight together."""
    max_queued_requests: int = 1024
    """Sequences that may wait or be tokenised beyond those that run."""
    max_queued_tokens: int = 1 << 22
    """Tokens of prompts whose answers have not begun."""
    max_body_bytes: int = 16 * MIB
    """Of one request; of all that are being read or worked on together MAX_BODIES times as much."""
    request_timeout_s: float | None = None
    """From a request's arrival to the end of its answer, however long it waits; a request may ask for less."""
    drain_timeout_s: float = 25.0
    """How long requests in flight may go on after the first signal to stop."""
    stuck_after_s: float = 120.0
    """An engine that has work and makes no step for so long is reported."""

    def __post_init__(self) -> None:
        for key in self.api_keys:
            _check_key("--api-key", key)
        if self.admin_key is not None:
            _check_key("--admin-key", self.admin_key)
        self._read_files()
        if self.admin_key in self.api_keys:
            raise ValueError("--admin-key is one of the API keys: its holder could do all that the administrator can")
        for name in self.allowed_hosts:
            check_name(name)
        if self.max_tokens_per_key is not None:
            if not self.api_keys:
                raise ValueError("--max-tokens-per-key has no keys to count by: add --api-key or --api-key-file")
            self._at_least("--max-tokens-per-key", self.max_tokens_per_key, 2, "tokens, one of a prompt and one of an answer")
        self._at_least("--max-queued-requests", self.max_queued_requests, 0, "sequences that wait")
        self._at_least("--max-queued-tokens", self.max_queued_tokens, 1, "tokens of prompts that wait")
        if self.max_body_bytes < 4 * KIB:
            raise ValueError(f"--max-body-size is {format_bytes(self.max_body_bytes)}; at least {format_bytes(4 * KIB)} works")
        if self.request_timeout_s is not None:
            self._seconds("--request-timeout", self.request_timeout_s)
        if self.drain_timeout_s != 0:
            self._seconds("--drain-timeout", self.drain_timeout_s)
        self._seconds("--stuck-after", self.stuck_after_s)

    def _read_files(self) -> None:
        if self.api_key_file is not None:
            keys = (*self.api_keys, *read_keys("--api-key-file", Path(self.api_key_file)))
            object.__setattr__(self, "api_keys", keys)
            object.__setattr__(self, "api_key_file", None)
        object.__setattr__(self, "api_keys", tuple(dict.fromkeys(self.api_keys)))
        if self.admin_key_file is not None:
            admins = {self.admin_key, *read_keys("--admin-key-file", Path(self.admin_key_file))} - {None}
            if len(admins) > 1:
                raise ValueError("--admin-key and --admin-key-file name several keys; the administrator has one")
            object.__setattr__(self, "admin_key", admins.pop())
            object.__setattr__(self, "admin_key_file", None)

    def _at_least(self, name: str, value: int, least: int, what: str) -> None:
        if value < least:
            raise ValueError(f"{name} {value}: it must be at least {least} ({what})")

    def _seconds(self, name: str, value: float) -> None:
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{name} {value:g}: wanted a number of seconds above 0")


def _check_key(where: str, key: str) -> None:
    """Can a header carry it, and is it long enough? Raises: ValueError, which says where it was found, and not the key."""
    if len(key) < LEAST_KEY_CHARS or not _KEY.fullmatch(key):
        raise ValueError(
            f"{where} has a key of {counted(len(key), 'character')} that cannot be used: it needs {LEAST_KEY_CHARS} or more, "
            "visible ASCII without spaces; `openssl rand -hex 24` makes one"
        )


def read_keys(option: str, path: Path) -> tuple[str, ...]:
    """The keys in a file, one a line; empty lines and those that begin with # are none.

    Raises: ValueError for a file that cannot be read, or has a key that cannot be used or none at all.
    """
    try:
        lines = path.read_text(encoding="utf-8").splitlines()
    except OSError as error:
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    except UnicodeDecodeError:
        raise ValueError(f"{option} {path} is not UTF-8; write one key a line, of visible ASCII") from None
    keys = {number: key for number, line in enumerate(lines, 1) if (key := line.strip()) and not key.startswith("#")}
    for number, key in keys.items():
        _check_key(f"{option} {path}, line {number},", key)
    if not keys:
        raise ValueError(f"{option} {path} has no key in it; write one a line")
    return tuple(keys.values())
