"""Passive data of a step: the scheduler makes it, the runner launches it, and its results come back.

Legend: W rows whose states are wanted, E hidden, R rows of a step.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import torch

from vmmkv_server.engine.kv_backend import KVSequence, Slots, TokenIds
from vmmkv_server.engine.ranking import Ranked
from vmmkv_server.engine.request import Request


@dataclass(eq=False, slots=True)
class Chunk:
    """The next tokens of one sequence in a step, known to the host."""

    request: Request
    sequence: KVSequence
    start: int
    """Rows that the sequence has."""
    tokens: TokenIds
    is_last: bool = True
    """Is a token, or are candidates, wanted after it?"""
    num_candidates: int = 0
    """Likeliest next tokens that are wanted; 0 if one is sampled."""
    is_own: bool = True
    """Is it part of the request's own tokens?"""
    num_admitted: int = field(init=False)
    """`Request.num_admitted` when the chunk was made."""

    def __post_init__(self) -> None:
        self.num_admitted = self.request.num_admitted

    @classmethod
    def own(cls, request: Request, num_candidates: int = 0) -> "Chunk":
        """A request's own tokens for which no step has been launched."""
        start = request.memory.length
        return cls(request, request.memory, start, request.tokens[start + request.num_dropped :], num_candidates=num_candidates)

    @property
    def slot(self) -> int:
        """The slot of its sequence."""
        return self.sequence.slot

    @property
    def end(self) -> int:
        """Rows that the sequence has after it."""
        return self.start + len(self.tokens)

    @property
    def is_live(self) -> bool:
        """Does its request still run, without having been preempted in between?"""
        return self.request.is_running and self.request.num_admitted == self.num_admitted

    @property
    def is_sampled(self) -> bool:
        """Is the request's next token sampled after it?"""
        return self.is_last and not self.num_candidates and self.request.ask.params.max_tokens > 0

    def first(self, count: int) -> "Chunk":
        """The first `count` tokens of the chunk, or all if there are no more."""
        if len(self.tokens) <= count:
            return self
        return Chunk(self.request, self.sequence, self.start, self.tokens[:count], is_last=False, is_own=self.is_own)


class WantedStates(Protocol):
    """Rows of a step whose last states are wanted, beside those of rows that are given a token."""

    @property
    def rows(self) -> Sequence[tuple[int, int, int]]:
        """Rows of some chunks: the index of the chunk in the step, and the first and number of its tokens."""

    def read(self, states_WE: torch.Tensor) -> Sequence[torch.Tensor]:
        """Tensors that the host is to have of these states. Waits for nothing."""


@dataclass(eq=False, slots=True)
class Step:
    """A step: the scheduler makes it, the runner launches it, the engine reads its results back."""

    slots: Slots
    """Slots that compute the one token that is on the device. Their results come first."""
    ends: Slots
    """Rows that each of these slots has after the step."""
    epochs: Slots
    """Epochs of these slots, at the launch."""
    chunks: list[Chunk]
    """Tokens that the host knows."""
    ranked: list[Ranked] = field(default_factory=list)
    """Sequences of it with queries that their rows are ranked by."""
    wanted: WantedStates | None = None
    """States that one feature wants, which sets this in `planned`. Such a step runs without a CUDA graph."""
    readback: "Readback | None" = None
    """Readback, once all of the step is launched."""
    launched_s: float = 0.0
    """Time at which its launch began, by time.perf_counter."""

    def last_chunks(self) -> Iterator[tuple[int, Chunk]]:
        """The chunks with something wanted after them, and the row of it among the step's results."""
        return enumerate((chunk for chunk in self.chunks if chunk.is_last), len(self.slots))


class Logprobs(NamedTuple):
    """Log-probabilities of one token, under the model's own distribution. Where none is sampled, `chosen` means nothing."""

    chosen: float
    likeliest: list[tuple[int, float]]
    """Token ids and log-probabilities, the highest first; as many as were asked for."""


class Results(NamedTuple):
    """Results of a step, on the host."""

    tokens: TokenIds
    """Token of each row."""
    logprobs: dict[int, Logprobs]
    """Log-probabilities by row, where they are wanted, or candidates are: then these are `likeliest`."""
    of_states: Sequence[torch.Tensor] = ()
    """Tensors that the step's `WantedStates.read` gave."""


@dataclass(slots=True)
class Readback:
    """The results of a step on their way to the host, through pinned memory."""

    tokens_R: torch.Tensor
    logprobs: list[tuple[Sequence[tuple[int, int]], list[torch.Tensor]]] = field(default_factory=list)
    """Rows with log-probabilities, how many of the likeliest tokens each wants, and what `sampler.logprobs` gives for them."""
    of_states: Sequence[torch.Tensor] = ()
    done: torch.cuda.Event | None = None
    """Recorded after all of it; None on a CPU."""

    @property
    def is_done(self) -> bool:
        """Has the device ended the step, be it by a failure, which `wait` raises? Never on a CPU. Cost: 2 us."""
        try:
            return self.done is not None and bool(self.done.query())  # type: ignore[no-untyped-call]
        except RuntimeError:
            return True

    def wait(self) -> Results:
        """The results. Blocks until the device is done with the step. It can be called again."""
        if self.done is not None:
            self.done.synchronize()
        found: dict[int, Logprobs] = {}
        for rows, tensors in self.logprobs:
            for (row, count), chosen, values, ids in zip(rows, *(tensor.tolist() for tensor in tensors), strict=True):
                found[row] = Logprobs(chosen, list(zip(ids[:count], values[:count], strict=True)))
        return Results(self.tokens_R.numpy(), found, self.of_states)
