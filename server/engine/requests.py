"""What the engine knows of one request."""

from dataclasses import dataclass, field

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

    def __post_init__(self) -> None:
        self.tokens = list(self.ask.prompt)

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
