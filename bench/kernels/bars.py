"""What the kernels' issue has promised of Llama-3.1-8B's shapes, computed from rows."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Final

from bench.kernels.attending import AGAIN
from bench.kernels.cases import DECODE, SKEWED, TWIN
from bench.settings import SHAPES

SHAPE: Final = "llama-3.1-8b"

Key = tuple[str, str, str]
"""Workload, system, metric."""
Medians = Mapping[Key, float]

_VMMKV, _PLAIN, _PAGED = "vmmkv, all layers a page", "cudaMalloc", "paged 16"
_LARGE_BYTES: Final = 8e9


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """A promise, and its figures by the name of what they are of. `at_least` or else at most `bound`, each of them."""

    text: str
    bound: float
    figures: Mapping[str, float]
    at_least: bool = True

    @property
    def holds(self) -> bool:
        """Every figure? Not if there is none."""
        good = (figure >= self.bound if self.at_least else figure <= self.bound for figure in self.figures.values())
        return bool(self.figures) and all(good)

    def line(self) -> str:
        """A line of a checklist, in Markdown."""
        mark = "x" if self.holds else " "
        figures = (
            f"{name} {figure:,.0f}" if figure >= 100 else f"{name} {figure:.2f}" for name, figure in self.figures.items()
        )
        wanted = f"{'>=' if self.at_least else '<='} {self.bound:,g}"
        return f"- [{mark}] {self.text} ({wanted}): {', '.join(figures) or 'not measured'}"


def bars(medians: Medians) -> Iterator[Bar]:
    """All of them, in the issue's order."""
    shape = SHAPES[SHAPE]
    names = [case.name for case in DECODE]

    def layer_us(case: str, system: str, part: str = "decode") -> float | None:
        return medians.get((f"{SHAPE} {part} {case}", system, "layer"))

    def ratios(over: str, under: str, cases: list[str] = names) -> dict[str, float]:
        pairs = {case: (layer_us(case, over), layer_us(case, under)) for case in cases}
        return {case: a / b for case, (a, b) in pairs.items() if a is not None and b is not None}

    def figure(name: str, workload: str, system: str, metric: str) -> dict[str, float]:
        value = medians.get((f"{SHAPE} {workload}", system, metric))
        return {} if value is None else {name: value}

    # Measured before and after vmmkv's memory: half of a drift goes to either.
    first, last = ratios(f"decode, {_PLAIN}", f"decode, {_VMMKV}"), ratios(f"decode, {_PLAIN}{AGAIN}", f"decode, {_VMMKV}")
    both = {case: (ratio + last.get(case, ratio)) / 2 for case, ratio in first.items()}
    yield Bar(text="decode on vmmkv's memory against cudaMalloc", bound=0.97, figures=both)
    large = [
        case.name for case in DECODE if case.bytes_per_layer(shape.layout.groups[0].layer_bytes) * shape.layers >= _LARGE_BYTES
    ]
    speeds: dict[str, float] = {}
    for case in large:
        speeds |= figure(case, f"decode {case}", f"decode, {_VMMKV}", "bandwidth")
    yield Bar(text="decode on vmmkv's memory, GB/s where K and V are 8 GB or more", bound=4200, figures=speeds)
    yield Bar(
        text="decode against FlashAttention-3, both on vmmkv's memory",
        bound=1.0,
        figures=ratios(f"FA3, {_VMMKV}", f"decode, {_VMMKV}"),
    )
    yield Bar(
        text="decode on vmmkv's memory against FlashAttention-3 over blocks of 16",
        bound=1.3,
        figures=ratios(f"FA3, {_PAGED}", f"decode, {_VMMKV}", ["1x1K", "1x8K"]),
    )
    skewed, twin = layer_us(SKEWED.name, f"decode, {_VMMKV}"), layer_us(TWIN.name, f"decode, {_VMMKV}")
    yield Bar(
        text="a skewed batch against a uniform one of the same bytes, in time",
        bound=1.1,
        figures={} if skewed is None or twin is None else {SKEWED.name: skewed / twin},
        at_least=False,
    )
    yield Bar(
        text="prefill on vmmkv's memory, TFLOP/s",
        bound=450,
        figures=figure("8192", "prefill 8192", f"prefill, {_VMMKV}", "throughput"),
    )
    for kind, least in (("fp8", 1.6), ("int4", 2.5)):
        faster: dict[str, float] = {}
        for (workload, system, metric), value in medians.items():
            if workload == f"{SHAPE} quantised 64x8K" and system.startswith(f"decode {kind}") and metric.startswith("speed-up"):
                faster[system.removeprefix("decode ")] = value
        yield Bar(text=f"{kind} K and V against bf16 at 64x8K, in tokens a second", bound=least, figures=faster)
    moved = {system: medians.get((f"{SHAPE} append 8192", system, "moved")) for system in (f"append, {_VMMKV}", "copy_")}
    appended, copied = moved.values()
    yield Bar(
        text="append on vmmkv's memory against torch's copy of the same bytes",
        bound=0.8,
        figures={} if appended is None or copied is None else {"8192": appended / copied},
    )
