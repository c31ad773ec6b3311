"""Engines over a holder and two tiers, and an operator who does what he may: tokens stay right."""

import contextlib
import itertools
import random
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest

from tests.engine.conftest import VOCABULARY, Harness, wide_rows, windowed
from tests.laws.faulty_tier import FAULTS, FaultyTier
from tests.unit.holder_engines import start_holder
from vmmkv import PAGE_BYTES, BudgetError, DiskTier, HostTier
from vmmkv_server.engine.features import fetches
from vmmkv_server.engine.kv_backend import SlotBackend
from vmmkv_server.protocol import Abort


@pytest.mark.nightly
@pytest.mark.parametrize("seed", [0, 1, None])
def test_tokens_are_right_whatever_an_operator_does(seed: int | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over a holder and two tiers, of which one fails: budgets, sleeps, a cache that is forgotten, an engine that ends."""
    seed = random.SystemRandom().randrange(2**32) if seed is None else seed
    print(f"seed {seed}")
    chance, looks = random.Random(seed), itertools.count()
    monkeypatch.setattr(fetches, "LEAST_MEASURED", 1 << 30)
    monkeypatch.setattr(fetches, "FIRST_TOKENS_PER_S", chance.choice([0.1, 10.0, 100.0]))
    monkeypatch.setattr(fetches, "time", SimpleNamespace(perf_counter=lambda: float(next(looks))))  # time is counted in looks
    holder, path = start_holder(tmp_path / "kv.sock"), str(tmp_path / "kv.sock")
    host = FaultyTier(HostTier(chance.choice([8, 40]) * PAGE_BYTES), seed, FAULTS if seed % 2 else ["slow"])
    disk = DiskTier(tmp_path / "kv", 60 * PAGE_BYTES)
    prompts = [[(7 * place * (stem + 3) + stem) % VOCABULARY for place in range(700)] for stem in range(4)]
    wide = windowed() if seed % 3 == 0 else wide_rows()
    expected: dict[tuple[int, ...], list[int]] = {}
    for life in range(2):
        one = Harness(
            wide, ours=True, share=True, tiers=[host, disk], max_tokens=1024, budget_pages=chance.choice([20, 40]), slots=4,
            max_sequences=4, open_memory=lambda config: SlotBackend.open(replace(config, holder=path)),
        )  # fmt: skip
        engine, memory, asked = one.engine, one.memory, dict[str, tuple[list[int], int]]()
        assert isinstance(memory, SlotBackend)
        is_asleep = False
        for turn in range(100):
            match chance.choices(["ask", "leave", "resize", "forget", "sleep", "arrive", "step"], [5, 1, 1, 1, 2, 1, 8])[0]:
                case "sleep" if is_asleep:
                    memory.wake_up()
                    engine.budget_changed()
                    is_asleep = False
                case "sleep" if not engine.has_work:
                    engine.store_all(0.01)
                    engine.settle()
                    memory.sleep()
                    engine.budget_changed()
                    is_asleep = True
                    assert one.pool.created_bytes == 0
                case "arrive":
                    host.advance()
                case "forget":
                    engine.forget()
                case _ if is_asleep:
                    continue
                case "ask":
                    prompt = chance.choice(prompts)[: chance.choice([100, 300, 500, 650])] + chance.choice([[], [turn]])
                    asked[f"{life} {turn}"] = prompt, chance.choice([4, 8, 40, 200])
                    salt = chance.choice([None, "red"])
                    one.ask(f"{life} {turn}", *asked[f"{life} {turn}"], cache_salt=salt, priority=chance.choice([0, 0, 1]))
                case "leave" if asked:
                    asked.pop(name := chance.choice(list(asked)))
                    engine.receive(Abort(request_id=name))
                case "resize":
                    with contextlib.suppress(BudgetError):
                        memory.resize(chance.choice([18, 24, 40]) * PAGE_BYTES)
                        engine.budget_changed()
                case _:
                    one.step(chance.choice([1, 3, 10]))
            one.cache.check()
        if is_asleep:
            memory.wake_up()
            engine.budget_changed()
        for _ in range(20_000):
            if not engine.has_work:
                break
            engine.step()
            host.advance()
        assert not engine.has_work and not one.failures()
        for name, (prompt, max_new_tokens) in asked.items():
            key = (*prompt, max_new_tokens)
            expected[key] = expected.get(key) or one.expected(prompt, max_new_tokens)
            assert one.tokens(name) == expected[key], name
        host.hurry()
        one.close()
        assert not host.lent
    host.close()
    disk.close()
    holder.kill()
