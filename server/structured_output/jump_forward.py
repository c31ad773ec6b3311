"""Answers that follow a grammar, in the loop: what is forced is told, a step's rows get their masks, tokens are accepted.

    begin ──> open: its grammar has been read, and forces the first tokens ──> waiting ──> tell_begun, when it runs
    follow: what was sampled ──> the matchers accept it, and say what comes next ──> it ends, jumps, or has a mask
    masks: the forward half of a step is under way ──> the earlier ones are read, and so followed ──> a mask for each row

What may come next depends on the tokens before, so the earlier steps are read before such a step samples: they run while the
matchers work, and so does its forward half. Legend: G rows with a grammar, W words of a mask.
"""

import logging
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.kv_backend import KV
from vmmkv.server.engine.launched import Counts, Launched, LaunchedChunk, output_of
from vmmkv.server.engine.request import Request, Slots, TokenIds
from vmmkv.server.engine.runner import Readback
from vmmkv.server.engine.scheduler import Plan, Scheduler
from vmmkv.server.engine.uploads import TokenMasks, Uploads
from vmmkv.server.protocol import Failed, FromEngine, Output, Outputs
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
    """If there are none, any token that its matcher allows."""


_ANY: Final = Next(False, [])


class Followed(NamedTuple):
    """What the matchers said of tokens that were sampled."""

    strays: dict[int, str]
    """Places of those that are not allowed, or could not be followed, and why."""
    going_on: list[tuple[Request, Next]]
    """Those that must end, or go on with tokens that are forced."""


NOTHING_FOLLOWED: Final = Followed({}, [])


class StructuredOutputManager:
    """The requests of one engine that have a grammar. `send`, `fail`, `map_ahead` and `drain` are the engine's own."""

    def __init__(
        self,
        matchers: Matchers,
        scheduler: Scheduler,
        cache: KV,
        counts: Counts,
        *,
        send: Callable[[FromEngine], None],
        fail: Callable[[Sequence[Request], str], None],
        pump: Callable[[], None],
        drain: Callable[[], object],
    ) -> None:
        self.matchers = matchers
        self.scheduler: Final = scheduler
        self.cache: Final = cache
        self.fail: Final = fail
        self.pump: Final = pump
        self.drain: Final = drain
        self.send: Final = send
        self._counts = counts
        self._begun: list[Request] = []
        """Those that begin with tokens which their grammar forced, and that nobody was told."""

    def open(self, *, is_idle: bool) -> None:
        """Queue those whose grammars have been read, with what these force already. `is_idle`: no step is under way."""
        begun: list[Request] = []
        for request, matcher in self.matchers.opened():
            if isinstance(matcher, Exception):
                self._refuse(request, "cannot be read", matcher)
            else:
                request.matcher, request.may_jump = matcher, jumps(request)
                begun.append(request)
        calls = [(request, partial(self._forced, request)) for request in begun]
        for request, forced in zip(begun, self.matchers.call(calls), strict=True):
            if isinstance(forced, Exception):
                self._refuse(request, "cannot be followed", forced)
                continue
            if forced:
                request.begin_with(forced)
                self._begun.append(request)
            self.scheduler.waiting.append(request)
        if self.matchers.num_opening and is_idle and not self.scheduler.has_work:
            time.sleep(_NAP_S)

    def _forced(self, request: Request) -> list[int]:
        """What an answer begins with. Raises: CallOverran; each is asked behind those that took too long before it."""
        if self.matchers.is_overloaded:
            raise CallOverran("others that took too long are still being worked on; try again later")
        assert request.matcher is not None, "its grammar has been read"
        return request.matcher.force(request.ask.max_new_tokens - 1) if request.may_jump else []

    def tell_begun(self) -> None:
        """Those that run by now: what was cached of their prompts is known."""
        if not self._begun:
            return
        running = [request for request in self._begun if request.sequence is not None]
        alive = set(map(id, self.scheduler.waiting))
        self._begun = [request for request in self._begun if id(request) in alive]
        outputs = [self.told(request, request.tokens[len(request.prompt) :].tolist()) for request in running]
        if outputs:
            self.send(Outputs(outputs=outputs))

    def told(self, request: Request, forced: list[int]) -> Output:
        """Tokens that were forced go to the client as those that are sampled do."""
        is_first = not request.num_answered
        request.num_answered += len(forced)
        self._counts.generated_tokens += len(forced)
        return Output(
            request_id=request.ask.request_id,
            token_ids=tuple(forced),
            cached_tokens=request.num_cached if is_first else 0,
            queued_us=request.queued_us if is_first else 0,
        )

    def masks(self, plan: Plan, slots: Slots, chunks: list[LaunchedChunk]) -> "StepMasks | None":
        """Of a step that is about to be launched; None if nobody in it follows a grammar."""
        ledger = self.scheduler.ledger
        if not ledger.num_constrained:
            return None
        speaks = any(chunk.is_last and chunk.strand.request.matcher is not None for chunk in chunks)
        return StepMasks(self, plan, slots, chunks) if speaks or ledger.constrained[slots].any() else None

    def follow(self, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> Followed:
        """The matchers of those that follow a grammar accept what was sampled, and say what comes next, in one trip."""
        ledger = self.scheduler.ledger
        if not ledger.num_constrained:
            return NOTHING_FOLLOWED
        found = Followed({}, [])
        places = np.flatnonzero(ledger.constrained[slots] & is_kept)
        among = slots[places]
        calls: list[tuple[Request, Callable[[], Next | None]]] = []
        nums_more = (ledger.ends[among] - ledger.known[among]).tolist()
        for slot, token, num_more in zip(among.tolist(), tokens[places].tolist(), nums_more, strict=True):
            request = ledger.requests[slot]
            assert request is not None and request.matcher is not None, "nobody with a grammar runs there"
            calls.append((request, partial(_accept, request.matcher, token, num_more, request.may_jump)))
        for place, (request, _), comes in zip(places.tolist(), calls, self.matchers.call(calls), strict=True):
            if isinstance(comes, Exception):
                found.strays[place] = not_followed(request, comes)
            elif comes is None:
                found.strays[place] = _NO_TOKEN
            elif comes.must_end or comes.forced:
                found.going_on.append((request, comes))
        return found

    def go_on(self, going_on: Sequence[tuple[Request, Next]], outputs: list[Output]) -> None:
        """Their clients know what was sampled last: now they end, or go on with what is forced."""
        for request, comes in going_on:
            if comes.must_end:
                outputs.append(output_of(request, -1, "stop"))
                self.scheduler.end(request)
            else:
                self.scheduler.force(request, comes.forced)
                outputs.append(self.told(request, comes.forced))

    def _refuse(self, request: Request, why: str, error: Exception) -> None:
        log.warning("request %s: its grammar %s: %s", request.ask.request_id, why, error)
        self.send(Failed(request_id=request.ask.request_id, message=f"its grammar {why}: {error}"))


class _Following(NamedTuple):
    """A row of a step whose request follows a grammar."""

    row: int
    request: Request
    matcher: "Matcher"
    place: int | None
    """Of the chunk that it is behind; None if it decodes."""


class StepMasks:
    """What may come next in the rows of one step, when its forward half is under way; and that step, when all of it is."""

    def __init__(self, guided: StructuredOutputManager, plan: Plan, slots: Slots, chunks: list[LaunchedChunk]) -> None:
        self._structured, self._plan, self._slots, self._chunks = guided, plan, slots, chunks
        self._ledger = guided.scheduler.ledger
        self._epochs: Slots | None = None
        """Of the slots, when the forward half was launched; none that is, of those who go on with forced tokens instead."""
        self._ends = slots

    @torch.inference_mode(False)  # as steps are read elsewhere: who ends here leaves nothing that was made in another mode
    def __call__(self, rows: Slots, uploads: Uploads) -> TokenMasks | None:
        """Read what is under way, and so follow it. `rows` are the slots of the rows that are given a token."""
        self._book()
        self._structured.pump()  # while the device has work: between two such steps it waits for the host
        self._structured.drain()
        asking = []
        for each in self._following(rows):
            if each.request.sequence is None:
                continue
            if each.request.decodes:
                asking.append(each)
            else:  # it goes on with what is forced
                self._disown(each.row, each.place)
        if not asking:
            return None
        masks = TokenMasks.of([each.row for each in asking], asking[0].matcher.num_words, uploads)
        self._fill(asking, masks.words_GW.numpy())
        return masks

    def _fill(self, asking: Sequence[_Following], words_GW: npt.NDArray[np.int32]) -> None:
        """What may come next in these rows, side by side: most of it is work within xgrammar."""
        calls = [(each.request, partial(each.matcher.fill, words_GW, index)) for index, each in enumerate(asking)]
        for index, filled in enumerate(self._structured.matchers.call(calls, spread=True)):
            if isinstance(filled, Exception):
                words_GW[index] = -1  # nobody's row, in which something may still write
                request = asking[index].request
                self._structured.fail([request], not_followed(request, filled))

    def launched(self, readback: Readback) -> Launched:
        """All of the step is under way."""
        self._book()
        assert self._epochs is not None, "it is in the books"
        return Launched(readback, self._slots, self._epochs, self._ends, self._chunks)

    def _book(self) -> None:
        """Once: from now on the books have the step's rows, and who ends ends behind them."""
        if self._epochs is None:
            self._structured.scheduler.launched(self._plan)
            self._epochs, self._ends = self._ledger.epochs[self._slots], self._structured.cache.lengths[self._slots]

    def _following(self, rows: Slots) -> list[_Following]:
        """Rows of those that follow a grammar and still run."""
        speaking = [place for place, chunk in enumerate(self._chunks) if chunk.is_last]
        found = []
        for row, slot in enumerate(rows.tolist()):
            place = None if row < len(self._slots) else speaking[row - len(self._slots)]
            request = self._still(row, slot, place)
            if request is not None and request.matcher is not None:
                found.append(_Following(row, request, request.matcher, place))
        return found

    def _still(self, row: int, slot: int, place: int | None) -> Request | None:
        """Who had a part in the step when it was launched, and still runs."""
        assert self._epochs is not None, "it is in the books"
        if place is not None:
            chunk = self._chunks[place]
            return chunk.strand.request if chunk.is_live else None
        return self._ledger.requests[slot] if self._ledger.epochs[slot] == self._epochs[row] else None

    def _disown(self, row: int, place: int | None) -> None:
        """What is sampled in this row is nobody's."""
        assert self._epochs is not None, "it is in the books"
        if place is None:
            self._epochs[row] = -1
        else:
            self._chunks[place] = replace(self._chunks[place], is_answered=False)


def not_followed(request: Request, error: Exception) -> str:
    """Why a request ends whose matcher has failed; logged."""
    log.warning("request %s: its grammar cannot be followed: %s", request.ask.request_id, error)
    return f"its grammar cannot be followed: {error}"


def _accept(matcher: "Matcher", token: int, num_more: int, may_jump: bool) -> Next | None:
    """What comes behind a token, of an answer that may have so many more; None if it is not allowed."""
    if not matcher.accept(token):
        return None
    if not num_more or not may_jump:
        return _ANY
    return Next(True, []) if matcher.must_end() else Next(False, matcher.force(num_more - 1))


def jumps(request: Request) -> bool:
    """May forced tokens be appended without being sampled?

    Not if each is to be counted by a penalty, has a log-probability, or may be one that ends the answer.
    """
    ask = request.ask
    wants_logprobs = ask.want_logprobs or ask.num_prompt_logprobs is not None
    penalties = (ask.presence_penalty, ask.frequency_penalty, ask.repetition_penalty)
    return not wants_logprobs and not ask.stop_token_ids and penalties == (0.0, 0.0, 1.0)
