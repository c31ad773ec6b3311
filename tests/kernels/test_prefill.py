"""Laws of the prefill kernel, over slots and over blocks."""

import dataclasses
import importlib.util
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.kernels.cases import LENGTHS, NAN
from tests.kernels.compiling import assert_compiles
from vmmkv.kernels import reference
from vmmkv.kernels.attention.decode import decode, workspace_elements
from vmmkv.kernels.attention.paged import paged_prefill
from vmmkv.kernels.attention.prefill import PrefillTiling, _hopper, prefill
from vmmkv.kernels.quantise import KINDS, Kind, dequantise, quantise

SMALL: dict[str, Any] = {"heads": 4, "kv_heads": 2, "head_dim": 64, "dtype": torch.float16}
FEW_HEADS = {**SMALL, "heads": 2, "kv_heads": 1}
STRAY = 3
"""Rows of q that belong to no sequence."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Prompts:
    """One prefill problem, with NaN in all that must not be read: past the lengths, before the windows, in other slots."""

    q_NHD: torch.Tensor
    k: torch.Tensor
    v: torch.Tensor
    starts: torch.Tensor
    lengths_B: torch.Tensor
    slots_B: torch.Tensor
    k_truth_STKD: torch.Tensor
    """What K means, in float32 and with zeros for what must not be read."""
    v_truth_STKD: torch.Tensor
    scales: dict[str, torch.Tensor] = dataclasses.field(default_factory=dict)

    @property
    def arguments(self) -> tuple[torch.Tensor, ...]:
        return self.q_NHD, self.k, self.v, self.starts, self.lengths_B, self.slots_B

    @property
    def counts_B(self) -> torch.Tensor:
        return self.starts.diff()

    def poisoned_out(self) -> torch.Tensor:
        """An output of NaN, every other head of a wider tensor."""
        num_queries, num_heads, head_dim = self.q_NHD.shape
        wide = torch.full((num_queries, 2 * num_heads, head_dim), NAN, dtype=self.q_NHD.dtype, device=self.q_NHD.device)
        return wide[:, ::2]

    def part(self, b: int, first: int, stop: int) -> "Prompts":
        """The chunk [first, stop) of the queries of sequence b, alone."""
        start, count = int(self.starts[b]), int(self.counts_B[b])
        return dataclasses.replace(
            self,
            q_NHD=self.q_NHD[start + first : start + stop],
            starts=torch.tensor([0, stop - first], dtype=torch.int32, device=self.q_NHD.device),
            lengths_B=self.lengths_B[b : b + 1] - (count - stop),
            slots_B=self.slots_B[b : b + 1].clone(),
        )

    def attend_paged(self, block: int, **options: Any) -> torch.Tensor:
        """`paged_prefill` over the same rows in shuffled blocks."""
        num_slots, num_rows = self.k.shape[:2]
        columns = -(-num_rows // block)
        generator = torch.Generator().manual_seed(1)
        tables_SC = torch.randperm(num_slots * columns, generator=generator).view(num_slots, columns)

        def blocks(x_ST: torch.Tensor) -> torch.Tensor:
            rest = x_ST.shape[2:]
            padded = torch.zeros(num_slots, columns * block, *rest, dtype=x_ST.dtype)
            padded[:, :num_rows] = x_ST.cpu()
            shuffled = torch.empty(num_slots * columns, block, *rest, dtype=x_ST.dtype)
            shuffled[tables_SC.flatten()] = padded.view(num_slots * columns, block, *rest)
            return shuffled.to(x_ST.device)

        scales = {name: scale if scale.dim() == 1 else blocks(scale) for name, scale in self.scales.items()}
        raw = self.k.element_size() == 1
        k, v = (blocks(x.view(torch.uint8) if raw else x).view(x.dtype) for x in (self.k, self.v))
        tables_SC = tables_SC.int().to(self.k.device)
        # Entries past the rows that are read are never loaded, so they may be anything.
        for slot in range(num_slots):
            longest = max((int(n) for n, s in zip(self.lengths_B, self.slots_B, strict=True) if s == slot), default=0)
            tables_SC[slot, -(-longest // block) :] = 2**31 - 1
        return paged_prefill(self.q_NHD, k, v, *self.arguments[3:], tables_SC, **scales, **options)

    def assert_right(self, out_NHD: torch.Tensor, **options: Any) -> None:
        """The rule of FlashAttention's tests: at most twice the error of torch in the same dtype, plus 1e-5."""
        num_queries = int(self.starts[-1])
        rest = (self.counts_B, self.lengths_B, self.slots_B)
        arguments = (self.q_NHD[:num_queries], self.k_truth_STKD, self.v_truth_STKD, *rest)
        truth = reference.prefill(*arguments, **options)
        peer = reference.prefill(*arguments, **options, dtype=out_NHD.dtype)
        bound = 2 * (peer.float() - truth).abs().max().item() + 1e-5
        error = (out_NHD[:num_queries].float() - truth).abs().max().item()
        assert error <= bound, f"error {error:.3g} is above {bound:.3g}"
        assert out_NHD[num_queries:].isnan().all(), "rows that belong to no sequence are written"


def make_prompts(
    counts: Sequence[int],
    lengths: Sequence[int],
    *,
    heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None = None,
    kind: Kind | None = None,
    head_scale: bool = False,
    seed: int = 0,
) -> Prompts:
    """Sequences of these lengths in shuffled slots of an arena of three layers, the last `counts` tokens of each being new."""
    generator = torch.Generator().manual_seed(seed)
    num_slots, num_rows, num_queries = len(lengths) + 2, max(*lengths, 1) + 5, sum(counts)
    slots = torch.randperm(num_slots, generator=generator)[: len(lengths)]
    values = torch.full((num_slots, num_rows, 3, 2, kv_heads, head_dim), NAN)
    for slot, count, length in zip(slots.tolist(), counts, lengths, strict=True):
        start = max(0, length - count + 1 - window) if window else 0
        values[slot, start:length, 1] = torch.randn(length - start, 2, kv_heads, head_dim, generator=generator)
    q_NHD = torch.randn(num_queries + STRAY, heads, head_dim, generator=generator).to(device, dtype)
    values = values.to(device)
    scales: dict[str, torch.Tensor] = {}
    if kind is None:
        arena = values.to(dtype)
        truths = arena.float().nan_to_num(0.0)
    else:
        per_head_K = torch.full((kv_heads,), 0.0078125, device=device) * torch.arange(1, kv_heads + 1, device=device)
        arena, scale = quantise(values.nan_to_num(0.0), kind, per_head_K if head_scale else None)
        truths = dequantise(arena, scale)
        if head_scale:
            scales = {"k_scale": scale, "v_scale": scale}
        else:
            poisoned = scale.masked_fill(values.isnan().any(dim=-1), NAN)
            scales = {"k_scale": poisoned[:, :, 1, 0], "v_scale": poisoned[:, :, 1, 1]}
    return Prompts(
        q_NHD=q_NHD,
        k=arena[:, :, 1, 0],
        v=arena[:, :, 1, 1],
        starts=torch.tensor([0, *accumulate(counts)], dtype=torch.int32, device=device),
        lengths_B=torch.tensor(lengths, dtype=torch.int32, device=device),
        slots_B=slots.to(device, torch.int32),
        k_truth_STKD=truths[:, :, 1, 0],
        v_truth_STKD=truths[:, :, 1, 1],
        scales=scales,
    )


@pytest.fixture(autouse=True)
def small_tiles(monkeypatch: pytest.MonkeyPatch) -> PrefillTiling:
    """Tiles of 32 by 32, so that short sequences go through what long ones do."""
    cut = PrefillTiling(tokens=32, tile_rows=32, num_warps=4)
    monkeypatch.setattr("vmmkv.kernels.attention.prefill.prefill_tiling", lambda *shape: cut)
    return cut


@pytest.fixture
def exact_dots(monkeypatch: pytest.MonkeyPatch) -> None:
    """numpy's products, which stand for tl.dot in the interpreter, round a row by where it lies in its tile; in float64 not."""
    matmul = np.matmul

    def rounded_once(a: Any, b: Any, dtype: Any = np.float32) -> Any:
        return matmul(a.astype(np.float64), b.astype(np.float64)).astype(dtype)

    monkeypatch.setattr(np, "matmul", rounded_once)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (4, 2, 64, torch.float16),
        (3, 3, 64, torch.float32),
        (9, 3, 64, torch.float16),
        (3, 1, 80, torch.float16),
        (3, 1, 80, torch.float32),
        (16, 1, 96, torch.float16),
        (4, 1, 128, torch.float32),
        (2, 1, 256, torch.float16),
        (1, 1, 16, torch.float32),
    ],
)
def test_prefill_is_right_at_every_shape(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device
) -> None:
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    prompts = make_prompts([33, 0, 1, 7], [33, 12, 40, 71], device=device, **shape)
    out = prompts.poisoned_out()
    assert prefill(*prompts.arguments, out=out) is out
    prompts.assert_right(out)


def test_queries_start_anywhere(device: torch.device) -> None:
    prompts = make_prompts([1, 0, 31, 32, 33, 2, 0, 65], [1, 0, 32, 64, 96, 97, 63, 100], device=device, **FEW_HEADS)
    prompts.assert_right(prefill(*prompts.arguments, out=prompts.poisoned_out()))


@pytest.mark.parametrize("length", LENGTHS[1:-1])
def test_a_whole_prompt_is_right_at_every_length(length: int, device: torch.device) -> None:
    prompts = make_prompts([length], [length], device=device, **{**SMALL, "heads": 1, "kv_heads": 1})
    prompts.assert_right(prefill(*prompts.arguments, out=prompts.poisoned_out()))


def test_the_tiling_of_the_library_is_right(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    monkeypatch.undo()
    prompts = make_prompts([300, 5], [300, 1000], device=device, **{**SMALL, "head_dim": 128, "heads": 2, "kv_heads": 1})
    prompts.assert_right(prefill(*prompts.arguments, out=prompts.poisoned_out()))


@pytest.mark.parametrize("window", [1, 17, 63])
def test_a_window_reads_nothing_before_it(window: int, device: torch.device) -> None:
    prompts = make_prompts([65, 1, 33], [65, 64, 200], window=window, device=device, **FEW_HEADS)
    out = prefill(*prompts.arguments, window=window, out=prompts.poisoned_out())
    prompts.assert_right(out, window=window)


@pytest.mark.parametrize("softcap", [0.5, 50.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_scores_are_capped_softly(softcap: float, dtype: torch.dtype, device: torch.device) -> None:
    prompts = make_prompts([1, 40], [9, 75], device=device, **{**SMALL, "dtype": dtype})
    out = prefill(*prompts.arguments, softcap=softcap, scale=0.7, out=prompts.poisoned_out())
    prompts.assert_right(out, softcap=softcap, scale=0.7)


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("softcap", [None, 30.0])
def test_an_extreme_score_gives_no_nan(softcap: float | None, device: torch.device) -> None:
    prompts = make_prompts([70], [70], device=device, **{**SMALL, "dtype": torch.float32})
    assert prefill(*prompts.arguments, scale=300.0, softcap=softcap)[:70].isfinite().all()


def test_rows_at_and_past_the_limit_are_not_read(device: torch.device) -> None:
    prompts = make_prompts([40, 5, 33], [100, 17, 64], device=device, **SMALL)
    expected = prefill(*prompts.arguments)
    limit_S = torch.full((prompts.k.shape[0],), 1000, dtype=torch.int32, device=device)
    limit_S[prompts.slots_B[0]], limit_S[prompts.slots_B[1]] = 77, 0
    prompts.k[prompts.slots_B[0], 77:], prompts.v[prompts.slots_B[0], 77:] = NAN, NAN
    prompts.k[prompts.slots_B[1]], prompts.v[prompts.slots_B[1]] = NAN, NAN
    out = prefill(*prompts.arguments, limit_S=limit_S, out=prompts.poisoned_out())
    assert torch.equal(out[:17], expected[:17])
    assert out[17:40].isfinite().all()
    assert torch.equal(out[40:45], torch.zeros_like(out[40:45]))
    assert torch.equal(out[45:78], expected[45:78])


def test_what_lies_outside_the_arena_is_not_read(device: torch.device) -> None:
    prompts = make_prompts([5, 33, 2, 3], [50, 50, 50, 50], device=device, **SMALL)
    prompts.slots_B[0], prompts.slots_B[1] = -1, prompts.k.shape[0]
    prompts.lengths_B[2] = -(2**31)
    out = prefill(*prompts.arguments, out=prompts.poisoned_out())
    assert torch.equal(out[:40], torch.zeros_like(out[:40]))
    assert out[40:43].isfinite().all()


def test_a_window_past_the_last_row_gives_zeros(device: torch.device) -> None:
    prompts = make_prompts([3], [50], device=device, **SMALL)
    prompts.lengths_B[0] = 2**31 - 1
    out = prefill(*prompts.arguments, window=20, out=prompts.poisoned_out())
    assert torch.equal(out[:3], torch.zeros_like(out[:3]))


@pytest.mark.parametrize("window", [None, 40])
def test_a_query_rounds_the_same_in_any_chunk_and_batch(window: int | None, exact_dots: None, device: torch.device) -> None:
    prompts = make_prompts([13, 100, 1], [20, 111, 90], device=device, **FEW_HEADS)
    together = prefill(*prompts.arguments, window=window)
    for first, stop in ((0, 2), (2, 35), (35, 100)):
        alone = prefill(*prompts.part(1, first, stop).arguments, window=window)
        assert torch.equal(alone, together[13 + first : 13 + stop])


@pytest.mark.parametrize(("block", "window"), [(1, None), (7, 30), (16, None), (128, 30)])
def test_blocks_give_the_bits_of_slots(block: int, window: int | None, device: torch.device) -> None:
    prompts = make_prompts([33, 0, 1, 7], [33, 12, 64, 71], window=window, device=device, **FEW_HEADS)
    expected = prefill(*prompts.arguments, window=window)[:41]
    out = prompts.attend_paged(block, window=window, out=prompts.poisoned_out())
    assert torch.equal(out[:41], expected)
    prompts.assert_right(out, window=window)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("dtype", "head_dim"), [(torch.float16, 96), (torch.float32, 64)], ids=["fp16", "fp32"])
def test_quantised_rows_mean_what_their_bits_say(dtype: torch.dtype, head_dim: int, kind: Kind, device: torch.device) -> None:
    shape = {**SMALL, "head_dim": head_dim, "dtype": dtype, "heads": 2}
    prompts = make_prompts([33, 1, 7], [33, 12, 71], kind=kind, device=device, **shape)
    out = prefill(*prompts.arguments, **prompts.scales, out=prompts.poisoned_out())
    prompts.assert_right(out)
    paged = prompts.attend_paged(16)
    assert torch.equal(out[:41], paged[:41])


def test_a_scale_may_belong_to_a_head(device: torch.device) -> None:
    prompts = make_prompts([33, 1], [33, 12], kind="fp8", head_scale=True, device=device, **SMALL)
    out = prefill(*prompts.arguments, **prompts.scales, out=prompts.poisoned_out())
    prompts.assert_right(out)
    assert torch.equal(out[:34], prompts.attend_paged(7)[:34])


@pytest.mark.parametrize(
    ("kind", "options"), [("fp8", {}), (None, {"window": 40, "softcap": 20.0, "scale": 0.2})], ids=["fp8", "window and cap"]
)
def test_a_single_query_has_the_bits_of_decode(kind: Kind | None, options: dict[str, Any], device: torch.device) -> None:
    counts, lengths = [1, 33, 1, 0, 1, 2], [9, 33, 150, 12, 1, 70]
    prompts = make_prompts(counts, lengths, kind=kind, device=device, **{**SMALL, "kv_heads": 1})
    singles = torch.tensor([0, 2, 4], device=device)
    memory = (prompts.k, prompts.v, prompts.lengths_B[singles], prompts.slots_B[singles])
    rows = prompts.starts[singles].long()
    expected = decode(prompts.q_NHD[rows], *memory, **prompts.scales, **options)
    limit_S = torch.full((prompts.k.shape[0],), 1000, dtype=torch.int32, device=device)
    out = prefill(*prompts.arguments, **prompts.scales, **options, limit_S=limit_S, out=prompts.poisoned_out())
    assert torch.equal(out[rows], expected)
    prompts.assert_right(out, **options)
    assert torch.equal(prompts.attend_paged(7, **options)[rows], expected)
    alone = prompts.part(2, 0, 1)
    assert torch.equal(prefill(*alone.arguments, **prompts.scales, **options), expected[1:2])


def test_the_workspace_is_that_of_decode(device: torch.device) -> None:
    prompts = make_prompts([1, 33, 1], [9, 33, 50], device=device, **SMALL)
    elements = workspace_elements(prompts.q_NHD[:3], prompts.k)
    workspace = torch.full((elements,), NAN, device=device)
    assert torch.equal(prefill(*prompts.arguments, workspace=workspace)[:35], prefill(*prompts.arguments)[:35])
    with pytest.raises(ValueError, match=f"workspace is {elements - 1} elements"):
        prefill(*prompts.arguments, workspace=workspace[1:])


def test_indices_may_have_64_bits(device: torch.device) -> None:
    prompts = make_prompts([33, 1], [50, 77], device=device, **SMALL)
    wide = dataclasses.replace(prompts, lengths_B=prompts.lengths_B.long(), slots_B=prompts.slots_B.long())
    assert torch.equal(prefill(*wide.arguments, window=60)[:34], prefill(*prompts.arguments, window=60)[:34])


def test_no_queries_launch_nothing(device: torch.device) -> None:
    prompts = make_prompts([5], [5], device=device, **SMALL)
    none = torch.empty(0, dtype=torch.int32, device=device)
    assert prefill(prompts.q_NHD[:0], prompts.k, prompts.v, prompts.starts[:1], none, none).shape == (0, 4, 64)
    out = prefill(prompts.q_NHD, prompts.k, prompts.v, prompts.starts[:1], none, none, out=prompts.poisoned_out())
    assert out.isnan().all()


@pytest.mark.skipif(importlib.util.find_spec("triton.experimental.gluon") is None, reason="this Triton has no Gluon")
def test_prefill_for_hopper_compiles_without_one(tmp_path: Path) -> None:
    statements = """
from vmmkv.kernels.attention import prefill
from vmmkv.kernels.attention import prefill_hopper
launch, launched = prefill_hopper.launch_prefill_hopper, []
def counted(*arguments):
    launched.append(launch(*arguments))
prefill_hopper.launch_prefill_hopper = counted
prefill.attend_singles = lambda *arguments: None  # decode is compiled elsewhere
for heads, kv_heads in ((32, 8), (7, 1)):
    for limit in (False, True):
        Model(heads, kv_heads, 128, torch.bfloat16).prefill(torch.int64 if limit else torch.int32, limit=limit)
assert len(launched) == 4
for shape in ((8, 8, 128, torch.float16), (8, 8, 64, torch.bfloat16)):
    Model(*shape).prefill()
model = Model(8, 8, 128, torch.bfloat16)
model.prefill(window=9)
model.prefill(softcap=9.0)
Model(8, 8, 128, torch.bfloat16, block=16).prefill()
Model(8, 8, 128, torch.bfloat16, "fp8").prefill()
assert len(launched) == 4
"""
    assert_compiles(statements, tmp_path)


def test_the_interpreter_never_imports_gluon(device: torch.device) -> None:
    if device.type == "cuda":
        pytest.skip("on a GPU it may be imported")
    assert _hopper(device) is None


@pytest.mark.parametrize(
    ("name", "spoil", "wanted"),
    [
        ("q_NHD", lambda q: q[0], "3 dimensions"),
        ("q_NHD", lambda q: q[:, :3], "multiple of the 2 kv heads"),
        ("q_NHD", lambda q: q[..., :32], "64"),
        ("k_STKW", lambda k: k.float(), "float16"),
        ("v_STKW", lambda v: v[:, :-1], "(3, "),
        ("query_starts", lambda starts: starts[:-1], "(2,)"),
        ("query_starts", lambda starts: starts.float(), "int32"),
        ("query_starts", lambda starts: starts.long(), "int32"),
        ("lengths_B", lambda lengths: lengths.to("meta"), "the host never reads it"),
        ("slots_B", lambda slots: slots.repeat(2), "(1,)"),
        ("limit_S", lambda _: torch.zeros(2, dtype=torch.int32), "(3,)"),
        ("window", lambda _: 0, "at least 1"),
        ("softcap", lambda _: 0.0, "positive"),
        ("scale", lambda _: -1.0, "positive"),
        ("out", lambda q: q.float(), "float16"),
    ],
)
def test_prefill_names_the_argument_it_refuses(name: str, spoil: Any, wanted: str, device: torch.device) -> None:
    prompts = make_prompts([5], [9], device=device, **SMALL)
    names = ("q_NHD", "k_STKW", "v_STKW", "query_starts", "lengths_B", "slots_B")
    arguments: dict[str, Any] = dict(zip(names, prompts.arguments, strict=True))
    arguments[name] = spoil(arguments.get(name, prompts.q_NHD))
    with pytest.raises(ValueError) as refusal:
        prefill(**arguments)
    assert str(refusal.value).startswith(f"{name} is ")
    assert wanted in str(refusal.value)
