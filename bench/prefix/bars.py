"""What the issue of shared prefixes has promised, computed from rows; and the table of a run."""

from collections.abc import Iterator

from bench.kernels.bars import Bar, Key, Medians
from bench.prefix.attaching import AGAIN
from bench.prefix.naming import PROMISED, shape_of
from bench.report import Report

_CHOOSER, _PAGED = "vmmkv chooser", "paged 16"
_METHODS = ("vmmkv adopt", "vmmkv alias", "vmmkv compute")


def bars(medians: Medians, p99s: Medians) -> Iterator[Bar]:
    """All of them, in the issue's order, of Llama-3.1-8B's shape: rows of other shapes are held against nothing."""
    medians, p99s = ({key: each for key, each in of.items() if shape_of(key[0]) == PROMISED} for of in (medians, p99s))
    requests = {_short(key[0]): key[0] for key in medians if " requests of " in key[0]}

    def ratios(metric: str, over: str, under: str) -> dict[str, float]:
        pairs = {
            short: (medians.get((name, over, metric)), medians.get((name, under, metric))) for short, name in requests.items()
        }
        return {short: a / b for short, (a, b) in pairs.items() if a is not None and b}

    yield Bar(text="memory against blocks", bound=1.05, figures=ratios("memory, held", _CHOOSER, _PAGED), at_least=False)
    yield Bar(text="total time against blocks", bound=1.02, figures=ratios("total", _CHOOSER, _PAGED), at_least=False)
    against: dict[str, float] = {}
    for short, name in requests.items():
        methods_s = [total for method in _METHODS if (total := medians.get((name, method, "total"))) is not None]
        chooser_s = medians.get((name, _CHOOSER, "total"))
        if methods_s and chooser_s is not None:
            against[short] = chooser_s / min(methods_s)
    yield Bar(text="the chooser against the best method, in total time", bound=1.03, figures=against, at_least=False)
    attention = {key[1]: value for key, value in medians.items() if key[2] == "attention"}
    aliased, copied, paged = (attention.get(name) for name in ("aliased", "copied", "paged"))
    yield Bar(
        text="attention over aliases, times as fast as over copies",
        bound=1.7,
        figures={} if aliased is None or copied is None else {"decode": copied / aliased},
    )
    yield Bar(
        text="attention over aliases against blocks, in time",
        bound=1.0,
        figures={} if aliased is None or paged is None else {"decode": aliased / paged},
        at_least=False,
    )
    adopted = [value for (name, _, metric), value in medians.items() if name.startswith("chat") and metric == "by adopt"]
    yield Bar(text="turns of a chat that adopt, %", bound=95, figures={"turns": adopted[0]} if adopted else {})
    alone: Key = ("attach 4096 tokens", AGAIN, "in the driver")
    text = "attaching 4096 tokens by alias, us of driver time"
    yield Bar(text=text, bound=1000, figures={"p50": medians[alone]} if alone in medians else {}, at_least=False)
    slowest = {"alone, p99": p99s[alone]} if alone in p99s else {}
    serving: Key = (requests.get("4096 warm", ""), "vmmkv alias", "attach, in the driver")
    if serving in p99s:
        slowest["serving, p99"] = p99s[serving]
    yield Bar(text=text, bound=2000, figures=slowest, at_least=False)


def print_tables(report: Report) -> None:
    """All rows of a run, then the promises kept or not."""
    report.print_tables("prefix")
    rows = [row for row in report.rows if row.suite == "prefix"]
    medians = {(row.workload, row.system, row.metric): row.summary.p50 for row in rows}
    p99s = {(row.workload, row.system, row.metric): row.summary.p99 for row in rows}
    promised = list(bars(medians, p99s))
    if any(bar.figures for bar in promised):
        report.say("\nprefix: bars" + ("; quick: figures are noise" if report.file.provenance.quick else ""))
        for bar in promised:
            report.say(bar.line())


def _short(workload: str) -> str:
    """The shared tokens and the state of "N requests of P + own tokens, ..., state"."""
    words = workload.split()
    return f"{words[words.index('of') + 1]} {words[-1]}"
