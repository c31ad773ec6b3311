"""Answers that follow a grammar.

    takes:   a thread reads the compiled grammar ──> poll: the request waits, with the tokens that its answer begins with
    sampled: the matchers accept the tokens and say what comes next ──> it ends, jumps forward, or is sampled
    masks:   of the rows of a step, made by `poll` and `sampled`

*Jump-forward*: where only one text can come next, its tokens are appended in one chunk instead of being sampled.

*Gate*: the grammar of an answer may begin within it. Before, the answer is free, and costs a look-up for all such in a step.
When its grammar begins, steps in flight have sampled what comes next without a mask. That is dropped, with its rows.
Legend: G rows with a grammar, S slots, W words of a mask.
"""

import logging
import math
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

from vmmkv_server.engine.feature import Feature, Followed
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.kv_backend import Slots, TokenIds
from vmmkv_server.engine.request import Request, Status
from vmmkv_server.engine.step import Step
from vmmkv_server.engine.uploads import TokenMasks
from vmmkv_server.protocol import Failed, Gate, Outputs
from vmmkv_server.structured_output.gate import GateSearch
from vmmkv_server.structured_output.matcher import (
    CONTEXT_TOKENS,
    DIGEST_BYTES,
    CallOverran,
    CallThreads,
    Matcher,
    Vocabulary,
    Words,
)

if TYPE_CHECKING:
    import xgrammar

log = logging.getLogger(__name__)

T = TypeVar("T")
MAX_ABANDONED: Final = 2
"""Threads that may still work on abandoned calls before no new answer begins: each takes a core."""
CACHE_BYTES: Final = 64 << 20
ANSWER_S: Final = 0.2
TOKEN_S: Final = 0.002
"""CPU time that one answer's grammar may take: so much, and so much more for each token. Most take tens of microseconds a
token; some short expressions take seconds, and every request waits for them.
"""
LOOP_SHARE: Final = 0.25
"""Share of the loop's time for all grammars together. Beyond it, and ANSWER_S at once, an answer has CROWDED_S, not ANSWER_S:
many slow choices, none of them over its own limit, would stop the loop for seconds.
"""
CROWDED_S: Final = 0.01
THREAD_S: Final = 0.0015
"""CPU time that a step's tokens are expected to take, for each thread that follows them.

Most take some 20 us, half of it with Python's lock, which threads pass to each other: 64 such tokens take 1.4 ms by one thread
or by two, and 2.4 by eight; 64 within strings 17 by one, and 3.3 by eight.
"""


class Next(NamedTuple):
    """Continuation of an answer, by its grammar."""

    must_end: bool
    """Is the grammar complete, behind the forced tokens, and can nothing be added?"""
    forced: list[int]
    """Tokens that must come next; if there are none, any token that the matcher allows."""


_ANY: Final = Next(False, [])


@dataclass(slots=True)
class Following:
    """A request whose grammar has been read."""

    new_matcher: Callable[[], Matcher]
    """Makes a matcher at the start of the grammar."""
    search: GateSearch | None
    """Looks for places at which the grammar begins; None if it begins with the answer alone."""
    may_jump: bool
    """May tokens that its grammar forces be appended without being sampled?"""
    matcher: Matcher | None = None
    """The state of its grammar behind all tokens that the host knows; None while its answer is free."""
    took_s: float = 0.0
    """Time of the loop that its grammar has taken."""

    @property
    def repeats(self) -> bool:
        """Is the answer free again when its grammar is complete?"""
        return self.search is not None and self.search.repeats

    def followed(self) -> Matcher:
        """The matcher, where the answer is not free."""
        assert self.matcher is not None, "the answer is free"
        return self.matcher

    def end(self, num_tokens: int) -> None:
        """The grammar is complete with so many tokens of the answer, and the next ones are free."""
        assert self.search is not None, "its answer ends with the grammar"
        self.matcher = None
        self.search.restart(num_tokens)


class Opening(NamedTuple):
    """A request that waits for what a thread reads."""

    request: Request
    compiled: "Future[xgrammar.CompiledGrammar]"
    search: "Future[GateSearch] | None"

    @property
    def is_done(self) -> bool:
        """Has all been read?"""
        return self.compiled.done() and (self.search is None or self.search.done())


class Grammars(Feature):
    """Opens the matchers of an engine's requests, and calls them within time limits.

    The vocabulary is loaded in a thread, for the first grammar.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._table = core.scheduler.table
        self._cache_bytes = CACHE_BYTES
        """Memory of grammars that are kept ready, as they came over the wire."""
        self._vocabulary: Vocabulary | None = None
        self._following: dict[Request, Following] = {}
        self._begun: list[Request] = []
        """Waiting requests whose answers begin with tokens that have not been sent."""
        self._reader = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        self._opening: dict[str, Opening] = {}
        self._compiled: OrderedDict[tuple[Hashable, bytes], tuple[Future[Any], int]] = OrderedDict()
        """Grammars by namespace and digest. Namespaces share nothing: an answer's time would tell what others have asked."""
        self._completing_SW: Words = np.zeros((0, 0), np.int32)
        """By slot the tokens behind which the grammar of a free answer may begin; empty before there is any."""
        self.threads: Final = CallThreads()
        """Threads in which matchers are called."""
        self._token_s = 0.0
        """CPU time to follow a token, on average over those that were followed last."""
        self.balance_s = ANSWER_S
        """CPU time that all grammars may take before answers have CROWDED_S."""
        self._balanced_s = time.perf_counter()

    def is_working(self) -> bool:
        """Are grammars being read?"""
        return bool(self._opening)

    def takes(self, request: Request) -> bool:
        """Have a request's grammar read, if it is not there. The request drops it, since it can have megabytes."""
        if not request.ask.grammar:
            return False
        data, gate = request.ask.grammar, request.ask.gate
        request.ask = msgspec.structs.replace(request.ask, grammar=b"", gate=None)
        key = request.namespace, data[:DIGEST_BYTES]
        future, _ = self._compiled.pop(key, (None, 0))
        if future is None or future.cancelled() or (future.done() and future.exception() is not None):
            future = self._reader.submit(self._read, data)
            while self._compiled and sum(size for _, size in self._compiled.values()) + len(data) > self._cache_bytes:
                self._compiled.popitem(last=False)
        self._compiled[key] = future, len(data)
        search = None if gate is None else self._reader.submit(self._search, gate)
        self._opening[request.ask.request_id] = Opening(request, future, search)
        return True

    def cancel(self, request_id: str) -> None:
        """Read no grammar for a request if no other waits for it."""
        opening = self._opening.pop(request_id, None)
        if opening is not None and all(opening.compiled is not other.compiled for other in self._opening.values()):
            opening.compiled.cancel()

    def poll(self) -> None:
        """Queue the requests whose grammars have been read since, with the tokens that these force already."""
        for request, refusal in self._opened() if self._opening else ():
            if refusal is not None:
                self._following.pop(request, None)
                self._core.send(Failed(request_id=request.ask.request_id, message=refusal))
                continue
            self._core.scheduler.add(request)
            if request.num_generated:
                self._begun.append(request)

    def _opened(self) -> list[tuple[Request, str | None]]:
        """Requests whose grammars have been read since the last call, and why one is refused."""
        found: list[tuple[Request, str | None]] = []
        calls: list[tuple[Request, Callable[[], list[int]]]] = []
        for request_id in [name for name, opening in self._opening.items() if opening.is_done]:
            request, compiled, search = self._opening.pop(request_id)
            try:
                new_matcher = partial(self.matcher_for, request, compiled.result())
                following = Following(new_matcher, None if search is None else search.result(), may_jump(request))
                if search is None:
                    following.matcher = new_matcher()
                    calls.append((request, partial(self._forced, request)))
                else:
                    found.append((request, None))
                self._following[request] = following
            except Exception as error:
                found.append((request, _reason(request, "cannot be read", error)))
        for (request, _), forced in zip(calls, self._call(calls)[0], strict=True):
            if isinstance(forced, Exception):
                found.append((request, _reason(request, "cannot be followed", forced)))
                continue
            if forced:
                request.begin_with(forced)
            found.append((request, None))
        return found

    def admitted(self, request: Request) -> None:
        """The tokens of its slot are followed, or looked at."""
        if request in self._following:
            self._watch(request)

    def planned(self, step: Step) -> None:
        """Send the first tokens of answers that run by now: only then is known how much of their prompts was cached."""
        if not self._begun:
            return
        running = [request for request in self._begun if request.is_running]
        self._begun = [request for request in self._begun if request.status is Status.WAITING]
        if running:
            forced = self._core.answers.forced
            outputs = [forced(each, each.tokens[len(each.prompt) :].tolist()) for each in running]
            self._core.send(Outputs(outputs=outputs))

    def left(self, request: Request) -> None:
        """Look at nothing more in the request's slot."""
        if (following := self._following.get(request)) is not None and following.search is not None:
            self._completing_SW[request.memory.slot] = 0

    def finished(self, request: Request) -> None:
        """Drop the matcher of a request."""
        self._following.pop(request, None)

    def sampled(self, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> Followed:
        """The matchers of these slots accept the tokens that are kept, say what comes next, and make the masks for that.

        One trip to their thread. Free answers make it where their grammar may begin.
        """
        refused, continued = dict[int, str](), list[tuple[Request, list[int] | None]]()
        if not self._following:
            return Followed(refused, continued)
        table, indices, calls = self._table, list[int](), list[tuple[Request, Callable[[], Next | None]]]()
        wanted = np.flatnonzero(is_kept & (table.constrained[slots] | self._completes(slots, tokens)))
        among = slots[wanted]
        nums_left = (table.max_tokens[among] - table.num_known[among]).tolist()
        for index, slot, token, num_left in zip(
            wanted.tolist(), among.tolist(), tokens[wanted].tolist(), nums_left, strict=True
        ):
            request = table.requests[slot]
            assert request is not None, "no request runs there"
            if table.constrained[slot]:
                call = partial(_accept, self._following[request], token, num_left)
            elif num_left and (texts := self._found(request)):
                call = partial(self._begin, request, texts, num_left)
            else:
                continue
            indices.append(index)
            calls.append((request, call))
        results, took_s = self._call(calls, num_threads=math.ceil(len(calls) * self._token_s / THREAD_S))
        if calls:
            self._token_s = took_s / len(calls)
        for index, (request, _), comes in zip(indices, calls, results, strict=True):
            was_free = not table.constrained[slots[index]]
            if isinstance(comes, Exception):
                refused[index] = _reason(request, "cannot be followed", comes)
            elif comes is not None:
                if (goes_on := self._goes_on(request, comes, was_free=was_free)) is not None:
                    continued.append(goes_on)
            elif not was_free:  # else its text only looked like the begin of its grammar
                refused[index] = "the model's vocabulary has no token that the grammar allows here"
        return Followed(refused, continued)

    def _goes_on(self, request: Request, comes: Next, *, was_free: bool) -> tuple[Request, list[int] | None] | None:
        """Continuation of a request by tokens of the host; None if a sampled one comes next."""
        following = self._following[request]
        if comes.must_end and not following.repeats:
            return request, None
        if comes.must_end:
            following.end(request.num_generated + len(comes.forced))
        if comes.must_end or was_free:
            self._watch(request)
        begins = was_free and not comes.must_end  # what launched steps have sampled since was not masked
        return (request, comes.forced) if comes.forced or begins else None

    def masks_rows(self, step: Step) -> bool:
        """Are some of its rows those of running requests that follow their grammar?"""
        constrained = self._table.constrained
        return bool(self._following) and (
            bool(constrained[step.slots].any()) or any(constrained[chunk.slot] for _, chunk in step.last_chunks())
        )

    def masks(self, step: Step) -> TokenMasks | None:
        """The masks of a step's rows. Copies of those that are there: no matcher works.

        What is sampled for a request with forced tokens is dropped, and needs none.
        """
        table = self._table
        live = (table.epochs[step.slots] == step.epochs) & table.constrained[step.slots]
        asking = [(row, table.requests[step.slots[row]]) for row in np.flatnonzero(live).tolist()]
        asking += [(row, chunk.request) for row, chunk in step.last_chunks() if chunk.is_live and table.constrained[chunk.slot]]
        if not asking:
            return None
        assert self._vocabulary is not None, "it was there to read the grammars"
        masks = TokenMasks.of([row for row, _ in asking], self._vocabulary.num_words, self._core.runner.uploads)
        for words, (_, request) in zip(masks.words_GW.numpy(), asking, strict=True):
            assert request is not None, "it runs"
            self._following[request].followed().fill(words)
        return masks

    def _watch(self, request: Request) -> None:
        """Have the tokens of a running request followed, or those looked at behind which its grammar may begin."""
        slot, following = request.memory.slot, self._following[request]
        is_free = following.matcher is None
        self._table.constrained[slot] = not is_free
        if following.search is not None:
            completing = following.search.completing
            if not self._completing_SW.size:
                self._completing_SW = np.zeros((len(self._table.requests), len(completing)), np.int32)
            self._completing_SW[slot] = completing if is_free else 0

    def _completes(self, slots: Slots, tokens: TokenIds) -> npt.NDArray[np.bool_]:
        """May the grammars of these slots begin with these tokens?"""
        if not self._completing_SW.size:
            return np.zeros(len(slots), np.bool_)
        tokens = tokens.clip(min=0)
        completes: npt.NDArray[np.bool_] = (self._completing_SW[slots, tokens >> 5] >> (tokens & 31) & 1) == 1
        return completes

    def _found(self, request: Request) -> list[bytes]:
        """The texts that the grammar of a free answer may begin with."""
        search = self._following[request].search
        assert search is not None, "its answer is never free"
        texts = search.found(request.tokens[len(request.prompt) :].tolist())
        self._completing_SW[request.memory.slot] = search.completing
        return texts

    def _begin(self, request: Request, texts: Sequence[bytes], num_left: int) -> Next | None:
        """Continuation of an answer whose grammar begins with the first of these texts that it allows; None if none is."""
        self._check_abandoned()
        following = self._following[request]
        matcher = following.new_matcher()
        tokens = request.tokens[len(request.prompt) :][-CONTEXT_TOKENS:].tolist()
        if not any(matcher.begin(text, tokens) for text in texts):
            return None
        following.matcher = matcher
        return _next(following, num_left)

    def matcher_for(self, request: Request, compiled: "xgrammar.CompiledGrammar") -> Matcher:
        """A new matcher. Benchmarks override it."""
        assert self._vocabulary is not None, "it was there to read the grammar"
        return Matcher(compiled, self._vocabulary)

    def close(self) -> None:
        """End the threads, one that is at work after its call. Idempotent."""
        self._opening.clear()
        self._reader.shutdown(wait=False, cancel_futures=True)
        self.threads.close()

    def _read(self, data: bytes) -> "xgrammar.CompiledGrammar":
        """Read a compiled grammar, in the reader's thread."""
        return self._loaded().read(data)

    def _search(self, gate: Gate) -> GateSearch:
        """A search by a gate, in the reader's thread."""
        return GateSearch(gate, self._loaded())

    def _loaded(self) -> Vocabulary:
        """The vocabulary, in the reader's thread."""
        if self._vocabulary is None:
            self._vocabulary = self._core.vocabulary()
        return self._vocabulary

    def _forced(self, request: Request) -> list[int]:
        """First tokens of an answer; makes the mask behind them. Raises: CallOverran, as `_check_abandoned`."""
        self._check_abandoned()
        following = self._following[request]
        matcher = following.followed()
        forced = matcher.force(request.ask.params.max_tokens - 1) if following.may_jump else []
        matcher.mask()
        return forced

    def _check_abandoned(self) -> None:
        """Let a grammar begin. Raises: CallOverran while too many of others overrun."""
        if self.threads.num_abandoned >= MAX_ABANDONED:
            raise CallOverran("others that took too long are still being worked on; try again later")

    def _call(
        self, calls: Sequence[tuple[Request, Callable[[], T]]], *, num_threads: int = 1
    ) -> tuple[list[T | Exception], float]:
        """The results of calls of the requests' matchers, or their errors, and their CPU time, which the requests are charged.

        A matcher whose call has failed must not be called again: a thread may still work on it. `num_threads`: at most.
        """
        began_s = time.perf_counter()
        self.balance_s = min(ANSWER_S, self.balance_s + LOOP_SHARE * (began_s - self._balanced_s))
        self._balanced_s = began_s
        outcomes = self.threads.run([call for _, call in calls], num_threads=num_threads)
        # Calls in several threads hold the loop for less than they take; a thread that is not scheduled holds it for more.
        held_s, took_s = time.perf_counter() - began_s, sum(outcome.took_s for outcome in outcomes)
        loop_share = min(1.0, held_s / took_s) if took_s else 0.0
        results: list[T | Exception] = []
        for (request, _), outcome in zip(calls, outcomes, strict=True):
            following = self._following[request]
            following.took_s += outcome.took_s
            self.balance_s -= outcome.took_s * loop_share
            over_s = following.took_s - (ANSWER_S if self.balance_s > 0 else CROWDED_S)
            is_slow = over_s > 0 and over_s > TOKEN_S * request.num_generated  # which costs a look-up
            try:
                results.append(outcome.get() if not is_slow else CallOverran("it takes too long to follow; make it simpler"))
            except Exception as error:
                results.append(error)
        return results, took_s


def may_jump(request: Request) -> bool:
    """May forced tokens be appended without being sampled?

    Not if each is to be counted by a penalty, has a log-probability, or may be one that ends the answer.
    """
    ask = request.ask
    wants_logprobs = ask.params.logprobs is not None or ask.params.prompt_logprobs is not None
    penalties = (ask.params.presence_penalty, ask.params.frequency_penalty, ask.params.repetition_penalty)
    return not wants_logprobs and not ask.params.stop_token_ids and penalties == (0.0, 0.0, 1.0)


def _accept(following: Following, token: int, num_left: int) -> Next | None:
    """Continuation of an answer behind a token; None if the token is not allowed."""
    return _next(following, num_left) if following.followed().accept(token) else None


def _next(following: Following, num_left: int) -> Next:
    """Continuation of an answer that may have so many more tokens. Where one is to be sampled, its mask is made."""
    matcher, may_jump, repeats = following.followed(), following.may_jump, following.repeats
    if not num_left:
        return _ANY
    if (may_jump or repeats) and matcher.must_end():
        return Next(True, [])
    forced = matcher.force(num_left - 1) if may_jump else []
    if forced and repeats and matcher.must_end():
        return Next(True, forced)
    matcher.mask()
    return Next(False, forced)


def _reason(request: Request, why: str, error: Exception) -> str:
    log.warning("request %s: its grammar %s: %s", request.ask.request_id, why, error)
    return f"its grammar {why}: {error}"
