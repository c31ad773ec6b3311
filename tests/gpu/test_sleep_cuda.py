"""A sleep gives a GPU's memory back, and steps that were captured before it go on behind it."""

import pytest
import torch

from tests.engine.conftest import Harness, prompt_of, slow_prefill, wide_rows
from tests.gpu.test_decode_steps_cuda import DEVICE
from tests.server.fake_engine import READY
from vmmkv import MIB, PAGE_BYTES, HostTier
from vmmkv_server.engine.administration import manage
from vmmkv_server.engine.kv_backend import SlotBackend
from vmmkv_server.engine.loading import Loaded
from vmmkv_server.protocol import Sleep, WakeUp

__all__ = ["slow_prefill"]

PROMPTS = [prompt_of(500 + 40 * seed, seed) for seed in range(6)]


@pytest.mark.usefixtures("slow_prefill")
@pytest.mark.parametrize("has_tier", [False, True])
def test_the_memory_of_a_sleeper_is_the_devices_and_its_captured_steps_stay_right(has_tier: bool) -> None:
    tiers = [HostTier(256 * MIB)] * has_tier
    one = Harness(
        wide_rows(), device=DEVICE, ours=True, capture=True, share=True, tiers=tiers, budget_pages=128, max_tokens=1024,
        step_tokens=512, open_memory=SlotBackend.open,
    )  # fmt: skip
    loaded = Loaded(one.engine, READY, one.memory)
    expected = [one.expected(prompt, 40) for prompt in PROMPTS]

    def said() -> list[list[int]]:
        before = len(one.tokens("0"))
        for name, prompt in enumerate(PROMPTS):
            one.ask(str(name), prompt, 40)
        one.run()
        return [one.tokens(str(name))[before:] for name in range(len(PROMPTS))]

    assert said() == expected
    address = one.cache.k(0).data_ptr()
    for _ in range(3):
        torch.cuda.synchronize()
        created_bytes, free_bytes = one.pool.created_bytes, torch.cuda.mem_get_info()[0]
        assert created_bytes >= 40 * PAGE_BYTES
        asleep = manage(loaded, Sleep())
        assert (asleep.error, asleep.freed_bytes) == (None, created_bytes)
        assert torch.cuda.mem_get_info()[0] - free_bytes > created_bytes // 2, "kernels that are loaded take some of it"
        others = torch.full((created_bytes,), 255, dtype=torch.uint8, device=DEVICE)  # in memory that was ours
        del others
        torch.cuda.empty_cache()
        assert manage(loaded, WakeUp()).error is None
        fetched = one.prefix.stats().fetched_tokens
        assert said() == expected
        assert (one.prefix.stats().fetched_tokens - fetched > 2000) == has_tier
        assert one.cache.k(0).data_ptr() == address
        one.cache.check()
    assert not one.failures()
    one.close()
    for tier in tiers:
        tier.close()
