"""The matrix products of one decoder layer by rows: the library's (cuBLAS), and where it takes so few rows our kernel's.

    query, key and value; output; gate and up; down       one behind the other, as in a layer, without norms and residuals

Layers of weights take turns, so many that no L2 cache keeps one until its next turn. Bounds are the bytes of weights over the
memory's bandwidth, or the products over dense bfloat16.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Final

import torch
from torch.nn.functional import linear

from bench.harness import BF16_FLOPS, HBM_BYTES_PER_S, Recorder, WrongNumbers, time_for
from bench.systems.models import ServedModel, model_of
from vmmkv.units import MIB, ceil_div
from vmmkv_kernels import linear as kernels

_ROWS: Final = (1, 8, 16, 32, 64, 128, 256)
_LEAST_BYTES: Final = 512 * MIB
"""Of all weights; some ten times an L2 cache."""
_TOLERANCE: Final = 1e-2

Product = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]
"""x [M, K], weight [N, K]: [M, N]."""


def run(recorder: Recorder) -> None:
    """Every model's layer at every number of rows."""
    settings = recorder.settings
    for shape in settings.shapes or (settings.shape,):
        _measure(recorder, model_of(shape.name, tiny=settings.small))


def _measure(recorder: Recorder, model: ServedModel) -> None:
    settings, device = recorder.settings, recorder.settings.device
    dtype = torch.bfloat16 if settings.on_gpu else torch.float32
    hidden, inner = model.config["hidden_size"], model.config["intermediate_size"]
    attended, kv_width = model.attention_width, model.config["num_key_value_heads"] * model.config["head_dim"]
    sizes = [(attended + 2 * kv_width, hidden), (hidden, attended), (2 * inner, hidden), (hidden, inner)]
    num_weights = sum(num_outputs * num_inputs for num_outputs, num_inputs in sizes)
    generator = torch.Generator(device).manual_seed(settings.seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device=device, dtype=dtype)

    num_layers = 1 if settings.small else ceil_div(_LEAST_BYTES, num_weights * dtype.itemsize)
    layers = [[random(*size) for size in sizes] for _ in range(num_layers)]
    for num_rows in recorder.track(_ROWS, lambda num_rows: f"{model.name}, rows: {num_rows}"):
        workload = f"{model.name}: a layer's products of {num_rows} rows"
        inputs = [random(num_rows, num_inputs) for _, num_inputs in sizes]
        systems: dict[str, Product] = {"cuBLAS" if settings.on_gpu else "torch": linear}
        if settings.on_gpu and num_rows <= kernels.MAX_ROWS:
            systems["vmmkv"] = kernels.linear
        bound_s = max(num_weights * dtype.itemsize / HBM_BYTES_PER_S, 2 * num_rows * num_weights / BF16_FLOPS)
        for system, product in systems.items():
            with recorder.guarded(workload, system):
                _check(product, inputs, layers[0])
                all_us = time_for(partial(_multiply, product, inputs, layers), device, 0.02 if settings.quick else 0.2)
                recorder.samples(workload, system, "time", "us", [each / num_layers for each in all_us], 1e6 * bound_s)


def _multiply(product: Product, inputs: Sequence[torch.Tensor], layers: Sequence[Sequence[torch.Tensor]]) -> None:
    for weights in layers:
        for x_MK, weight_NK in zip(inputs, weights, strict=True):
            product(x_MK, weight_NK)


def _check(product: Product, inputs: Sequence[torch.Tensor], weights: Sequence[torch.Tensor]) -> None:
    """Raises: WrongNumbers if a product is not that of float64."""
    for x_MK, weight_NK in zip(inputs, weights, strict=True):
        wanted_MN = x_MK.double() @ weight_NK.double().T
        off = float((product(x_MK, weight_NK).double() - wanted_MN).norm() / wanted_MN.norm())
        if not off <= _TOLERANCE:
            raise WrongNumbers(f"{tuple(x_MK.shape)} by {tuple(weight_NK.shape)}: off by {off:.2g}")
