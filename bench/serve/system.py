"""Systems that serve the same workloads: the engine over one kind of memory, and whatever else is compared with it."""

from collections import deque
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Final, Protocol

import torch

from bench.baselines.memory import systems_on
from bench.serve.checks import LogProbs
from bench.serve.drive import Drive, Outcome
from bench.serve.models import ServedModel
from bench.timing import WrongNumbers
from bench.workloads import TokenIds, Workload
from vmmkv.server.config import ServeConfig
from vmmkv.server.engine.loading import ModelSource, assemble, choose_dtype
from vmmkv.server.protocol import FromEngine, Generate, Outputs

LIKELIEST: Final = 20
"""Tokens whose log-probabilities are held against each other."""


@dataclass(frozen=True, slots=True)
class Begin:
    """Of an answer: its first tokens, and at each what was likely."""

    tokens: list[int]
    likeliest: list[LogProbs]


class System(Protocol):
    """Serves a workload. Close it."""

    @property
    def name(self) -> str:
        """As rows have it."""
        ...

    def run(self, workload: Workload) -> Outcome:
        """All requests, each when it arrives, greedy, with no end but its number of tokens. Nothing is known of any before.

        Raises: WrongNumbers.
        """
        ...

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """The likeliest first tokens of each prompt, computed side by side."""
        ...

    def close(self) -> None:
        """Give its memory back. Idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The same for all systems."""

    budget_bytes: int
    """For K and V."""
    max_tokens: int
    """Of the longest request: what a static cache takes for each."""
    max_num_seqs: int
    max_num_batched_tokens: int | None


class Models:
    """The weights, loaded once for all systems."""

    def __init__(self, model: ServedModel, device: torch.device, seed: int) -> None:
        self.model: Final = model
        self.device: Final = device
        self._stack = ExitStack()
        self.directory: Final = self._stack.enter_context(model.directory())
        self.config: Final = ServeConfig(model=str(self.directory), device=str(device), load_format="dummy", seed=seed)
        self.source: Final = ModelSource(self.config, device, choose_dtype("auto", device))

    def close(self) -> None:
        """Forget the directory; the weights go with the last system."""
        self._stack.close()


class EngineSystem:
    """The engine over one kind of memory. See System."""

    def __init__(self, memory: str, models: Models, limits: Limits) -> None:
        self.name: Final = f"{memory} {limits.max_tokens}" if memory == "static" else memory
        self.dtype: Final = models.source.dtype
        self._said: deque[FromEngine] = deque()
        config = ServeConfig(
            model=models.config.model,
            device=models.config.device,
            load_format="dummy",
            seed=models.config.seed,
            kv_budget_bytes=limits.budget_bytes,
            max_tokens=limits.max_tokens,
            max_num_seqs=limits.max_num_seqs,
            max_num_batched_tokens=limits.max_num_batched_tokens,
        )
        self._loaded = assemble(config, models.source, self._said.append, open_memory=systems_on(models.device)[memory])

    def run(self, workload: Workload) -> Outcome:
        """See System.run."""
        self.forget()
        return Drive(self._loaded.engine, self._said, workload.asks).run()

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System.likeliest."""
        return [begin.likeliest[0] for begin in self.begins(prompts, 1)]

    def begins(self, prompts: Sequence[TokenIds], num_tokens: int) -> list[Begin]:
        """The first tokens of the answer to each prompt, all of them side by side."""
        self.forget()
        core = self._loaded.engine
        begins = [Begin([], []) for _ in prompts]
        for index, prompt in enumerate(prompts):
            core.receive(
                Generate(
                    request_id=str(index),
                    prompt=prompt.tolist(),
                    max_new_tokens=num_tokens,
                    temperature=0.0,
                    ignore_eos=True,
                    want_logprobs=True,
                    num_logprobs=LIKELIEST,
                )
            )
        while core.has_work:
            core.step()
        for message in self._said:
            for output in message.outputs if isinstance(message, Outputs) else ():
                begins[int(output.request_id)].tokens.extend(output.token_ids)
                begins[int(output.request_id)].likeliest.extend(map(dict, output.top_logprobs))
        self._said.clear()
        if any(len(begin.tokens) != num_tokens for begin in begins):
            raise WrongNumbers(f"{self.name} has not answered all prompts with {num_tokens} tokens")
        return begins

    def forget(self) -> None:
        """Empty the prefix cache. Memory stays with the engine."""
        self._loaded.engine.forget()
        self._said.clear()

    def close(self) -> None:
        """See System.close."""
        self._loaded.close()
