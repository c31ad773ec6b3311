"""The loop's body: take requests, launch a step, read back an earlier one, answer. It knows messages, not sockets.

    step n      plan ── launch ── pump ── read step n - 1 ── answer
    step n + 1                                               plan ── launch ── pump ── read step n ...
    device            |<------------- step n - 1 ... ------->|<------ step n ------------->|

What a step is planned from is what earlier ones will have done: only which tokens they gave is not known yet, and no step
but one with beams depends on that. Where a token ends its sequence, the steps launched meanwhile have computed for nobody.

Where an answer follows a grammar, what may come next depends on the tokens before: the forward half of such a step is launched
ahead as any, then the earlier steps are read, and then it samples (`_Masks`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch

from vmmkv import DriverError
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.capacity import why_never_fits
from vmmkv.server.engine.constraints import Constraints, TokenMasks, charged, jumps
from vmmkv.server.engine.kv import KV, Prefixes
from vmmkv.server.engine.ledger import Slots, TokenIds
from vmmkv.server.engine.mixed_steps import Chunk
from vmmkv.server.engine.readback import Logprobs, PromptScores, Readback
from vmmkv.server.engine.requests import Request, Strand
from vmmkv.server.engine.runner import Runner
from vmmkv.server.engine.sampler import NOT_A_NUMBER
from vmmkv.server.engine.scheduler import CannotRun, Plan, Scheduler
from vmmkv.server.engine.sharers import Arrangement
from vmmkv.server.engine.snapshot import snapshot
from vmmkv.server.prompt_logprobs import packed
from vmmkv.server.protocol import Abort, Beams, Failed, FinishReason, FromEngine, Generate, Output, Outputs

if TYPE_CHECKING:
    from vmmkv.server.grammar.matcher import Matcher

log = logging.getLogger(__name__)

SNAPSHOT_S = 0.5
"""How often the HTTP process hears of the cache while there is work."""

_WINDOW_STEPS = 16
"""After so many steps rows that have left a window are given back: a fence each time, for a page every so many."""


_SLOT_STEPS = 8
"""After so many steps slots that were parked longest ago are given up, for those who want a bare one."""

_NO_NUMBERS = "the model's logits are not numbers: it may need another --dtype"

_NO_TOKEN = "the model's vocabulary has no token that the grammar allows here"

_STRAY = NOT_A_NUMBER - 1000
"""In place of a token that the grammar of its request does not allow."""

_NO_ROOM = "the device had no room for a row that the host had: this is a bug"


class EngineDied(Exception):
    """The device's context is lost: the process must end."""


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Part of a launched step: tokens of one strand. Nobody's, if its request does not run any more, or runs again."""

    strand: Strand
    num_admitted: int
    end: int
    """Rows that it has then."""
    is_last: bool
    is_answered: bool = True
    """Does what is sampled behind it count, if it is its strand's last? Not where a grammar has forced other tokens."""

    @property
    def is_live(self) -> bool:
        """Does the same request still run?"""
        request = self.strand.request
        return request.sequence is not None and request.num_admitted == self.num_admitted


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step under way: what it gives for whom."""

    readback: Readback
    slots: Slots
    """Of those that decode; the first of its tokens are theirs."""
    epochs: Slots
    """Of the slots, when it was launched."""
    ends: Slots
    """Rows that they have then."""
    chunks: list[_Chunk]

    @property
    def requests(self) -> list[Request]:
        """All that have a part in it through chunks, and still do."""
        return list(dict.fromkeys(chunk.strand.request for chunk in self.chunks if chunk.is_live))


class EngineCore:
    """Continuous batching: sequences join and leave at every step. `send` takes the answers.

    `max_sequences` run at once, as many as there are slots if None; the others are for sequences that have ended, and whose
    slots wait to be adopted. `lookahead` steps are under way when `step` returns, if there is work for so many.
    """

    def __init__(
        self,
        cache: KV,
        runner: Runner,
        *,
        prefix: Prefixes | None = None,
        max_sequences: int | None = None,
        eos_ids: frozenset[int],
        step_tokens: int,
        lookahead: int = 1,
        send: Callable[[FromEngine], None],
        constraints: Constraints | None = None,
    ) -> None:
        """`constraints` reads grammars; without it requests that have one are refused."""
        self.cache = cache
        self._runner = runner
        self._prefix = prefix
        self._max_sequences = max_sequences or cache.num_slots
        self._scheduler = Scheduler(
            cache, prefix, runner, step_tokens=step_tokens, max_sequences=self._max_sequences, drain=self._drain
        )
        self._ledger = self._scheduler.ledger
        self._budget_bytes = cache.stats().pool_budget_bytes
        """As it was when it was last looked up: to count all that `stats` does takes a while."""
        self._lookahead = lookahead
        self._under_way: deque[_Launched] = deque()
        self._eos_ids = eos_ids
        self._eos = np.array(sorted(eos_ids), np.int32)
        self._send = send
        self._constraints = constraints
        self._begun: list[Request] = []
        """Those that begin with tokens which their grammar forced, and that nobody was told."""
        self._windowed = [index for index, group in enumerate(cache.layout.groups) if group.window is not None]
        self._arrangement = Arrangement(self._ledger)
        self._num_steps = 0
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._step_us = 10_000.0
        self._read_s = time.perf_counter()
        self._reported_s = 0.0

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running, or a step under way?"""
        is_reading = self._constraints is not None and bool(self._constraints.num_coming)
        return self._scheduler.has_work or bool(self._under_way) or is_reading

    @property
    def num_running(self) -> int:
        """Requests that have memory."""
        return len(self._scheduler.running)

    def request_in(self, slot: int) -> str | None:
        """The request that runs in a slot, if any; a search has one slot under its name, whatever its beams have."""
        request = self._ledger.requests[slot]
        return None if request is None else request.ask.request_id

    def receive(self, message: Generate | Abort) -> None:
        """A request comes, or its client goes."""
        if isinstance(message, Abort):
            request = self._scheduler.find(message.request_id)
            if request is not None:
                self._scheduler.end(request)
            elif self._constraints is not None:
                self._constraints.forget(message.request_id)
            return
        num_prompt, num_new = len(message.prompt), message.max_new_tokens
        scores_prompt = message.num_prompt_logprobs is not None
        least = 0 if scores_prompt and not message.grammar else 1
        if num_prompt < 1 or num_new < least or num_prompt + num_new > self.cache.max_tokens:
            both = f"a prompt of {num_prompt} tokens and {num_new} new ones"
            self._refuse(message, f"{both}; both must be at least 1, and at most {self.cache.max_tokens} together")
            return
        if scores_prompt and (message.beam_width or (message.num_prompt_logprobs or 0) < 0):
            self._refuse(message, "log-probabilities of a prompt are for sampling, and of 0 or more of the likeliest tokens")
            return
        if not 0 <= message.beam_width <= self._max_sequences:
            beams = f"a search of {message.beam_width} beams"
            self._refuse(message, f"{beams}; each takes a slot, and there are {self._max_sequences}: lower the number of beams")
            return
        size = self._runner.model.vocabulary_size
        if not 0 <= min(message.prompt) <= max(message.prompt) < size:  # to look one up would fail the whole step
            stranger = next(token for token in message.prompt if not 0 <= token < size)
            self._refuse(message, f"the prompt has token {stranger}; wanted ids of the model's vocabulary, 0 to {size - 1}")
            return
        try:
            self._runner.check(message)
        except ValueError as error:
            self._refuse(message, str(error))
            return
        stop_ids = frozenset(message.stop_token_ids) | (frozenset() if message.ignore_eos else self._eos_ids)
        withheld = frozenset[int]()
        if message.min_tokens:
            withheld = frozenset(token for token in (*message.stop_token_ids, *self._eos_ids) if 0 <= token < size)
            if reason := _why_no_floor(message, len(withheld) < size):
                self._refuse(message, reason)
                return
        if reason := self._why_never_fits(message, may_stop=bool(stop_ids)):
            self._refuse(message, reason)
            return
        if not message.grammar:
            self._scheduler.waiting.append(Request(message, stop_ids, withheld))
        elif self._constraints is None:
            self._refuse(message, "this engine knows no grammars")
        elif message.beam_width or message.ignore_eos:
            self._refuse(message, "an answer by a grammar is sampled, and ends where its grammar does: no beams, no ignore_eos")
        else:
            self._constraints.begin(Request(message, stop_ids))

    def _why_never_fits(self, message: Generate, *, may_stop: bool) -> str | None:
        def why() -> str | None:
            return why_never_fits(
                self.cache.layout,
                self._budget_bytes,
                message,
                may_stop=may_stop,
                attaches=self._prefix is not None,
                vocabulary_size=self._runner.model.vocabulary_size,
            )

        if why() is None:
            return None
        self._budget_bytes = self.cache.stats().pool_budget_bytes  # it can have been raised since
        return why()

    def step(self) -> None:
        """Launch a step for whoever is to run, and answer what an earlier one gave. One failing request stops no others.

        Raises: EngineDied.
        """
        if self._constraints is not None and self._constraints.num_coming:
            self._open(self._constraints)
        try:
            plan = self._scheduler.plan()
        except CannotRun as error:
            log.warning("request %s ends: %s", error.request.ask.request_id, error)
            self._check_device()
            self._fail([error.request], str(error))
            return
        except Exception:
            self._check_device()
            raise
        if self._begun:
            self._tell_begun()
        if plan:
            self._launch(plan)
            self._pump()
        while len(self._under_way) > (self._lookahead if plan else 0):
            self._read()
            if not plan:
                break
        self.report(only_if_due=True)

    def _open(self, constraints: Constraints) -> None:
        """Queue those whose grammars have been read, with what these force already."""
        for request, matcher in constraints.opened():
            if isinstance(matcher, Exception):
                log.warning("request %s: its grammar cannot be read: %s", request.ask.request_id, matcher)
                self._refuse(request.ask, f"its grammar cannot be read: {matcher}")
                continue
            request.matcher = matcher
            try:
                with charged(request):
                    forced = matcher.force(request.ask.max_new_tokens - 1) if jumps(request) else []
            except Exception as error:
                log.warning("request %s: its grammar cannot be followed: %s", request.ask.request_id, error)
                self._refuse(request.ask, _not_followed(error))
                continue
            if forced:
                request.begin_with(forced)
                self._begun.append(request)
            self._scheduler.waiting.append(request)
        if constraints.num_coming and not self._scheduler.has_work and not self._under_way:
            constraints.nap()

    def _tell_begun(self) -> None:
        """Those that run by now: what was cached of their prompts is known."""
        running = [request for request in self._begun if request.sequence is not None]
        alive = set(map(id, self._scheduler.waiting))
        self._begun = [request for request in self._begun if id(request) in alive]
        outputs: list[Output] = []
        for request in running:
            self._tell(request, request.tokens[len(request.prompt) :].tolist(), outputs)
        if outputs:
            self._send(Outputs(outputs=outputs))

    def _tell(self, request: Request, forced: list[int], outputs: list[Output]) -> None:
        """Tokens that were forced go to the client as those that are sampled do."""
        is_first = not request.num_answered
        outputs.append(
            Output(
                request_id=request.ask.request_id,
                token_ids=tuple(forced),
                cached_tokens=request.num_cached if is_first else 0,
                queued_us=request.queued_us if is_first else 0,
            )
        )
        request.num_answered += len(forced)
        self._generated_tokens += len(forced)

    def _launch(self, plan: Plan) -> None:
        lengths = self.cache.lengths
        masks = None
        slots, chunks = plan.decoding, list[_Chunk]()
        try:
            slots = self._arranged(slots)
            asked = []
            for strand, count in plan.chunks:
                is_last = count == strand.num_left
                start, tokens = strand.memory.length, strand.next_tokens(count)
                candidates = strand.num_candidates if is_last else 0
                scored = strand.request.scored(start, start + count)
                asked.append(Chunk(strand.memory.slot, start, tokens, is_last, candidates, scored))
                chunks.append(_Chunk(strand, strand.request.num_admitted, start + count, is_last))
            if self._ledger.num_constrained and (self._ledger.constrained[slots].any() or _any_constrained(chunks)):
                masks = _Masks(self, plan, slots, chunks)
            if masks is not None and chunks:
                readback = self._runner.mixed(slots, lengths[slots], asked, masks)
            elif masks is not None:
                readback = self._runner.decode(slots, lengths[slots], masks)
            elif chunks:
                readback = self._runner.mixed(slots, lengths[slots], asked)
            else:
                readback = self._runner.decode(slots, lengths[slots])
        except Exception as error:
            log.exception("a step failed")
            self._check_device()
            requests = [self._ledger.requests[slot] for slot in slots]
            everybody = [
                *(request for request in requests if request is not None),
                # Who follows a grammar can have ended meanwhile, when earlier steps were read.
                *(strand.request for strand, _ in plan.chunks if strand.request.sequence is not None),
            ]
            self._fail(list(dict.fromkeys(everybody)), f"the step failed: {error}")
            return
        if not self._under_way:
            self._read_s = time.perf_counter()  # the device was idle until now, and that is no step's time
        if masks is not None:
            self._under_way.append(masks.launched(readback))
            return
        self._scheduler.launched(plan)
        self._under_way.append(_Launched(readback, slots, self._ledger.epochs[slots], lengths[slots], chunks))

    def _arranged(self, slots: Slots) -> Slots:
        """The slots with sharers of a prefix side by side, where that is faster."""
        if not self._runner.shares or not len(slots):
            return slots
        return self._arrangement.of(slots, self._runner.share)

    def _drain(self) -> bool:
        """Read back all steps under way; were there any?"""
        were_any = bool(self._under_way)
        while self._under_way:
            self._read()
        return were_any

    def _read(self) -> None:
        """Wait for the oldest step under way, and answer what it gave."""
        step = self._under_way.popleft()
        try:
            tokens = step.readback.wait()
            logprobs, candidates = step.readback.logprobs(), step.readback.candidates()
            scores = step.readback.prompt_scores()
        except Exception as error:
            log.exception("a step failed")
            self._check_device()
            live = self._ledger.epochs[step.slots] == step.epochs
            requests = [self._ledger.requests[slot] for slot in step.slots[live]]
            everybody = [*(request for request in requests if request is not None), *step.requests]
            self._fail(list(dict.fromkeys(everybody)), f"the step failed: {error}")
            return
        now_s = time.perf_counter()
        self._step_us += 0.1 * ((now_s - self._read_s) * 1e6 - self._step_us)
        self._read_s = now_s
        self._num_steps += 1
        outputs: list[Output] = []
        row = len(step.slots)
        live = np.flatnonzero(self._ledger.epochs[step.slots] == step.epochs)
        slots = step.slots[live]
        self._ledger.confirmed[slots] = step.ends[live]
        self._answer(slots, tokens[live], [logprobs.get(index) for index in live.tolist()] if logprobs else None, outputs)
        for index, chunk in enumerate(step.chunks):
            if chunk.is_live:
                if index in scores:
                    self._score(chunk.strand.request, scores[index])
                self._confirm(chunk, tokens, row, logprobs, candidates, outputs)
            row += chunk.is_last
        if outputs:
            self._send(Outputs(outputs=outputs))
        if self._windowed and self._num_steps % _WINDOW_STEPS == 0:
            self._scheduler.slide()

    def _confirm(
        self,
        chunk: _Chunk,
        tokens: TokenIds,
        row: int,
        logprobs: dict[int, Logprobs],
        candidates: dict[int, list[Candidate]],
        outputs: list[Output],
    ) -> None:
        """A chunk has been computed; `row` is what the step gave for it, if it was its strand's last."""
        strand, request = chunk.strand, chunk.strand.request
        if strand is request:
            slot = request.memory.slot
            before = int(self._ledger.confirmed[slot])
            self._ledger.confirmed[slot] = chunk.end
            num_prompt = min(chunk.end, len(request.prompt)) - min(before, len(request.prompt))
            self._prompt_tokens += num_prompt
            if num_prompt and not (chunk.is_last and tokens[row] == NOT_A_NUMBER):
                self._scheduler.share(request)
        if not chunk.is_last or not chunk.is_answered:
            return
        if not request.ask.max_new_tokens and tokens[row] >= 0:
            outputs.append(_output(request, -1, "length", None))
            self._scheduler.end(request)
        elif request.beams is None:
            self._answer(np.array([request.memory.slot]), tokens[row : row + 1], [logprobs.get(row)], outputs)
        elif tokens[row] == NOT_A_NUMBER:
            self._fail([request], _NO_NUMBERS)
        else:
            self._search(request, strand, candidates[row])

    def _score(self, request: Request, scores: PromptScores) -> None:
        """Its client is told how likely the next tokens of its prompt were."""
        assert scores.first == request.num_scored, "each is told once, in order"
        request.num_scored += len(scores.chosen_W)
        self._send(packed(request.ask.request_id, scores.chosen_W, scores.values_WT, scores.ids_WT))

    def _answer(
        self, slots: Slots, tokens: TokenIds, logprobs: Sequence[Logprobs | None] | None, outputs: list[Output]
    ) -> None:
        """The requests in these slots have their next tokens. A few numpy calls, and an answer each."""
        ledger = self._ledger
        is_bad = tokens < 0
        stops = np.isin(tokens, self._eos) & ~ledger.ignores_eos[slots]
        for index in np.flatnonzero(ledger.has_stops[slots]).tolist():
            request = ledger.requests[slots[index]]
            stops[index] |= request is not None and int(tokens[index]) in request.stop_ids
        is_kept = ~(is_bad | stops)
        ledger.take(slots[is_kept], tokens[is_kept])
        self._generated_tokens += int(is_kept.sum())
        ends = stops | (ledger.known[slots] >= ledger.ends[slots])
        ended: list[Request] = []
        why = dict[int, str]()
        if ledger.num_constrained and (why := self._strays(slots, tokens, is_kept)):
            tokens = tokens.copy()
            tokens[list(why)] = _STRAY
        for index, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            request = ledger.requests[slot]
            assert request is not None, "nobody runs there"
            if token < 0:
                self._fail([request], why.get(index) or (_NO_NUMBERS if token == NOT_A_NUMBER else _NO_ROOM))
                continue
            reason: FinishReason | None = ("stop" if stops[index] else "length") if ends[index] else None
            outputs.append(_output(request, token, reason, logprobs[index] if logprobs else None))
            request.num_answered += 1
            if reason is not None:
                ended.append(request)
        for request in ended:
            self._scheduler.end(request)

    def _strays(self, slots: Slots, tokens: TokenIds, is_kept: npt.NDArray[np.bool_]) -> dict[int, str]:
        """The matchers of those that follow a grammar accept what was sampled; places where one does not, and why."""
        strays: dict[int, str] = {}
        for index in np.flatnonzero(self._ledger.constrained[slots] & is_kept).tolist():
            request = self._ledger.requests[slots[index]]
            assert request is not None and request.matcher is not None, "nobody with a grammar runs there"
            try:
                with charged(request):
                    if not request.matcher.accept(int(tokens[index])):
                        strays[index] = _NO_TOKEN
            except Exception as error:
                log.warning("request %s: its grammar cannot be followed: %s", request.ask.request_id, error)
                strays[index] = _not_followed(error)
        return strays

    def _pump(self) -> None:
        """While the device computes: map what the next steps need, unmap what the last ones left."""
        try:
            self.cache.pump(self._step_us / 2, lead_tokens=self.cache.lead_tokens(self._step_us / 2))
            if self._prefix is not None:
                self._prefix.promote(self._step_us / 4)
                if self._num_steps % _SLOT_STEPS == 0:
                    self._prefix.free_slots((self.cache.num_slots - self._max_sequences) // 4)
        except DriverError:
            log.exception("nothing was mapped ahead")  # who needs it will ask again, and be told

    def settle(self) -> None:
        """Nothing is left to do: unmap what retires, and report the end state."""
        self.cache.drain()
        self.report()

    def forget(self) -> None:
        """Forget every prefix that no running request uses. Memory stays with the pool, as it does where much is cached."""
        if self._prefix is not None:
            self._prefix.evict()
        self.settle()

    def budget_changed(self) -> None:
        """The memory has another budget than before: requests are held against that from now on."""
        self._budget_bytes = self.cache.stats().pool_budget_bytes
        self._scheduler.look_again()
        self.report()

    def report(self, *, only_if_due: bool = False) -> None:
        """Send a snapshot, at most every SNAPSHOT_S while there is work."""
        now_s = time.monotonic()
        if only_if_due and now_s - self._reported_s < SNAPSHOT_S:
            return
        self._reported_s = now_s
        scheduler = self._scheduler
        self._send(
            snapshot(
                self.cache,
                self._prefix,
                running=len(scheduler.running),
                waiting=len(scheduler.waiting),
                preemptions=scheduler.num_preempted,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
            )
        )

    def _search(self, request: Request, strand: Strand, candidates: list[Candidate]) -> None:
        """One beam of a request knows what may come next."""
        assert request.beams is not None, "there is no search"
        found = request.beams.take(strand, candidates)
        if found is not None:
            self._generated_tokens += sum(len(beam.token_ids) for beam in found)
            first = {"cached_tokens": request.num_cached, "queued_us": request.queued_us}
            self._send(Beams(request_id=request.ask.request_id, beams=found, **first))
            self._scheduler.end(request)

    def _refuse(self, message: Generate, reason: str) -> None:
        """A request never starts."""
        self._send(Failed(request_id=message.request_id, message=reason))

    def _fail(self, requests: Sequence[Request], message: str) -> None:
        for request in requests:
            self._send(Failed(request_id=request.ask.request_id, message=message))
            self._scheduler.end(request, keep=False)

    def _check_device(self) -> None:
        """After a failure: is the device's context still there?"""
        if self.cache.device.type != "cuda":
            return
        try:
            torch.cuda.synchronize(self.cache.device)
        except Exception as error:
            raise EngineDied(f"the device's context is lost: {error}") from error


class _Masks:
    """What may come next in the rows of one step, when its forward half is under way; and that step, when all of it is."""

    def __init__(self, engine: EngineCore, plan: Plan, slots: Slots, chunks: list[_Chunk]) -> None:
        self._engine, self._plan, self._slots, self._chunks = engine, plan, slots, chunks
        self._epochs: Slots | None = None
        """Of the slots, when the forward half was launched; none that is, of those who go on with forced tokens instead."""
        self._ends = slots

    @torch.inference_mode(False)  # as steps are read elsewhere: who ends here leaves nothing that was made in another mode
    def __call__(self, rows: Slots) -> TokenMasks | None:
        """Read what is under way, and have the matchers say. `rows` are the slots of the rows that are given a token."""
        self._book()
        engine, asking = self._engine, list[int]()
        engine._drain()
        words_GW: npt.NDArray[np.int32] | None = None
        outputs: list[Output] = []
        speaking = [place for place, chunk in enumerate(self._chunks) if chunk.is_last]
        for row, slot in enumerate(rows.tolist()):
            place = None if row < len(self._slots) else speaking[row - len(self._slots)]
            request = self._still(row, slot, place)
            if request is None or request.matcher is None:
                continue
            if words_GW is None:
                words_GW = np.empty((len(rows), request.matcher.num_words), np.int32)
            try:
                with charged(request):
                    must_end, forced = self._ahead(request, request.matcher, is_decoding=place is None)
                    if not must_end and not forced:
                        request.matcher.fill(words_GW, len(asking))
            except Exception as error:
                log.warning("request %s: its grammar cannot be followed: %s", request.ask.request_id, error)
                engine._fail([request], _not_followed(error))
                continue
            if must_end:
                outputs.append(_output(request, -1, "stop", None))
                engine._scheduler.end(request)
            elif forced:
                engine._scheduler.force(request, forced)
                engine._tell(request, forced, outputs)
                self._disown(row, place)
            else:
                asking.append(row)
        if outputs:
            engine._send(Outputs(outputs=outputs))
        return TokenMasks(asking, words_GW[: len(asking)]) if words_GW is not None and asking else None

    def _ahead(self, request: Request, matcher: "Matcher", *, is_decoding: bool) -> tuple[bool, list[int]]:
        """Can its answer only end here? And if not, which tokens must come next?"""
        if not jumps(request):
            return False, []
        if is_decoding and matcher.must_end():
            return True, []
        ledger, slot = self._engine._ledger, request.memory.slot
        return False, matcher.force(int(ledger.ends[slot] - ledger.known[slot]) - 1)

    def launched(self, readback: Readback) -> _Launched:
        """All of the step is under way."""
        self._book()
        assert self._epochs is not None, "it is in the books"
        return _Launched(readback, self._slots, self._epochs, self._ends, self._chunks)

    def _book(self) -> None:
        """Once: from now on the books have the step's rows, and who ends ends behind them."""
        if self._epochs is None:
            self._engine._scheduler.launched(self._plan)
            self._epochs, self._ends = self._engine._ledger.epochs[self._slots], self._engine.cache.lengths[self._slots]

    def _still(self, row: int, slot: int, place: int | None) -> Request | None:
        """Who had a part in the step when it was launched, and still runs."""
        assert self._epochs is not None, "it is in the books"
        if place is not None:
            chunk = self._chunks[place]
            return chunk.strand.request if chunk.is_live else None
        return self._engine._ledger.requests[slot] if self._engine._ledger.epochs[slot] == self._epochs[row] else None

    def _disown(self, row: int, place: int | None) -> None:
        """What is sampled in this row is nobody's."""
        assert self._epochs is not None, "it is in the books"
        if place is None:
            self._epochs[row] = -1
        else:
            self._chunks[place] = replace(self._chunks[place], is_answered=False)


def _any_constrained(chunks: Sequence[_Chunk]) -> bool:
    return any(chunk.is_last and chunk.strand.request.matcher is not None for chunk in chunks)


def _why_no_floor(message: Generate, leaves_some: bool) -> str | None:
    """What is wrong with a request for `min_tokens`, if anything; does what is withheld until then leave any token?"""
    given = f"min_tokens={message.min_tokens}"
    if not 0 < message.min_tokens <= message.max_new_tokens:
        return f"{given} of an answer of {message.max_new_tokens} new tokens at most; wanted 0 to {message.max_new_tokens}"
    if message.beam_width:
        return f"{given} with a beam search: the search ends where its beams do; leave one of them out"
    if message.grammar:
        return f"{given} with a grammar: the answer ends where the grammar does; leave one of them out"
    return (
        None if leaves_some else f"{given} leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids"
    )


def _not_followed(error: Exception) -> str:
    return f"its grammar cannot be followed: {error}"


def _output(request: Request, token: int, reason: FinishReason | None, logprobs: Logprobs | None) -> Output:
    return Output(
        request_id=request.ask.request_id,
        token_ids=() if reason == "stop" or token < 0 else (token,),
        finish_reason=reason,
        cached_tokens=0 if request.num_answered else request.num_cached,
        queued_us=0 if request.num_answered else request.queued_us,
        logprobs=() if logprobs is None else (logprobs.chosen,),
        top_logprobs=(tuple(logprobs.likeliest),) if logprobs is not None and logprobs.likeliest else (),
    )
