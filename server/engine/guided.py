"""Answers that follow a grammar, in the loop: what is forced is told, a step's rows get their masks, tokens are accepted.

    begin ──> open: its grammar has been read, and forces the first tokens ──> waiting ──> tell_begun, when it runs
    masks: the forward half of a step is under way ──> the earlier ones are read ──> for each row: it ends, jumps, or has a mask
    strays: what was sampled ──> the matchers accept it

What may come next depends on the tokens before, so the earlier steps are read before such a step samples: they run while the
matchers work, and so does its forward half. Legend: G rows with a grammar, W words of a mask.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Final, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.server.engine.constraints import Constraints, TokenMasks, jumps
from vmmkv.server.engine.kv import KV
from vmmkv.server.engine.launched import Counts, Launched, LaunchedChunk, output_of
from vmmkv.server.engine.ledger import Slots, TokenIds
from vmmkv.server.engine.readback import Readback
from vmmkv.server.engine.requests import Request
from vmmkv.server.engine.scheduler import Plan, Scheduler
from vmmkv.server.engine.uploads import Uploads
from vmmkv.server.grammar.watch import OverTime
from vmmkv.server.protocol import Failed, FromEngine, Output, Outputs

if TYPE_CHECKING:
    from vmmkv.server.grammar.matcher import Matcher

log = logging.getLogger(__name__)

_NO_TOKEN: Final = "the model's vocabulary has no token that the grammar allows here"


class Guided:
    """The requests of one engine that have a grammar. `send`, `fail` and `drain` are the engine's own."""

    def __init__(
        self,
        constraints: Constraints,
        scheduler: Scheduler,
        cache: KV,
        counts: Counts,
        *,
        send: Callable[[FromEngine], None],
        fail: Callable[[Sequence[Request], str], None],
        drain: Callable[[], object],
    ) -> None:
        self.constraints = constraints
        self.scheduler: Final = scheduler
        self.cache: Final = cache
        self.fail: Final = fail
        self.drain: Final = drain
        self.send: Final = send
        self._counts = counts
        self._begun: list[Request] = []
        """Those that begin with tokens which their grammar forced, and that nobody was told."""

    def open(self, *, is_idle: bool) -> None:
        """Queue those whose grammars have been read, with what these force already. `is_idle`: no step is under way."""
        for request, matcher in self.constraints.opened():
            if isinstance(matcher, Exception):
                self._refuse(request, "cannot be read", matcher)
                continue
            if self.constraints.is_full:
                busy = OverTime("others that took too long are still being worked on; try again later")
                self._refuse(request, "cannot be followed", busy)
                continue
            request.matcher = matcher
            forced: list[int] | Exception = []
            if jumps(request):
                ((forced),) = self.constraints.follow([(request, _forcing(matcher, request.ask.max_new_tokens - 1))])
            if isinstance(forced, Exception):
                self._refuse(request, "cannot be followed", forced)
                continue
            if forced:
                request.begin_with(forced)
                self._begun.append(request)
            self.scheduler.waiting.append(request)
        if self.constraints.num_coming and is_idle and not self.scheduler.has_work:
            self.constraints.nap()

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

    def strays(self, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> dict[int, str]:
        """The matchers of those that follow a grammar accept what was sampled; places where one does not, and why."""
        ledger = self.scheduler.ledger
        if not ledger.num_constrained:
            return {}
        places = np.flatnonzero(ledger.constrained[slots] & is_kept).tolist()
        calls: list[tuple[Request, Callable[[], bool]]] = []
        for place in places:
            request = ledger.requests[slots[place]]
            assert request is not None and request.matcher is not None, "nobody with a grammar runs there"
            calls.append((request, _accepting(request.matcher, int(tokens[place]))))
        strays: dict[int, str] = {}
        for place, (request, _), accepted in zip(places, calls, self.constraints.follow(calls), strict=True):
            if isinstance(accepted, Exception):
                strays[place] = not_followed(request, accepted)
            elif not accepted:
                strays[place] = _NO_TOKEN
        return strays

    def _refuse(self, request: Request, why: str, error: Exception) -> None:
        log.warning("request %s: its grammar %s: %s", request.ask.request_id, why, error)
        self.send(Failed(request_id=request.ask.request_id, message=f"its grammar {why}: {error}"))


class _Next(NamedTuple):
    """What comes next in an answer."""

    must_end: bool
    forced: list[int]
    """If there are none, any token that its mask allows."""


class StepMasks:
    """What may come next in the rows of one step, when its forward half is under way; and that step, when all of it is."""

    def __init__(self, guided: Guided, plan: Plan, slots: Slots, chunks: list[LaunchedChunk]) -> None:
        self._guided, self._plan, self._slots, self._chunks = guided, plan, slots, chunks
        self._ledger = guided.scheduler.ledger
        self._epochs: Slots | None = None
        """Of the slots, when the forward half was launched; none that is, of those who go on with forced tokens instead."""
        self._ends = slots

    @torch.inference_mode(False)  # as steps are read elsewhere: who ends here leaves nothing that was made in another mode
    def __call__(self, rows: Slots, uploads: Uploads) -> TokenMasks | None:
        """Read what is under way, and have the matchers say. `rows` are the slots of the rows that are given a token."""
        self._book()
        self._guided.drain()
        following = self._following(rows)
        if not following:
            return None
        # Rows of their own for all: one that takes too long is written to even when nobody waits for it any more.
        blank_GW = uploads.blank(len(following), following[0][2].num_words)
        words_GW = blank_GW.numpy()
        calls = [
            (request, self._looking(request, matcher, words_GW, index, is_decoding=place is None))
            for index, (_, request, matcher, place) in enumerate(following)
        ]
        asking = [-1] * len(following)
        outputs: list[Output] = []
        guided = self._guided
        for index, following_next in enumerate(guided.constraints.follow(calls)):
            row, request, _, place = following[index]
            if isinstance(following_next, Exception):
                guided.fail([request], not_followed(request, following_next))
            elif following_next.must_end:
                outputs.append(output_of(request, -1, "stop"))
                guided.scheduler.end(request)
            elif following_next.forced:
                guided.scheduler.force(request, following_next.forced)
                outputs.append(guided.told(request, following_next.forced))
                self._disown(row, place)
            else:
                asking[index] = row
        if outputs:
            guided.send(Outputs(outputs=outputs))
        return TokenMasks(asking, blank_GW) if max(asking) >= 0 else None

    def launched(self, readback: Readback) -> Launched:
        """All of the step is under way."""
        self._book()
        assert self._epochs is not None, "it is in the books"
        return Launched(readback, self._slots, self._epochs, self._ends, self._chunks)

    def _book(self) -> None:
        """Once: from now on the books have the step's rows, and who ends ends behind them."""
        if self._epochs is None:
            self._guided.scheduler.launched(self._plan)
            self._epochs, self._ends = self._ledger.epochs[self._slots], self._guided.cache.lengths[self._slots]

    def _following(self, rows: Slots) -> "list[tuple[int, Request, Matcher, int | None]]":
        """Rows of those that follow a grammar and still run; of a chunk's, the chunk's place too."""
        speaking = [place for place, chunk in enumerate(self._chunks) if chunk.is_last]
        found = []
        for row, slot in enumerate(rows.tolist()):
            place = None if row < len(self._slots) else speaking[row - len(self._slots)]
            request = self._still(row, slot, place)
            if request is not None and request.matcher is not None:
                found.append((row, request, request.matcher, place))
        return found

    def _looking(
        self, request: Request, matcher: "Matcher", words_GW: npt.NDArray[np.int32], index: int, *, is_decoding: bool
    ) -> Callable[[], _Next]:
        """Can its answer only end here? If not, which tokens must come next? If none must, the mask of those that may."""
        slot = request.memory.slot
        at_most = int(self._ledger.ends[slot] - self._ledger.known[slot]) - 1 if jumps(request) else 0
        may_end = is_decoding and jumps(request)

        def look() -> _Next:
            if may_end and matcher.must_end():
                return _Next(True, [])
            forced = matcher.force(at_most) if at_most > 0 else []
            if not forced:
                matcher.fill(words_GW, index)
            return _Next(False, forced)

        return look

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


def _forcing(matcher: "Matcher", at_most: int) -> Callable[[], list[int]]:
    return lambda: matcher.force(at_most)


def _accepting(matcher: "Matcher", token: int) -> Callable[[], bool]:
    return lambda: matcher.accept(token)
