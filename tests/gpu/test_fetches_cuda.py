"""The engine with tiers on a GPU: loads and stores beside captured decode steps change no token."""

from pathlib import Path

import pytest

from tests.engine.conftest import Harness, prompt_of, slow_prefill, wide_rows
from tests.gpu.test_decode_steps_cuda import DEVICE
from vmmkv import MIB, PAGE_BYTES, DiskTier, HostTier
from vmmkv.tiers import Tier
from vmmkv_server.engine.features.fetches import Fetches

__all__ = ["slow_prefill"]

PROMPTS = {str(seed): prompt_of(500 + 40 * seed, seed) for seed in range(6)}
"""Of 7 to 10 full pages: two of them, and a request that runs beside them, fill the device."""


@pytest.mark.usefixtures("slow_prefill")
@pytest.mark.parametrize("kind", ["host", "disk", "both"])
def test_tokens_are_those_of_transformers_while_a_request_decodes_beside_loads(kind: str, tmp_path: Path) -> None:
    tiers: list[Tier] = [] if kind == "disk" else [HostTier(128 * MIB)]
    tiers += [] if kind == "host" else [DiskTier(tmp_path / "kv", 128 * MIB)]
    one = Harness(
        wide_rows(), device=DEVICE, ours=True, capture=True, share=True, tiers=tiers, budget_pages=32, max_tokens=1024,
        step_tokens=512,
    )  # fmt: skip
    expected = {name: one.expected(prompt) for name, prompt in PROMPTS.items()}
    running = prompt_of(100, 99)
    for turn in range(3):
        one.ask(f"beside {turn}", running, 300)
        for name, prompt in PROMPTS.items():
            one.ask(f"{name} {turn}", prompt)
        one.run()
        one.engine.store_all(30)
    for turn in range(3):
        assert one.tokens(f"beside {turn}") == one.expected(running, 300)
        assert {name: one.tokens(f"{name} {turn}") for name in PROMPTS} == expected
    assert not one.failures()
    stats = one.prefix.stats()
    # The request beside them grows into the memory of some fetches, which are given up: of how many is a matter of the pace.
    counts = one.engine.features.of(Fetches).counts.fetches
    assert counts["done"] and stats.fetched_tokens >= 7 * 64, counts
    assert not stats.tier_errors and not any(tier.errors for tier in stats.tiers)
    assert sum(tier.loaded_bytes for tier in stats.tiers) >= stats.fetched_tokens // 64 * PAGE_BYTES
    one.close()
    for tier in tiers:
        tier.close()
