"""What takes requests as they come: their loop, and transformers' own continuous batching over blocks."""

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Final, Protocol

from transformers import ContinuousBatchingConfig, GenerationConfig

from bench.serve.checks import LogProbs
from bench.serve.drive import Outcome
from bench.serve.outside.weights import no_grad, release, row_bytes
from bench.serve.system import Limits
from bench.serve.turns import Turns
from bench.timing import WrongNumbers
from bench.workloads import Ask, TokenIds, Workload
from vmmkv.server.engine.loading import STEP_TOKENS
from vmmkv.units import format_bytes

_BLOCK_TOKENS: Final = 256
"""transformers' default."""

_IDLE_S: Final = 1.0
"""After which a server that says nothing is asked whether it still runs."""


@dataclass(frozen=True, slots=True)
class Said:
    """What a server says of one request."""

    index: int
    tokens: list[int]
    """All that it has so far."""
    has_ended: bool


class Server(Protocol):
    """Serves by itself."""

    def add(self, index: int, prompt: list[int], num_out: int) -> None:
        """A request, from now on."""
        ...

    def wait(self, timeout_s: float) -> list[Said]:
        """What there is to say, as soon as there is something. Raises: WrongNumbers if a request or the server has failed."""
        ...


def serve(server: Server, asks: Sequence[Ask]) -> Outcome:
    """All of them, each when it arrives. Raises: WrongNumbers.

    When something is said, those are counted that run: who has a first token, and had not its last before.
    """
    turns = Turns(asks)
    begun: set[int] = set()
    running: list[int] = []
    began_s = time.perf_counter()
    while turns.num_unfinished:
        now_s = time.perf_counter() - began_s
        for index in turns.arrived(now_s):
            server.add(index, turns.prompts[index], asks[index].num_out)
        said = server.wait(_IDLE_S if turns.next_s is None else max(0.0, min(_IDLE_S, turns.next_s - now_s)))
        now_s = time.perf_counter() - began_s
        most = 0
        for each in said:
            served = turns.served[each.index]
            served.token_s += [now_s] * (len(each.tokens) - len(served.tokens))
            served.tokens = each.tokens
            begun.add(each.index)
            most = max(most, len(begun))
            if each.has_ended:
                begun.remove(each.index)
                turns.end(each.index)
        if said:
            running.append(most)
    return Outcome(turns.served, turns.seconds, running)


class ContinuousBatching:
    """transformers' own, over as many blocks of 256 tokens as the budget holds. See System.

    Set are how many blocks there are, how many requests run at once, and how many tokens a step has: as in the engine. Tokens
    are streamed, so that it is known when each was there. All else is its default: prefixes are shared by whole blocks, and
    FlashAttention attends, in CUDA graphs, where its package is installed. Where it is not, SDPA does, without graphs, under a
    mask of all tokens of a step by all rows that any of them reads.
    """

    name: Final = "transformers continuous batching"

    def __init__(self, model: Any, limits: Limits) -> None:
        block_bytes = _BLOCK_TOKENS * row_bytes(model)
        self._model = model
        self._limits: Final = limits
        self._num_blocks: Final = limits.budget_bytes // block_bytes
        if not self._num_blocks:
            raise ValueError(
                f"{self.name}: a block of {_BLOCK_TOKENS} tokens takes {format_bytes(block_bytes)}, and the budget is "
                f"{format_bytes(limits.budget_bytes)}; raise budget_bytes"
            )

    def run(self, workload: Workload) -> Outcome:
        """See System.run."""
        with self._opened(wants_logprobs=False) as manager:
            return serve(_Manager(manager), workload.asks)

    def likeliest(self, prompts: Sequence[TokenIds]) -> list[LogProbs]:
        """See System.likeliest. It tells of the likeliest only."""
        found: dict[int, LogProbs] = {}
        with self._opened(wants_logprobs=True) as manager:
            server = _Manager(manager)
            for index, prompt in enumerate(prompts):
                server.add(index, prompt.tolist(), 1)
            while len(found) < len(prompts):
                for output in server.outputs(_IDLE_S):
                    found[int(output.request_id)] = dict(zip(output.generated_tokens, output.logprobs, strict=True))
        return [found[index] for index in range(len(prompts))]

    def close(self) -> None:
        """See System.close. The weights are the engine's."""
        self._model = None

    @contextmanager
    def _opened(self, *, wants_logprobs: bool) -> Iterator[Any]:
        """A manager that runs, over empty blocks, which are given back at the end."""
        config = ContinuousBatchingConfig(
            block_size=_BLOCK_TOKENS,
            num_blocks=self._num_blocks,
            max_batch_tokens=self._limits.max_num_batched_tokens or STEP_TOKENS[self._model.device.type],
            max_requests_per_batch=self._limits.max_num_seqs,
            return_logprobs=wants_logprobs,
        )
        greedy = GenerationConfig(do_sample=False, eos_token_id=-1)
        with no_grad():
            opened = self._model.continuous_batching_context_manager(greedy, continuous_batching_config=config)
            try:
                with opened as manager:
                    yield manager
            finally:
                release(self._model.device)


class _Manager:
    """A Server. Its manager works in a thread of its own."""

    def __init__(self, manager: Any) -> None:
        self._manager = manager

    def add(self, index: int, prompt: list[int], num_out: int) -> None:
        """See Server."""
        self._manager.add_request(prompt, request_id=str(index), max_new_tokens=num_out, streaming=True)

    def wait(self, timeout_s: float) -> list[Said]:
        """See Server."""
        return [
            Said(int(output.request_id), output.generated_tokens, output.is_finished()) for output in self.outputs(timeout_s)
        ]

    def outputs(self, timeout_s: float) -> list[Any]:
        """All there are, once there is one. Raises: WrongNumbers if a request has failed, or the thread has ended."""
        outputs: list[Any] = []
        output = self._manager.get_result(timeout=timeout_s)
        while output is not None:
            if output.error is not None:
                raise WrongNumbers(f"request {output.request_id} failed: {output.error}")
            outputs.append(output)
            output = self._manager.get_result(timeout=0)
        if not outputs and not self._manager.is_running():
            raise WrongNumbers(f"its thread has ended: {self._manager.background_thread_status.fatal_error}")
        return outputs
