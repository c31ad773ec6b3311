"""vLLM over the same weights, as its users call it in a program of their own. Imported only where it is installed.

Written from what vLLM publishes, and not run: it is neither in the development environment nor on the machine with the GPU.
"""

import time
from collections.abc import Sequence
from importlib import import_module
from typing import Any, Final

import torch
from safetensors.torch import save_file

from bench.serve.checks import LogProbs
from bench.serve.drive import Outcome
from bench.serve.outside.continuous import Said, serve
from bench.serve.outside.weights import ours
from bench.serve.system import LIKELIEST, Limits, Models
from bench.workloads import TokenIds, Workload
from vmmkv.server.engine.models.decoder import param_bytes
from vmmkv.units import GIB

_BESIDE_BYTES: Final = 8 * GIB
"""For activations and CUDA graphs, beside weights, K and V."""


class Vllm:
    """vLLM's engine. See System.

    Set are the limits (`kv_cache_memory_bytes`, `max_model_len`, `max_num_seqs`, and `max_num_batched_tokens` if one is given),
    `gpu_memory_utilization`, since others are on the GPU too, and `skip_tokenizer_init`, since there is none.
    """

    def __init__(self, models: Models, limits: Limits) -> None:
        vllm = import_module("vllm")
        config, weights = ours(models)
        needed_bytes = limits.budget_bytes + param_bytes(config, models.source.dtype) + _BESIDE_BYTES
        total_bytes = torch.cuda.get_device_properties(models.device).total_memory
        step_tokens = limits.max_num_batched_tokens
        self.name: Final = f"vLLM {vllm.__version__}"
        self._params: Final = vllm.SamplingParams
        with models.model.directory() as folder:
            tensors = {name: tensor.to("cpu", copy=True) for name, tensor in weights.items()}
            save_file(tensors, folder / "model.safetensors", {"format": "pt"})
            self._llm: Any = vllm.LLM(
                str(folder),
                skip_tokenizer_init=True,
                kv_cache_memory_bytes=limits.budget_bytes,
                gpu_memory_utilization=needed_bytes / total_bytes,
                max_model_len=limits.max_tokens,
                max_num_seqs=limits.max_num_seqs,
                **({} if step_tokens is None else {"max_num_batched_tokens": step_tokens}),
            )

    def run(self, workload: Workload) -> Outcome:
        """See System.run."""
        self._llm.reset_prefix_cache()
        return serve(self, workload.asks)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System.likeliest."""
        self._llm.reset_prefix_cache()
        asked = [{"prompt_token_ids": prompt.tolist()} for prompt in prompts]
        params = self._params(temperature=0.0, max_tokens=1, ignore_eos=True, detokenize=False, logprobs=LIKELIEST)
        firsts = [answer.outputs[0].logprobs[0] for answer in self._llm.generate(asked, params, use_tqdm=False)]
        return [{token: found.logprob for token, found in first.items()} for first in firsts]

    def add(self, index: int, prompt: list[int], num_out: int) -> None:
        """See Server."""
        params = self._params(temperature=0.0, max_tokens=num_out, ignore_eos=True, detokenize=False)
        self._llm.llm_engine.add_request(str(index), {"prompt_token_ids": prompt}, params)

    def wait(self, timeout_s: float) -> list[Said]:
        """See Server. A step, if there is anything to do."""
        if not self._llm.llm_engine.has_unfinished_requests():
            time.sleep(timeout_s)
            return []
        outputs = self._llm.llm_engine.step()
        return [Said(int(each.request_id), list(each.outputs[0].token_ids), each.finished) for each in outputs]

    def close(self) -> None:
        """See System.close. Its engine runs in a process of its own, which ends."""
        llm, self._llm = self._llm, None
        if llm is not None:
            llm.llm_engine.engine_core.shutdown()
