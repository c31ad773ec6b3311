"""Random problems in vmmkv's geometry, with poison in everything that a kernel must not read or must write."""

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from tests.kernels.memories import Memory, make_memory
from vmmkv.kernels import reference
from vmmkv.kernels.attention.decode import decode
from vmmkv.kernels.attention.paged import paged_decode
from vmmkv.kernels.quantise import Kind, quantise

NAN = float("nan")
LENGTHS = (0, 1, 15, 16, 17, 63, 111, 127, 128, 129, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode problem: a query for each sequence, and where the sequences' rows are."""

    q_BHD: torch.Tensor
    memory: Memory
    lengths_B: torch.Tensor
    slots_B: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Of `decode`, in order."""
        return self.q_BHD, self.memory.k, self.memory.v, self.lengths_B, self.slots_B

    @property
    def num_slots(self) -> int:
        return self.memory.k.shape[0]

    def decode(self, **options: Any) -> torch.Tensor:
        """By the kernel, over slots."""
        return decode(*self.arguments, **self.memory.scales, **options)

    def paged_decode(self, block: int, **options: Any) -> torch.Tensor:
        """By the kernel, over the same rows in shuffled blocks; what a table has past the longest sequence is garbage."""
        blocks, tables_SC = self.memory.in_blocks(block)
        longest_S = torch.zeros(self.num_slots, dtype=torch.int64, device=self.lengths_B.device)
        longest_S.scatter_reduce_(0, self.slots_B.long(), self.lengths_B.long(), "amax")
        columns_C = torch.arange(tables_SC.shape[1], device=tables_SC.device)
        tables_SC[columns_C * block >= longest_S[:, None]] = 2**31 - 1
        arguments = (self.q_BHD, blocks.k, blocks.v, self.lengths_B, self.slots_B, tables_SC)
        return paged_decode(*arguments, **blocks.scales, **options)

    def only(self, b: int) -> "Case":
        """Sequence b alone."""
        return dataclasses.replace(
            self,
            q_BHD=self.q_BHD[b : b + 1],
            lengths_B=self.lengths_B[b : b + 1].clone(),
            slots_B=self.slots_B[b : b + 1].clone(),
        )

    def poisoned_out(self) -> torch.Tensor:
        """An output of NaN, every other head of a wider tensor."""
        num_sequences, num_heads, head_dim = self.q_BHD.shape
        wide = torch.full((num_sequences, 2 * num_heads, head_dim), NAN, dtype=self.q_BHD.dtype, device=self.q_BHD.device)
        return wide[:, ::2]


def make_case(
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    kind: Kind | None = None,
    scale: str = "token",
    window: int | None = None,
    num_rows: int | None = None,
    seed: int = 0,
) -> Case:
    """Sequences of these lengths in shuffled slots. Rows past a length, before a window and in other slots are poison.

    All layers of a token share a row, as in vmmkv, and K and V are those of a middle one. `scale` is for quantised ones.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_slots, num_rows = len(lengths) + 2, num_rows or max(*lengths, 1) + 5
    memory = make_memory((num_slots, num_rows), kv_heads, head_dim, dtype, kind, scale if kind else "", device)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[: len(lengths)].tolist()
    for slot, length in zip(slots, lengths, strict=True):
        start = max(0, length - window) if window else 0
        for view, name in ((memory.k, "k_scale"), (memory.v, "v_scale")):
            values_TKD = random(length - start, kv_heads, head_dim)
            if kind is None:
                view[slot, start:length] = values_TKD
            elif scale == "head":
                view[slot, start:length] = quantise(values_TKD, kind, memory.scales[name])[0]
            else:
                view[slot, start:length], memory.scales[name][slot, start:length] = quantise(values_TKD, kind)
    return Case(
        q_BHD=random(len(lengths), heads + 2 * kv_heads, head_dim)[:, :heads],
        memory=memory,
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots_B=torch.tensor(slots, dtype=torch.int32, device=device),
    )


def assert_right(out_BHD: torch.Tensor, case: Case, **options: Any) -> None:
    """The rule of FlashAttention's tests: at most twice the error of torch in the same dtype, plus 1e-5."""
    arguments = (case.q_BHD, *case.memory.values(), case.lengths_B, case.slots_B)
    truth = reference.decode(*arguments, **options)
    peer = reference.decode(*arguments, **options, dtype=out_BHD.dtype)
    bound = 2 * (peer.float() - truth).abs().max().item() + 1e-5
    error = (out_BHD.float() - truth).abs().max().item()
    assert error <= bound, f"error {error:.3g} is above {bound:.3g}"
