"""Random problems in vmmkv's geometry, with poison in everything that a kernel must not read or must write."""

import dataclasses
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any

import pytest
import torch

from vmmkv.units import ceil_div, round_up
from vmmkv_kernels import reference
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.quantise import PAYLOAD_DTYPES, Kind, dequantise, payload_width, quantise

DEVICE = torch.device("cpu") if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)
"""The GPU where there is one, and else the CPU, in Triton's interpreter (see tests/conftest.py)."""
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
SMALL: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_dim": 64, "dtype": FP16}
"""The shape of tests that are about something else."""
LLAMA: dict[str, Any] = {"heads": 32, "kv_heads": 8, "head_dim": 128, "dtype": BF16}
"""That of Llama-3.1-8B."""
NAN = float("nan")
POISON = 0xFF
"""NaN in every float type, scales and fp8 payloads among them, and a payload that is rarely written."""
FINITE_POISON = 0x77
"""A finite number in every type, large in all but int4: for rows that may be touched, though they are not read."""
NO_BLOCK = 2**31 - 1
"""A table entry that must not be read."""
SPARE_BLOCKS = 3
"""Physical blocks that no table names."""
STRAY = 3
"""Queries at the end that belong to no sequence."""
LENGTHS = (0, 1, 15, 16, 17, 63, 111, 127, 128, 129, 1000)

Format = tuple[int, int, torch.dtype, Kind | None, str]
"""kv heads, head dim, the dtype of what is not quantised, kind, and where the scales are: "token", "head" or ""."""
FORMATS: list[tuple[Kind | None, str]] = [(None, ""), ("fp8", "token"), ("fp8", "head"), ("int8", "token"), ("int4", "token")]
"""Everything that K and V are kept as."""

dtypes = pytest.mark.parametrize("dtype", [FP16, FP32], ids=["fp16", "fp32"])


def some(default: Sequence[Any], wide: Sequence[Any] = ()) -> list[Any]:
    """Values of a parametrisation: those of every run, and those that the nightly run adds."""
    nightly = [pytest.param(*(value if isinstance(value, tuple) else (value,)), marks=pytest.mark.nightly) for value in wide]
    return [*default, *nightly]


def index(*values: int, dtype: torch.dtype = torch.int32, device: torch.device = DEVICE) -> torch.Tensor:
    """Integers on the device."""
    return torch.tensor(values, dtype=dtype, device=device)


def assert_close(out: torch.Tensor, truth: torch.Tensor, peer: torch.Tensor) -> None:
    """The rule of FlashAttention's tests: at most twice the error of torch in the same dtype (`peer`), plus 1e-5."""
    bound = 2 * (peer.float() - truth).abs().max().item() + 1e-5
    error = (out.float() - truth).abs().max().item()
    assert error <= bound, f"error {error:.3g} is above {bound:.3g}"


@dataclass(frozen=True, kw_only=True)
class Memory:
    """Rows of K and V payloads, then their token scales; each head begins at a multiple of 16 bytes."""

    bytes_STE: torch.Tensor
    """Also one more slot (or block) at the end, and what lies around K and V in a row."""
    k: torch.Tensor
    v: torch.Tensor
    scales: dict[str, torch.Tensor]
    format: Format

    def values(self) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V dequantised, in float32; zero for poison."""
        k, v = self.k.float(), self.v.float()
        if self.scales:
            k, v = dequantise(self.k, self.scales["k_scale"]), dequantise(self.v, self.scales["v_scale"])
        return k.nan_to_num(0.0), v.nan_to_num(0.0)

    def in_blocks(self, block: int) -> tuple["Memory", torch.Tensor]:
        """The same rows in shuffled physical blocks of so many rows. Returns them and the table of each slot."""
        num_slots, num_rows = self.k.shape[:2]
        columns = ceil_div(num_rows, block)
        num_blocks = num_slots * columns + SPARE_BLOCKS
        blocks = make_memory((num_blocks, block), *self.format, self.k.device)
        blocks.scales.update({name: scale for name, scale in self.scales.items() if scale.dim() == 1})
        order = torch.randperm(num_blocks, generator=torch.Generator().manual_seed(block))[: num_slots * columns]
        tables_SC = order.to(self.k.device).view(num_slots, columns)
        padded = self.bytes_STE.new_full((num_slots, columns * block, self.bytes_STE.shape[2]), POISON)
        padded[:, :num_rows] = self.bytes_STE[:num_slots]
        blocks.bytes_STE[tables_SC.flatten()] = padded.view(-1, block, padded.shape[2])
        return blocks, tables_SC.int()


def make_memory(
    shape: tuple[int, int],
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    kind: Kind | None = None,
    scale: str = "",
    device: torch.device = DEVICE,
) -> Memory:
    """A layer between two others, of [slots, rows] or [blocks, rows of a block]: poison, but for head scales."""
    stored = PAYLOAD_DTYPES[kind] if kind else dtype
    width = payload_width(kind, head_dim)
    head_bytes = round_up(width * stored.itemsize, 16)
    plane_bytes, scale_bytes = kv_heads * head_bytes, round_up(2 * kv_heads, 16)
    first_scale = 64 + 2 * plane_bytes
    row_bytes = first_scale + 2 * scale_bytes + 64
    bytes_STE = torch.full((shape[0] + 1, shape[1], row_bytes), POISON, dtype=torch.uint8, device=device)
    own_STE = bytes_STE[:-1]

    def plane(i: int) -> torch.Tensor:
        start = 64 + i * plane_bytes
        return own_STE[:, :, start : start + plane_bytes].unflatten(-1, (kv_heads, head_bytes)).view(stored)[..., :width]

    def scales_of(i: int) -> torch.Tensor:
        if scale == "head":
            return torch.rand(kv_heads, generator=torch.Generator().manual_seed(1 + i)).to(device) / 100
        if kv_heads % 2 == 0:  # in pairs, as a cache has them
            return own_STE[:, :, first_scale : first_scale + 4 * kv_heads].view(FP16)[:, :, i::2]
        start = first_scale + i * scale_bytes
        return own_STE[:, :, start : start + 2 * kv_heads].view(FP16)

    scales = {"k_scale": scales_of(0), "v_scale": scales_of(1)} if scale else {}
    return Memory(bytes_STE=bytes_STE, k=plane(0), v=plane(1), scales=scales, format=(kv_heads, head_dim, dtype, kind, scale))


@dataclass(frozen=True, kw_only=True)
class Case:
    """One attention problem: the last queries of each sequence, and where the sequences' rows are. Decode without `starts`."""

    q_NHD: torch.Tensor
    memory: Memory
    lengths_B: torch.Tensor
    slots_B: torch.Tensor
    starts: torch.Tensor | None = None

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        """Of `decode` or `prefill`, in order."""
        starts = () if self.starts is None else (self.starts,)
        return self.q_NHD, self.memory.k, self.memory.v, *starts, self.lengths_B, self.slots_B

    @property
    def num_slots(self) -> int:
        return self.memory.k.shape[0]

    @property
    def num_queries(self) -> int:
        """Queries that belong to a sequence."""
        return self.q_NHD.shape[0] - (0 if self.starts is None else STRAY)

    def limits(self, limit: int, *of_sequences: int) -> torch.Tensor:
        """The limit of each slot: that of the first sequences, and `limit` for all others."""
        limit_S = torch.full((self.num_slots,), limit, dtype=torch.int32, device=self.q_NHD.device)
        limit_S[self.slots_B[: len(of_sequences)].long()] = limit_S.new_tensor(of_sequences)
        return limit_S

    def attend(self, **options: Any) -> torch.Tensor:
        """By the kernels, over slots, into poison."""
        return self._attend(self.arguments, self.memory.scales | options)

    def attend_in_blocks(self, block: int, **options: Any) -> torch.Tensor:
        """By the kernels, over the same rows in shuffled blocks; table entries past the longest sequence name no block."""
        blocks, tables_SC = self.memory.in_blocks(block)
        longest_S = torch.zeros(self.num_slots, dtype=torch.int64, device=self.lengths_B.device)
        longest_S.scatter_reduce_(0, self.slots_B.long(), self.lengths_B.long(), "amax")
        if "limit_S" in options:
            longest_S = longest_S.minimum(options["limit_S"])
        columns_C = torch.arange(tables_SC.shape[1], device=tables_SC.device)
        tables_SC[columns_C * block >= longest_S[:, None]] = NO_BLOCK
        arguments = (self.q_NHD, blocks.k, blocks.v, *self.arguments[3:])
        return self._attend(arguments, blocks.scales | {"tables_SC": tables_SC} | options)

    def _attend(self, arguments: tuple[torch.Tensor, ...], options: dict[str, Any]) -> torch.Tensor:
        kernel = decode if self.starts is None else prefill
        if "out" in options:  # perhaps under capture, where nothing may be looked at
            return kernel(*arguments, **options)
        out = self.poisoned_out()
        assert kernel(*arguments, out=out, **options) is out
        assert self.starts is None or out[self.num_queries :].isnan().all(), "a query of no sequence has no output"
        return out[: self.num_queries]

    def only(self, b: int, first: int = 0, stop: int | None = None) -> "Case":
        """Sequence b alone; the chunk [first, stop) of its queries."""
        lengths_B, slots_B = self.lengths_B[b : b + 1].clone(), self.slots_B[b : b + 1].clone()
        if self.starts is None:
            return dataclasses.replace(self, q_NHD=self.q_NHD[b : b + 1], lengths_B=lengths_B, slots_B=slots_B)
        start, end = int(self.starts[b]), int(self.starts[b + 1])
        stop = end - start if stop is None else stop
        q_NHD = torch.cat([self.q_NHD[start + first : start + stop], self.q_NHD[-STRAY:]])
        return dataclasses.replace(
            self,
            q_NHD=q_NHD,
            starts=index(0, stop - first, device=q_NHD.device),
            lengths_B=lengths_B - (end - start - stop),
            slots_B=slots_B,
        )

    def with_long_indices(self) -> "Case":
        """The same with indices of 64 bits."""
        return dataclasses.replace(self, lengths_B=self.lengths_B.long(), slots_B=self.slots_B.long())

    def poisoned_out(self) -> torch.Tensor:
        """An output of NaN, every other head of a wider tensor."""
        num_queries, num_heads, head_dim = self.q_NHD.shape
        wide = torch.full((num_queries, 2 * num_heads, head_dim), NAN, dtype=self.q_NHD.dtype, device=self.q_NHD.device)
        return wide[:, ::2]

    def log_sum_exps(
        self, *, scale: float | None = None, softcap: float | None = None, window: int | None = None
    ) -> torch.Tensor:
        """[N, H] log2(sum(exp(score))) of each query, by torch in float32; NaN for queries of no sequence."""
        assert self.starts is not None
        num_queries, num_heads, head_dim = self.q_NHD.shape
        lse_NH = torch.full((num_queries, num_heads), NAN, device=self.q_NHD.device)
        starts, lengths, slots = (each.tolist() for each in (self.starts, self.lengths_B, self.slots_B))
        for start, end, length, slot in zip(starts, starts[1:], lengths, slots, strict=False):
            k_THD = self.memory.values()[0][slot, :length].repeat_interleave(num_heads // self.memory.k.shape[2], 1)
            scores_HNT = torch.einsum("nhd,thd->hnt", self.q_NHD[start:end].float(), k_THD) * (scale or head_dim**-0.5)
            if softcap is not None:
                scores_HNT = softcap * torch.tanh(scores_HNT / softcap)
            seen_NT = torch.ones(end - start, length, dtype=torch.bool, device=lse_NH.device).tril(length - end + start)
            seen_NT = seen_NT if window is None else seen_NT.triu(length - end + start - window + 1)
            lse_NH[start:end] = scores_HNT.masked_fill(~seen_NT, -math.inf).logsumexp(2).T / math.log(2.0)
        return lse_NH

    def assert_right(self, out_NHD: torch.Tensor, **options: Any) -> None:
        """`assert_close` to the reference."""
        counts_B = torch.ones_like(self.lengths_B) if self.starts is None else self.starts.diff()
        arguments = (self.q_NHD[: self.num_queries], *self.memory.values(), counts_B, self.lengths_B, self.slots_B)
        truth = reference.prefill(*arguments, **options)
        assert_close(out_NHD, truth, reference.prefill(*arguments, **options, dtype=out_NHD.dtype))


def make_case(
    lengths: Sequence[int],
    counts: Sequence[int] | None = None,
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device = DEVICE,
    kind: Kind | None = None,
    scale: str = "token",
    window: int | None = None,
    num_rows: int | None = None,
    seed: int = 0,
) -> Case:
    """Sequences of these lengths in shuffled slots. Rows past a length, before a window and in other slots are poison.

    With `counts` the last so many tokens of each sequence are new, for `prefill`. All layers of a token share a row, as in
    vmmkv, and K and V are those of a middle one. `scale` is for quantised ones.
    """
    generator = torch.Generator(device).manual_seed(seed)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator, device=device).to(dtype)

    num_slots, num_rows = len(lengths) + 2, num_rows or max(*lengths, 1) + 5
    memory = make_memory((num_slots, num_rows), kv_heads, head_dim, dtype, kind, scale if kind else "", device)
    slots = torch.randperm(num_slots, generator=torch.Generator().manual_seed(seed))[: len(lengths)].tolist()
    for slot, length, count in zip(slots, lengths, counts or [1] * len(lengths), strict=True):
        start = max(0, length - count + 1 - window) if window else 0
        for view, name in ((memory.k, "k_scale"), (memory.v, "v_scale")):
            values_TKD = random(length - start, kv_heads, head_dim)
            if kind is None:
                view[slot, start:length] = values_TKD
            elif scale == "head":
                view[slot, start:length] = quantise(values_TKD, kind, memory.scales[name])[0]
            else:
                view[slot, start:length], memory.scales[name][slot, start:length] = quantise(values_TKD, kind)
    num_queries = len(lengths) if counts is None else sum(counts) + STRAY
    return Case(
        q_NHD=random(num_queries, heads + 2 * kv_heads, head_dim)[:, :heads],
        memory=memory,
        lengths_B=index(*lengths, device=device),
        slots_B=index(*slots, device=device),
        starts=None if counts is None else index(0, *accumulate(counts), device=device),
    )
