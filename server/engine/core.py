"""The loop's body: take requests, do a step, answer. It knows messages, not sockets."""

import logging
import time
from collections.abc import Callable

import torch

from vmmkv import DriverError, KVCache
from vmmkv.prefix import PrefixCache
from vmmkv.server.engine.beams import Candidate
from vmmkv.server.engine.requests import Request, Strand
from vmmkv.server.engine.runner import ModelRunner
from vmmkv.server.engine.sampler import NOT_A_NUMBER, Pick
from vmmkv.server.engine.scheduler import CannotRun, Scheduler
from vmmkv.server.protocol import Abort, Beams, Failed, FromEngine, Generate, Snapshot, Tokens
from vmmkv.units import PAGE_BYTES

log = logging.getLogger(__name__)

SNAPSHOT_S = 0.5
"""How often the HTTP process hears of the cache while there is work."""


class EngineDied(Exception):
    """The device's context is lost: the process must end."""


class Engine:
    """Continuous batching: sequences join and leave at every step. `send` takes the answers.

    `max_sequences` run at once, as many as there are slots if None; the others are for sequences that have ended, and whose
    slots wait to be adopted.
    """

    def __init__(
        self,
        cache: KVCache,
        runner: ModelRunner,
        *,
        prefix: PrefixCache | None = None,
        max_sequences: int | None = None,
        eos_ids: frozenset[int],
        step_tokens: int,
        send: Callable[[FromEngine], None],
    ) -> None:
        self.cache = cache
        self._runner = runner
        self._prefix = prefix
        self._max_sequences = max_sequences or cache.num_slots
        self._scheduler = Scheduler(cache, prefix, step_tokens=step_tokens, max_sequences=self._max_sequences)
        self._eos_ids = eos_ids
        self._send = send
        self._windowed = [index for index, group in enumerate(cache.layout.groups) if group.window is not None]
        self._prompt_tokens = 0
        self._generated_tokens = 0
        self._step_us = 10_000.0
        self._reported_s = 0.0

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running?"""
        return self._scheduler.has_work

    def receive(self, message: Generate | Abort) -> None:
        """A request comes, or its client goes."""
        if isinstance(message, Abort):
            request = self._scheduler.find(message.request_id)
            if request is not None:
                self._scheduler.end(request)
            return
        num_prompt, num_new = len(message.prompt), message.max_new_tokens
        if num_prompt < 1 or num_new < 1 or num_prompt + num_new > self.cache.max_tokens:
            both = f"a prompt of {num_prompt} tokens and {num_new} new ones"
            self._refuse(message, f"{both}; both must be at least 1, and at most {self.cache.max_tokens} together")
            return
        stop_ids = frozenset(message.stop_token_ids) | (frozenset() if message.ignore_eos else self._eos_ids)
        if not 0 <= message.beam_width <= self._max_sequences:
            beams = f"a search of {message.beam_width} beams"
            self._refuse(message, f"{beams}; each takes a slot, and there are {self._max_sequences}: lower the number of beams")
            return
        self._scheduler.waiting.append(Request(message, stop_ids))

    def step(self) -> None:
        """One forward pass over whoever is to run, and its answers. One failing request does not stop the others.

        Raises: EngineDied.
        """
        began_s = time.perf_counter()
        try:
            work = self._scheduler.plan()
        except CannotRun as error:
            log.warning("request %s ends: %s", error.request.ask.request_id, error)
            self._check_device()
            self._fail([error.request], str(error))
            return
        if not work:
            return
        try:
            sampled = self._runner.forward(work)
            self._pump()
            picks, candidates = sampled.tolist(), sampled.candidates()
        except Exception as error:
            log.exception("a step failed")
            self._check_device()
            self._fail(list(dict.fromkeys(strand.request for strand, _ in work)), f"the step failed: {error}")
            return
        for row, ((strand, count), pick) in enumerate(zip(work, picks, strict=True)):
            if strand.request.sequence is not None:  # else another of its beams has ended it
                self._account(strand, count, pick, candidates.get(row, []))
        self._step_us += 0.1 * ((time.perf_counter() - began_s) * 1e6 - self._step_us)
        self.report(only_if_due=True)

    def _pump(self) -> None:
        """While the device computes: map what the next steps need, unmap what the last ones left."""
        try:
            self.cache.pump(self._step_us / 2, lead_tokens=self.cache.lead_tokens(self._step_us / 2))
            if self._prefix is not None:
                self._prefix.promote(self._step_us / 4)
                self._prefix.free_slots((self.cache.num_slots - self._max_sequences) // 4)
        except DriverError:
            log.exception("nothing was mapped ahead")  # who needs it will ask again, and be told

    def settle(self) -> None:
        """Nothing is left to do: unmap what retires, and report the end state."""
        self.cache.drain()
        self.report()

    def report(self, *, only_if_due: bool = False) -> None:
        """Send a snapshot, at most every SNAPSHOT_S while there is work."""
        now_s = time.monotonic()
        if only_if_due and now_s - self._reported_s < SNAPSHOT_S:
            return
        self._reported_s = now_s
        stats = self.cache.stats()
        prefix = None if self._prefix is None else self._prefix.stats()
        self._send(
            Snapshot(
                running=len(self._scheduler.running),
                waiting=len(self._scheduler.waiting),
                preemptions=self._scheduler.num_preempted,
                prompt_tokens=self._prompt_tokens,
                generated_tokens=self._generated_tokens,
                kv_tokens=stats.num_tokens,
                kv_mapped_bytes=stats.mapped_bytes - stats.parked_bytes,
                kv_free_bytes=stats.pool_free_bytes,
                kv_cached_bytes=max(0, stats.pool_held_bytes - stats.pool_used_bytes - stats.retiring_bytes),
                kv_retiring_bytes=stats.retiring_bytes,
                kv_created_bytes=stats.pool_created_bytes,
                kv_budget_bytes=stats.pool_budget_bytes,
                stalls=stats.stalls,
                stall_us=stats.stall_us,
                driver_calls=stats.driver_calls,
                prefix_hit_tokens=0 if prefix is None else prefix.hit_tokens,
                prefix_pages=0 if prefix is None else prefix.held_bytes // PAGE_BYTES,
            )
        )

    def _account(self, strand: Strand, count: int, pick: Pick, candidates: list[Candidate]) -> None:
        """The device has computed `count` tokens of a strand; if those were all it had, `pick` or a candidate comes next."""
        request = strand.request
        strand.memory.advance(count)
        for group in self._windowed:
            strand.memory.advance_start(group)
        if strand is request:
            self._prompt_tokens += max(0, min(count, len(request.ask.prompt) - request.num_computed))
            request.num_computed += count
            if request.num_computed <= len(request.ask.prompt) and pick.token != NOT_A_NUMBER:
                self._scheduler.share(request)
        if strand.num_left:
            return
        if pick.token == NOT_A_NUMBER:
            self._fail([request], "the model's logits are not numbers: it may need another --dtype")
        elif request.beams is None:
            self._answer(request, pick)
        else:
            self._search(request, strand, candidates)

    def _answer(self, request: Request, pick: Pick) -> None:
        """A request has its next token."""
        is_first = request.num_generated == 0
        finish_reason = request.accept(pick.token)
        kept = finish_reason != "stop"
        self._generated_tokens += kept
        self._send(
            Tokens(
                request_id=request.ask.request_id,
                token_ids=[pick.token] if kept else [],
                finish_reason=finish_reason,
                logprobs=[] if pick.logprob is None else [pick.logprob],
                cached_tokens=request.num_cached if is_first else 0,
            )
        )
        if finish_reason is not None:
            self._scheduler.end(request)

    def _search(self, request: Request, strand: Strand, candidates: list[Candidate]) -> None:
        """One beam of a request knows what may come next."""
        assert request.beams is not None, "there is no search"
        found = request.beams.take(strand, candidates)
        if found is not None:
            self._generated_tokens += sum(len(beam.token_ids) for beam in found)
            self._send(Beams(request_id=request.ask.request_id, beams=found, cached_tokens=request.num_cached))
            self._scheduler.end(request)

    def _refuse(self, message: Generate, reason: str) -> None:
        """A request never starts."""
        self._send(Failed(request_id=message.request_id, message=reason))

    def _fail(self, requests: list[Request], message: str) -> None:
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
