"""Log-probabilities of prompts on a GPU: those of transformers on the same GPU."""

from collections.abc import Callable

import pytest

from tests.engine.conftest import Harness, harness, prompt_of
from tests.engine.test_prompt_logprobs import assert_right
from tests.gpu.test_decode_steps_cuda import DEVICE

__all__ = ["harness"]


@pytest.mark.parametrize("ours", [False, True])
def test_prompts_are_as_likely_as_transformers_says_beside_others(harness: Callable[..., Harness], ours: bool) -> None:
    one = harness(device=DEVICE, ours=ours, capture=ours, share=True, step_tokens=200, max_tokens=4096)
    prompts = {str(length): prompt_of(length, length) for length in (2, 63, 900)}
    one.ask("plain", prompt_of(130), 40)
    for rounds in range(2):  # the second time the prefix cache has the prompts
        for name, prompt in prompts.items():
            one.ask(f"{name} {rounds}", prompt, 4 * rounds, prompt_logprobs=3)
        one.run()
        for name, prompt in prompts.items():
            assert_right(one, f"{name} {rounds}", prompt, 3, within=2e-3)
    assert one.tokens("plain") == one.expected(prompt_of(130), 40)
