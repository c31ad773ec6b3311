"""The options of `vmmkv serve` that say who may ask, for how much, and for how long."""

import argparse
from collections.abc import MutableMapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vmmkv.server.front_settings import FrontConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe them; the defaults are those of FrontConfig."""
    add, absent = parser.add_argument, argparse.SUPPRESS
    add(
        "--api-key", metavar="KEY", action="append", default=absent,
        help="answer only who has this key, on every route but /health; may be given several times (default: "
        "answer everybody). Other users of this machine can see it in the list of processes",
    )  # fmt: skip
    add("--api-key-file", metavar="FILE", type=Path, default=absent, help="the same, with a key on each line of a file")
    add("--admin-key", metavar="KEY", default=absent, help="opens /kv/reset and /kv/resize, which are not there without it")
    add("--admin-key-file", metavar="FILE", type=Path, default=absent, help="the same, in a file")
    add(
        "--max-tokens-per-key", metavar="N", type=int, default=absent,
        help="tokens, of prompts and of answers at their longest, that one key may have in flight (default: any number)",
    )  # fmt: skip
    add(
        "--max-queued-requests", metavar="N", type=int, default=absent,
        help="sequences in flight beyond --max-num-seqs, before requests get 429 (default: 1024)",
    )  # fmt: skip
    add(
        "--max-queued-tokens", metavar="N", type=int, default=absent,
        help="tokens of prompts whose answers have not begun, before requests get 429 (default: 4194304)",
    )  # fmt: skip
    add("--max-body-size", metavar="SIZE", default=absent, help="of a request (default: 16MiB)")
    add(
        "--request-timeout", dest="request_timeout_s", metavar="SECONDS", type=float, default=absent,
        help="from a request to the end of its answer, after which it gets 408 (default: any time)",
    )  # fmt: skip
    add(
        "--drain-timeout", dest="drain_timeout_s", metavar="SECONDS", type=float, default=absent,
        help="how long requests in flight may go on after a signal to stop (default: 25)",
    )  # fmt: skip
    add(
        "--stuck-after", dest="stuck_after_s", metavar="SECONDS", type=float, default=absent,
        help="report an engine that has work and makes no step for so long (default: 120)",
    )  # fmt: skip


def take(options: MutableMapping[str, Any]) -> "FrontConfig":
    """Take these options out of all of them. Raises: ValueError for what cannot be."""
    from vmmkv.server.front_settings import FrontConfig, read_keys
    from vmmkv.units import parse_bytes

    names = FrontConfig.__dataclass_fields__.keys() - {"api_keys", "admin_key", "max_body_bytes"}
    front = {name: options.pop(name) for name in names & options.keys()}
    keys = list(options.pop("api_key", ()))
    if (path := options.pop("api_key_file", None)) is not None:
        keys += read_keys("--api-key-file", path)
    admin_key = options.pop("admin_key", None)
    if (path := options.pop("admin_key_file", None)) is not None:
        admin_keys = (*(() if admin_key is None else (admin_key,)), *read_keys("--admin-key-file", path))
        if len(admin_keys) > 1:
            raise ValueError("--admin-key and --admin-key-file name several keys; the administrator has one")
        (admin_key,) = admin_keys
    if "max_body_size" in options:
        front["max_body_bytes"] = parse_bytes(options.pop("max_body_size"))
    return FrontConfig(api_keys=tuple(dict.fromkeys(keys)), admin_key=admin_key, **front)
