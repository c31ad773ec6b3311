"""A PolicyCache on a GPU: the rows and tokens of one on the host."""

import pytest
import torch

from tests.adapters.models import generated, llama, prompts, states_of
from tests.adapters.test_transformers_policy import POLICIES
from vmmkv import GIB, Pool
from vmmkv.adapters.transformers import PolicyCache
from vmmkv.eviction import KVPolicy

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU to test on")]


@pytest.mark.filterwarnings("ignore::vmmkv.adapters.transformers.DeclinedWarning")  # of the kernels on the host
@pytest.mark.parametrize("policy", POLICIES, ids=str)
def test_a_policy_keeps_the_rows_that_it_keeps_on_the_host(policy: KVPolicy) -> None:
    """Rows of two sequences, by their prompts and as they generate, and their tokens."""
    found = []
    with Pool("cpu", GIB) as host, Pool("cuda:0", 4 * GIB) as pool:
        for device, memory in (("cpu", host), ("cuda:0", pool)):
            model = llama().to(device)
            model.set_attn_implementation("vmmkv")
            with PolicyCache(model.config, memory, policy=policy) as cache:
                answer = generated(model, cache, {name: each.to(device) for name, each in prompts(150, 150).items()})
                assert cache.states(0)[0].shape[2] < 55 < cache.get_seq_length()
                found.append((answer, [states.to("cpu", copy=True) for states in states_of(cache)]))
                cache.check()
    (expected, rows), (given, rows_on_gpu) = found
    assert given == expected
    torch.testing.assert_close(rows_on_gpu, rows, atol=1e-3, rtol=1e-3)
