"""Tensor parallelism over GPUs: sums within captured steps give the tokens of one GPU; a rank that is gone ends the engine."""

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers as hf

from tests.engine.conftest import tiny_model, wide_rows
from tests.engine.decoder_models import model_of, small
from tests.engine.test_ranks import GREEDY, ends, everything, saved
from tests.server.tiny import byte_tokenizer
from vmmkv import MIB
from vmmkv_server import LLM, SamplingParams
from vmmkv_server.engine.ranks import RankFailed

pytestmark = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="it takes two GPUs")

OPTIONS: dict[str, Any] = {
    "device": "cuda:0",
    "dtype": "float32",
    "max_num_seqs": 16,
    "max_num_batched_tokens": 256,
    "kv_budget_bytes": 128 * MIB,
}


@pytest.mark.parametrize("make", [tiny_model, wide_rows])
def test_two_gpus_give_the_tokens_of_one(make: Any, tmp_path: Path) -> None:
    path = saved(make(vocab_size=258, max_position_embeddings=2048), tmp_path)
    found = []
    for num_ranks in (1, 2):
        with LLM(path, tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            several = llm.loaded.ranks
            assert several is None or several.collectives.symmetric is not None, "NVLink is between them"
            together = llm.generate([[seed, *range(100)] for seed in range(12)], GREEDY)
            found.append([everything(llm), [output.outputs[0].token_ids for output in together]])
    assert found[0] == found[1]


@pytest.mark.parametrize("kind", [hf.Gemma3TextConfig, hf.Phi3Config, hf.MixtralConfig])
def test_two_gpus_give_the_tokens_of_one_by_transformers_code(kind: Any, tmp_path: Path) -> None:
    model_of(small(kind, vocab_size=258, hidden_size=128, head_dim=32)).save_pretrained(tmp_path)
    byte_tokenizer().save_pretrained(tmp_path)
    found = []
    for num_ranks in (1, 2):
        with LLM(tmp_path, model_impl="transformers", tensor_parallel_size=num_ranks, **OPTIONS) as llm:
            found.append(everything(llm))
    assert found[0] == found[1]


def test_preempted_requests_have_the_tokens_of_one_gpu(tmp_path: Path) -> None:
    path = saved(wide_rows(vocab_size=258, max_position_embeddings=512), tmp_path)
    long = SamplingParams(temperature=0.0, max_tokens=200, ignore_eos=True)
    found = []
    for num_ranks, num_pages in ((1, 12), (2, 6)):
        options = OPTIONS | {"kv_budget_bytes": num_pages * 2 * MIB, "max_num_batched_tokens": 128}
        with LLM(path, tensor_parallel_size=num_ranks, **options) as llm:
            outputs = llm.generate([[seed] * 60 for seed in range(1, 9)], long)
            assert llm.snapshot is not None and llm.snapshot.scheduler.preemptions
            found.append([output.outputs[0].token_ids for output in outputs])
    assert found[0] == found[1]


def test_a_gpu_that_is_not_the_first_gives_the_tokens_of_the_first(tmp_path: Path) -> None:
    path = saved(tiny_model(vocab_size=258, max_position_embeddings=2048), tmp_path)
    found = []
    for device in ("cuda:0", "cuda:1"):
        with LLM(path, **OPTIONS | {"device": device}) as llm:
            found.append(everything(llm))
    assert found[0] == found[1]
    assert torch.cuda.current_device() == 0


def test_a_rank_that_is_killed_while_steps_run_ends_the_engine(tmp_path: Path) -> None:
    """The device waits in sums for the rank; closing gives its memory back all the same. Nothing else may use the GPU."""
    path = saved(wide_rows(vocab_size=258, max_position_embeddings=2048), tmp_path)
    free_bytes, kept = [], []
    for _ in range(3):
        with LLM(path, tensor_parallel_size=2, **OPTIONS) as llm:
            llm.generate([[1, 2, 3]], GREEDY)
            kept.append(list(llm.loaded.engine.runner.cuda_graphs))  # as a log or a console keeps the frames of an error
            (peer,) = llm.loaded.ranks.peers  # type: ignore[union-attr]
            assert peer.process is not None
            threading.Timer(0.3, peer.process.kill).start()
            began_s = time.monotonic()
            with pytest.raises(RankFailed, match="rank 1 has ended with exit code -9"):
                while True:
                    llm.generate([[seed] * 20 for seed in range(8)], SamplingParams(max_tokens=1000, ignore_eos=True))
            assert time.monotonic() - began_s < 30.0
        time.sleep(2.0)  # NCCL ends in a thread, once the graphs have ended
        free_bytes.append(torch.cuda.mem_get_info(0)[0])
    assert free_bytes[2] > free_bytes[1] - 64 * MIB, "what NCCL and the graphs had is given back"


def test_a_rank_that_is_killed_ends_the_engine_within_its_timeout(tmp_path: Path) -> None:
    path = saved(tiny_model(vocab_size=258), tmp_path)
    with LLM(path, tensor_parallel_size=2, **OPTIONS) as llm:
        llm.generate([[1, 2, 3]], GREEDY)
        (peer,) = llm.loaded.ranks.peers  # type: ignore[union-attr]
        assert peer.process is not None
        peer.process.kill()
        ends(llm, "rank 1 has ended with exit code -9")


START = """
import logging, sys
from vmmkv_server import LLM
logging.basicConfig(level=logging.INFO, stream=sys.stdout)
LLM(sys.argv[1], device="cuda:0", tensor_parallel_size=2, kv_budget_bytes=1 << 27)
"""


def test_ctrl_c_while_graphs_are_captured_ends_the_process_in_order(tmp_path: Path) -> None:
    path = saved(wide_rows(vocab_size=258, max_position_embeddings=2048), tmp_path)
    command = [sys.executable, "-X", "faulthandler", "-c", START, str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, process_group=0) as process:
        assert process.stdout is not None
        assert any("capturing graphs" in line for line in process.stdout), "it ended before"
        time.sleep(1.0)
        os.kill(process.pid, signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    assert process.returncode in (1, -signal.SIGINT) and "KeyboardInterrupt" in errors, errors[-4000:]
