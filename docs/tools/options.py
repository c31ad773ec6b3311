"""The table of docs/guides/server/options.md, from the options' declarations: `python docs/tools/options.py` writes it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from vmmkv_server.config import Option

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "guides" / "server" / "options.md"
_TABLE: Final = re.compile(r"(<!-- options -->\n).*(<!-- end of options -->)", re.DOTALL)
_CODE: Final = re.compile(r"(?<!`)(--[a-z-]+|/[a-z_]+(?:/[a-z_]+)*(?=[ ,;]|$)|\w+://[^ ,]+)")
"""Flags, routes and addresses."""
_SEE: Final = {
    "tensor_parallel_size": "[Several GPUs](models.md#several-gpus)",
    "load_format": "[quantised models](models.md), which have no random weights",
    "kv_budget_bytes": "[capacity planning](../capacity.md#what-the-server-takes)",
    "kv_cache_dtype": "[Quantised KV](models.md#quantised-kv)",
    "kv_holder": "[Upgrades and crashes](operate.md#upgrades-and-crashes)",
    "kv_lender": "[Prefill and decode apart](../scale-out.md#prefill-and-decode-apart)",
    "kv_policy": "[Fewer rows](api.md#fewer-rows)",
    "kv_host_budget_bytes": "[Tiers](operate.md#tiers)",
    "kv_store": "[Tiers](operate.md#tiers); a URL with a password stays out of the process list in `VMMKV_KV_STORE`",
    "kv_events": "[KV events](../../reference/kv-events.md)",
    "allowed_hosts": "[Keys](operate.md#keys)",
}
"""What the guides say of a field."""


def filled(text: str) -> str:
    """The page with the table of today's options."""
    lines = "".join(_lines())
    return _TABLE.sub(
        lambda table: f"{table[1]}\n| option | default | what it does |\n|---|---|---|\n{lines}\n{table[2]}", text
    )


def _lines() -> Iterator[str]:
    from vmmkv.cli.serve import shown_default
    from vmmkv_server.config import OPTIONS

    yield "| `--config FILE` | none | a TOML file with any of these options |\n"
    for option in OPTIONS:
        text = _CODE.sub(r"`\1`", option.help.text)
        see = f". See {_SEE[option.field]}" if option.field in _SEE else ""
        yield f"| `{_flag(option)}` | {shown_default(option)} | {text}{see} |\n"


def _flag(option: "Option") -> str:
    if option.kind is bool:
        return option.flag.replace("--", "--[no-]")
    return f"{option.flag} {(option.help.metavar or option.name.upper()).replace('|', ' or ')}"


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / source) for source in (".", "kernels", "server")]
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
