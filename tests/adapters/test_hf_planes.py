"""How new rows are written: in two launches a layer however far apart the slots are, and with few calls of torch."""

from collections import Counter
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.adapters.hf_models import assert_same, gemma3, generated, llama, mistral, prompts, wide_llama
from vmmkv import GIB, KVCache, LayoutError, Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers import batch as batch_module


class Calls(TorchDispatchMode):
    """What torch is asked for within, views among it."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names[func.overloadpacket.__name__] += 1
        return func(*args, **kwargs or {})


@pytest.fixture
def far_slots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows are written as where torch would split a copy."""
    monkeypatch.setattr(batch_module, "splits_a_copy", lambda device, span_bytes: True)


def append(cache: VmmCache, num_layers: int, num_tokens: int, batch: int = 8) -> None:
    """A pass of random keys and values."""
    for layer in range(num_layers):
        cache.update(*torch.randn(2, batch, 2, num_tokens, 32), layer)


def calls_of_a_step(pool: Pool, num_layers: int) -> Counter[str]:
    with VmmCache(llama(num_hidden_layers=num_layers).config, pool) as cache, torch.inference_mode():
        for num_tokens in (5, 1):
            append(cache, num_layers, num_tokens)
        k, v = torch.randn(2, 8, 2, 1, 32)
        with Calls() as calls:
            for layer in range(num_layers):
                cache.update(k, v, layer)
    return calls.names


def test_a_layer_of_a_step_calls_torch_twice(pool: Pool) -> None:
    few, many = calls_of_a_step(pool, 4), calls_of_a_step(pool, 12)
    assert many - few == Counter(copy_=2 * 8)
    assert few.total() < 2 * 4 + 10


def test_rows_that_are_far_apart_are_written_by_one_call_for_all_slots(pool: Pool, far_slots: None) -> None:
    calls = calls_of_a_step(pool, 4)
    assert calls["index_copy_"] == 2 * 4 and calls["copy_"] == calls["arange"] == 0


@pytest.mark.parametrize(
    ("device", "span_bytes", "splits"),
    [("cuda:0", 2**31 + 1, True), ("cuda:0", 2**31, False), ("cpu", 2**40, False)],
)
def test_torch_splits_a_copy_past_offsets_of_32_bits_on_a_gpu(device: str, span_bytes: int, splits: bool) -> None:
    assert batch_module.splits_a_copy(torch.device(device), span_bytes) is splits


@pytest.mark.parametrize(("max_tokens", "span_bytes"), [(2**16, 4 * GIB + 2**16), (2**10, 2**26 + 2**16)])
def test_the_span_is_from_the_first_slots_row_to_the_last_ones(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, max_tokens: int, span_bytes: int
) -> None:
    asked: list[int] = []
    monkeypatch.setattr(batch_module, "splits_a_copy", lambda device, span_bytes: bool(asked.append(span_bytes)))
    with VmmCache(wide_llama().config, pool, max_tokens=max_tokens, slots=6) as cache, torch.inference_mode():
        for layer in range(4):
            cache.update(*torch.randn(2, 2, 4, 3, 512), layer)
    assert asked == [span_bytes]


@pytest.mark.parametrize(
    "make", [llama, wide_llama, lambda: mistral(16), lambda: gemma3(16)], ids=["full", "wide", "sliding", "hybrid"]
)
def test_far_rows_are_those_of_transformers_own_cache(pool: Pool, make: Any, far_slots: None) -> None:
    assert_same(make(), pool, prompts(45, 20, 3))
    assert_same(make(), pool, prompts(45), num_beams=3, prefill_chunk_size=7)  # of which windows drop some


def test_far_rows_are_written_under_any_mode(pool: Pool, far_slots: None) -> None:
    model = llama().requires_grad_(False)
    expected = generated(model, None, prompts(9), max_new_tokens=3)
    with VmmCache(model.config, pool) as cache:
        ids = prompts(9)["input_ids"]
        for mode in (torch.inference_mode(), torch.no_grad(), torch.enable_grad()):
            with mode:
                chosen = model(ids[:, cache.get_seq_length() :], past_key_values=cache).logits[:, -1:].argmax(-1)
            ids = torch.cat([ids, chosen.clone()], dim=1)
        assert ids.tolist() == expected


class IndicesByStream(TorchDispatchMode):
    """Which index tensors are read on which stream. They are kept, so that each is known again."""

    def __init__(self) -> None:
        super().__init__()
        self.stream: Any = "first"
        self.read: list[tuple[torch.Tensor, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.overloadpacket.__name__ in ("index_copy_", "index_select"):
            self.read.append((args[2], self.stream))
        return func(*args, **kwargs or {})


def test_an_index_is_read_on_the_stream_that_it_was_made_on_and_no_other(
    pool: Pool, monkeypatch: pytest.MonkeyPatch, far_slots: None
) -> None:
    """Another one might read it before it is written, or after its memory was given to somebody else."""
    recorded: list[Any] = []
    monkeypatch.setattr(KVCache, "record_stream", lambda cache, stream: recorded.append(stream))
    with VmmCache(llama().config, pool) as cache, torch.inference_mode(), IndicesByStream() as indices:
        monkeypatch.setattr(batch_module, "_current_stream", lambda device: indices.stream)
        for layer in range(4):
            cache.update(*torch.randn(2, 1, 2, 3, 32).repeat_interleave(8, dim=1), layer)  # equal prompts, kept once
        for stream in ("first", "second", "second", "first", "third"):
            indices.stream = stream
            cache.states(2)
        for stream in ("third", "second", "first"):
            indices.stream = stream
            append(cache, 4, 1)
        cache.reset()
    streams_of: dict[int, set[str]] = {}
    for index, stream in indices.read:
        streams_of.setdefault(index.untyped_storage()._cdata, set()).add(stream)
    assert {stream for streams in streams_of.values() for stream in streams} == {"first", "second", "third"}
    assert all(len(streams) == 1 for streams in streams_of.values())
    assert set(recorded) == {"first", "second", "third"}


def test_far_rows_of_another_kind_are_refused(pool: Pool, far_slots: None) -> None:
    with VmmCache(llama().config, pool) as cache, torch.inference_mode():
        append(cache, 4, 3)
        k, v = torch.randn(2, 8, 2, 1, 32)
        for keys, values in ((k.half(), v), (k, v.half()), (k[:, :1], v), (k, v[..., :16]), (k.to("meta"), v)):
            with pytest.raises(LayoutError, match=r"layer 2 gives .* and its rows are \[8, 2, 1, 32\] torch\.float32 on cpu"):
                cache.update(keys, values, 2)
        append(cache, 4, 1)
        assert cache.get_seq_length() == 4
