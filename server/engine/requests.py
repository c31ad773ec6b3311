"""What the engine knows of one request."""

from collections.abc import Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

import numpy as np
import numpy.typing as npt

from vmmkv import Sequence
from vmmkv.server.protocol import FinishReason, Generate

if TYPE_CHECKING:
    from vmmkv.server.engine.beam_group import BeamGroup


class Strand(Protocol):
    """The tokens of one sequence of memory, of which a step computes the next few: a request's own, or those of a beam."""

    @property
    def request(self) -> "Request":
        """Whose it is."""
        ...

    @property
    def ask(self) -> Generate:
        """What that asked for."""
        ...

    @property
    def memory(self) -> Sequence:
        """The sequence."""
        ...

    @property
    def num_computed(self) -> int:
        """Rows that it has."""
        ...

    @property
    def num_left(self) -> int:
        """Tokens that are known and not computed."""
        ...

    @property
    def num_candidates(self) -> int:
        """How many of the likeliest tokens are wanted after its last one; 0 if one is sampled."""
        ...

    def next_tokens(self, count: int) -> list[int]:
        """The first `count` of those left."""
        ...


@dataclass(eq=False, slots=True)
class Request:
    """A request, waiting or running. Its tokens outlive its memory: a preempted one is computed again from them.

    tokens   | prompt ............ | generated ...... |
             |<- num_computed ->|                        rows in the cache, while it runs
    """

    ask: Generate
    stop_ids: frozenset[int]
    tokens: list[int] = field(init=False)
    sequence: Sequence | None = None
    """Its memory, while it runs."""
    num_computed: int = 0
    num_cached: int = 0
    """Tokens of its prompt that it was given from the prefix cache when it was admitted first: what its client is told."""
    num_admitted: int = 0
    """How often it has begun: more than once if it gave way."""
    num_overtaken: int = 0
    """By others that waited less, and whose prefix was known."""
    max_others: int | None = None
    """How many others may run when it begins again. None: any number, unless it gave way as a search, which does not know how
    much memory it will take: then one that ran beside it must have ended."""
    beams: "BeamGroup | None" = None
    """Its search, while it runs; None if it samples."""
    prompt: npt.NDArray[np.int32] = field(init=False)
    """The tokens asked for, as an array, to be compared."""

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)
        self.prompt = np.array(self.ask.prompt, dtype=np.int32)

    @property
    def namespace(self) -> Hashable:
        """Requests of different ones share nothing; the model and its KV type are the engine's, the same for all."""
        return self.ask.cache_salt

    @property
    def max_tokens(self) -> int:
        """The most tokens it may ever have. The last one is never written: nothing attends to it."""
        return len(self.ask.prompt) + self.ask.max_new_tokens

    @property
    def num_slots(self) -> int:
        """Slots that it takes while it runs: one for each beam, from the start."""
        return max(1, self.ask.beam_width)

    @property
    def num_generated(self) -> int:
        """Tokens that were sampled for it."""
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def memory(self) -> Sequence:
        """Its sequence; only of a running request."""
        assert self.sequence is not None, "a waiting request has no memory"
        return self.sequence

    @property
    def strands(self) -> Seq[Strand]:
        """What can be computed of it: its own tokens, or when the prompt is, those of its live beams."""
        return [self] if self.beams is None else self.beams.strands

    # as a strand

    @property
    def request(self) -> "Request":
        """See Strand."""
        return self

    @property
    def num_left(self) -> int:
        """See Strand."""
        return len(self.tokens) - self.num_computed

    @property
    def num_candidates(self) -> int:
        """See Strand."""
        return 0 if self.beams is None else self.beams.search.num_candidates

    def next_tokens(self, count: int) -> list[int]:
        """See Strand."""
        return self.tokens[self.num_computed : self.num_computed + count]

    def accept(self, token: int) -> FinishReason | None:
        """Take a sampled token; why the request ends with it, if it does. An end token is not kept."""
        if token in self.stop_ids:
            return "stop"
        self.tokens.append(token)
        return "length" if self.num_generated == self.ask.max_new_tokens else None
