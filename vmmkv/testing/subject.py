"""What is tested: an attention function, the form of its arguments, and the memory that it is to be right on."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Final, Literal, get_args

import torch

Form = Literal["decode", "prefill"]

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An attention function and what it is tested on. It goes to a child process, by pickle.

    The two forms, and what each argument is, stand at `vmmkv.testing.conformance`.
    """

    attention_fn: Callable[..., torch.Tensor]
    form: Form
    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    guard_tokens: int
    error_ratio: float
    """How much larger than torch's in the same dtype the error may be."""
    error_floor: float
    """What is added to that."""
    capturable: bool
    """Is it launches alone, which a CUDA graph can capture?"""

    def __post_init__(self) -> None:
        if not callable(self.attention_fn):
            raise TypeError(f"attention_fn is {self.attention_fn!r}; give a function")
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r}: an attention function has the form {' or '.join(get_args(Form))}")
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(self.device)!r}: there is vmmkv memory on 'cpu' and 'cuda:0'")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: it is one of {', '.join(map(str, DTYPES))}")
        if self.kv_heads < 1 or self.head_dim < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}: all at least 1, and heads a multiple "
                f"of kv_heads"
            )
        if self.guard_tokens < 0 or self.error_ratio < 1.0 or self.error_floor < 0.0:
            raise ValueError(
                f"guard_tokens={self.guard_tokens}, error_ratio={self.error_ratio}, error_floor={self.error_floor}: at least "
                f"0, 1 and 0"
            )

    @property
    def name(self) -> str:
        """Of the function."""
        return getattr(self.attention_fn, "__name__", repr(self.attention_fn))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.form}, {dtype}, {heads}, guard_tokens={self.guard_tokens}, on {self.device}"
