"""Answers that follow a grammar, as the engine's loop sees them: what is forced, which tokens may come next, what was sampled.

    opened: grammars that have been read, with the first tokens that they force ──> the request waits
    follow: sampled tokens ──> the matchers accept them, and say what comes next ──> it ends, jumps, or is sampled
    masks:  the forward half of a step runs, all earlier tokens are known ──> a mask for each row

Legend: G rows with a grammar, W words of a mask.
"""

import logging
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt

from vmmkv.server.engine.kv_backend import Slots, TokenIds
from vmmkv.server.engine.request import Request, RequestTable
from vmmkv.server.engine.uploads import TokenMasks, Uploads
from vmmkv.server.structured_output.matcher import CallOverran, Matchers

if TYPE_CHECKING:
    from vmmkv.server.structured_output.matcher import Matcher

log = logging.getLogger(__name__)

_NAP_S: Final = 0.0005
"""While the loop has nothing else to do. Reading a grammar takes some ten milliseconds."""
_NO_TOKEN: Final = "the model's vocabulary has no token that the grammar allows here"


class Next(NamedTuple):
    """What comes next in an answer."""

    must_end: bool
    forced: list[int]
    """Tokens that must come next; if there are none, any token that the matcher allows."""


_ANY: Final = Next(False, [])


class Followed(NamedTuple):
    """What the matchers said of sampled tokens."""

    refused: dict[int, str]
    """Indices of tokens that are not allowed, or could not be followed, and why."""
    going_on: list[tuple[Request, Next]]
    """Requests that must end, or go on with forced tokens."""


NOTHING_FOLLOWED: Final = Followed({}, [])


class StructuredOutputManager:
    """The requests of one engine that have a grammar."""

    def __init__(self, matchers: Matchers) -> None:
        self.matchers: Final = matchers

    def opened(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammars have been read since, and why one is refused; the others know what they begin with."""
        found: list[tuple[Request, str | None]] = []
        calls: list[tuple[Request, Callable[[], list[int]]]] = []
        for request, matcher in self.matchers.opened():
            if isinstance(matcher, Exception):
                found.append((request, _reason(request, "cannot be read", matcher)))
            else:
                request.matcher, request.may_jump = matcher, jumps(request)
                calls.append((request, partial(self._forced, request)))
        for (request, _), forced in zip(calls, self.matchers.call(calls), strict=True):
            if isinstance(forced, Exception):
                found.append((request, _reason(request, "cannot be followed", forced)))
                continue
            if forced:
                request.begin_with(forced)
            found.append((request, None))
        return found

    def nap(self) -> None:
        """Leave the interpreter to the thread that reads grammars: there is nothing else to do."""
        time.sleep(_NAP_S)

    def follow(self, table: RequestTable, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> Followed:
        """The matchers of these slots accept the tokens that are kept, and say what comes next: one trip to their thread."""
        if not table.num_constrained:
            return NOTHING_FOLLOWED
        followed = Followed({}, [])
        indices = np.flatnonzero(table.constrained[slots] & is_kept)
        among = slots[indices]
        calls: list[tuple[Request, Callable[[], Next | None]]] = []
        nums_left = (table.max_tokens[among] - table.num_known[among]).tolist()
        for slot, token, num_left in zip(among.tolist(), tokens[indices].tolist(), nums_left, strict=True):
            request = table.requests[slot]
            assert request is not None and request.matcher is not None, "no request with a grammar runs there"
            calls.append((request, partial(_accept, request.matcher, token, num_left, request.may_jump)))
        for index, (request, _), comes in zip(indices.tolist(), calls, self.matchers.call(calls), strict=True):
            if isinstance(comes, Exception):
                followed.refused[index] = _reason(request, "cannot be followed", comes)
            elif comes is None:
                followed.refused[index] = _NO_TOKEN
            elif comes.must_end or comes.forced:
                followed.going_on.append((request, comes))
        return followed

    def masks(self, rows: Sequence[tuple[int, Request]], uploads: Uploads) -> tuple[TokenMasks, list[tuple[Request, str]]]:
        """The masks of a step's rows, filled in several threads; and the requests whose matchers failed, with the reason."""
        matchers = [request.matcher for _, request in rows if request.matcher is not None]
        masks = TokenMasks.of([row for row, _ in rows], matchers[0].num_words, uploads)
        words_GW = masks.words_GW.numpy()
        calls = [
            (request, partial(matcher.fill, words_GW, index))
            for index, ((_, request), matcher) in enumerate(zip(rows, matchers, strict=True))
        ]
        failed: list[tuple[Request, str]] = []
        for index, filled in enumerate(self.matchers.call(calls, spread=True)):
            if isinstance(filled, Exception):
                words_GW[index] = -1  # its call may still write here, and what is sampled in the row is dropped
                failed.append((calls[index][0], _reason(calls[index][0], "cannot be followed", filled)))
        return masks, failed

    def _forced(self, request: Request) -> list[int]:
        """What an answer begins with. Raises: CallOverran, also while too many calls of others overrun."""
        if self.matchers.is_overloaded:
            raise CallOverran("others that took too long are still being worked on; try again later")
        assert request.matcher is not None, "its grammar has been read"
        return request.matcher.force(request.ask.max_new_tokens - 1) if request.may_jump else []


def _reason(request: Request, why: str, error: Exception) -> str:
    log.warning("request %s: its grammar %s: %s", request.ask.request_id, why, error)
    return f"its grammar {why}: {error}"


def _accept(matcher: "Matcher", token: int, num_left: int, may_jump: bool) -> Next | None:
    """What comes behind a token, of an answer that may have so many more; None if the token is not allowed."""
    if not matcher.accept(token):
        return None
    if not num_left or not may_jump:
        return _ANY
    return Next(True, []) if matcher.must_end() else Next(False, matcher.force(num_left - 1))


def jumps(request: Request) -> bool:
    """May forced tokens be appended without being sampled?

    Not if each is to be counted by a penalty, has a log-probability, or may be one that ends the answer.
    """
    ask = request.ask
    wants_logprobs = ask.want_logprobs or ask.num_prompt_logprobs is not None
    penalties = (ask.presence_penalty, ask.frequency_penalty, ask.repetition_penalty)
    return not wants_logprobs and not ask.stop_token_ids and penalties == (0.0, 0.0, 1.0)
