"""The kernels suite: its arithmetic, what it lays in memory, what it refuses to time, and the tables made of its rows."""

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from rich.console import Console

from bench import kernels, run, suites, table
from bench.gpu_clocks import GPU
from bench.kernels import cases, from_flashinfer, memories, systems
from bench.kernels.bars import Bar, bars
from bench.kernels.batch import Batch
from bench.kernels.cases import Case
from bench.kernels.formats import Format
from bench.report import Report
from bench.rows import Provenance, Row, RowFile
from bench.settings import SHAPES, Settings, Shape
from bench.timing import WrongNumbers, exact, summarize
from vmmkv.kernels import reference
from vmmkv.layout import KVType

CPU = torch.device("cpu")
LLAMA = SHAPES["llama-3.1-8b"]
SMALL = Shape(name="small", layers=3, heads=4, kv_heads=2, head_dim=16, dtype=torch.float32, weight_bytes=0)
UNLIKE = Case(name="unlike", lengths=(33, 7, 70))


@pytest.fixture(autouse=True)
def one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def settings(**options: Any) -> Settings:
    return Settings(device=CPU, shape=SHAPES["wide"], quick=True, **options)


def report_in(folder: Path) -> Report:
    return Report(RowFile(folder, Provenance.collect(CPU, seed=0, quick=True, commit="abc123")))


def test_bytes_are_those_of_the_rows() -> None:
    plain = Format(shape=LLAMA)
    assert plain.token_bytes == 2 * 8 * 128 * 2
    assert cases.uniform(64, 8192).bytes_per_layer(plain.token_bytes) * LLAMA.layers == 64 * 8192 * 128 * 1024
    token_bytes = {
        (kind, scale): Format(shape=LLAMA, quantised=KVType(kind, scale)).token_bytes
        for kind, scale in (("fp8", "head"), ("fp8", "token"), ("int8", "token"), ("int4", "token"))
    }
    vectors = 2 * 8
    assert token_bytes == {
        ("fp8", "head"): vectors * 128,
        ("fp8", "token"): vectors * (128 + 2),
        ("int8", "token"): vectors * (128 + 2),
        ("int4", "token"): vectors * (64 + 2),
    }


def test_operations_are_those_of_what_is_seen() -> None:
    seen = sum(position + 1 for position in range(8192))
    whole, chunk, mixed = cases.PREFILL
    assert whole.flops_per_layer(LLAMA) == 4 * 32 * 128 * seen
    assert chunk.flops_per_layer(LLAMA) == 4 * 32 * 128 * sum(range(32768 - 2048 + 1, 32768 + 1))
    assert mixed.queries[-1] == 1 and len(mixed.lengths) == 64


def test_the_skewed_batch_and_its_twin_have_the_same_bytes() -> None:
    assert cases.SKEWED.num_tokens == cases.TWIN.num_tokens == 127 * 1024
    assert (cases.SKEWED.longest, len(cases.SKEWED.lengths), cases.TWIN.longest) == (65536, 64, 2032)


def test_a_small_batch_is_read_in_copies_that_do_not_fit_in_l2() -> None:
    assert cases.uniform(1, 1024).copies(128 << 20) == 2
    assert cases.uniform(64, 8192).copies(64 << 30) == 1


def test_a_case_says_what_is_wrong_with_it() -> None:
    with pytest.raises(ValueError, match="no more than it has"):
        Case(name="late", lengths=(3,), counts=(4,))
    with pytest.raises(ValueError, match="1 counts of queries for 2"):
        Case(name="few", lengths=(3, 3), counts=(1,))


FORMATS = [
    Format(shape=SMALL),
    Format(shape=SMALL, quantised=KVType("fp8", "head")),
    Format(shape=SMALL, quantised=KVType("fp8"), scales_at="layer"),
    Format(shape=SMALL, quantised=KVType("int8")),
    Format(shape=SMALL, quantised=KVType("int4")),
]


@pytest.mark.parametrize("case", [UNLIKE, cases.uniform(3, 40)], ids=lambda case: case.name)
@pytest.mark.parametrize("kind", memories.MEMORIES)
@pytest.mark.parametrize("form", FORMATS, ids=lambda form: form.name)
def test_every_sequence_has_rows_of_its_own_that_are_finite(form: Format, kind: str, case: Case) -> None:
    if kind == "paged" and form.quantised is not None:
        with pytest.raises(ValueError, match="plain K and V only"):
            memories.open_memory(kind, case, 2, form, CPU)
        return
    torch.manual_seed(0)
    memory = memories.open_memory(kind, case, 2, form, CPU)
    try:
        seen = []
        for index, length in enumerate(case.lengths * 2):
            for layer in range(SMALL.layers):
                for rows_TKD in memories.rows_of(memory, layer, index, length):
                    assert rows_TKD.shape == (length, SMALL.kv_heads, SMALL.head_dim)
                    assert rows_TKD.isfinite().all()
                    assert 0.5 < rows_TKD.std() < 1.6
                    seen.append(rows_TKD[0])
        assert len(torch.stack(seen).unique(dim=0)) == len(seen)
    finally:
        memory.close()
    assert memory.layers == []


def test_the_tensor_has_the_strides_of_vmmkvs_rows() -> None:
    form = Format(shape=SMALL)
    tensor, mapped = (memories.open_memory(kind, UNLIKE, 1, form, CPU) for kind in ("tensor", "vmmkv"))
    for ours, theirs in zip(tensor.layers, mapped.layers, strict=True):
        assert ours.k.stride()[1:] == theirs.k.stride()[1:]
        assert ours.k.storage_offset() == theirs.k.storage_offset()
    tensor.close()
    mapped.close()


def test_blocks_are_in_no_order_and_each_is_used_once() -> None:
    case = cases.uniform(8, 160)
    memory = memories.open_memory("paged", case, 1, Format(shape=SMALL), CPU)
    assert memory.tables_SC is not None
    blocks = memory.tables_SC.flatten().tolist()
    assert sorted(blocks) == list(range(80)) != blocks
    memory.close()


def test_what_is_wrong_is_not_timed_and_the_rest_is(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def nothing(query: torch.Tensor, *arguments: Any, **options: Any) -> torch.Tensor:
        return torch.full_like(query, float("nan"))

    monkeypatch.setattr(systems, "scaled_dot_product_attention", nothing)
    report = report_in(tmp_path)
    with pytest.raises(ExceptionGroup) as caught:
        kernels.run(settings(parts=("decode",), cases=("2x96",)), report)
    assert caught.group_contains(WrongNumbers, match="is off by nan")
    assert {row.system.split(",")[0] for row in report.rows} == {"reference"}


def test_rows_of_another_slot_are_found_out() -> None:
    memory = memories.open_memory("vmmkv", cases.uniform(3, 40), 1, Format(shape=SMALL), CPU)
    batch = Batch(cases.uniform(3, 40), 1, memory, seed=0)
    outputs = batch.passes(systems.bind_reference)()
    batch.check(outputs)
    with pytest.raises(WrongNumbers):
        batch.check([output.roll(1, dims=0) for output in outputs])
    memory.close()


@pytest.mark.parametrize(
    ("options", "complaint"),
    [
        ({"parts": ("deocde",)}, "no part deocde; kernels has decode, prefill"),
        (
            {"cases": ("2x96", "64x8K")},
            "no case 64x8K on a CPU: decode has 2x96, skewed; prefill has 64, mixed; quantised has none",
        ),
        ({"parts": ("prefill",), "cases": ("2x96",)}, "no case 2x96 on a CPU: prefill has 64, mixed$"),
    ],
)
def test_parts_and_cases_that_there_are_not_are_refused(tmp_path: Path, options: dict[str, Any], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        kernels.run(settings(**options), report_in(tmp_path))


def test_every_part_has_cases_on_a_gpu() -> None:
    for quick in (False, True):
        names = kernels.case_names(Settings(device=torch.device("cuda"), shape=LLAMA, quick=quick))
        assert list(names) == list(kernels.PARTS) and all(names.values())


def test_what_a_cpu_cannot_run_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    report = report_in(tmp_path)
    kernels.run(settings(parts=("append", "copy")), report)
    assert not report.rows
    assert "absent: append, copy: they time the Triton kernels, which do not run on a CPU" in capsys.readouterr().out


SCHEMAS = {
    "fwd": (
        "(Tensor q, Tensor k, Tensor v, Tensor? k_new, Tensor? v_new, Tensor? q_v, Tensor(a!)? out, Tensor? cu_seqlens_q, "
        "Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, Tensor? seqused_q, Tensor? seqused_k, int? max_seqlen_q, "
        "int? max_seqlen_k, Tensor? page_table, Tensor? kv_batch_idx, Tensor? leftpad_k, Tensor? rotary_cos, "
        "Tensor? rotary_sin, Tensor? seqlens_rotary, Tensor? q_descale, Tensor? k_descale, Tensor? v_descale, "
        "float softmax_scale, bool is_causal, int window_size_left, int window_size_right, float softcap, "
        "bool is_rotary_interleaved, Tensor? scheduler_metadata, int num_splits, bool? pack_gqa, int sm_margin, "
        "Tensor? s_aux, int cp_world_size, int cp_rank, Tensor? cp_tot_seqused_k) -> Tensor[]"
    ),
    "get_scheduler_metadata": (
        "(int batch_size, int max_seqlen_q, int max_seqlen_k, int num_heads, int num_heads_k, int headdim, int headdim_v, "
        "ScalarType qkv_dtype, Tensor seqused_k, Tensor? cu_seqlens_q, Tensor? cu_seqlens_k, Tensor? cu_seqlens_k_new, "
        "Tensor? seqused_q, Tensor? leftpad_k, int? page_size, int max_seqlen_k_new, bool is_causal, int window_size_left, "
        "int window_size_right, bool has_softcap, int num_splits, bool? pack_gqa, int sm_margin) -> Tensor"
    ),
}
"""The interface of FlashAttention-3's library, which is built for GPUs alone."""


@pytest.fixture
def fa3_on_cpu() -> Iterator[None]:
    """Its operators, played by the reference."""

    def fwd(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *rest: Any) -> list[torch.Tensor]:
        _, _, _, out, starts, _, _, _, lengths, most_queries, longest, table, slots, *others = rest
        scale, causal, metadata = others[7], others[8], others[13]
        assert causal and metadata.numel() == len(lengths) and scale == q.shape[2] ** -0.5
        counts = starts.diff()
        assert most_queries == counts.max()
        if table is None:
            assert k.shape[1] == longest
        else:
            k, v = (plane[table.long()].flatten(1, 2) for plane in (k, v))
            slots = torch.arange(len(lengths))
        out.copy_(reference.prefill(q, k, v, counts, lengths, slots))
        return [out]

    library = torch.library.Library("_vllm_fa3_C", "DEF")
    for name, schema in SCHEMAS.items():
        library.define(name + schema)
    library.impl("fwd", fwd, "CPU")
    library.impl("get_scheduler_metadata", lambda batch, *rest: rest[7].clone(), "CPU")
    yield
    library._destroy()


@pytest.mark.parametrize("kind", memories.MEMORIES)
@pytest.mark.parametrize(
    "case", [UNLIKE, Case(name="ragged", lengths=(33, 7, 70), counts=(5, 7, 1))], ids=lambda case: case.name
)
def test_fa3_is_called_as_its_library_wants(fa3_on_cpu: None, kind: str, case: Case) -> None:
    memory = memories.open_memory(kind, case, 2, Format(shape=SMALL), CPU)
    batch = Batch(case, 2, memory, seed=0)
    batch.check(batch.passes(systems.bind_fa3)())
    memory.close()


class PagedWrapper:
    """Plays FlashInfer's wrappers over a table of blocks: what is planned is what runs, on K and V of one layer."""

    planned: list[dict[str, Any]] = []  # noqa: RUF012

    def __init__(self, float_workspace_buffer: torch.Tensor, kv_layout: str, **options: Any) -> None:
        assert kv_layout == "NHD" and float_workspace_buffer.dtype == torch.uint8 and not float_workspace_buffer.any()
        assert float_workspace_buffer.numel() == 128 * 2**20
        self.options = options

    def run(
        self, q: torch.Tensor, paged_kv_cache: tuple[torch.Tensor, torch.Tensor], *, out: torch.Tensor | None = None
    ) -> torch.Tensor:
        given = self.given
        assert out is not None and all(plane.shape[1:] == (16, 2, 16) for plane in paged_kv_cache)
        starts, indices, last = (given[name].tolist() for name in ("indptr", "indices", "last_page_len"))
        queries = given["qo_indptr"].tolist()
        for b in range(len(last)):
            blocks = indices[starts[b] : starts[b + 1]]
            length = 16 * (len(blocks) - 1) + last[b]
            k_TKD, v_TKD = (plane[blocks].flatten(0, 1)[:length] for plane in paged_kv_cache)
            count = queries[b + 1] - queries[b]
            rows = slice(queries[b], queries[b + 1])
            out[rows] = reference.attend(q[rows], k_TKD, v_TKD, torch.arange(length - count, length))
        return out

    def keep(self, **given: Any) -> None:
        assert given["q_data_type"] == given["kv_data_type"] == torch.float32
        assert all(given[name].dtype == torch.int32 for name in ("indptr", "indices", "last_page_len", "qo_indptr"))
        assert (given["num_qo_heads"], given["num_kv_heads"], given["head_dim"], given["page_size"]) == (4, 2, 16, 16)
        assert all(1 <= rows <= 16 for rows in given["last_page_len"].tolist())
        self.given = given
        self.planned.append(given | self.options)


class DecodeWrapper(PagedWrapper):
    def plan(
        self, indptr: Any, indices: Any, last_page_len: Any, num_qo_heads: int, num_kv_heads: int, head_dim: int,
        page_size: int, *, q_data_type: Any = "float16", kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        given = {name: value for name, value in locals().items() if name != "self"}
        self.keep(qo_indptr=torch.arange(len(last_page_len) + 1, dtype=torch.int32), **given)


class PrefillWrapper(PagedWrapper):
    def plan(
        self, qo_indptr: Any, paged_kv_indptr: Any, paged_kv_indices: Any, paged_kv_last_page_len: Any, num_qo_heads: int,
        num_kv_heads: int, head_dim_qk: int, page_size: int, *, causal: bool = False, q_data_type: Any = "float16",
        kv_data_type: Any = None,
    ) -> None:  # fmt: skip
        assert causal
        heads = {"num_qo_heads": num_qo_heads, "num_kv_heads": num_kv_heads, "head_dim": head_dim_qk, "page_size": page_size}
        blocks = {"indptr": paged_kv_indptr, "indices": paged_kv_indices, "last_page_len": paged_kv_last_page_len}
        self.keep(qo_indptr=qo_indptr, **blocks, **heads, q_data_type=q_data_type, kv_data_type=kv_data_type)


def single_prefill(q: Any, k: Any, v: Any, *, causal: bool, kv_layout: str, backend: str) -> torch.Tensor:
    assert causal and kv_layout == "NHD" and backend == "fa2"
    return reference.attend(q, k, v, torch.arange(len(k) - len(q), len(k)))


@pytest.mark.parametrize("kind", memories.MEMORIES)
@pytest.mark.parametrize(
    "case", [UNLIKE, Case(name="ragged", lengths=(33, 7, 80), counts=(5, 7, 1))], ids=lambda case: case.name
)
def test_flashinfer_is_called_as_it_documents(monkeypatch: pytest.MonkeyPatch, kind: str, case: Case) -> None:
    """Planned once for a copy, and then run for each layer; over slots by a call for each sequence."""
    wrappers = {"BatchDecodeWithPagedKVCacheWrapper": DecodeWrapper, "BatchPrefillWithPagedKVCacheWrapper": PrefillWrapper}
    played = SimpleNamespace(single_prefill_with_kv_cache=single_prefill, **wrappers)
    monkeypatch.setitem(sys.modules, "flashinfer", played)
    PagedWrapper.planned.clear()
    memory = memories.open_memory(kind, case, 2, Format(shape=SMALL), CPU)
    batch = Batch(case, 2, memory, seed=0)
    batch.check(batch.passes(systems.bind_flashinfer)())
    assert len(PagedWrapper.planned) == (2 if kind == "paged" else 0)
    if kind == "paged" and case.is_decode:
        assert all(planned["use_tensor_cores"] for planned in PagedWrapper.planned)
    memory.close()


@pytest.mark.parametrize("installed", [True, False])
def test_flashinfer_is_among_the_systems_of_a_gpu_if_it_can_be_imported(
    monkeypatch: pytest.MonkeyPatch, installed: bool
) -> None:
    for module in (systems, from_flashinfer):
        monkeypatch.setattr(module, "is_installed", lambda: installed)
    on_cpu = settings()
    assert "FlashInfer" not in systems.decode_systems(on_cpu)
    monkeypatch.setattr(Settings, "on_gpu", property(lambda settings: True))
    for offered in (systems.decode_systems(on_cpu), systems.prefill_systems(on_cpu)):
        assert ("FlashInfer" in offered) is installed
        assert next(iter(offered)) != "FlashInfer", "ours is the first"


def test_others_kernels_that_cannot_run_here_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    assert suites.absent("kernels", settings()) == {
        "FlashAttention-3": "its kernels do not run on a CPU",
        "FlashInfer": "its kernels do not run on a CPU",
    }
    monkeypatch.setattr(Settings, "on_gpu", property(lambda settings: True))
    assert kernels.absent(settings()) == {
        "FlashAttention-3": "--fa3 names no library of it",
        "FlashInfer": "the package flashinfer (flashinfer-python) is not installed",
    }
    monkeypatch.setattr(from_flashinfer, "is_installed", lambda: True)
    assert kernels.absent(settings(fa3=Path(__file__))) == {}


def row(workload: str, system: str, metric: str, p50: float, bound: float | None = None) -> dict[str, Any]:
    return {
        **{"suite": "kernels", "workload": f"llama-3.1-8b {workload}", "system": system, "metric": metric},
        **{
            "unit": "us" if metric == "layer" else "GB/s",
            "p20": p50,
            "p50": p50,
            "p80": p50,
            "p99": p50,
            "n": 9,
            "bound": bound,
        },
        **{
            "device": "NVIDIA H200",
            "driver": "1",
            "versions": {},
            "commit": "abc123",
            "seed": 0,
            "quick": False,
            "date": "2026",
        },
    }


ROWS = [
    row("decode 64x8K", "decode, cudaMalloc", "layer", 500.0, 477.0),
    row("decode 64x8K", "decode, cudaMalloc", "bandwidth", 4300.0),
    row("decode 64x8K", "decode, vmmkv, all layers a page", "layer", 505.0, 477.0),
    row("decode 64x8K", "decode, vmmkv, all layers a page", "bandwidth", 4250.0),
    row("decode 64x8K", "decode, cudaMalloc, again", "layer", 490.0, 477.0),
    row("decode 1x1K", "decode, vmmkv, all layers a page", "layer", 5.0, 0.932),
    row("decode 1x1K", "FA3, paged 16", "layer", 6.0, 0.932),
    row("decode skewed", "decode, vmmkv, all layers a page", "layer", 120.0),
    row("decode 64x2032", "decode, vmmkv, all layers a page", "layer", 115.0),
    row("quantised 64x8K", "decode int4 token scales at the end, cudaMalloc", "speed-up", 2.9),
]


def test_rows_become_a_table_of_cases_and_systems(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "kernels.jsonl"
    stale = row("decode 64x8K", "decode, cudaMalloc", "layer", 999.0)
    clocks = {**row("", GPU, "SM clock", 1980.0), "workload": "kernels llama-3.1-8b decode: GPU"}
    path.write_text("".join(json.dumps(each) + "\n" for each in [stale, *ROWS, clocks]))
    assert run.main(["table", str(path)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert printed[0] == "NVIDIA H200, commit abc123"
    assert printed[4] == (
        "| us a layer (GB/s) | floor | decode, cudaMalloc | decode, vmmkv, all layers a page | FA3, paged 16 |"
    )
    assert "| 64x8K | 477 | 500 (4,300) | 505 (4,250) | - |" in printed
    assert any(line.startswith("Measured again") and "0.980 to 0.980" in line for line in printed)
    assert "999" not in "".join(printed)


def test_a_table_of_a_cpu_has_neither_floors_nor_a_drift() -> None:
    rows = [{**each, "bound": None, "device": "a CPU", "quick": True} for each in ROWS]
    printed = list(table.lines({(each["workload"], each["system"], each["metric"]): each for each in rows}))
    assert printed[0] == "a CPU, commit abc123; quick: figures are noise\n"
    assert "| 64x8K | 500 (4,300) | 505 (4,250) | - |" in printed
    assert not any("floor" in line or "Measured again" in line for line in printed)


def test_quality_has_a_line_a_kv_type(tmp_path: Path) -> None:
    report = report_in(tmp_path)
    report.console = Console(width=80, record=True)
    figures = {"row": 12032.0, "perplexity": 22.976, "perplexity above exact": 0.8195}
    for system in ("float32 KV", "fp8, scales by token"):
        for metric, value in figures.items():
            if system != "float32 KV" or metric != "perplexity above exact":
                summary = exact(value, 1)
                report.add(Row(suite="quality", workload="a text", system=system, metric=metric, unit="", summary=summary))
    errors = summarize([4.75, 7.13])
    metric = "attention output error"
    report.add(Row(suite="quality", workload="a text", system="fp8, scales by token", metric=metric, unit="%", summary=errors))
    table.print_quality(report)
    lines = [" ".join(line.split()) for line in report.console.export_text().splitlines()]
    assert "quality: a text; quick: figures are noise" in lines
    assert "float32 KV 12,032 22.98" in lines
    assert "fp8, scales by token 12,032 22.98 +0.82 % 4.75 / 7.13 %" in lines


def test_bars_are_computed_from_rows() -> None:
    medians = {(each["workload"], each["system"], each["metric"]): each["p50"] for each in ROWS}
    memory, speed, fa3, paged, skewed, prefill, fp8, int4, append = bars(medians)
    assert memory.figures == pytest.approx({"64x8K": (500 / 505 + 490 / 505) / 2})
    assert memory.holds
    assert speed.figures == {"64x8K": 4250.0} and speed.holds
    assert paged.figures == pytest.approx({"1x1K": 1.2}) and not paged.holds
    assert skewed.figures == pytest.approx({"skewed": 120 / 115}) and skewed.holds
    assert list(int4.figures.values()) == [2.9] and int4.holds
    assert not any(bar.figures or bar.holds for bar in (fa3, prefill, fp8, append))
    assert append.line().endswith("(>= 0.8): not measured")
    assert Bar(text="speed", bound=4200, figures={"a": 4300.0}).line() == "- [x] speed (>= 4,200): a 4,300"


@pytest.mark.parametrize(
    ("content", "complaint"),
    [
        (None, "no such file or folder"),
        ("", "`python -m bench run` writes some"),
        (json.dumps(row("decode 64x8K", "s", "layer", 1.0) | {"suite": "append"}), "no row of the suite kernels"),
    ],
)
def test_a_table_of_nothing_is_refused(
    tmp_path: Path, content: str | None, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    if content is not None:
        path.write_text(content)
    with pytest.raises(SystemExit, match="2"):
        table.main([str(path)])
    assert complaint in capsys.readouterr().err
