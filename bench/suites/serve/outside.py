"""transformers beside the engine under the workloads of `compared`, and vLLM under those of `generate`."""

from collections.abc import Sequence

from bench.suites.serve import compared
from bench.suites.serve.context import GENERATED, Context, lacks_vllm
from bench.suites.serve.generate import computed_alone, measure, stages
from bench.suites.serve.models import Weights
from bench.suites.serve.peers import Vllm, save_weights
from bench.suites.serve.systems import UserEngine


def run(context: Context, part: str) -> None:
    """transformers beside the engine, and vLLM under the workloads of `generate`, as far as they are wanted."""
    compared.run(context, part)
    wanted = [each for each in GENERATED if context.settings.wants_case(each)]
    if wanted and lacks_vllm(context.settings) is None:
        _run_vllm(context, wanted)


def _run_vllm(context: Context, parts: Sequence[str]) -> None:
    """vLLM over the engine's weights. First tokens are held against the engine's, of the request alone."""
    model, settings = context.model, context.settings
    ours: UserEngine = context.engine(UserEngine, model, settings)
    all_stages = [stages(model, settings, part) for part in parts]
    wanted = [computed_alone(context, ours, of_part) for of_part in all_stages]
    context.close()  # each engine takes all memory
    with model.directory() as folder:
        save_weights(Weights(model, settings.device, settings.seed), folder)
        vllm: Vllm = context.engine(Vllm, folder, model, settings)
    for of_part, of_ours in zip(all_stages, wanted, strict=True):
        measure(context, vllm, of_part, of_ours)
