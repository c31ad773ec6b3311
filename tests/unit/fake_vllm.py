"""Stands for vLLM 0.25.1: the names that `bench` uses, with its arguments, over transformers' own code on a CPU."""

from collections import deque
from dataclasses import dataclass, field
from enum import Enum
from types import ModuleType, SimpleNamespace
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig


class RequestOutputKind(Enum):
    CUMULATIVE = 0
    DELTA = 1
    FINAL_ONLY = 2


@dataclass(kw_only=True)
class SamplingParams:
    max_tokens: int
    temperature: float
    ignore_eos: bool
    detokenize: bool
    output_kind: RequestOutputKind
    logprobs: int | None = None
    top_p: float = 1.0


def tokens_input(prompt_token_ids: list[int]) -> dict[str, Any]:
    return {"type": "token", "prompt_token_ids": prompt_token_ids}


@dataclass
class LLM:
    """Answers one request a step, greedily, and forgets all prompts at each reset."""

    model: str
    skip_tokenizer_init: bool
    gpu_memory_utilization: float
    max_model_len: int
    max_num_seqs: int
    seed: int
    stream_interval: int
    kv_cache_memory_bytes: int | None = None
    kv_offloading_size: float | None = None
    kept: list[int] = field(default_factory=list)
    """Lengths of the prompts since the last reset."""
    off: float = 0.0
    """That is added to the log-probability of every other token id."""

    def __post_init__(self) -> None:
        assert self.skip_tokenizer_init and self.stream_interval > self.max_model_len - 1
        self._model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.float32)
        self._model.generation_config = GenerationConfig(pad_token_id=0)  # no end token
        self.model_config = SimpleNamespace(dtype=torch.float32)
        cache = SimpleNamespace(kv_cache_size_tokens=self.max_model_len)
        self.llm_engine = Engine(self, SimpleNamespace(cache_config=cache))

    def reset_prefix_cache(self) -> bool:
        if not self.llm_engine.has_unfinished_requests():
            self.kept.clear()
        return not self.kept


class Engine:
    def __init__(self, llm: LLM, vllm_config: Any) -> None:
        self.vllm_config = vllm_config
        self.engine_core = SimpleNamespace(shutdown=lambda: None)
        self.params: list[SamplingParams] = []
        self._llm = llm
        self._waiting: deque[tuple[str, list[int], SamplingParams]] = deque()
        self._said: list[Any] = []

    def add_request(self, request_id: str, prompt: dict[str, Any], params: SamplingParams) -> str:
        assert prompt["type"] == "token" and params.ignore_eos and not params.detokenize
        assert params.output_kind is RequestOutputKind.DELTA
        self.params.append(params)
        self._waiting.append((request_id, prompt["prompt_token_ids"], params))
        return request_id

    def has_unfinished_requests(self) -> bool:
        return bool(self._waiting or self._said)

    def step(self) -> list[Any]:
        """The rest of the answer that began in the last step, and the first token of the next one."""
        said, self._said = self._said, []
        if self._waiting:
            first, *self._said = self._answered(*self._waiting.popleft())
            said.append(first)
        return said

    def _answered(self, request_id: str, prompt: list[int], params: SamplingParams) -> list[Any]:
        config = GenerationConfig(
            max_new_tokens=params.max_tokens, do_sample=False, return_dict_in_generate=True, output_scores=True
        )
        ids = torch.tensor([prompt])
        with torch.no_grad():
            found = self._llm._model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)
        self._llm.kept.append(len(prompt))
        tokens = found.sequences[0, len(prompt) :].tolist()
        logprobs = None
        if params.logprobs:
            values, ids = torch.log_softmax(found.scores[0][0], dim=-1).topk(params.logprobs)
            off = [self._llm.off * (token % 2) for token in ids.tolist()]
            shown = [SimpleNamespace(logprob=value) for value in (values + torch.tensor(off)).tolist()]
            logprobs = [dict(zip(ids.tolist(), shown, strict=True))]
        deltas = [tokens[:1], tokens[1:]] if tokens[1:] else [tokens]
        return [
            SimpleNamespace(
                request_id=request_id,
                outputs=[SimpleNamespace(token_ids=delta, logprobs=logprobs)],
                finished=delta is deltas[-1],
                num_cached_tokens=0,
            )
            for delta in deltas
        ]


def modules(off: float = 0.0) -> tuple[dict[str, ModuleType], list[LLM]]:
    """What to put into sys.modules, and the list that LLMs are added to as they are opened."""
    opened: list[LLM] = []

    def opens(model: str, **options: Any) -> LLM:
        opened.append(LLM(model, **options, off=off))
        return opened[-1]

    of_module = {
        "vllm": {"LLM": opens, "SamplingParams": SamplingParams, "__version__": "0.25.1"},
        "vllm.inputs": {"tokens_input": tokens_input},
        "vllm.sampling_params": {"RequestOutputKind": RequestOutputKind},
    }
    made = {name: ModuleType(name) for name in of_module}
    for name, module in made.items():
        vars(module).update(of_module[name])
    return made, opened
