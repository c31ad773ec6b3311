"""What a decode step asks of the host is the same whatever the context: the same calls, of our own code and of the driver."""

import gc
import sys
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import pytest

import vmmkv
from tests.engine.conftest import VOCABULARY, Harness, tiny_model
from vmmkv import KVCache
from vmmkv.memory.mapper import Mapper
from vmmkv.server.engine import engine
from vmmkv.server.engine.request import Status

ROOT = Path(vmmkv.__file__).parents[1]
TOKENS_A_PAGE = 64
SEQUENCES = 3


@contextmanager
def counted() -> Iterator[Counter[str]]:
    """Calls of the functions of this project, by file and name."""
    calls: Counter[str] = Counter()

    def note(frame: FrameType, event: str, _: Any) -> None:
        path = frame.f_code.co_filename
        if event == "call" and path.startswith(str(ROOT)) and ".venv" not in path:
            calls[f"{Path(path).name}:{frame.f_code.co_qualname}"] += 1

    gc.disable()  # what it calls back is nobody's
    sys.setprofile(note)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        gc.enable()


def steady(harness: Callable[..., Harness], num_tokens: int, *, share: bool) -> Harness:
    """All decode, with as many tokens and a few, each of them at another place in its page."""
    model = tiny_model(num_key_value_heads=4, head_dim=512)  # a row of 32 KiB
    sizes = {"slots": 2 * SEQUENCES, "max_sequences": SEQUENCES, "budget_pages": 200, "step_tokens": 4096}
    one = harness(model, ours=True, share=share, **sizes)
    for index in range(SEQUENCES):
        prompt = [(7 * index + each) % VOCABULARY for each in range(num_tokens + 5 * index)]
        one.ask(str(index), prompt, 4 * TOKENS_A_PAGE)
    for _ in range(10):
        one.engine.step()
    assert len(one.engine._scheduler.running) == SEQUENCES
    assert all(request.status is Status.DECODING for request in one.engine._scheduler.running)
    return one


@pytest.mark.parametrize("share", [False, True])
def test_a_decode_step_makes_the_same_calls_whatever_the_context(
    harness: Callable[..., Harness], monkeypatch: pytest.MonkeyPatch, share: bool
) -> None:
    # What depends on the clock: how far ahead is mapped, how much of it fits into a step, when a report is due.
    monkeypatch.setattr(engine, "SNAPSHOT_S", float("inf"))
    monkeypatch.setattr(KVCache, "lookahead_tokens", lambda cache, step_us: 2)
    monkeypatch.setattr(Mapper, "pages_within", lambda mapper, budget_us: 100)
    found = []
    for num_tokens in (TOKENS_A_PAGE, 12 * TOKENS_A_PAGE):
        one = steady(harness, num_tokens, share=share)
        one.engine._step_us = 1e15  # there is time for whatever there is to do
        before = one.cache.stats().driver_calls
        with counted() as calls:
            for _ in range(TOKENS_A_PAGE):
                one.engine.step()
        after = one.cache.stats().driver_calls
        found.append((calls, {call: after[call] - before.get(call, 0) for call in after}))
        one.run()
        one.close()
    (short_calls, short_driver), (long_calls, long_driver) = found
    assert short_driver == long_driver
    assert short_driver["map"] == SEQUENCES, "pages end while it is counted"
    assert short_calls["engine.py:Engine.step"] == TOKENS_A_PAGE
    assert short_calls == long_calls
