"""What the engine knows of one request."""

from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from vmmkv import Sequence
from vmmkv.server.protocol import FinishReason, Generate


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
    def num_generated(self) -> int:
        """Tokens that were sampled for it."""
        return len(self.tokens) - len(self.ask.prompt)

    @property
    def memory(self) -> Sequence:
        """Its sequence; only of a running request."""
        assert self.sequence is not None, "a waiting request has no memory"
        return self.sequence

    def accept(self, token: int) -> FinishReason | None:
        """Take a sampled token; why the request ends with it, if it does. An end token is not kept."""
        if token in self.stop_ids:
            return "stop"
        self.tokens.append(token)
        return "length" if self.num_generated == self.ask.max_new_tokens else None
