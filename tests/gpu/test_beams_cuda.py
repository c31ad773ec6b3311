"""Beam search on a GPU: the beams of transformers on the same GPU."""

from collections.abc import Callable, Iterator

import pytest

from tests.engine.conftest import Harness, making, prompt_of
from tests.engine.test_beams import answer, by_transformers, check, model_of
from tests.gpu.test_decode_steps_cuda import DEVICE
from vmmkv.layout import KV_KINDS


@pytest.fixture(params=[None, *KV_KINDS])
def harness(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    """Over exact rows and over quantised ones."""
    yield from making(request.param)


@pytest.mark.parametrize("share", [False, True])
def test_beams_are_those_of_transformers(harness: Callable[..., Harness], share: bool) -> None:
    one = harness(model_of(), device=DEVICE, share=share, step_tokens=4096)
    prompt = prompt_of(2040)
    one.ask("beams", prompt, 20, beam_width=4)
    one.ask("beside", prompt[:700], 20)
    one.run()
    check(answer(one, "beams"), by_transformers(one, prompt, width=4, max_new_tokens=20))
    assert one.tokens("beside") == one.expected(prompt[:700], 20)
