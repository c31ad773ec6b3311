"""Random problems in vmmkv's geometry, with NaN in everything that a kernel must not read or must write."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from vmmkv.kernels import reference

NAN = float("nan")
LENGTHS = (0, 1, 15, 16, 17, 63, 111, 127, 128, 129, 1000)


@dataclass(frozen=True, kw_only=True)
class Case:
    """One decode problem: the arguments of `decode`, in order."""

    q_BHD: torch.Tensor
    k_STKD: torch.Tensor
    v_STKD: torch.Tensor
    lengths_B: torch.Tensor
    slots_B: torch.Tensor

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q_BHD, self.k_STKD, self.v_STKD, self.lengths_B, self.slots_B

    def only(self, b: int) -> "Case":
        """Sequence b alone."""
        return Case(
            q_BHD=self.q_BHD[b : b + 1],
            k_STKD=self.k_STKD,
            v_STKD=self.v_STKD,
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
    window: int | None = None,
    num_rows: int | None = None,
    seed: int = 0,
) -> Case:
    """Sequences of these lengths in shuffled slots of an arena of three layers; K and V are those of the middle one.

    All layers of a token share a row, as in vmmkv. Rows past a length, before a window and in other slots are NaN.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_slots, num_rows = len(lengths) + 2, num_rows or max(*lengths, 1) + 5
    arena = torch.full((num_slots, num_rows, 3, 2, kv_heads, head_dim), NAN, dtype=dtype, device=device)
    k_STKD, v_STKD = arena[:, :, 1, 0], arena[:, :, 1, 1]
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[: len(lengths)].tolist()
    for slot, length in zip(slots, lengths, strict=True):
        start = max(0, length - window) if window else 0
        k_STKD[slot, start:length] = random(length - start, kv_heads, head_dim)
        v_STKD[slot, start:length] = random(length - start, kv_heads, head_dim)
    return Case(
        q_BHD=random(len(lengths), heads + 2 * kv_heads, head_dim)[:, :heads],
        k_STKD=k_STKD,
        v_STKD=v_STKD,
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots_B=torch.tensor(slots, dtype=torch.int32, device=device),
    )


def assert_right(
    out_BHD: torch.Tensor, case: Case, *, scale: float | None = None, window: int | None = None, softcap: float | None = None
) -> None:
    """The rule of FlashAttention's tests: at most twice the error of torch in the same dtype, plus 1e-5."""
    k_STKD, v_STKD = case.k_STKD, case.v_STKD
    if window is not None:
        # torch multiplies a masked NaN by zero and gets NaN; the kernels do not read it.
        k_STKD, v_STKD = k_STKD.nan_to_num(0.0), v_STKD.nan_to_num(0.0)
    arguments = (case.q_BHD, k_STKD, v_STKD, case.lengths_B, case.slots_B)
    truth = reference.decode(*arguments, scale=scale, window=window, softcap=softcap)
    peer = reference.decode(*arguments, scale=scale, window=window, softcap=softcap, dtype=out_BHD.dtype)
    bound = 2 * (peer.float() - truth).abs().max().item() + 1e-5
    error = (out_BHD.float() - truth).abs().max().item()
    assert error <= bound, f"error {error:.3g} is above {bound:.3g}"
