"""What the parts of the suite share: sizes, workloads, one run of each system under each, rows, and what to do on failure."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from bench import workloads
from bench.report import Report
from bench.rows import Row
from bench.settings import Settings, Shape
from bench.timing import exact, summarize
from bench.waste.loop import Outcome, simulate
from bench.waste.memories import Memory, Static, Tables
from bench.waste.sizes import MAX_TOKENS, Sizes, shapes_of
from bench.waste.slots import Slots
from bench.workloads import Workload
from vmmkv.units import format_bytes

SUITE: Final = "waste"

VOCABULARY: Final = 32_000
"""Token ids are no matter here, but where prompts are shared."""

_WORKLOADS: Final = (workloads.uniform, workloads.chat, workloads.long_documents, workloads.skewed, workloads.ragged)

System = Callable[[Shape, Sizes], Memory]
SYSTEMS: Final[tuple[System, ...]] = (
    lambda shape, sizes: Slots(shape, sizes.budget_bytes, slots=sizes.slots),
    lambda shape, sizes: Tables(shape, sizes.budget_bytes, slots=sizes.slots),
    lambda shape, sizes: Static(shape, sizes.budget_bytes),
)


class Context:
    """One run of the suite."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings, self.report = settings, report
        self.sizes: Final = Sizes.of(settings)
        self.shapes: Final = shapes_of(settings)
        self.failures: list[Exception] = []
        self.workloads: Final = tuple(
            make(seed=settings.seed, vocabulary=VOCABULARY, count=self.sizes.asks, max_tokens=MAX_TOKENS) for make in _WORKLOADS
        )
        self._outcomes: dict[tuple[str, str], list[Outcome]] = {}

    @property
    def runs(self) -> list[tuple[Shape, Workload]]:
        """Each model under each workload."""
        return [(shape, workload) for shape in self.shapes for workload in self.workloads]

    def name(self, shape: Shape, workload: Workload) -> str:
        """A row's workload."""
        return f"{shape.name} {workload.name}: {workload.text}, {format_bytes(self.sizes.budget_bytes)}"

    def outcomes(self, shape: Shape, workload: Workload) -> list[Outcome]:
        """Of all systems that did not fail; run when they are first asked for, and for all parts."""
        key = shape.name, workload.name
        if key not in self._outcomes:
            self._outcomes[key] = []
            for system in SYSTEMS:
                with self.guarded(self.name(shape, workload)):
                    memory = system(shape, self.sizes)
                    outcome = simulate(memory, workload, shape, self.sizes, seed=self.settings.seed)
                    self._outcomes[key].append(outcome)
        return self._outcomes[key]

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails in here is said and kept, and the suite goes on."""
        try:
            yield
        except Exception as error:
            self.report.say(f"absent: {what}: {type(error).__name__}: {error}")
            error.add_note(what)
            self.failures.append(error)

    def add(
        self, workload: str, system: str, metric: str, unit: str, samples: Sequence[float], bound: float | None = None
    ) -> None:
        """A row of samples."""
        names = {"suite": SUITE, "workload": workload, "system": system, "metric": metric, "unit": unit}
        self.report.add(Row(**names, summary=summarize(samples), bound=bound))

    def add_figure(
        self, workload: str, system: str, metric: str, unit: str, figure: float, count: int, bound: float | None = None
    ) -> None:
        """A row of one figure over `count` things."""
        names = {"suite": SUITE, "workload": workload, "system": system, "metric": metric, "unit": unit}
        self.report.add(Row(**names, summary=exact(figure, count), bound=bound))
