"""The context that the parts of a shape share, and the parts that vLLM serves too."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final

import torch

from bench.harness import Recorder, Settings, Shape, release_memory
from bench.suites.serve.models import ServedModel, model_of, tokenizer_file

GENERATED: Final = ("mixed", "single", "first", "long", "shared", "sampled", "full")
"""Parts of `generate`. vLLM, outside, serves the same."""


class Context:
    """Context of the parts of one shape: the model, the recorder of rows, and an engine that a part keeps for the next."""

    def __init__(self, recorder: Recorder, shape: Shape, num_ranks: int = 1, alone: dict[str, Any] | None = None) -> None:
        self.recorder, self.settings = recorder, recorder.settings
        self.num_ranks = num_ranks
        """Ranks of the engines that are opened as users open them."""
        self.alone = {} if alone is None else alone
        """By part: what `generate` holds first tokens against, by the engine of the fewest ranks."""
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


def lacks_vllm(settings: Settings) -> str | None:
    """Why vLLM cannot run; None if it can."""
    if find_spec("vllm") is None:
        return "the package vllm is not installed"
    return None if settings.device == torch.device("cuda:0") else "it runs on cuda:0 alone"
