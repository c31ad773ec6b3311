"""The laws of a cache under random use, as tests/laws/test_cache_machine.py has them, on a GPU's memory."""

from collections.abc import Sequence

import torch
from hypothesis import settings

from tests.gpu.conftest import WALK
from tests.laws.test_cache_machine import CacheMachine
from vmmkv.driver import Driver, Fence
from vmmkv.driver.cuda import CudaDriver


class PromptCuda(CudaDriver):
    """A device that is never behind: what runs is what the machine launches on the fake driver."""

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        fence = super().fence(streams)
        fence.wait()
        return fence


class OverCuda:
    """A machine over CUDA: the bytes too."""

    real_memory = True

    def open_below(self) -> Driver:
        return PromptCuda(torch.device("cuda", 0))


class CudaMachine(OverCuda, CacheMachine):
    """See OverCuda."""


TestOnCuda = CudaMachine.TestCase
TestOnCuda.settings = settings(WALK, max_examples=30)
