"""What serves the same requests without the engine: transformers by `generate` and by its continuous batching, and vLLM.

weights     the engine's weights as a model of transformers: the same memory, under other names
batches     `model.generate` over one batch after the other, with a DynamicCache or a StaticCache
continuous  what takes requests as they come: their loop, and transformers' own continuous batching
from_vllm   vLLM, where it is installed

Nothing but weights is kept between two runs, so that each has the whole budget. Greedy, and no token ends an answer early.
"""

from importlib.util import find_spec

import torch

from bench.serve.system import Limits, Models, System


def outside_systems(models: Models, limits: Limits) -> list[System]:
    """Those that can run here. transformers takes seconds to import, and is imported now.

    Raises: ValueError if the budget does not hold one sequence.
    """
    from bench.serve.outside.batches import Batches
    from bench.serve.outside.continuous import ContinuousBatching
    from bench.serve.outside.weights import as_transformers

    model = as_transformers(models)
    systems: list[System] = [
        Batches("DynamicCache", model, limits),
        Batches("StaticCache", model, limits),
        ContinuousBatching(model, limits),
    ]
    if "vLLM" not in absent(models.device):
        from bench.serve.outside.from_vllm import Vllm

        systems.append(Vllm(models, limits))
    return systems


def absent(device: torch.device) -> dict[str, str]:
    """Those that cannot, and why."""
    reasons = {
        "vLLM over FlashInfer": "vLLM attends by its own choice here; FlashInfer's kernels alone are in the suite kernels"
    }
    if find_spec("vllm") is None:
        return reasons | {"vLLM": "the package vllm is not installed"}
    return reasons if device.type == "cuda" else reasons | {"vLLM": f"it is installed, and does not run on {device} here"}
