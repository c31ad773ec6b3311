"""The socket of features: what the loop asks of them, and what it tells them.

A feature is a capability of some requests. It stands in a module of `features/`, keeps a table of its own by request, and meets
the loop in the hooks that it defines. To those of others it costs nothing, to a request without it a look into its table.

    receive ── refusal, need ──> waiting ── shape ──> admitted ──> planned ── launched ──> results, sampled ──> left, finished

`planning` is told of each step before requests are admitted for it.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, TypeVar, get_type_hints

import numpy as np
import numpy.typing as npt

from vmmkv_server.engine.kv_backend import KVSequence, Slots, TokenIds
from vmmkv_server.engine.request import Request, Shape
from vmmkv_server.engine.runner import Runner
from vmmkv_server.engine.step import Chunk, Results, Step
from vmmkv_server.engine.uploads import TokenMasks
from vmmkv_server.protocol import Generate
from vmmkv_server.statistics import Metric, Statistics


class Need(NamedTuple):
    """Least memory that a request which has just come needs before it ends, and the words of a refusal for it."""

    num_rows: int
    """Rows after the prompt, in each sequence."""
    num_sequences: int = 1
    attaches: bool = True
    """May rows of its prompt be taken from the prefix cache?"""
    each: str = ""
    """Words of a refusal after the number of new tokens."""
    fewer: str = "tokens"
    """Words of a refusal for what to ask less of."""


Kind = TypeVar("Kind", bound="Feature")


class Followed(NamedTuple):
    """Outcome of the sampled tokens in a feature."""

    refused: dict[int, str]
    """Indices of tokens that end their requests by an error, and which."""
    continued: list[tuple[Request, list[int] | None]]
    """Requests that go on with these tokens of the host instead of a sampled one; None for those that end here."""


class Feature:
    """A capability of some requests. Each hook has a default that changes nothing.

    Questions are asked by the core. Events are told after they have happened, to all features in order.
    """

    def __init__(self, core: Any) -> None:
        """`core` is the `Core` of its engine: see `features/__init__.py`."""

    @staticmethod
    def warm_up(runner: Runner, whole: Chunk, behind: Chunk, compute: Callable[..., None]) -> None:
        """Have kernels compile, and torch take its peak of memory, for what it adds to steps, before there is an engine.

        `whole` and `behind` are two chunks of one prompt; `compute` runs a step of one of them, with more fields of `Step`.
        """

    # questions

    def refusal(self, ask: Generate) -> str | None:
        """Reason to refuse a request that has come, in words for the client; None to take it."""
        return None

    def takes(self, request: Request) -> bool:
        """Does it keep a request that has come, to add it to the scheduler later?"""
        return False

    def is_working(self) -> bool:
        """Does it keep any?"""
        return False

    def need(self, ask: Generate, need: Need) -> Need:
        """The least memory of a request that has come, given what it is without this feature."""
        return need

    def shape(self, request: Request, shape: Shape) -> Shape:
        """The shape of a request that begins to wait, given what it is without this feature."""
        return shape

    def hold(self, request: Request) -> bool | None:
        """Does it hold a request that could be admitted, with its slots reserved, until it is `released`?

        None: neither now, but it is worth waiting for what running requests leave when they end.
        """
        return False

    def is_full(self, priority: float) -> bool:
        """Is no request of this priority admitted, since enough are held?"""
        return False

    def released(self) -> list[Request]:
        """Requests that are held no longer."""
        return []

    def sources(self, request: Request, num_cached: int) -> Counter[str] | None:
        """Sources of the cached tokens of a request that is about to run, as of when it came; None: all on the device."""
        return None

    def chunks(self, request: Request) -> list[Chunk] | None:
        """All that can be computed now of a running request that does not decode; None: its own tokens.

        It may take memory by `Scheduler.with_room`, which can preempt requests, this one too.
        Raises: CannotRun, DriverError.
        """
        return None

    def sequences(self, request: Request) -> Sequence[KVSequence] | None:
        """The sequences of a running request that takes several slots; None: its own."""
        return None

    def masks_rows(self, step: Step) -> bool:
        """Do the tokens that may come next in rows of a launched step depend on those before? These are read first, then."""
        return False

    def masks(self, step: Step) -> TokenMasks | None:
        """Masks of the tokens that may come next in rows of a step. Its forward half runs, and all earlier tokens are known.

        One feature of an engine defines it, as `sampled`: see `Features.plug_in`.
        """
        return None

    def sampled(self, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> Followed:
        """Follow the next tokens of these slots, which are appended where they are kept. One feature alone defines it."""
        return Followed({}, [])

    # events

    def poll(self) -> None:
        """The loop goes round."""

    def cancel(self, request_id: str) -> None:
        """The client of a request has gone that is not with the scheduler."""

    def planning(self) -> None:
        """A step is about to be planned, and requests to be admitted for it. Raises: CannotRun."""

    def let_go(self, request: Request) -> None:
        """A request is held no longer: it has ended, or its room is needed."""

    def admitted(self, request: Request) -> None:
        """A request runs."""

    def planned(self, step: Step) -> None:
        """A step has been planned, and is launched next."""

    def launched(self, step: Step) -> None:
        """A step has been counted, and goes to the device. Its slots, ends and epochs may be put in another order."""

    def results(self, step: Step, results: Results) -> None:
        """A step has been read, and its rows are confirmed. Its tokens are answered next."""

    def mapped_ahead(self) -> None:
        """Pages are mapped ahead while the device computes, and some time is left. Raises: DriverError."""

    def prefilled(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """A step has been read that computed so many prompt tokens, at these times of time.perf_counter."""

    def left(self, request: Request) -> None:
        """A request gives its memory back, preempted or at its end."""

    def finished(self, request: Request) -> None:
        """A request has ended, whether it ever ran or not."""

    def close(self) -> None:
        """The engine ends. Idempotent."""

    def check(self) -> None:
        """Recount its tables, as tests do between steps. Raises: AssertionError."""

    def statistics(self) -> Statistics:
        """Numbers of the feature, for each snapshot. The return type in the annotation declares their metrics."""
        return Statistics()


def metrics_of(features: Iterable[type[Feature]]) -> dict[str, Metric]:
    """The metrics of features by name, as their `statistics` declare them."""
    metrics: dict[str, Metric] = {}
    for feature in features:
        metrics |= get_type_hints(feature.statistics)["return"].metrics()
    return metrics


class Features:
    """The features of one engine, in order. Without any it is that of a scheduler alone."""

    def __init__(self) -> None:
        self.every: tuple[Feature, ...] = ()
        self._having: dict[Callable[..., Any], tuple[Feature, ...]] = {}

    def plug_in(self, features: Iterable[Feature]) -> None:
        """Have these features, in place of others. Raises: TypeError if two answer what only one can."""
        self.every = tuple(features)
        for name, hook in vars(Feature).items():
            if not name.startswith("_"):
                self._having[hook] = tuple(each for each in self.every if getattr(type(each), name) is not hook)
        for hook in (Feature.masks, Feature.sampled):
            if len(several := self.having(hook)) > 1:
                names = " and ".join(type(each).__name__ for each in several)
                raise TypeError(f"{names} define {hook.__name__}, which one feature of an engine can")

    def having(self, hook: Callable[..., Any]) -> tuple[Feature, ...]:
        """The features that define a hook, which is named as `Feature.planned`."""
        return self._having.get(hook, ())

    def of(self, kind: type[Kind]) -> Kind:
        """The feature of this type."""
        return next(each for each in self.every if isinstance(each, kind))
