"""The adapters give what the reference gives, ask for what is not installed by name, and call libraries as these are declared.

The stand-ins have the signatures of FlashAttention 2.7 (flash_attn/flash_attn_interface.py), FlashAttention-3
(hopper/flash_attn_interface.py) and FlashInfer 0.2 and later (flashinfer/prefill.py), and compute what these document.
"""

import inspect
import itertools
import sys
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any

import pytest
import torch

from vmmkv import MIB, KVCache, KVLayout, Pool, VmmkvError
from vmmkv.adapters import attention
from vmmkv.kernels import reference

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


def truth(problem: Problem) -> torch.Tensor:
    if len(problem) == 5:
        return reference.decode(*problem)
    q_NHD, k_STKD, v_STKD, starts, lengths_B, slots_B = problem
    return reference.prefill(q_NHD, k_STKD, v_STKD, starts.diff(), lengths_B, slots_B)


Call = tuple[str, dict[str, Any]]


class Library(ModuleType):
    """A stand-in that takes what the real functions take, and records it."""

    def __init__(self, name: str, **functions: Callable[..., torch.Tensor]) -> None:
        super().__init__(name)
        self.calls: list[Call] = []
        for function_name, function in functions.items():
            setattr(self, function_name, self.recording(function_name, function))

    def recording(self, name: str, function: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def call(*args: Any, **options: Any) -> torch.Tensor:
            given = inspect.signature(function).bind(*args, **options).arguments
            self.calls.append((name, given))
            return function(*args, **options)

        return call


def per_sequence(q_NHD: torch.Tensor, starts: list[int], rows: Iterator[tuple[torch.Tensor, torch.Tensor]]) -> torch.Tensor:
    """Causal, aligned at the last row, as all of these are documented to be."""
    outs = [
        reference.attend(q_NHD[start:end], k_TKD, v_TKD, torch.arange(len(k_TKD) - (end - start), len(k_TKD)))
        for (start, end), (k_TKD, v_TKD) in zip(itertools.pairwise(starts), rows, strict=True)
    ]
    return torch.cat(outs)


def with_kvcache(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cache_batch_idx: torch.Tensor,
    cu_seqlens_q: torch.Tensor | None,
) -> torch.Tensor:
    if cu_seqlens_q is None:
        starts, q_NHD = list(range(0, q.shape[0] * q.shape[1] + 1, q.shape[1])), q.flatten(0, 1)
    else:
        starts, q_NHD = cu_seqlens_q.tolist(), q
    where = zip(cache_batch_idx.tolist(), cache_seqlens.tolist(), strict=True)
    rows = ((k_cache[slot, :length], v_cache[slot, :length]) for slot, length in where)
    return per_sequence(q_NHD, starts, rows).view(q.shape)


def flash_2_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, block_table=None, softmax_scale=None, causal=False, window_size=(-1, -1), softcap=0.0,
    rotary_interleaved=True, alibi_slopes=None, num_splits=0, return_softmax_lse=False,
):  # fmt: skip
    assert causal and cache_seqlens.dtype == cache_batch_idx.dtype == torch.int32
    return with_kvcache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, None)


def flash_3_with_kvcache(
    q, k_cache, v_cache, k=None, v=None, qv=None, rotary_cos=None, rotary_sin=None, cache_seqlens=None, cache_batch_idx=None,
    cache_leftpad=None, page_table=None, cu_seqlens_q=None, cu_seqlens_k_new=None, max_seqlen_q=None, rotary_seqlens=None,
    q_descale=None, k_descale=None, v_descale=None, softmax_scale=None, causal=False, window_size=(-1, -1), attention_chunk=0,
    softcap=0.0, rotary_interleaved=True, scheduler_metadata=None, num_splits=0, pack_gqa=None, sm_margin=0,
    return_softmax_lse=False,
):  # fmt: skip
    assert causal and (cu_seqlens_q is None) == (max_seqlen_q is None)
    return with_kvcache(q, k_cache, v_cache, cache_seqlens, cache_batch_idx, cu_seqlens_q)


def flash_3_varlen_func(
    q, k, v, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, seqused_q=None, seqused_k=None, softmax_scale=None,
    causal=False, qv=None, q_descale=None, k_descale=None, v_descale=None, window_size=(-1, -1), attention_chunk=0, softcap=0.0,
    num_splits=1, pack_gqa=None, deterministic=False, sm_margin=0, return_attn_probs=False,
):  # fmt: skip
    assert causal and cu_seqlens_q.dtype == cu_seqlens_k.dtype == seqused_k.dtype == torch.int32
    assert len(cu_seqlens_k) == len(cu_seqlens_q) == len(seqused_k) + 1
    begins = zip(cu_seqlens_k.tolist(), seqused_k.tolist(), strict=False)
    rows = ((k[begin : begin + length], v[begin : begin + length]) for begin, length in begins)
    return per_sequence(q, cu_seqlens_q.tolist(), rows)


def flashinfer_single_prefill(
    q, k, v, scale_q=None, scale_k=None, scale_v=None, o_dtype=None, custom_mask=None, packed_custom_mask=None, causal=False,
    kv_layout="NHD", pos_encoding_mode="NONE", use_fp16_qk_reduction=False, sm_scale=None, window_left=-1,
    logits_soft_cap=None, rope_scale=None, rope_theta=None, backend="auto", return_lse=False,
):  # fmt: skip
    assert causal and kv_layout == "NHD" and backend in ("fa2", "fa3", "auto")
    return per_sequence(q, [0, len(q)], iter([(k, v)]))


@pytest.fixture
def libraries(monkeypatch: pytest.MonkeyPatch) -> dict[str, Library]:
    """All that is not installed."""
    made = [
        Library("flash_attn", flash_attn_with_kvcache=flash_2_with_kvcache),
        Library(
            "flash_attn_interface",
            flash_attn_with_kvcache=flash_3_with_kvcache,
            flash_attn_varlen_func=flash_3_varlen_func,
        ),
        Library("flashinfer", single_prefill_with_kv_cache=flashinfer_single_prefill),
    ]
    for library in made:
        monkeypatch.setitem(sys.modules, library.__name__, library)
    return {library.__name__: library for library in made}


@pytest.mark.parametrize("name", DECODE)
@pytest.mark.usefixtures("libraries")
def test_decode_gives_what_the_reference_gives(name: str, decode_problem: Problem) -> None:
    torch.testing.assert_close(getattr(attention, name)(*decode_problem), truth(decode_problem))


@pytest.mark.parametrize("name", PREFILL)
@pytest.mark.usefixtures("libraries")
def test_prefill_gives_what_the_reference_gives(name: str, prefill_problem: Problem) -> None:
    torch.testing.assert_close(getattr(attention, name)(*prefill_problem), truth(prefill_problem))


@pytest.mark.parametrize("name", [name for name in (*DECODE, *PREFILL) if name.startswith("flash")])
def test_a_library_that_is_missing_is_named(
    name: str, decode_problem: Problem, prefill_problem: Problem, monkeypatch: pytest.MonkeyPatch
) -> None:
    modules = {"flash_2": "flash_attn", "flash_3": "flash_attn_interface", "flashin": "flashinfer"}
    module = modules[name[:7]]
    monkeypatch.setitem(sys.modules, module, None)
    problem = decode_problem if name in DECODE else prefill_problem
    with pytest.raises(attention.LibraryMissing, match=f"{module}.* install .* sdpa_decode") as error:
        getattr(attention, name)(*problem)
    assert isinstance(error.value, VmmkvError) and isinstance(error.value, ImportError)


def test_a_library_without_the_function_is_to_be_updated(decode_problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "flashinfer", Library("flashinfer"))
    with pytest.raises(attention.LibraryMissing, match=r"no attribute .*: update flashinfer, or use sdpa_decode"):
        attention.flashinfer_decode(*decode_problem)


def test_importing_the_adapters_imports_no_library() -> None:
    assert not {"flash_attn", "flash_attn_interface", "flashinfer"} & set(sys.modules)


def test_adjoining_slots_of_one_length_are_one_call(decode_problem: Problem, monkeypatch: pytest.MonkeyPatch) -> None:
    batches: list[int] = []
    sdpa = attention._sdpa
    monkeypatch.setattr(attention, "_sdpa", lambda q, k, v: (batches.append(len(q)), sdpa(q, k, v))[1])
    attention.sdpa_decode_grouped(*decode_problem)
    assert sorted(batches) == [1, 1, 3]


def test_views_go_to_the_libraries_without_a_copy(
    decode_problem: Problem, prefill_problem: Problem, libraries: dict[str, Library]
) -> None:
    attention.flash_2_decode(*decode_problem, max_length=64)
    attention.flash_3_decode(*decode_problem)
    attention.flash_3_varlen(*prefill_problem)
    attention.flashinfer_prefill(*prefill_problem)
    k_STKD = decode_problem[1]
    storage = k_STKD.untyped_storage().data_ptr()
    for library in libraries.values():
        for _, given in library.calls:
            view = given["k_cache"] if "k_cache" in given else given["k"]
            assert view.untyped_storage().data_ptr() == storage
            assert view.stride()[-3:] == k_STKD.stride()[-3:]
    assert libraries["flash_attn"].calls[0][1]["k_cache"].shape[1] == 64
    varlen = libraries["flash_attn_interface"].calls[-1][1]
    assert varlen["cu_seqlens_k"][:-1].tolist() == [slot * k_STKD.shape[1] for slot in prefill_problem[5].tolist()]


def test_starts_that_int32_cannot_hold_and_views_that_are_cut_are_refused(
    prefill_problem: Problem, libraries: dict[str, Library]
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
