"""An engine in this process: a real model of transformers over a real cache, with its answers in a list."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from vmmkv import KVCache, KVLayout, Pool
from vmmkv.prefix import PrefixCache
from vmmkv.server.engine.core import Engine
from vmmkv.server.engine.runner import ModelRunner
from vmmkv.server.models import resolve
from vmmkv.server.protocol import Failed, Generate, Message, Tokens

VOCABULARY = 199


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct; fetched if it is not here yet."""
    return resolve("smollm2-135m")


def tiny_model(seed: int = 0, **changes: Any) -> LlamaForCausalLM:
    """Random weights, four query heads over two key-value heads; a row of 1 KiB, so that 2,048 tokens fill a page."""
    torch.manual_seed(seed)
    options: dict[str, Any] = {
        "vocab_size": VOCABULARY,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 32,
        "max_position_embeddings": 8192,
        "bos_token_id": None,
        "eos_token_id": None,
        "pad_token_id": None,
    }
    return LlamaForCausalLM(LlamaConfig(**(options | changes))).eval()


class Harness:
    """An engine, what it sent, and what transformers itself would say."""

    def __init__(
        self,
        model: Any,
        *,
        device: str = "cpu",
        budget_pages: int = 64,
        slots: int = 8,
        step_tokens: int = 256,
        eos_ids: frozenset[int] = frozenset(),
        share: bool = False,
    ) -> None:
        self.model = model.to(device)
        layout = KVLayout.from_config(model.config, torch.float32)
        self.pool = Pool(device, budget_pages * 2**21)
        self.cache = KVCache(layout, self.pool, slots=slots, max_tokens=model.config.max_position_embeddings)
        self.sent: list[Message] = []
        runner = ModelRunner(model, self.cache)
        self.prefix = PrefixCache(self.cache) if share else None
        self.engine = Engine(
            self.cache, runner, prefix=self.prefix, eos_ids=eos_ids, step_tokens=step_tokens, send=self.sent.append
        )

    def ask(self, request_id: str, prompt: list[int], max_new_tokens: int = 8, **options: Any) -> None:
        """Queue a request; greedy unless the options say otherwise."""
        options = {"temperature": 0.0} | options
        self.engine.receive(Generate(request_id=request_id, prompt=prompt, max_new_tokens=max_new_tokens, **options))

    def run(self, *, at_most: int = 5000) -> None:
        """Step until all is done, recounting the laws after each step."""
        for _ in range(at_most):
            if not self.engine.has_work:
                self.engine.settle()
                return
            self.engine.step()
            self.cache.check()
        raise AssertionError(f"still busy after {at_most} steps")

    def tokens(self, request_id: str) -> list[int]:
        """What was answered."""
        return [
            token
            for message in self.sent
            if isinstance(message, Tokens) and message.request_id == request_id
            for token in message.token_ids
        ]

    def finish_reasons(self, request_id: str) -> list[str | None]:
        """The finish reasons of its messages, in order."""
        return [
            message.finish_reason for message in self.sent if isinstance(message, Tokens) and message.request_id == request_id
        ]

    def logprobs(self, request_id: str) -> list[float]:
        """The log-probabilities that were answered."""
        return [
            logprob
            for message in self.sent
            if isinstance(message, Tokens) and message.request_id == request_id
            for logprob in message.logprobs
        ]

    def failures(self) -> dict[str, str]:
        """What failed, by request."""
        return {message.request_id: message.message for message in self.sent if isinstance(message, Failed)}

    def expected(self, prompt: list[int], max_new_tokens: int = 8) -> list[int]:
        """transformers' own greedy answer, with its DynamicCache and its own attention."""
        self.model.set_attn_implementation("sdpa")
        ids = torch.tensor([prompt], device=self.cache.device)
        out = self.model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=max_new_tokens, do_sample=False)
        self.model.set_attn_implementation("vmmkv")
        return out[0, len(prompt) :].tolist()

    def close(self) -> None:
        """Everything goes back, or this raises."""
        self.cache.close()
        self.pool.close()
        calls = self.pool.driver.calls
        assert calls["create"] == calls["release"] and calls["map"] == calls["unmap"]


@pytest.fixture
def harness() -> Iterator[Callable[..., Harness]]:
    """Makes harnesses, and closes them after the test."""
    made: list[Harness] = []

    def make(model: Any = None, **options: Any) -> Harness:
        made.append(Harness(tiny_model() if model is None else model, **options))
        return made[-1]

    yield make
    for one in made:
        one.close()


def prompt_of(length: int, seed: int = 0) -> list[int]:
    """Random token ids."""
    return torch.randint(0, VOCABULARY, (length,), generator=torch.Generator().manual_seed(seed)).tolist()
