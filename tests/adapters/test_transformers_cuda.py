"""On a GPU, where the host goes on while kernels still read: the same tokens, and the memory of the tokens alone."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from tests.adapters import flash
from tests.adapters.models import (
    assert_attention_is_sdpas,
    assert_same,
    forward,
    gemma3,
    ids_of,
    llama,
    mistral,
    prompts,
    states_of,
    wide_llama,
)
from tests.attending import attending_by
from vmmkv import GIB, Pool
from vmmkv.adapters.transformers import VmmCache
from vmmkv.adapters.transformers.attention import attention, declined
from vmmkv.units import PAGE_BYTES

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to test on")]


@pytest.fixture
def pool() -> Iterator[Pool]:
    with Pool("cuda:0", 4 * GIB) as pool:
        yield pool


def on_gpu(inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {name: tensor.to("cuda:0") for name, tensor in inputs.items()}


HYBRID = pytest.mark.parametrize("make", [llama, lambda **changes: gemma3(16, **changes)], ids=["full", "hybrid"])


@pytest.mark.parametrize("attention", ["eager", "sdpa"])
@HYBRID
def test_the_tokens_are_those_of_transformers_own_cache(pool: Pool, make: Any, attention: str) -> None:
    model = make().to("cuda:0")
    model.set_attn_implementation(attention)
    assert_same(model, pool, on_gpu(prompts(45)))
    assert_same(model, pool, on_gpu(prompts(45, 20, 3)))


@pytest.mark.parametrize("lengths", [(45,), (45, 20, 3)], ids=["one", "padded"])
@HYBRID
def test_flex_attention_gives_the_tokens_of_sdpa(pool: Pool, make: Any, lengths: tuple[int, ...]) -> None:
    """sdpa is the reference, since torch's compiler fails on flex_attention over some of transformers' own cache's tensors."""
    model = make(head_dim=64).to("cuda:0")  # torch has no flex_attention in float32 that would fit heads of 256 into an SM
    model.set_attn_implementation("flex_attention")
    try:
        assert_same(model, pool, on_gpu(prompts(*lengths)), reference="sdpa", max_new_tokens=6)
    except RuntimeError as error:
        if "NoValidChoicesError" not in repr(error):
            raise
        pytest.skip("torch's compiler finds no kernel for flex_attention on this GPU: NoValidChoicesError")


@pytest.mark.parametrize("make", [llama, lambda: gemma3(16), lambda: mistral(40)], ids=["full", "hybrid", "sliding"])
def test_flash_attention_by_torchs_build_of_its_kernels(monkeypatch: pytest.MonkeyPatch, pool: Pool, make: Any) -> None:
    package = flash.install(monkeypatch, 2, flash.aten_flash_2)
    model = make().to("cuda:0", torch.bfloat16)
    with attending_by(model, "flash_attention_2"):
        assert_same(model, pool, on_gpu(prompts(70)), prefill_chunk_size=7)
        assert_same(model, pool, on_gpu(prompts(70, 70)))
        assert_same(model, pool, on_gpu(prompts(70, 40, 3)))
    assert {function for function, _ in package.calls} == {"flash_attn_func", "flash_attn_varlen_func"}


def test_beams_and_prompt_lookup(pool: Pool) -> None:
    model = wide_llama(initializer_range=0.3).to("cuda:0")
    assert_same(model, pool, on_gpu(prompts(70, 40)), num_beams=4, max_new_tokens=60)
    assert_same(model, pool, on_gpu(prompts(70)), prompt_lookup_num_tokens=4, max_new_tokens=60)


def test_what_a_window_passes_is_unmapped_behind_its_readers(pool: Pool) -> None:
    model = mistral(40, num_key_value_heads=4, head_dim=512).to("cuda:0")
    assert_same(model, pool, on_gpu(prompts(100, 70)), max_new_tokens=300)


@pytest.mark.parametrize("max_tokens", [2**16, 2**10], ids=["slots of 4 GiB", "slots of 64 MiB"])
def test_a_layer_of_a_step_launches_two_kernels(pool: Pool, max_tokens: int) -> None:
    with VmmCache(wide_llama().config, pool, max_tokens=max_tokens) as cache, torch.inference_mode():
        k, v = torch.randn(2, 8, 4, 1, 512, device="cuda:0")
        for _ in range(3):
            for layer in range(4):
                cache.update(k, v, layer)
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA]) as profiler:
            for layer in range(4):
                seen = cache.update(k, v, layer)
            torch.cuda.synchronize()
        assert sum(event.device_type == DeviceType.CUDA for event in profiler.events()) == 2 * 4
        for states, new in zip(seen, (k, v), strict=True):
            assert torch.equal(states, new.expand(-1, -1, 4, -1))


def test_a_capture_is_refused(pool: Pool) -> None:
    model = llama().to("cuda:0")
    ids = on_gpu(prompts(1))["input_ids"]
    with VmmCache(model.config, pool) as cache, torch.inference_mode():
        model(ids, past_key_values=cache)
        states = torch.zeros(1, 2, 1, 32, device="cuda:0")
        with pytest.raises(RuntimeError, match="outside the capture"), torch.cuda.graph(torch.cuda.CUDAGraph()):
            cache.update(states, states, 0)
        model(ids, past_key_values=cache)
        assert cache.get_seq_length() == 2


def test_equal_prompts_are_seen_on_the_device(pool: Pool) -> None:
    model = wide_llama().to("cuda:0", torch.bfloat16)
    ids = on_gpu(prompts(1024))["input_ids"]
    with VmmCache(model.config, pool) as cache, torch.inference_mode():
        model(ids.expand(6, -1), past_key_values=cache)
        assert pool.held_bytes == 16 * PAGE_BYTES  # 64 rows of 32 KiB a page


@pytest.mark.parametrize("make", [llama, lambda: gemma3(16), lambda: mistral(40)], ids=["full", "hybrid", "sliding"])
def test_vmmkvs_attention_gives_the_tokens_of_sdpa(pool: Pool, make: Any) -> None:
    model, inputs = make().to("cuda:0"), on_gpu(prompts(70, 70))
    declined.clear()
    for options in ({}, {"prefill_chunk_size": 7}, {"num_beams": 3}):
        assert_attention_is_sdpas(model, pool, inputs, **options)
    assert not declined


def test_vmmkvs_attention_launches_two_kernels_in_a_layer_of_a_step(pool: Pool) -> None:
    q = torch.randn(8, 32, 1, 128, device="cuda:0", dtype=torch.bfloat16)
    k, v = torch.randn(2, 8, 8, 1000, 128, device="cuda:0", dtype=torch.bfloat16)
    layer = torch.nn.Module()
    for _ in range(3):
        attention(layer, q, k, v, None, scaling=128**-0.5)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA]) as profiler:
        for _ in range(4):
            out, _ = attention(layer, q, k, v, None, scaling=128**-0.5)
        torch.cuda.synchronize()
    assert sum(event.device_type == DeviceType.CUDA for event in profiler.events()) == 2 * 4
    expected = torch.nn.functional.scaled_dot_product_attention(q.float(), k.float(), v.float(), enable_gqa=True)
    torch.testing.assert_close(out.float(), expected.transpose(1, 2), atol=1e-2, rtol=1e-2)


@pytest.mark.parametrize("queries", [1, 7], ids=["decode", "chunk"])
def test_a_captured_attention_reads_its_own_numbers(queries: int) -> None:
    q = torch.randn(2, 8, queries, 128, device="cuda:0", dtype=torch.bfloat16)
    k, v = torch.randn(2, 2, 2, 90, 128, device="cuda:0", dtype=torch.bfloat16)
    layer, graphs, outs = torch.nn.Module(), [], []
    expected, _ = attention(layer, q, k, v, None, scaling=0.1)
    for _ in range(2):
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            outs.append(attention(layer, q, k, v, None, scaling=0.1)[0])
        graphs.append(graph)
    graphs[1].replay()  # not the first, whose numbers are not written
    torch.cuda.synchronize()
    assert torch.equal(outs[1], expected)
    assert torch.equal(attention(layer, q, k, v, None, scaling=0.1)[0], expected)


def test_a_compiled_step_gives_the_eager_tokens(pool: Pool) -> None:
    model = llama().to("cuda:0")
    model.set_attn_implementation("vmmkv")
    compiled = torch.compile(model, fullgraph=True, dynamic=True)
    ids = on_gpu(prompts(40, 40))["input_ids"]
    answers = []
    for call in (model, compiled):
        with VmmCache(model.config, pool) as cache, torch.no_grad():
            tokens = [model(ids, past_key_values=cache).logits[:, -1:].argmax(-1)]
            for _ in range(20):
                tokens.append(call(tokens[-1], past_key_values=cache).logits[:, -1:].argmax(-1))
            cache.check()
        answers.append(torch.cat(tokens, 1).tolist())
    torch.compiler.reset()
    assert answers[0] == answers[1]


@HYBRID
def test_offloaded_rows_come_back_after_others_wrote_their_memory(pool: Pool, make: Any) -> None:
    """Rows leave while the kernels that write them still wait."""
    model, ids, more = make().to("cuda:0"), ids_of(0, 0, 1, num_tokens=600).cuda(), ids_of(0, 1, 2, num_tokens=1).cuda()
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as twin, VmmCache(model.config, pool) as other:
        for each in (cache, twin):
            forward(model, each, ids, logits_to_keep=1)
            torch.cuda._sleep(100_000_000)
            forward(model, each, more)
            if each is cache:
                cache.offload()
                assert pool.used_bytes == 0
                forward(model, other, ids_of(3, 4, 5, num_tokens=600).cuda())
        assert torch.equal(forward(model, cache, more), forward(model, twin, more))
        assert all(map(torch.equal, states_of(cache), states_of(twin)))
        cache.check()
