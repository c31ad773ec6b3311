"""What the parts that compare systems ask of them, and what the systems may take."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Final, TypeVar

from bench import workloads
from bench.serve.models import ServedModel
from bench.serve.system import Limits
from bench.settings import Settings
from bench.workloads import Workload
from vmmkv.units import GIB, MIB

_Asked = TypeVar("_Asked", Workload, float)

_IDS: Final = 10_001
"""Token ids of prompts are below it, whatever the model, as in the suite's other parts."""

_DOCUMENTS: Final = 0.3
"""How long documents are, as a share of arxiv's: most of them fit beside an answer into what a static slot reserves."""

_SMALL: Final = 0.04
"""How long chats are for a tiny model, as a share of how long people's are."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """What a request must keep to, to count as good (goodput, as in DistServe: Zhong et al., OSDI 2024)."""

    first_s: float
    """From its arrival to its first token."""
    per_token_s: float
    """For each token behind it, on average."""

    @property
    def text(self) -> str:
        """In words."""
        return f"{self.first_s:g} s to the first token, {1e3 * self.per_token_s:g} ms for each other"


@dataclass(frozen=True, slots=True, kw_only=True)
class ComparedSizes:
    """Sizes of one model's comparison."""

    limits: Limits
    closed: tuple[Workload, ...]
    """All requests there at once, or when the turn before has ended."""
    outside: tuple[Workload, ...]
    """What is served without the engine too."""
    open: Workload
    """Its requests arrive one after the other."""
    rates: tuple[float, ...]
    """Requests a second, of a Poisson process."""
    bursts: tuple[float, ...]
    """The same, in bursts."""
    duration_s: float
    """For which they arrive; at least `least` do."""
    least: int
    target: Target
    sampled: int
    """Requests whose first tokens are held against those of the first system."""

    def case_names(self, part: str) -> list[str]:
        """By which `--cases` chooses among what a part asks one after the other: workloads' names, or rates."""
        asked: tuple[Workload | float, ...] = getattr(self, part)
        return [_case_name(each) for each in asked]

    def only(self, cases: Sequence[str]) -> "ComparedSizes":
        """Of what the parts ask that of these names; all if none is named."""
        if not cases:
            return self

        def chosen(asked: tuple[_Asked, ...]) -> tuple[_Asked, ...]:
            return tuple(each for each in asked if _case_name(each) in cases)

        return replace(
            self,
            closed=chosen(self.closed),
            outside=chosen(self.outside),
            rates=chosen(self.rates),
            bursts=chosen(self.bursts),
        )

    def arriving(self, rate: float, burstiness: float, seed: int) -> Workload:
        """The open workload's first requests at a rate."""
        count = min(len(self.open.asks), max(self.least, round(rate * self.duration_s)))
        first = Workload(name=self.open.name, text=self.open.text, asks=self.open.asks[:count])
        return workloads.arriving(first, rate, burstiness, seed=seed)

    @classmethod
    def of(cls, model: ServedModel, seed: int, *, small: bool, max_num_batched_tokens: int | None) -> "ComparedSizes":
        """Those of bench/README.md; or `small` ones, which say only that everything works."""
        longest = 512 if small else 4096
        common: dict[str, Any] = {"seed": seed, "vocabulary": min(_IDS, model.vocabulary), "max_tokens": longest}
        if small:
            limits = Limits(budget_bytes=16 * MIB, max_tokens=longest, max_num_seqs=8, max_num_batched_tokens=256)
            closed = [
                workloads.uniform(**common, count=6, prompt=(10, 100), out=(10, 40)),
                workloads.chat(**common, count=6, scale=_SMALL),
                workloads.long_documents(**common, count=3, scale=_SMALL),
                workloads.shared_prefix(**common, count=6, prefix_tokens=256, own=(8, 16), out=(8, 16)),
                workloads.multi_turn(**common, count=2, turns=2, new=(20, 40), out=(10, 20), think_s=0.05),
                workloads.skewed(**common, count=6, short=(10, 40), long=(300, 400), out=(8, 30)),
                workloads.ragged(**common, count=6, prompt=(10, 100), mean_out=20),
            ]
        else:
            limits = Limits(
                budget_bytes=24 * GIB, max_tokens=longest, max_num_seqs=256, max_num_batched_tokens=max_num_batched_tokens
            )
            closed = [
                workloads.uniform(**common, count=128),
                workloads.chat(**common, count=96),
                workloads.long_documents(**common, count=48, scale=_DOCUMENTS),
                workloads.shared_prefix(**common, count=128, prefix_tokens=2048),
                workloads.multi_turn(**common, count=32, turns=4),
                workloads.skewed(**common, count=128),
                workloads.ragged(**common, count=128),
            ]
        return cls(
            limits=limits,
            closed=tuple(closed),
            outside=tuple(closed if small else (workloads.uniform(**common, count=32), workloads.chat(**common, count=32))),
            open=workloads.chat(**common, count=8 if small else 256, scale=_SMALL if small else 1.0),
            rates=(4.0, 8.0) if small else (1.0, 2.0, 4.0, 8.0, 16.0),
            bursts=(8.0,) if small else (2.0, 8.0),
            duration_s=1.0 if small else 12.0,
            least=4 if small else 24,
            target=Target(first_s=5.0, per_token_s=0.5) if small else Target(first_s=1.0, per_token_s=0.05),
            sampled=2 if small else 4,
        )


def sizes_of(settings: Settings, model: ServedModel) -> ComparedSizes:
    """Those of a run."""
    return ComparedSizes.of(
        model,
        settings.seed,
        small=settings.quick or not settings.on_gpu,
        max_num_batched_tokens=settings.max_num_batched_tokens,
    )


def _case_name(asked: Workload | float) -> str:
    return asked.name if isinstance(asked, Workload) else f"{asked:g}"
