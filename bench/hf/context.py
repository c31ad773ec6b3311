"""What the parts of the suite share: sizes, models, rows of the report, and what to do on failure."""

import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Final

import torch

from bench.hf.sizes import Sizes
from bench.report import Report
from bench.rows import Row
from bench.serve.models import ServedModel, model_of
from bench.settings import Settings
from bench.timing import exact, summarize

SUITE: Final = "hf"


class Context:
    """One run of the suite."""

    def __init__(self, settings: Settings, report: Report) -> None:
        self.settings, self.report = settings, report
        self.device: Final = settings.device
        self.sizes: Final = Sizes.of(settings)
        self.rows_of: Final = model_of(settings.shape.name, tiny=False)
        """Whose rows are kept where no model runs: in bfloat16, on a CPU too."""
        self.decoder: Final = model_of(settings.shape.name, tiny=settings.quick or not settings.on_gpu)
        """What decodes."""
        self.failures: list[Exception] = []

    def config_of(self, model: ServedModel) -> Any:
        """As transformers has it. Loaded here: transformers takes seconds to import."""
        from transformers import AutoConfig

        return AutoConfig.for_model(**model.config)

    def random_model(self) -> Any:
        """The decoder, with random weights: float32 on a CPU, where results are compared exactly, bfloat16 on a GPU."""
        from transformers import AutoModelForCausalLM

        dtype = torch.bfloat16 if self.settings.on_gpu else torch.float32
        torch.manual_seed(self.settings.seed)
        with self.device:
            config = self.config_of(self.decoder)
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa")
        return model.requires_grad_(False).eval()

    @contextmanager
    def guarded(self, what: str) -> Iterator[None]:
        """What fails in here is said and kept, and the suite goes on."""
        try:
            yield
        except Exception as error:
            self.report.say(f"absent: {what}: {type(error).__name__}: {error}")
            error.add_note(what)
            traceback.clear_frames(error.__traceback__)  # they have caches, whose memory what comes next needs
            self.failures.append(error)

    def add(
        self, workload: str, system: str, metric: str, unit: str, samples: Sequence[float], bound: float | None = None
    ) -> None:
        """A row of samples."""
        names = {"suite": SUITE, "workload": workload, "system": system, "metric": metric, "unit": unit}
        self.report.add(Row(**names, summary=summarize(samples), bound=bound))

    def add_figure(self, workload: str, system: str, metric: str, unit: str, figure: float, bound: float | None = None) -> None:
        """A row of one figure."""
        names = {"suite": SUITE, "workload": workload, "system": system, "metric": metric, "unit": unit}
        self.report.add(Row(**names, summary=exact(figure, 1), bound=bound))
