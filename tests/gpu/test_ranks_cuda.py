"""Tensor parallelism over GPUs: NCCL within captured steps gives the tokens of one GPU; a rank that is gone ends the engine."""

from pathlib import Path
from typing import Any

import pytest
import torch

from tests.engine.conftest import tiny_model, wide_rows
from tests.engine.test_ranks import GREEDY, ends, everything, saved
from vmmkv import MIB
from vmmkv.server import LLM, SamplingParams

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")

OPTIONS: dict[str, Any] = {"device": "cuda:0", "dtype": "float32", "max_num_seqs": 16, "kv_budget_bytes": 128 * MIB}


@pytest.mark.parametrize("make", [tiny_model, wide_rows])
def test_two_gpus_give_the_tokens_of_one(make: Any, tmp_path: Path) -> None:
    path = saved(make(vocab_size=258, max_position_embeddings=2048), tmp_path)
    found = []
    for num_ranks in (1, 2):
        with LLM(path, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            together = llm.generate([[seed, *range(100)] for seed in range(12)], GREEDY)
            found.append([everything(llm), [output.outputs[0].token_ids for output in together]])
    assert found[0] == found[1]


def test_preempted_requests_have_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    path = saved(wide_rows(vocab_size=258, max_position_embeddings=512), tmp_path)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    found = []
    for num_ranks, num_pages in ((1, 12), (2, 6)):
        options = OPTIONS | {"kv_budget_bytes": num_pages * 2 * MIB, "max_num_batched_tokens": 128}
        with LLM(path, tensor_parallel_size=num_ranks, **options) as llm:
            outputs = llm.generate([[seed] * 60 for seed in range(1, 9)], long)
            assert llm.snapshot is not None and llm.snapshot.preemptions
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_a_rank_that_is_killed_ends_the_engine_within_its_timeout(tmp_path: Path) -> None:
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        (peer,) = llm._open().ranks._peers  # type: ignore[union-attr]
        assert peer.process is not None
        peer.process.kill()
        ends(llm, "rank 1 has ended with exit code -9")
