"""What is compared: systems that serve workloads, a line each.

    SHARED          over weights and limits that all share: the engine over each kind of memory, and transformers
    vmmkv, VLLM     as their users open them, in all memory: the engine in this process, and vLLM

To add a system, write a class with the methods of `runs.SharedSystem` or `runs.UsersSystem`, and its line here. Suites name
the systems that they compare; rows have the same names.

models       models that are served: configurations, weights, bounds, tokenizers
runs         a run of a workload, and the checks of it (read first)
engine       the engine over a kind of memory, and as a user opens it
outside      transformers and vLLM
over_http    `vmmkv serve`, and several behind a router, in processes of their own; clients
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.baselines import COMMON_PREFILL, PAGED_FA3, fa3
from bench.baselines.backend import open_common_prefill, open_paged, open_paged_fa3, open_static
from bench.harness import Recorder, Settings, Shape, release_memory
from bench.systems.engine import EngineSystem, Options, UserEngine
from bench.systems.models import ServedModel, Weights, model_of, tokenizer_file
from bench.systems.runs import SharedSystem, UsersSystem
from vmmkv_server.engine.kv_backend import OpenBackend, SlotBackend

# over the same weights, with the same limits

TRANSFORMERS: Final = "transformers StaticCache"
NO_SHARING: Final = "none"
"""vmmkv without a prefix cache."""


class Shared(NamedTuple):
    """How a system over shared weights is opened, by its name, and why it cannot run here; None if it can."""

    open: Callable[[str, Weights, Options], SharedSystem]
    lacks: Callable[[Settings], str | None] = lambda settings: None


def _engine(open_memory: OpenBackend = SlotBackend.open, **fixed: Any) -> Callable[[str, Weights, Options], SharedSystem]:
    return lambda name, weights, limits: EngineSystem(weights, {**limits, **fixed}, name=name, open_memory=open_memory)


def _static(name: str, weights: Weights, limits: Options) -> SharedSystem:
    return EngineSystem(weights, limits, name=f"{name} {limits['max_tokens']}", open_memory=open_static)


def _fa3(name: str, weights: Weights, limits: Options) -> SharedSystem:
    fa3.load(weights.settings.fa3, weights.device)
    return EngineSystem(weights, limits, name=name, open_memory=open_paged_fa3)


def _transformers(name: str, weights: Weights, limits: Options) -> SharedSystem:
    from bench.systems.outside import StaticBatches  # not above: transformers takes seconds to import

    return StaticBatches(name, weights, limits)


def _lacks_hopper(settings: Settings) -> str | None:
    is_hopper = settings.on_gpu and torch.cuda.get_device_capability(settings.device) == (9, 0)
    return None if is_hopper else "vmmkv runs without its Hopper kernel here"


SHARED: Final[Mapping[str, Shared]] = {
    "vmmkv": Shared(_engine()),
    "paged 16": Shared(_engine(open_paged)),
    PAGED_FA3: Shared(_fa3, lambda settings: fa3.why_absent(settings.fa3, settings.device)),
    "paged 128": Shared(_engine(partial(open_paged, block_rows=128))),
    "static": Shared(_static),
    COMMON_PREFILL: Shared(_engine(open_common_prefill), _lacks_hopper),
    NO_SHARING: Shared(_engine(prefix_cache=False)),
    TRANSFORMERS: Shared(_transformers),
}
"""By the name that rows have; `static` adds the tokens of a slot."""
MEMORIES: Final = ("vmmkv", "paged 16", PAGED_FA3, "paged 128", "static", COMMON_PREFILL)
"""The engine over each kind of memory."""


def absent(settings: Settings, names: Iterable[str]) -> dict[str, str]:
    """Systems that cannot run here, and why."""
    return {name: why for name in names if (why := SHARED[name].lacks(settings))}


# as users open them


class Users(NamedTuple):
    """How a system is opened as its users do, and over how many GPUs."""

    name: str
    open: Callable[[ServedModel, Settings], UsersSystem]
    num_ranks: int = 1


def vmmkv(num_ranks: int = 1) -> Users:
    """The engine in this process."""
    return Users("vmmkv" if num_ranks == 1 else f"vmmkv, TP {num_ranks}", partial(UserEngine, num_ranks=num_ranks), num_ranks)


def _vllm(model: ServedModel, settings: Settings) -> UsersSystem:
    from bench.systems.outside import Vllm

    return Vllm(model, settings)


VLLM: Final = Users("vLLM", _vllm)


def lacks_vllm(settings: Settings) -> str | None:
    """Why vLLM cannot run; None if it can."""
    if find_spec("vllm") is None:
        return "the package vllm is not installed"
    return None if settings.device == torch.device("cuda:0") else "it runs on cuda:0 alone"


# the systems of one model


class Context:
    """Context of the parts of one model: the model, the recorder of rows, and an engine that a part keeps for the next."""

    def __init__(
        self, recorder: Recorder, shape: Shape, users: Users | None = None, alone: dict[str, Any] | None = None
    ) -> None:
        self.recorder, self.settings = recorder, recorder.settings
        self.users = users or vmmkv()
        """The system that is opened as its users open it."""
        self.alone = {} if alone is None else alone
        """By part, what first tokens are held against: those of requests alone, by vmmkv over the fewest ranks."""
        self.model: ServedModel = model_of(shape.name, tiny=self.settings.small)
        self._kept: tuple[Callable[..., Any], Any] | None = None

    def name(self, part: str, text: str) -> str:
        """A row's workload."""
        return f"{self.model.name} {part}: {text}"

    def engine(self, open_: Callable[..., Any], *arguments: Any) -> Any:
        """The kept engine if it was opened so; else a new one, which takes all memory: another is closed first."""
        if self._kept is None or self._kept[0] is not open_:
            self.close()
            self.recorder.note(f"{self.model.name}: the engine starts")
            self._kept = open_, open_(*arguments)
        return self._kept[1]

    @contextmanager
    def beside(self, limits: Options, names: Iterable[str]) -> Iterator[list[SharedSystem]]:
        """Systems of SHARED beside each other, over the same weights, but those that cannot run here. No engine is kept."""
        self.close()
        with ExitStack() as stack:
            weights = Weights(self.model, self.settings)
            stack.callback(weights.close)
            stack.enter_context(torch.inference_mode())
            systems: list[SharedSystem] = []
            stack.callback(systems.clear)
            for name in names:
                if SHARED[name].lacks(self.settings) is None:
                    self.recorder.note(f"{self.model.name}: {name} starts")
                    systems.append(SHARED[name].open(name, weights, limits))
                    stack.callback(systems[-1].close)
            del weights
            yield systems
        self.close()  # collects: what captured graphs and weights keep is not free before

    @contextmanager
    def with_texts(self) -> Iterator[Path]:
        """The directory of the model with a tokenizer, as which it is served in the block. No engine is kept."""
        self.close()
        bare, self.model = self.model, self.model.with_tokenizer(tokenizer_file(self.settings.tokenizer))
        try:
            with self.model.directory() as directory:
                yield directory
        finally:
            self.model = bare
            self.close()

    def close(self) -> None:
        """Close the kept engine."""
        kept, self._kept = self._kept, None
        if kept is not None:
            kept[1].close()
        del kept
        release_memory(self.settings.device)
