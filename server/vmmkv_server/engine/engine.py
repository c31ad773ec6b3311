"""The loop: take requests, schedule a step, launch it, read an earlier one back, answer. It knows messages, not sockets.

    step n      schedule ── launch ── map ahead ── read step n - 1 ── answer
    step n + 1                                                        schedule ── launch ── map ahead ── read step n ...
    device               |<------------- step n - 1 ... ------->|<------ step n ------------->|

A step that the device has ended is read at once, and else when more than `lookahead` are in flight.

A step is scheduled from what the steps in flight will have done. Only the tokens they sample are unknown, and only a step with
beams depends on those. Where a token ends its request, or begins its grammar, the steps launched meanwhile have computed rows
that are dropped.

Where a feature masks rows, the tokens that may come next depend on those before. The forward half of such a step is
launched ahead as any other; then the earlier steps are read, which makes the masks, and the step samples.
"""

import contextlib
import logging
import math
import time
from collections import deque
from collections.abc import Callable, Iterator
from typing import Final

import torch

from vmmkv import DriverError
from vmmkv.units import PAGE_BYTES, counted, format_bytes
from vmmkv_server.engine.answers import Answers
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.feature import Feature, Features, Need
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.features.beams import Beams
from vmmkv_server.engine.features.compaction import Compaction
from vmmkv_server.engine.features.fetches import Fetches
from vmmkv_server.engine.features.grammars import Grammars
from vmmkv_server.engine.features.prefix_groups import PrefixGroups
from vmmkv_server.engine.features.prompt_scores import PromptScores
from vmmkv_server.engine.kv_backend import KVBackend, least_bytes
from vmmkv_server.engine.request import Request
from vmmkv_server.engine.runner import NAP_S, Runner
from vmmkv_server.engine.scheduler import CannotRun, Scheduler
from vmmkv_server.engine.step import Step
from vmmkv_server.engine.uploads import TokenMasks
from vmmkv_server.protocol import (
    Abort,
    Failed,
    FromEngine,
    Generate,
    Snapshot,
)
from vmmkv_server.sampling_params import KV_POLICY_REACH, Limits
from vmmkv_server.statistics import MemoryStatistics, PrefixStatistics, TierStatistics, Value
from vmmkv_server.structured_output.matcher import Vocabulary

log = logging.getLogger(__name__)

SNAPSHOT_S: Final = 0.5
"""Time between snapshots while there is work."""

_WINDOW_STEPS: Final = 16
"""Steps after which rows that have left a window are given back: each time costs a fence."""

_SLOT_STEPS: Final = 8
"""Steps after which slots that were parked longest ago are cleared."""

_POLL_US: Final = 200.0
"""Time for tiers while there is nothing to do but to wait."""

_FEATURES_NAP_S: Final = 0.0005
"""While nothing else is to be done, for the threads of features: to read a grammar takes some ten milliseconds."""

FEATURES: Final[tuple[type[Feature], ...]] = (
    PromptScores,
    Beams,
    Grammars,
    Fetches,
    Compaction,
    PrefixGroups,
)
"""The features of an engine, in the order in which they are asked and told."""


class Engine:
    """Continuous batching over one model and one KV memory: requests join and leave at every step.

    `send` takes the answers. `max_sequences` run at once, as many as there are slots if None; the other slots keep the rows of
    sequences that have ended. At most `lookahead` steps are in flight when `step` returns.
    """

    def __init__(
        self,
        memory: KVBackend,
        runner: Runner,
        *,
        max_sequences: int | None = None,
        eos_ids: frozenset[int],
        step_tokens: int,
        lookahead: int = 1,
        send: Callable[[FromEngine], None],
        vocabulary: Callable[[], Vocabulary],
        kv_policy: str | None = None,
    ) -> None:
        self.memory = memory
        self.in_flight: deque[Step] = deque()
        self.runner: Final = runner
        self._prefix = memory.prefixes
        self.limits: Final = _limits(runner, memory, max_sequences, kv_policy)
        self.features: Final = Features()
        self.scheduler: Final = Scheduler(
            memory,
            runner.sampler,
            step_tokens=step_tokens,
            max_sequences=self.limits.max_sequences,
            drain=self.drain,
            is_idle=self.is_idle,
            features=self.features,
            most_tokens=None if runner.kv_policy_refusal else KV_POLICY_REACH * memory.max_tokens,
        )
        self.answers: Final = Answers(self.scheduler, self.features, send, eos_ids)
        core = Core(
            memory=memory,
            runner=runner,
            scheduler=self.scheduler,
            answers=self.answers,
            limits=self.limits,
            send=send,
            vocabulary=vocabulary,
        )
        self.features.plug_in(make(core) for make in FEATURES)
        self._lookahead = lookahead
        self._eos_ids = eos_ids
        self._send = send
        self._has_windows = any(group.window is not None for group in memory.layout.groups)
        self.num_steps = 0
        """Steps that have been read."""
        self.is_interrupted = False
        """Has an interrupt come within a step, as of a second Ctrl-C? Then it can only be closed."""
        self._has_mapped_ahead = False
        """Since the last launch began."""
        self.step_us = 10_000.0
        """Time of a step, averaged."""
        self._read_s = time.perf_counter()
        self._reported_s = 0.0

    def prefilled(self, num_tokens: int, began_s: float, ended_s: float) -> None:
        """A step has been read that computed so many prompt tokens, at these times of time.perf_counter."""
        for feature in self.features.having(Feature.prefilled):
            feature.prefilled(num_tokens, began_s, ended_s)

    def close(self) -> None:
        """End the threads, and reset the graphs. Idempotent; the memory is the caller's."""
        self.runner.close()
        for feature in self.features.having(Feature.close):
            feature.close()

    @property
    def has_work(self) -> bool:
        """Is any request waiting or running, or a step in flight, or a feature at work?"""
        return self.scheduler.has_work or bool(self.in_flight) or self._are_features_working

    @property
    def _are_features_working(self) -> bool:
        return any(feature.is_working() for feature in self.features.having(Feature.is_working))

    @property
    def holder_is_gone(self) -> bool | None:
        """Has the process ended that owns memory which this one has? None if there is none."""
        cache = self.memory.cache
        holder = None if cache is None else cache.pool.holder or cache.pool.lender
        return None if holder is None else holder.is_gone()

    @property
    def num_running(self) -> int:
        """Requests that have memory."""
        return len(self.scheduler.running)

    def request_in(self, slot: int) -> str | None:
        """The id of the request that runs in a slot, if any; a beam search is named by one of its slots."""
        request = self.scheduler.table.requests[slot]
        return None if request is None else request.ask.request_id

    # ------------------------------------------------------------------ requests

    def receive(self, message: Generate | Abort) -> None:
        """A request comes, or its client goes. An interrupt ends the engine, as in `step`."""
        with self._ended_by_interrupts():
            self._receive(message)

    def _receive(self, message: Generate | Abort) -> None:
        if isinstance(message, Abort):
            request = self.scheduler.find(message.request_id)
            if request is not None:
                self.scheduler.finish(request)
                return
            for feature in self.features.having(Feature.cancel):
                feature.cancel(message.request_id)
            return
        params, own_ids = message.params, frozenset(message.params.stop_token_ids)
        ids = range(self.limits.vocabulary_size)
        suppressed_ids = frozenset(each for each in own_ids | self._eos_ids if params.min_tokens and each in ids)
        if (reason := self._why_refused(message, len(suppressed_ids))) is not None:
            self._send(Failed(request_id=message.request_id, message=reason))
            return
        request = Request(message, own_ids if params.ignore_eos else own_ids | self._eos_ids, suppressed_ids)
        if not any(feature.takes(request) for feature in self.features.having(Feature.takes)):
            self.scheduler.add(request)

    def _why_refused(self, ask: Generate, num_suppressed: int) -> str | None:
        """Reason to refuse a request that can never be served, in words for the client; None if it may be."""
        try:
            self.limits.check(ask.prompt, ask.params, follows_grammar=bool(ask.grammar))
        except ValueError as error:
            return str(error)
        for feature in self.features.having(Feature.refusal):
            if (reason := feature.refusal(ask)) is not None:
                return reason
        if num_suppressed == self.limits.vocabulary_size:
            given = f"min_tokens={ask.params.min_tokens}"
            return f"{given} leaves no token: each of the vocabulary ends this answer; give fewer stop_token_ids"
        return self._why_never_fits(ask)

    def _why_never_fits(self, ask: Generate) -> str | None:
        """Reason to refuse a request whose least memory exceeds the budget, in words for the client; None if it fits.

        A request that may stop early counts as if it stopped as soon as it may. Nothing attends to the last token.
        """
        params, layout, budget_bytes = ask.params, self.memory.layout, self.memory.budget_bytes
        may_stop = bool(params.stop_token_ids) or (bool(self._eos_ids) and not params.ignore_eos)
        num_new = params.min_tokens if may_stop else params.max_tokens
        need = Need(max(0, min(num_new, params.max_tokens - 1)), attaches=self.memory.shares_prefixes)
        for feature in self.features.having(Feature.need):
            need = feature.need(ask, need)
        num_rows, num_sequences = need.num_rows, need.num_sequences
        wanted_bytes = least_bytes(layout, len(ask.prompt), num_rows, num_beams=num_sequences, attaches=need.attaches)
        if wanted_bytes <= budget_bytes:
            return None
        given = f"a prompt of {counted(len(ask.prompt), 'token')}"
        if num_rows:
            given += f" and {num_new} new ones{need.each}"
        num_tokens = layout.tokens_in(budget_bytes // PAGE_BYTES, sliding=False)
        return (
            f"this request can never fit: {given} take at least {format_bytes(wanted_bytes)}, and the whole KV budget is "
            f"{format_bytes(budget_bytes)}, {counted(num_tokens, 'token')} of one sequence: ask for fewer "
            f"{need.fewer}, or raise the budget"
        )

    # ------------------------------------------------------------------ the loop

    def step(self) -> None:
        """Launch the next step, and answer what an earlier one gave. A failing request stops no others.

        An interrupt within a step ends the engine: what was begun is neither done nor undone.
        Raises: EngineDied.
        """
        if self.is_interrupted:
            raise EngineDied("an interrupt came within a step")
        with self._ended_by_interrupts():
            self._step()

    @contextlib.contextmanager
    def _ended_by_interrupts(self) -> Iterator[None]:
        try:
            yield
        except BaseException as error:
            self.is_interrupted |= not isinstance(error, Exception)
            raise

    def _step(self) -> None:
        for feature in self.features.having(Feature.poll):
            feature.poll()
        try:
            step = self.scheduler.schedule()
        except CannotRun as error:
            log.warning("request %s ends: %s", error.request.ask.request_id, error)
            self._check_device()
            self.answers.fail([error.request], str(error))
            return
        except Exception:
            self._check_device()
            raise
        if step is not None:
            self.launch(step)
            while self.in_flight and (len(self.in_flight) > self._lookahead or self._is_done(self.in_flight[0])):
                self.read()
        elif self.in_flight:
            self.read()
        elif self.scheduler.held:
            self.poll_tiers()
            time.sleep(NAP_S)
        elif self._are_features_working:
            time.sleep(_FEATURES_NAP_S)
        self.report(only_if_due=True)

    def launch(self, step: Step) -> None:
        """Launch a step, and map ahead while the device computes it."""
        self._has_mapped_ahead = False
        step.launched_s = time.perf_counter()
        self.scheduler.launched(step)
        try:
            for feature in self.features.having(Feature.launched):
                feature.launched(step)
            forwarded = self.runner.forward(step)
            step.readback = self.runner.sample(forwarded, self._masks(step))
        except Exception as error:
            self._fail_step(step, error)
        else:
            if not self.in_flight:
                self._read_s = max(self._read_s, step.launched_s)  # the device was idle until then: no step took that time
            self.in_flight.append(step)
        if not self._has_mapped_ahead:
            self.map_ahead()

    def _masks(self, step: Step) -> TokenMasks | None:
        """Masks of the tokens that may come next in rows of a step; the forward half of it runs meanwhile."""
        for feature in self.features.having(Feature.masks):
            if feature.masks_rows(step):
                self.map_ahead()  # while the device has work: between two such steps it waits for the host
                self.drain()
                return feature.masks(step)
        return None

    def is_idle(self) -> bool:
        """Does the device wait for the next step? Never on a CPU, which computes while a step is launched."""
        return self.memory.device.type == "cuda" and all(map(self._is_done, self.in_flight))

    def _is_done(self, step: Step) -> bool:
        assert step.readback is not None, "all of it is launched"
        return step.readback.is_done

    def drain(self) -> bool:
        """Read all steps in flight; were there any?"""
        were_any = bool(self.in_flight)
        while self.in_flight:
            self.read()
        return were_any

    def read(self) -> None:
        """Wait for the oldest step in flight, and answer what it gave."""
        step = self.in_flight.popleft()
        assert step.readback is not None, "all of it is launched"
        try:
            results = self.runner.wait(step.readback, self.poll_tiers)
        except Exception as error:
            self._fail_step(step, error)
            return
        now_s = time.perf_counter()
        num_prompt_tokens = sum(len(chunk.tokens) for chunk in step.chunks if chunk.is_own)
        self.prefilled(num_prompt_tokens, max(step.launched_s, self._read_s), now_s)
        self.step_us += 0.1 * ((now_s - self._read_s) * 1e6 - self.step_us)
        self._read_s = now_s
        self.num_steps += 1
        self.answers.give(step, results)
        if self._has_windows and self.num_steps % _WINDOW_STEPS == 0:
            self.scheduler.slide_windows()

    def map_ahead(self) -> None:
        """While the device computes: map what the next steps need, unmap what the last ones left."""
        self._has_mapped_ahead = True
        try:
            self.memory.map_ahead(self.step_us / 2)
            if self._prefix is not None and self.num_steps % _SLOT_STEPS == 0:
                self._prefix.free_slots(self._num_spare_slots)
            for feature in self.features.having(Feature.mapped_ahead):
                feature.mapped_ahead()
        except DriverError:
            log.exception("nothing was mapped ahead")  # the request that needs it asks again, and fails with the reason
        self.poll_tiers(self.step_us / 4)
        if self.is_idle():
            self.step_us /= 2  # the device has waited for this: it takes less time than its steps have come to take

    def poll_tiers(self, budget_us: float = _POLL_US) -> bool:
        """Go on with stores to tiers and loads from them for `budget_us`; False if none are left, or the device failed."""
        try:
            return self._prefix is not None and self._prefix.poll(budget_us)
        except DriverError:
            log.exception("a copy to or from a tier failed")  # what it would have brought is computed
            return False

    def store_all(self, timeout_s: float = math.inf, *, wait: Callable[[], object] = lambda: time.sleep(1e-3)) -> None:
        """Go on with stores until all is stored, while no request is there. `wait` lets some time pass, and ends it if true.

        Stores that are left after `timeout_s` go on beside the next steps.
        """
        until_s, is_stored = time.monotonic() + timeout_s, not self.poll_tiers()
        if is_stored:
            return
        while not (is_stored or time.monotonic() > until_s or wait()):
            self.report(only_if_due=True)
            is_stored = not self.poll_tiers()
        if is_stored:
            self.settle()

    def prepare(self, *, wait: Callable[[], object] = lambda: False) -> None:
        """Park what an earlier engine left with the holder, to be adopted. No request is there. `wait` ends it if true."""
        has_worked = False
        try:
            while self._prefix is not None and not wait() and self._prefix.prepare(_POLL_US, free_slots=self._num_spare_slots):
                has_worked = True
        except DriverError:
            log.exception("a prefix that an earlier engine left was not mapped")  # it is when a prompt has it
        if has_worked:
            self.settle()

    @property
    def _num_spare_slots(self) -> int:
        """Slots that are kept free of ended sequences."""
        return (self.memory.num_slots - self.limits.max_sequences) // 4

    def _fail_step(self, step: Step, error: Exception) -> None:
        """End the requests of a step that run since. Raises: EngineDied."""
        if isinstance(error, EngineDied):
            raise error
        self._check_device()
        log.error("a step failed", exc_info=error)
        live = step.slots[self.scheduler.table.epochs[step.slots] == step.epochs]
        decoding = [request for slot in live.tolist() if (request := self.scheduler.table.requests[slot]) is not None]
        chunked = [chunk.request for chunk in step.chunks if chunk.is_live]
        self.answers.fail(list(dict.fromkeys(decoding + chunked)), f"the step failed: {error}")

    def _check_device(self) -> None:
        """Check after a failure that the device's context and all ranks are still there. Raises: EngineDied."""
        if self.runner.ranks is not None:
            self.runner.ranks.check()
        if self.memory.device.type != "cuda":
            return
        try:
            self.runner.settle()
            torch.cuda.synchronize(self.memory.device)
        except EngineDied:
            raise
        except Exception as error:
            raise EngineDied(f"the device's context is lost: {error}") from error

    # ------------------------------------------------------------------ between requests

    def settle(self) -> None:
        """Unmap what is to be unmapped, when nothing is left to do, and report the end state."""
        self.memory.drain()
        self.report()

    def forget(self) -> None:
        """Evict every cached prefix that no running request uses. The memory stays in the pool; tiers keep theirs."""
        self.memory.evict()
        self.settle()

    def budget_changed(self) -> None:
        """The memory has another budget: there may be room for requests that found none."""
        self.scheduler.waiting.memory_changed()
        self.report()

    def report(self, *, only_if_due: bool = False) -> None:
        """Send a snapshot; `only_if_due`: if the last one is SNAPSHOT_S old. No driver call."""
        now_s = time.monotonic()
        if only_if_due and now_s - self._reported_s < SNAPSHOT_S:
            return
        self._reported_s = now_s
        prefix = self.memory.prefix_stats()
        features: dict[str, Value] = {}
        for feature in self.features.having(Feature.statistics):
            features |= feature.statistics().values()
        self._send(
            Snapshot(
                scheduler=self.scheduler.statistics(),
                answers=self.answers.counts.copy(),
                memory=MemoryStatistics.of(self.memory.stats(), holder_is_gone=self.holder_is_gone),
                prefix=PrefixStatistics.of(prefix),
                tiers={} if prefix is None else {tier.name: TierStatistics.of(tier) for tier in prefix.tiers},
                features=features,
            )
        )


def _limits(runner: Runner, memory: KVBackend, max_sequences: int | None, kv_policy: str | None) -> Limits:
    """Limits of the engine's requests. Its memory is counted in bytes, in `_why_never_fits`."""
    return Limits(
        model="this engine",
        model_tokens=memory.max_tokens,
        pool_tokens=memory.max_tokens,
        budget_bytes=0,
        max_sequences=max_sequences or memory.num_slots,
        vocabulary_size=runner.model.vocabulary_size,
        kv_policy=kv_policy,
        kv_policy_refusal=runner.kv_policy_refusal,
        kv_policy_again_refusal=runner.kv_policy_again_refusal,
    )
