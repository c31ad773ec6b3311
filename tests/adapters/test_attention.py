"""The adapters give what the reference gives, name what is not installed, and call libraries as these are declared."""

import itertools
import sys
from collections.abc import Iterator
from types import ModuleType

import pytest
import torch

from tests.adapters import flash
from vmmkv import MIB, KVCache, KVLayout, Pool, VmmkvError
from vmmkv.adapters import attention
from vmmkv_kernels import reference

HEADS, KV_HEADS, HEAD_DIM = 4, 2, 64
LENGTHS, COUNTS = (5, 40, 40, 40, 7), (1, 3, 40, 2, 0)

DECODE = ("sdpa_decode", "sdpa_decode_grouped", "flex_decode", "flash_2_decode", "flash_3_decode", "flashinfer_decode")
PREFILL = ("sdpa_prefill", "flex_prefill", "flash_2_prefill", "flash_3_prefill", "flash_3_varlen", "flashinfer_prefill")

Problem = tuple[torch.Tensor, ...]


@pytest.fixture(scope="module")
def views() -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """K and V of a cache with sequences of LENGTHS, their lengths and slots: 5, 2, 3, 4 and 1."""
    layout = KVLayout.uniform(layers=3, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=torch.float32)
    with Pool("cpu", 64 * MIB) as pool, KVCache(layout, pool, slots=6, max_tokens=1000) as cache:
        batch = cache.open_batch(5)
        sequences = [batch[index] for index in (4, 1, 2, 3, 0)]
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            sequence.grow(length)
            for view in (sequence.k(1), sequence.v(1)):
                view[:length] = torch.randn(length, KV_HEADS, HEAD_DIM)
            sequence.advance(length)
        slots_B = torch.tensor([sequence.slot for sequence in sequences], dtype=torch.int32)
        yield cache.k(1), cache.v(1), torch.tensor(LENGTHS, dtype=torch.int32), slots_B


@pytest.fixture
def decode_problem(views: Problem) -> Problem:
    return torch.randn(len(LENGTHS), HEADS, HEAD_DIM), *views


@pytest.fixture
def prefill_problem(views: Problem) -> Problem:
    starts = torch.tensor(list(itertools.accumulate(COUNTS, initial=0)), dtype=torch.int32)
    return torch.randn(sum(COUNTS), HEADS, HEAD_DIM), *views[:2], starts, *views[2:]


def answer(given: flash.Arguments) -> torch.Tensor:
    """What the function with these arguments documents: causal attention, aligned at the last row."""
    assert given["causal"]
    q, starts = given["q"], given.get("cu_seqlens_q")
    if "kv_layout" in given:
        assert given["kv_layout"] == "NHD" and given["backend"] in ("fa2", "fa3", "auto")
        return flash.by_sequence(q, [0, len(q)], [(given["k"], given["v"])])
    if "k_cache" in given:
        k, v, ends = given["k_cache"], given["v_cache"], given["cache_seqlens"]
        assert ends.dtype == given["cache_batch_idx"].dtype == torch.int32
        assert (starts is None) == (given.get("max_seqlen_q") is None)
        where = zip(given["cache_batch_idx"].tolist(), ends.tolist(), strict=True)
        rows = [(k[slot, :length], v[slot, :length]) for slot, length in where]
    else:
        begins, ends = given["cu_seqlens_k"], given["seqused_k"]
        assert starts.dtype == begins.dtype == ends.dtype == torch.int32 and len(starts) == len(begins) == len(ends) + 1
        where = zip(begins.tolist(), ends.tolist(), strict=False)
        rows = [tuple(given[name][begin : begin + length] for name in "kv") for begin, length in where]
    if starts is None:
        all_starts = list(range(0, q.shape[0] * q.shape[1] + 1, q.shape[1]))
        return flash.by_sequence(q.flatten(0, 1), all_starts, rows).view(q.shape)
    return flash.by_sequence(q, starts.tolist(), rows)


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, flash.Package]:
    """All that is not installed."""
    names = ("flash_attn", "flash_attn_interface", "flashinfer")
    return {name: flash.Package(monkeypatch, name, answer, lambda bound: None) for name in names}


@pytest.mark.parametrize("name", [*DECODE, *PREFILL])
@pytest.mark.usefixtures("libraries")
def test_each_function_gives_what_the_reference_gives(name: str, decode_problem: Problem, prefill_problem: Problem) -> None:
    if name in DECODE:
        problem, expected = decode_problem, reference.decode(*decode_problem)
    else:
        problem, (q_NHD, k_STKD, v_STKD, starts, *where) = prefill_problem, prefill_problem
        expected = reference.prefill(q_NHD, k_STKD, v_STKD, starts.diff(), *where)
    torch.testing.assert_close(getattr(attention, name)(*problem), expected)


@pytest.mark.parametrize("name", [name for name in (*DECODE, *PREFILL) if name.startswith("flash")])
def test_a_library_that_is_missing_is_named(
    name: str, decode_problem: Problem, prefill_problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = {"flash_2": "flash_attn", "flash_3": "flash_attn_interface", "flashin": "flashinfer"}[name[:7]]
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(attention.LibraryMissing, match=f"{module}.* install .* sdpa_decode") as error:
        getattr(attention, name)(*(decode_problem if name in DECODE else prefill_problem))
    assert isinstance(error.value, VmmkvError) and isinstance(error.value, ImportError)


def test_a_library_without_the_function_is_to_be_updated(decode_problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", ModuleType("flashinfer"))
    with pytest.raises(attention.LibraryMissing, match=r"no attribute .*: update flashinfer, or use sdpa_decode"):
        attention.flashinfer_decode(*decode_problem)


def test_importing_the_adapters_imports_no_library() -> None:
    assert not {"flash_attn", "flash_attn_interface", "flashinfer"} & set(sys.modules)


def test_adjoining_slots_of_one_length_are_one_call(decode_problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    sdpa = attention.scaled_dot_product_attention
    monkeypatch.setattr(
        attention, "scaled_dot_product_attention", lambda q, *given, **how: (batches.append(len(q)), sdpa(q, *given, **how))[1]
    )
    attention.sdpa_decode_grouped(*decode_problem)
    assert sorted(batches) == [1, 1, 3]


def test_views_go_to_the_libraries_without_a_copy(
    decode_problem: Problem, prefill_problem: Problem, libraries: dict[str, flash.Package]
) -> None:
    attention.flash_2_decode(*decode_problem, max_length=64)
    attention.flash_3_decode(*decode_problem)
    attention.flash_3_varlen(*prefill_problem)
    attention.flashinfer_prefill(*prefill_problem)
    k_STKD = decode_problem[1]
    for library in libraries.values():
        for _, given in library.calls:
            view = given["k_cache"] if "k_cache" in given else given["k"]
            assert view.untyped_storage().data_ptr() == k_STKD.untyped_storage().data_ptr()
            assert view.stride()[-3:] == k_STKD.stride()[-3:]
    assert libraries["flash_attn"].calls[0][1]["k_cache"].shape[1] == 64
    varlen = libraries["flash_attn_interface"].calls[-1][1]
    assert varlen["cu_seqlens_k"][:-1].tolist() == [slot * k_STKD.shape[1] for slot in prefill_problem[5].tolist()]


def test_starts_that_int32_cannot_hold_and_views_that_are_cut_are_refused(
    prefill_problem: Problem, libraries: dict[str, flash.Package]
) -> None:
    q_NHD, k_STKD, v_STKD, *rest = prefill_problem
    with pytest.raises(ValueError, match="cut, they cannot be flattened"):
        attention.flash_3_varlen(q_NHD, k_STKD[:, :64], v_STKD[:, :64], *rest)
    far = torch.empty(1, device="meta").expand(2**16, 2**15, 1, 64)
    with pytest.raises(ValueError, match="flash_3_prefill takes slots by number"):
        attention.flash_3_varlen(q_NHD, far, far, *rest)
    assert libraries["flash_attn_interface"].calls == []


def test_the_guard_of_flash_attention_3_is_its_tile() -> None:
    assert attention.flash_3_guard_tokens(128, torch.bfloat16) == 176
    assert attention.flash_3_guard_tokens(128, torch.float8_e4m3fn) == 224
    assert attention.flash_3_guard_tokens(80, torch.float16) == 144
    for head_dim, dtype in ((512, torch.bfloat16), (128, torch.float32), (0, torch.bfloat16)):
        with pytest.raises(ValueError, match="heads of up to 256"):
            attention.flash_3_guard_tokens(head_dim, dtype)
