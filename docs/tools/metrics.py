"""The table of docs/guides/server/metrics.md, from what a server exports: `python docs/tools/metrics.py` writes it."""

import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Final

from prometheus_client.metrics_core import Metric

ROOT: Final = Path(__file__).parents[2]
PAGE: Final = ROOT / "docs" / "guides" / "server" / "metrics.md"
_TABLE: Final = re.compile(r"(<!-- metrics -->\n).*(<!-- end of metrics -->)", re.DOTALL)


def filled(text: str) -> str:
    """The page with the table of today's metrics."""
    families = [family for family in _families() if family.name.startswith("vmmkv_")]
    lines = "".join(f"| `{_name(family)}` | {family.type} | {family.documentation.rstrip('.')} |\n" for family in families)
    return _TABLE.sub(lambda table: f"{table[1]}\n| metric | type | what it is |\n|---|---|---|\n{lines}\n{table[2]}", text)


def _families() -> Iterator[Metric]:
    """Metrics of a server that has tiers and a holder."""
    from tests.server.fake_engine import READY, FakeEngine, with_features
    from vmmkv_server.engine_client import EngineClient
    from vmmkv_server.metrics import Metrics

    ready = with_features(READY)
    engine, client = FakeEngine("ipc://nowhere", ready=ready), EngineClient("ipc://nowhere")
    engine.holder_is_gone = False
    client.snapshot, client.feature_metrics = engine.snapshot(), ready.feature_metrics
    metrics = Metrics(client, "model")
    for source in (metrics, metrics.requests, metrics.refused):
        yield from source.collect()


def _name(family: Metric) -> str:
    """The name with suffix and labels, as queries have it."""
    labels = [*getattr(family, "_labelnames", {}), *(label for sample in family.samples for label in sample.labels)]
    shown = ", ".join(label for label in dict.fromkeys(labels) if label != "le")
    return family.name + ("_total" if family.type == "counter" else "") + (f"{{{shown}}}" if shown else "")


if __name__ == "__main__":
    sys.path[:0] = [str(ROOT / source) for source in (".", "kernels", "server")]
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
