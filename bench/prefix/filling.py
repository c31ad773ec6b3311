"""A prefix without a model: random rows that are the same in every system, and the proof that what is attached has them.

Legend: T rows, K kv heads, D head dim.
"""

import numpy as np
import torch

from bench.prefix.systems import System, TokenIds
from bench.settings import Shape
from bench.timing import WrongNumbers
from vmmkv.units import PAGE_BYTES


def fill(system: System, shape: Shape, device: torch.device, tokens: TokenIds, *, seed: int, page_by_page: bool = False) -> int:
    """A running sequence that has rows of all `tokens` and has made them known. Returns its slot. Nobody knew them before.

    `page_by_page`: as memory comes to a sequence that decodes; else as it comes to a prompt, all at once.
    """
    slot = system.attach(tokens, len(tokens)).slot
    step = max(1, PAGE_BYTES // shape.layout.row_bytes) if page_by_page else len(tokens)
    one = np.array([slot])
    for end in (*range(step, len(tokens), step), len(tokens)):
        system.reserve(one, np.array([end]))
    system.advance(one, np.array([len(tokens)]))
    for layer in range(shape.layers):
        system.write(layer, slot, *_random(shape, device, len(tokens), seed + layer))
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # confirmed, and not only launched
    system.insert(slot, tokens)
    return slot


def check_rows(system: System, shape: Shape, slot: int, source: int, num_tokens: int) -> None:
    """Are the first rows of two slots the same, bit for bit? Raises WrongNumbers."""
    for layer in range(shape.layers):
        pairs = zip(system.rows(layer, slot, num_tokens), system.rows(layer, source, num_tokens), strict=True)
        for name, (given_TKD, wanted_TKD) in zip("kv", pairs, strict=True):
            if not torch.equal(given_TKD, wanted_TKD):
                raise WrongNumbers(f"layer {layer}, {name}: attached rows differ from those of the prefix")


def _random(shape: Shape, device: torch.device, num_tokens: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator(device).manual_seed(seed)
    size = (num_tokens, shape.kv_heads, shape.head_dim)
    k_TKD, v_TKD = (torch.randn(size, dtype=shape.dtype, device=device, generator=generator) for _ in range(2))
    return k_TKD, v_TKD
