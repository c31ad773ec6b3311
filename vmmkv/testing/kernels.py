"""Every attention function at hand: vmmkv's own, and those of `vmmkv.adapters.attention` whose library is installed."""

import importlib.util
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

import torch

from vmmkv.adapters import attention
from vmmkv.kernels import decode, prefill
from vmmkv.testing.subject import Form


@dataclass(frozen=True, slots=True, kw_only=True)
class Kernel:
    """An attention function, and what it needs."""

    name: str
    attention_fn: Callable[..., torch.Tensor]
    form: Form
    library: str | None = None
    """The module that it imports when it is called, if that is none of vmmkv's requirements."""
    guard: Callable[[int, torch.dtype], int] | None = None
    """Rows of guard, by head dim and dtype; none if None."""
    capturable: bool = False

    def missing(self, device: torch.device) -> str | None:
        """Why it cannot run on this device; None if it can."""
        if self.library is None:
            return None
        if importlib.util.find_spec(self.library) is None:
            return f"{self.library} is not installed"
        return None if device.type == "cuda" else f"{self.library} needs a GPU"

    def guard_tokens(self, head_dim: int, dtype: torch.dtype) -> int:
        """What the cache is to be made with."""
        return 0 if self.guard is None else self.guard(head_dim, dtype)


_FLASH_3: Final = "flash_attn_interface"

KERNELS: Final = (
    Kernel(name="vmmkv decode", attention_fn=decode.decode, form="decode", capturable=True),
    Kernel(name="vmmkv prefill", attention_fn=prefill.prefill, form="prefill", capturable=True),
    Kernel(name="SDPA, decode", attention_fn=attention.sdpa_decode, form="decode"),
    Kernel(name="SDPA grouped, decode", attention_fn=attention.sdpa_decode_grouped, form="decode"),
    Kernel(name="SDPA, prefill", attention_fn=attention.sdpa_prefill, form="prefill"),
    Kernel(name="FlexAttention, decode", attention_fn=attention.flex_decode, form="decode"),
    Kernel(name="FlexAttention, prefill", attention_fn=attention.flex_prefill, form="prefill"),
    Kernel(
        name="FlashAttention-2, decode",
        attention_fn=attention.flash_2_decode,
        form="decode",
        library="flash_attn",
        capturable=True,
    ),
    Kernel(name="FlashAttention-2, prefill", attention_fn=attention.flash_2_prefill, form="prefill", library="flash_attn"),
    Kernel(
        name="FlashAttention-3, decode",
        attention_fn=attention.flash_3_decode,
        form="decode",
        library=_FLASH_3,
        guard=attention.flash_3_guard_tokens,
        capturable=True,
    ),
    Kernel(
        name="FlashAttention-3, prefill",
        attention_fn=attention.flash_3_prefill,
        form="prefill",
        library=_FLASH_3,
        guard=attention.flash_3_guard_tokens,
        capturable=True,
    ),
    Kernel(
        name="FlashAttention-3 varlen, prefill",
        attention_fn=attention.flash_3_varlen,
        form="prefill",
        library=_FLASH_3,
        guard=attention.flash_3_guard_tokens,
        capturable=True,
    ),
    Kernel(name="FlashInfer, decode", attention_fn=attention.flashinfer_decode, form="decode", library="flashinfer"),
    Kernel(name="FlashInfer, prefill", attention_fn=attention.flashinfer_prefill, form="prefill", library="flashinfer"),
)
