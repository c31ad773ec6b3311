"""What every suite is told: the device, the shape of the model, how long to measure."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

import torch

from vmmkv import KVLayout


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """The parts of a model that a KV cache sees, and the bytes of its weights, which every decode step reads too."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    weight_bytes: int

    @property
    def layout(self) -> KVLayout:
        """One group, all layers in a row."""
        return KVLayout.uniform(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype)


_SHAPES = (
    Shape(
        name="llama-3.1-8b", layers=32, heads=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16, weight_bytes=16_060_522_496
    ),
    Shape(name="qwen3-0.6b", layers=28, heads=16, kv_heads=8, head_dim=128, dtype=torch.bfloat16, weight_bytes=1_192_099_840),
    Shape(name="smollm2-135m", layers=30, heads=9, kv_heads=3, head_dim=64, dtype=torch.bfloat16, weight_bytes=269_030_016),
    # Rows of 64 KiB in one layer: many pages are crossed in few steps, and a CPU still attends to them in milliseconds.
    Shape(name="wide", layers=1, heads=32, kv_heads=32, head_dim=256, dtype=torch.float32, weight_bytes=0),
)
SHAPES: Final = {shape.name: shape for shape in _SHAPES}
MODEL_SHAPES: Final = _SHAPES[:3]
"""Those of real models."""

_MOST: Final = 2**31 - 1
_MOST_SEQUENCES: Final = 65_536
"""More than any memory has rows for; their slots still find addresses: of llama-3.1-8b 10 TiB, of the 128 TiB there are."""

_RANGES: Final[Mapping[str, tuple[int, int]]] = {
    "seed": (0, _MOST),
    "sequences": (1, _MOST_SEQUENCES),
    "steps": (1, _MOST),
    "repeat": (1, _MOST),
    "max_num_batched_tokens": (1, _MOST),
}
"""By setting, the least and the most; refusals name it as the command line does."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run of the benchmarks.

    `quick` measures briefly, to see that everything works; its figures are noise. `work` is what a decode step of the
    append suite does on the device: `attention` (real rows, real kernels) or `sleep`. `sequences` and `steps` of None
    are the suite's own choice.

    `parts` of the kernels, the prefix or the serve suite by their names, empty for all. `cases` likewise, of the kernels suite
    and of the serve suite's parts that compare systems. Of the kernels suite: `fa3`, FlashAttention-3's library; `shapes`,
    empty for `shape` alone. Of the serve suite: `repeat`, timed runs of each workload; `max_num_batched_tokens`, what a step
    computes at most, None for the engine's own choice; `tokenizer`, the tokenizer.json of its parts that make texts, None for
    that of SmolLM2.
    """

    device: torch.device
    shape: Shape
    quick: bool = False
    seed: int = 0
    work: str = "attention"
    sequences: int | None = None
    steps: int | None = None
    parts: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    fa3: Path | None = None
    shapes: tuple[Shape, ...] = ()
    repeat: int = 2
    max_num_batched_tokens: int | None = None
    tokenizer: Path | None = None

    def __post_init__(self) -> None:
        for name, (least, most) in _RANGES.items():
            value = getattr(self, name)
            if value is not None and not least <= value <= most:
                limit = f"at least {least}" if value < least else f"at most {most:,}"
                raise ValueError(f"--{name.replace('_', '-')} {value}: {limit}")
        if self.fa3 is not None and not self.fa3.is_file():
            raise ValueError(f"--fa3 {self.fa3}: no such file; it is the library _vllm_fa3_C.abi3.so of vLLM's wheel")

    @property
    def kernel_shapes(self) -> tuple[Shape, ...]:
        """What the kernels suite measures, the most important first."""
        return self.shapes or (self.shape,)

    @property
    def on_gpu(self) -> bool:
        """Is the device a GPU?"""
        return self.device.type == "cuda"
