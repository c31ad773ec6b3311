"""The loop's body: take requests, launch a step, read back an earlier one, answer. It knows messages, not sockets.

    step n      plan ── launch ── pump ── read step n - 1 ── answer
    step n + 1                                               plan ── launch ── pump ── read step n ...
    device            |<------------- step n - 1 ... ------->|<------ step n ------------->|

What a step is planned from is what earlier ones will have done: only which tokens they gave is not known yet, and no step
but one with beams depends on that. Where a token ends its sequence, the steps launched meanwhile have computed for nobody.

Where an answer follows a grammar, what may come next depends on the tokens before: the forward half of such a step is launched
ahead as any, then the earlier steps are read, and then it samples (`guided`).
"""

import logging
import time
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np
import torch

from vmmkv import DriverError
from vmmkv.server.engine.admission import why_never_fits, why_no_floor, why_refused
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.kv_backend import KV, Prefixes
from vmmkv.server.engine.launched import Counts, Launched, LaunchedChunk, output_of
from vmmkv.server.engine.prefix_groups import Arrangement
from vmmkv.server.engine.request import Request, Slots, Strand, TokenIds
from vmmkv.server.engine.runner import Chunk, Logprobs, PromptScores, Runner
from vmmkv.server.engine.sampler import NOT_A_NUMBER
from vmmkv.server.engine.scheduler import CannotRun, Plan, Scheduler
from vmmkv.server.protocol import Abort, Beams, Failed, FinishReason, FromEngine, Generate, Output, Outputs, Snapshot, packed
from vmmkv.server.structured_output.jump_forward import NOTHING_FOLLOWED, StructuredOutputManager
from vmmkv.server.structured_output.matcher import Matchers
from vmmkv.units import PAGE_BYTES

# -------- snapshot
# What the HTTP process is told of the engine from time to time.


def snapshot(
    cache: KV,
    prefix: Prefixes | None,
    *,
    running: int,
    waiting: int,
    preemptions: int,
    prompt_tokens: int,
    generated_tokens: int,
) -> Snapshot:
    """The engine's own counts, and what its memory is doing. No driver call."""
    stats = cache.stats()
    known = None if prefix is None else prefix.stats()
    return Snapshot(
        running=running,
        waiting=waiting,
        preemptions=preemptions,
        prompt_tokens=prompt_tokens,
        generated_tokens=generated_tokens,
        kv_tokens=stats.num_tokens,
        kv_mapped_bytes=stats.mapped_bytes - stats.parked_bytes,
        kv_free_bytes=stats.pool_free_bytes,
        kv_cached_bytes=max(0, stats.pool_held_bytes - stats.pool_used_bytes - stats.pending_reclaim_bytes),
        kv_retiring_bytes=stats.pending_reclaim_bytes,
        kv_created_bytes=stats.pool_created_bytes,
        kv_budget_bytes=stats.pool_budget_bytes,
        stalls=stats.blocked_steps,
        stall_us=stats.blocked_us,
        driver_calls=stats.driver_calls,
        prefix_hit_tokens=0 if known is None else known.hit_tokens,
        prefix_missed_tokens=0 if known is None else known.missed_tokens,
        prefix_pages=0 if known is None else known.held_bytes // PAGE_BYTES,
        kv_used_bytes=stats.pool_used_bytes,
        attached={} if known is None else known.attached,
        attach_us={} if known is None else known.attach_us,
    )


# -------- core

log = logging.getLogger(__name__)

SNAPSHOT_S = 0.5
"""How often the HTTP process hears of the cache while there is work."""

_WINDOW_STEPS = 16
"""After so many steps rows that have left a window are given back: a fence each time, for a page every so many."""


_SLOT_STEPS = 8
"""After so many steps slots that were parked longest ago are given up, for those who want a bare one."""

_NO_NUMBERS = "the model's logits are not numbers: it may need another dtype"

_STRAY = NOT_A_NUMBER - 1000
"""In place of a token that the grammar of its request does not allow."""

_NO_ROOM = "the device had no room for a row that the host had: this is a bug"


class EngineDied(Exception):
    """The device's context is lost: the process must end."""


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
        matchers: Matchers | None = None,
    ) -> None:
        """`matchers` reads grammars; without it requests that have one are refused."""
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
        self._under_way: deque[Launched] = deque()
        self._eos_ids = eos_ids
        self._eos = np.array(sorted(eos_ids), np.int32)
        self._send = send
        self._windowed = [index for index, group in enumerate(cache.layout.groups) if group.window is not None]
        self._arrangement = Arrangement(self._ledger)
        self._num_steps = 0
        self._counts = Counts()
        self._structured: StructuredOutputManager | None = None
        if matchers is not None:
            self.follow_grammars(matchers)
        self._has_pumped = False
        """Since the last plan: a step with masks does while its forward half runs."""
        self._step_us = 10_000.0
        self._read_s = time.perf_counter()
        self._reported_s = 0.0

    def follow_grammars(self, matchers: Matchers) -> None:
        """From now on requests may have a grammar, which `matchers` reads. Before any has come."""
        self._structured = StructuredOutputManager(
            matchers,
            self._scheduler,
            self.cache,
            self._counts,
            send=self._send,
            fail=self._fail,
            pump=self._pump,
            drain=self._drain,
        )

    def close(self) -> None:
        """End its threads. Idempotent; memory is not the engine's."""
        if self._structured is not None:
            self._structured.matchers.close()

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running, or a step under way?"""
        is_reading = self._structured is not None and bool(self._structured.matchers.num_opening)
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
            elif self._structured is not None:
                self._structured.matchers.cancel(message.request_id)
            return
        if reason := why_refused(message, self._runner, max_tokens=self.cache.max_tokens, max_sequences=self._max_sequences):
            self._refuse(message, reason)
            return
        stop_ids = frozenset(message.stop_token_ids) | (frozenset() if message.ignore_eos else self._eos_ids)
        withheld = frozenset[int]()
        if message.min_tokens:
            size = self._runner.model.vocabulary_size
            withheld = frozenset(token for token in (*message.stop_token_ids, *self._eos_ids) if 0 <= token < size)
            if reason := why_no_floor(message, leaves_some=len(withheld) < size):
                self._refuse(message, reason)
                return
        if reason := self._why_never_fits(message, may_stop=bool(stop_ids)):
            self._refuse(message, reason)
            return
        if not message.grammar:
            self._scheduler.waiting.append(Request(message, stop_ids, withheld))
        elif self._structured is None:
            self._refuse(message, "this engine knows no grammars")
        elif message.beam_width or message.ignore_eos:
            self._refuse(message, "an answer by a grammar is sampled, and ends where its grammar does: no beams, no ignore_eos")
        else:
            self._structured.matchers.open(Request(message, stop_ids))

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
        if self._structured is not None and self._structured.matchers.num_opening:
            self._structured.open(is_idle=not self._under_way)
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
        if self._structured is not None:
            self._structured.tell_begun()
        if plan:
            self._has_pumped = False
            self._launch(plan)
            if not self._has_pumped:
                self._pump()
        while len(self._under_way) > (self._lookahead if plan else 0):
            self._read()
            if not plan:
                break
        self.report(only_if_due=True)

    def _launch(self, plan: Plan) -> None:
        lengths = self.cache.lengths
        masks = None
        slots, chunks = plan.decoding, list[LaunchedChunk]()
        try:
            slots = self._arranged(slots)
            asked = []
            for strand, count in plan.chunks:
                is_last = count == strand.num_left
                start, tokens = strand.memory.length, strand.next_tokens(count)
                candidates = strand.num_candidates if is_last else 0
                scored = strand.request.scored(start, start + count)
                asked.append(Chunk(strand.memory.slot, start, tokens, is_last, candidates, scored))
                chunks.append(LaunchedChunk(strand, strand.request.num_admitted, start + count, is_last))
            if self._structured is not None:
                masks = self._structured.masks(plan, slots, chunks)
            if chunks:
                readback = self._runner.mixed(slots, lengths[slots], asked, masks)
            else:
                readback = self._runner.decode(slots, lengths[slots], masks)
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
        self._under_way.append(Launched(readback, slots, self._ledger.epochs[slots], lengths[slots], chunks))

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
        live = np.flatnonzero(self._ledger.epochs[step.slots] == step.epochs)
        slots = step.slots[live]
        self._ledger.confirmed[slots] = step.ends[live]
        rows, speaking = live.tolist(), slots.tolist()
        row = len(step.slots)
        for index, chunk in enumerate(step.chunks):
            if chunk.is_live:
                if index in scores:
                    self._score(chunk.strand.request, scores[index])
                if self._confirm(chunk, tokens, row, candidates, outputs):
                    rows.append(row)
                    speaking.append(chunk.strand.memory.slot)
            row += chunk.is_last
        told = [logprobs.get(row) for row in rows] if logprobs else None
        self._answer(np.array(speaking, np.int64), tokens[rows], told, outputs)
        if outputs:
            self._send(Outputs(outputs=outputs))
        if self._windowed and self._num_steps % _WINDOW_STEPS == 0:
            self._scheduler.slide()

    def _confirm(
        self,
        chunk: LaunchedChunk,
        tokens: TokenIds,
        row: int,
        candidates: dict[int, list[Candidate]],
        outputs: list[Output],
    ) -> bool:
        """A chunk has been computed; `row` is what the step gave for it, if it was its last. Is that its next token?"""
        strand, request = chunk.strand, chunk.strand.request
        if strand is request:
            slot = request.memory.slot
            before = int(self._ledger.confirmed[slot])
            self._ledger.confirmed[slot] = chunk.end
            num_prompt = min(chunk.end, len(request.prompt)) - min(before, len(request.prompt))
            self._counts.prompt_tokens += num_prompt
            if num_prompt and not (chunk.is_last and tokens[row] == NOT_A_NUMBER):
                self._scheduler.share(request)
        if not chunk.is_last or not chunk.is_answered:
            return False
        if not request.ask.max_new_tokens and tokens[row] >= 0:
            outputs.append(output_of(request, -1, "length", None))
            self._scheduler.end(request)
        elif request.beams is None:
            return True
        elif tokens[row] == NOT_A_NUMBER:
            self._fail([request], _NO_NUMBERS)
        else:
            self._search(request, strand, candidates[row])
        return False

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
        self._counts.generated_tokens += int(is_kept.sum())
        ends = stops | (ledger.known[slots] >= ledger.ends[slots])
        ended: list[Request] = []
        why, going_on = NOTHING_FOLLOWED if self._structured is None else self._structured.follow(slots, tokens, is_kept)
        if why:
            tokens = tokens.copy()
            tokens[list(why)] = _STRAY
        for index, (slot, token) in enumerate(zip(slots.tolist(), tokens.tolist(), strict=True)):
            request = ledger.requests[slot]
            assert request is not None, "nobody runs there"
            if token < 0:
                self._fail([request], why.get(index) or (_NO_NUMBERS if token == NOT_A_NUMBER else _NO_ROOM))
                continue
            reason: FinishReason | None = ("stop" if stops[index] else "length") if ends[index] else None
            outputs.append(output_of(request, token, reason, logprobs[index] if logprobs else None))
            request.num_answered += 1
            if reason is not None:
                ended.append(request)
        for request in ended:
            self._scheduler.end(request)
        if self._structured is not None:
            self._structured.go_on(going_on, outputs)

    def _pump(self) -> None:
        """While the device computes: map what the next steps need, unmap what the last ones left."""
        self._has_pumped = True
        try:
            self.cache.map_ahead(self._step_us / 2, lookahead_tokens=self.cache.lookahead_tokens(self._step_us / 2))
            if self._prefix is not None and self._num_steps % _SLOT_STEPS == 0:
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
                prompt_tokens=self._counts.prompt_tokens,
                generated_tokens=self._counts.generated_tokens,
            )
        )

    def _search(self, request: Request, strand: Strand, candidates: list[Candidate]) -> None:
        """One beam of a request knows what may come next."""
        assert request.beams is not None, "there is no search"
        found = request.beams.take(strand, candidates)
        if found is not None:
            self._counts.generated_tokens += sum(len(beam.token_ids) for beam in found)
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
