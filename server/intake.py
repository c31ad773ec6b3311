"""How much is let in: a queue with an end, by sequences and by tokens, and a share for each key.

    enter ── tokenise ── reserve ── submit ── ... ── close
      │ sequences          │ tokens of prompts that wait; tokens in flight of the key

Who does not fit is told when to come again, by how fast others have come through of late.
"""

import math
import time
from collections import Counter, deque
from collections.abc import Callable
from typing import Final

from vmmkv.server import api_errors
from vmmkv.server.client import EngineClient
from vmmkv.server.front_settings import FrontConfig
from vmmkv.server.keys import Caller
from vmmkv.server.protocol import Ready
from vmmkv.units import counted

WINDOW_S: Final = 30
"""What counts as of late."""
MOST_RETRY_S: Final = 60
"""OpenAI's client takes no longer one for serious."""


class Rate:
    """How much comes through in a second, over the last WINDOW_S."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._amounts: deque[list[float]] = deque()
        """Of each second that had any: when it began, and how much."""

    def add(self, amount: float) -> None:
        """So much came through now."""
        second = math.floor(self._clock())
        if self._amounts and self._amounts[-1][0] == second:
            self._amounts[-1][1] += amount
        else:
            self._amounts.append([second, amount])
        self._forget()

    def seconds_for(self, amount: float) -> int:
        """How long so much will take, in whole seconds from 1 to MOST_RETRY_S; WINDOW_S if nothing came through of late."""
        self._forget()
        total = sum(amount for _, amount in self._amounts)
        if not total:
            return WINDOW_S
        span_s = max(1.0, self._clock() - self._amounts[0][0])
        return min(MOST_RETRY_S, max(1, math.ceil(amount * span_s / total)))

    def _forget(self) -> None:
        while self._amounts and self._amounts[0][0] < self._clock() - WINDOW_S:
            self._amounts.popleft()


class Intake:
    """What is in flight of one server. `engine` says how many sequences run at once, and which prompts wait."""

    def __init__(self, engine: EngineClient, config: FrontConfig) -> None:
        self.num_sequences = 0
        """In flight: tokenised, waiting or running."""
        self._engine = engine
        self._config = config
        self._tokens_of: Counter[Caller] = Counter()
        self._ended = Rate()
        self._begun = Rate()
        self._given_back = Rate()
        engine.on_begun = self._begun.add

    def check_room(self, num_sequences: int = 1) -> None:
        """Raises: ApiError (429) if so many more are too many. Who comes when nothing is in flight is let in, however many."""
        phase = self._engine.phase
        limit = self._config.max_queued_requests + (phase.max_sequences if isinstance(phase, Ready) else 0)
        excess = self.num_sequences + num_sequences - limit
        if self.num_sequences and excess > 0:
            raise api_errors.too_many(
                f"The queue is full: {counted(self.num_sequences, 'sequence')} in flight, this request is for "
                f"{num_sequences} more, "
                f"and {limit} is the most.",
                of="requests",
                retry_after_s=self._ended.seconds_for(excess),
            )

    def enter(self, caller: Caller, num_sequences: int) -> "Ticket":
        """Let a request in, to be tokenised; close the ticket whatever happens. Raises: as `check_room`."""
        self.check_room(num_sequences)
        return Ticket(self, caller, num_sequences)

    def key_limit(self, caller: Caller) -> int | None:
        """Tokens that the requests of this caller may have in flight; None for any number."""
        return None if caller.is_admin else self._config.max_tokens_per_key

    def reserve(self, caller: Caller, num_prompt: int, num_tokens: int) -> None:
        """See `Ticket.reserve`."""
        waiting, most = self._engine.waiting_tokens, self._config.max_queued_tokens
        if waiting and waiting + num_prompt > most:
            raise api_errors.too_many(
                f"The queue is full: prompts of {waiting} tokens wait, those of this request have {num_prompt}, and {most} is "
                "the most.",
                of="tokens",
                retry_after_s=self._begun.seconds_for(waiting + num_prompt - most),
            )
        limit, own = self.key_limit(caller), self._tokens_of[caller]
        if limit is not None and own + num_tokens > limit:
            raise api_errors.too_many(
                f"This key has {counted(own, 'token')} in flight, this request can come to {num_tokens}, and {limit} "
                "is the most for a key: wait for its other requests, or lower max_tokens.",
                of="tokens",
                retry_after_s=self._given_back.seconds_for(own + num_tokens - limit),
            )
        self._tokens_of[caller] += num_tokens

    def give_back(self, caller: Caller, num_sequences: int, num_tokens: int) -> None:
        """See `Ticket.close`."""
        self.num_sequences -= num_sequences
        if num_tokens:  # else it was turned away
            self._ended.add(num_sequences)
            self._given_back.add(num_tokens)
        self._tokens_of[caller] -= num_tokens
        if not self._tokens_of[caller]:
            del self._tokens_of[caller]


class Ticket:
    """A request's place."""

    def __init__(self, intake: Intake, caller: Caller, num_sequences: int) -> None:
        self.caller = caller
        self._intake = intake
        self._num_sequences = num_sequences
        self._num_tokens = 0
        self._is_open = True
        intake.num_sequences += num_sequences

    def reserve(self, num_prompt: int, num_tokens: int) -> None:
        """Its prompts have `num_prompt` tokens, once for each sequence, and it can come to `num_tokens` with its answers.

        Raises: ApiError (429) if too many tokens wait, or the key has too many in flight.
        """
        self._intake.reserve(self.caller, num_prompt, num_tokens)
        self._num_tokens = num_tokens

    def close(self) -> None:
        """The request has ended. Idempotent, never blocks."""
        if self._is_open:
            self._is_open = False
            self._intake.give_back(self.caller, self._num_sequences, self._num_tokens)
