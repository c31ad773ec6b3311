"""The scheduler under random use, over a memory and a device of plain data, against a model of what it promises.

Requests come, alone or several of one prompt, and go; steps are planned, launched, and read up to two later; the budget
changes, and calls of the memory fail. Features hold requests, run some in several slots, compact some, force tokens, and begin
to mask those of some that were free.
"""

import itertools
import math
from collections import Counter, deque
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.machine import cases, picks
from tests.laws.plain_memory import (
    PAGE_ROWS,
    VOCABULARY,
    Flight,
    Page,
    PlainDevice,
    PlainMemory,
    PlainSampler,
    PlainSequence,
    digest,
    masked,
    num_pages,
    sampled,
)
from vmmkv_server.engine import waiting
from vmmkv_server.engine.answers import Answers
from vmmkv_server.engine.feature import Feature, Features, Followed
from vmmkv_server.engine.kv_backend import Slots, TokenIds
from vmmkv_server.engine.request import Request, Shape, Status
from vmmkv_server.engine.scheduler import CannotRun, Scheduler
from vmmkv_server.engine.step import Chunk, Results, Step
from vmmkv_server.protocol import DEVICE, Failed, FromEngine, Generate, Outputs
from vmmkv_server.sampling_params import SamplingParams

MAX_TOKENS = 6 * PAGE_ROWS
MOST_ALIVE = 10
STEMS = [tuple((seed * index * index + index) % VOCABULARY for index in range(14)) for seed in (1, 3)]

prompts = st.builds(
    lambda stem, length, tail: (*stem[:length], *tail) or (0,),
    st.sampled_from(STEMS), st.sampled_from([0, 1, 3, 5, 8, 9, 13]), st.lists(st.integers(0, VOCABULARY - 1), max_size=2),
)  # fmt: skip
kinds = ["plain"] * 5 + ["held"] * 4 + ["roomy", "several", "dropping", "forced", "gated"] * 2 + ["refused"]
asks = st.fixed_dictionaries(
    {
        "prompt": prompts,
        "num_new": st.sampled_from([1, 2, 4, 6, 9, 14]),
        "stops": st.sampled_from([frozenset(), frozenset(), frozenset({1}), frozenset({0, 3})]),
        "priority": st.sampled_from([0, 1, 2]),
        "salt": st.sampled_from([None, None, "red"]),
        "kind": st.sampled_from(kinds),
    }
)
turns = st.tuples(asks, st.sampled_from([0, 0, 1, 1, 3]), st.integers(0, 2))
"""Requests that come for one prompt, and steps that are taken then."""
budgets = st.sampled_from([3, 4, 5, 6, 8, 12])


@dataclass(eq=False)
class Asked:
    """What the model knows of a request."""

    request: Request
    kind: str
    place: int
    """Place among those that wait: of its arrival, or below all others since it was preempted."""
    began: int = 0
    """Place among those that run."""
    answer: list[int] = field(default_factory=list)
    end: str | None = None
    num_overtaken: int = 0
    most_others: float = math.inf
    """Most requests that may run when it begins again."""
    num_lost: int | None = None
    """Rows that it had when it was preempted."""

    @property
    def priority(self) -> int:
        return self.request.ask.priority

    def expected(self) -> tuple[list[int], str]:
        """Its answer, and why that ends."""
        tokens, last, is_bound = list[int](), digest(self.request.ask.prompt), self.kind == "forced"
        while len(tokens) < self.request.ask.params.max_tokens:
            token = masked(sampled(last)) if is_bound else sampled(last)
            if token in self.request.stop_ids:
                return tokens, "stop"
            tokens.append(token)
            last = digest([token], last)
            num_left = self.request.ask.params.max_tokens - len(tokens)
            was_bound, is_bound = is_bound, self.kind == "forced" or (self.kind == "gated" and is_masked(last, num_left))
            if is_bound or was_bound:
                following = forced(last, num_left)
                tokens += following
                last = digest(following, last)
        return tokens, "length"


def forced(last: int, num_left: int) -> list[int]:
    """Tokens that must follow those of a digest, in an answer of a request that is forced: at least one is left to sample."""
    return [last % VOCABULARY, 1][: max(0, num_left - 1)] if last % 3 == 0 else []


def is_masked(last: int, num_left: int) -> bool:
    """Are tokens masked behind those of a digest, in an answer of a gated request?"""
    return last % 5 < 2 and num_left > 0


class Watch(Feature):
    """Tells the machine what the scheduler does. It is the first of the features."""

    def __init__(self, machine: "SchedulerMachine") -> None:
        self.machine = machine

    def hold(self, request: Request) -> bool:
        self.machine.chosen(request)
        return False

    def admitted(self, request: Request) -> None:
        self.machine.begun(request)

    def planned(self, step: Step) -> None:
        self.machine.planned(step)

    def left(self, request: Request) -> None:
        if self.machine.is_reading:
            self.machine.left[request] = len(request.confirmed_tokens)
        elif self.machine.is_planning:
            self.machine.preempted(request)


class Holds(Feature):
    """Holds the held requests once, for some steps; the roomy ones wait while others run and little is free."""

    NUM_STEPS = 6

    def __init__(self, machine: "SchedulerMachine") -> None:
        self.machine = machine
        self.had: set[Request] = set()
        self.held: dict[Request, int] = {}
        """Those that are held, and for how many steps yet."""

    def hold(self, request: Request) -> bool | None:
        kind = self.machine.model(request).kind
        if kind == "roomy" and self.lacks_room(request):
            return None
        if kind == "held" and request not in self.had:
            self.had.add(request)
            self.held[request] = self.NUM_STEPS
            self.machine.happened = True
            return True
        return False

    def lacks_room(self, request: Request) -> bool:
        memory = self.machine.memory
        free = memory.budget_pages - len(memory.used())
        return bool(self.machine.scheduler.running) and free <= num_pages(request.shape.num_first_rows)

    def is_full(self, priority: float) -> bool:
        return sum(request.ask.priority <= priority for request in self.held) >= 2

    def released(self) -> list[Request]:
        ready = [request for request, num_steps in self.held.items() if not num_steps]
        self.held = {request: num_steps - 1 for request, num_steps in self.held.items() if num_steps}
        self.machine.happened |= bool(ready)
        return ready

    def let_go(self, request: Request) -> None:
        del self.held[request]
        self.machine.happened = True

    def finished(self, request: Request) -> None:
        self.had.discard(request)


class Several(Feature):
    """Runs some requests in two slots each: both compute the prompt, and then tokens that the host has. None is sampled."""

    num_slots = 2

    def __init__(self, machine: "SchedulerMachine") -> None:
        self.machine = machine
        self.running: dict[Request, list[PlainSequence]] = {}
        self.done: Counter[Request] = Counter()

    def shape(self, request: Request, shape: Shape) -> Shape:
        if self.machine.model(request).kind != "several":
            return shape
        return shape._replace(num_slots=self.num_slots, samples=False)

    def admitted(self, request: Request) -> None:
        if not request.shape.samples:
            self.running[request] = [request.memory]

    def sequences(self, request: Request) -> list[PlainSequence] | None:
        return self.running.get(request)

    def chunks(self, request: Request) -> list[Chunk] | None:
        if (sequences := self.running.get(request)) is None:
            return None
        if request.memory.length < len(request.prompt):
            return [Chunk.own(request, 1)]
        if not self.machine.scheduler.with_room(request, partial(self.arrange, sequences)):
            return []
        tokens = np.array([*request.prompt, *[0] * request.ask.params.max_tokens], np.int32)
        return [Chunk(request, each, each.length, tokens[each.length :], num_candidates=1, is_own=False) for each in sequences]

    def arrange(self, sequences: list[PlainSequence]) -> None:
        while len(sequences) < self.num_slots:
            sequences.append(self.machine.memory.begin())

    def results(self, step: Step, results: Results) -> None:
        for row, chunk in step.last_chunks():
            if chunk.num_candidates and chunk.is_live and chunk.end == chunk.request.max_tokens:
                assert results.logprobs[row].likeliest
                self.done[chunk.request] += 1
                if self.done[chunk.request] == self.num_slots:
                    self.machine.model(chunk.request).end = "several"
                    self.machine.scheduler.finish(chunk.request)

    def left(self, request: Request) -> None:
        self.done.pop(request, None)
        for sequence in self.running.pop(request, [])[1:]:
            sequence.close()


class Drops(Feature):
    """Drops all but the last rows of some requests when these have `END` rows, or as many as their prompt has, if more."""

    KEPT = 3
    END = 7

    def __init__(self, machine: "SchedulerMachine") -> None:
        self.machine = machine
        self.running: set[Request] = set()

    def end(self, request: Request) -> int:
        return self.END if request.num_dropped else max(self.END, len(request.prompt))

    def room(self, request: Request) -> int:
        """Tokens that it may compute before."""
        return self.end(request) - request.memory.length

    def shape(self, request: Request, shape: Shape) -> Shape:
        if self.machine.model(request).kind != "dropping":
            return shape
        is_stuck, end = request.num_tokens_stuck is not None, self.end(request)
        return shape._replace(
            num_first_rows=min(shape.num_first_rows, end),
            most_rows=min(shape.most_rows, end),
            num_attachable=1 if is_stuck else len(request.prompt),
            shares_rows=not is_stuck,
            keeps_rows=False,
        )

    def admitted(self, request: Request) -> None:
        if not request.shape.keeps_rows:
            self.running.add(request)
            self.machine.scheduler.table.ends[request.memory.slot] = self.end(request)

    def chunks(self, request: Request) -> list[Chunk] | None:
        return [Chunk.own(request).first(self.room(request))] if request in self.running else None

    def planning(self) -> None:
        scheduler = self.machine.scheduler
        for request in [each for each in scheduler.running if each in self.running]:
            if not request.is_running or self.room(request):
                continue
            if len(request.confirmed_tokens) < request.memory.length + request.num_dropped:
                continue
            if scheduler.table.num_coming[request.memory.slot] == request.max_tokens:
                continue
            if scheduler.with_room(request, partial(self.drop, request)):
                scheduler.table.ends[request.memory.slot] = self.end(request)
                scheduler.rows_dropped(request)

    def drop(self, request: Request) -> None:
        num_rows = request.memory.length
        request.memory.drop_but(self.KEPT)
        request.num_dropped += num_rows - self.KEPT

    def left(self, request: Request) -> None:
        self.running.discard(request)


class Forces(Feature):
    """Masks the tokens of some requests, from the start or in between, and has them go on with tokens that were not sampled.

    Earlier steps are read before one of theirs samples.
    """

    def __init__(self, machine: "SchedulerMachine") -> None:
        self.machine = machine
        self.bound: set[Request] = set()
        """Gated requests whose tokens are masked."""

    def admitted(self, request: Request) -> None:
        is_bound = self.machine.model(request).kind == "forced" or request in self.bound
        self.machine.scheduler.table.constrained[request.memory.slot] = is_bound

    def masks_rows(self, step: Step) -> bool:
        constrained = self.machine.scheduler.table.constrained
        return constrained[step.slots].any() or any(constrained[chunk.slot] for _, chunk in step.last_chunks())

    def sampled(self, slots: Slots, tokens: TokenIds, is_kept: Any) -> Followed:
        table = self.machine.scheduler.table
        continued = []
        for slot in slots[is_kept].tolist():
            request, was_bound = table.requests[slot], bool(table.constrained[slot])
            last, num_left = digest(request.tokens.tolist()), request.max_tokens - len(request.tokens)
            if self.machine.model(request).kind == "gated":
                table.constrained[slot] = is_masked(last, num_left)
                self.bound = self.bound - {request} | ({request} if table.constrained[slot] else set())
            begins = bool(table.constrained[slot]) and not was_bound
            following = forced(last, num_left) if was_bound or begins else []
            if following or begins:
                continued.append((request, following))
        return Followed({}, continued)

    def finished(self, request: Request) -> None:
        self.bound.discard(request)


class SchedulerMachine(RuleBasedStateMachine):
    """`asked` has every request that ever came."""

    @initialize(
        pages=budgets,
        max_sequences=st.integers(2, 5),
        step_tokens=st.sampled_from([1, 3, 6, 12, 20]),
        lookahead=st.sampled_from([1, 2, 0]),
        shares=st.booleans(),
        refuses_cuts=st.booleans(),
    )
    def make(self, pages, max_sequences, step_tokens, lookahead, shares, refuses_cuts):
        self.memory = PlainMemory(budget_pages=pages, num_slots=max_sequences, max_tokens=MAX_TOKENS, shares_prefixes=shares)
        self.memory.refuses_cuts = refuses_cuts
        self.max_sequences, self.step_tokens, self.lookahead = max_sequences, step_tokens, lookahead
        self.sampler = PlainSampler()
        self.features = Features()
        self.scheduler = Scheduler(
            self.memory,
            self.sampler,
            step_tokens=step_tokens,
            max_sequences=max_sequences,
            drain=self.drain,
            is_idle=lambda: False,
            features=self.features,
        )
        self.answers = Answers(self.scheduler, self.features, self.told, frozenset())
        self.holds, self.several, self.drops, self.forces = Holds(self), Several(self), Drops(self), Forces(self)
        self.features.plug_in([Watch(self), self.holds, self.several, self.drops, self.forces])
        self.device = PlainDevice(self.memory, self.scheduler.table, self.sampler)
        self.in_flight: deque[Flight] = deque()
        self.is_planning = self.is_reading = self.happened = self.was_idle = False
        self.left: dict[Request, int] = {}
        """Requests that were told to have left while a step was read, and the rows that they had."""
        self.last_chosen: Request | None = None
        self.counter = itertools.count(1)
        self.asked: dict[str, Asked] = {}
        self.num_preempted = self.num_resumed = self.num_hit = 0

    # what the model says

    def model(self, request: Request) -> Asked:
        return self.asked[request.ask.request_id]

    def alive(self) -> list[Asked]:
        return [asked for asked in self.asked.values() if asked.end is None]

    def next_to_begin(self) -> Request | None:
        """The one of the most urgent with most of its prompt cached, or the oldest; not if a running one computes more of it.

        One that was passed as often as may be is passed no more. None if each waits for a running one.
        """
        urgent = [*self.scheduler.waiting][: waiting.MAX_COMPARED]
        urgent = [each for each in urgent if each.ask.priority == urgent[0].ask.priority]
        if not self.memory.shares_prefixes:
            return urgent[0] if urgent else None
        overdue = (index for index, each in enumerate(urgent) if self.is_overdue(each))
        ready = [each for each in urgent[: next(overdue, len(urgent)) + 1] if not self.is_being_computed(each)]
        return max(ready, key=self.num_cached, default=None)

    def is_overdue(self, request: Request) -> bool:
        return self.model(request).num_overtaken >= waiting.MAX_OVERTAKEN

    def num_cached(self, request: Request) -> int:
        return self.memory.counted[request.namespace, tuple(request.attachable.tolist())]

    def is_being_computed(self, request: Request) -> bool:
        wanted = self.num_cached(request) + waiting.MIN_AWAITED
        return any(
            len(request.attachable) >= wanted
            and tuple(other.prompt[:wanted].tolist()) == tuple(request.attachable[:wanted].tolist())
            and other.namespace == request.namespace
            for other in self.scheduler.running
            if other.shape.shares_rows and not other.is_prompt_confirmed
        )

    def num_left(self) -> int:
        """Tokens of a step that no running request will compute."""
        pending = [
            max(0, len(each.tokens) - each.memory.length - each.num_dropped) if each.status is Status.PREFILLING else 1
            for each in self.scheduler.running
        ]
        return self.step_tokens - sum(pending)

    def could_begin(self, request: Request) -> bool:
        """Would it fit if all requests that are less urgent were gone, and nothing were cached?"""
        staying = [each for each in self.scheduler.running if each.ask.priority <= request.ask.priority]
        staying_held = [each for each in self.scheduler.held if each.ask.priority <= request.ask.priority]
        num_slots = sum(each.shape.num_slots for each in staying + staying_held)
        pages = {page for each in staying for sequence in self.scheduler.sequences(each) for page in sequence.pages}
        num_wanted = num_pages(request.shape.num_first_rows)
        has_slots = num_slots + request.shape.num_slots <= self.max_sequences
        return has_slots and len(pages) + num_wanted <= self.memory.budget_pages

    def may_suffice(self, request: Request) -> bool:
        """Might it fit if all requests that are less urgent were preempted? A page that several share counts for each."""
        running = self.scheduler.running
        slots = sum(each.shape.num_slots for each in running if each.ask.priority <= request.ask.priority)
        less = [each for each in running if each.ask.priority > request.ask.priority]
        num_given = sum(len(sequence.pages) for each in less for sequence in self.scheduler.sequences(each))
        num_free = self.memory.budget_pages - len(self.memory.used())
        num_cached = len(self.memory.match(request.attachable, request.namespace))
        has_pages = num_pages(request.shape.num_first_rows) - num_cached <= num_free + num_given
        return has_pages and slots + request.shape.num_slots <= self.max_sequences

    # what the scheduler does

    def told(self, message: FromEngine) -> None:
        """Each request is answered what it must be, and ends once."""
        for output in message.outputs if isinstance(message, Outputs) else ():
            asked = self.asked[output.request_id]
            assert asked.end is None, "an answer to a request that has ended"
            asked.answer += output.token_ids
            asked.end = output.finish_reason
            tokens, reason = asked.expected()
            assert asked.answer == tokens[: len(asked.answer)]
            assert asked.end is None or (asked.answer, asked.end) == (tokens, reason)
        if isinstance(message, Failed):
            assert self.asked[message.request_id].end is None
            self.asked[message.request_id].end = "failed"

    def chosen(self, request: Request) -> None:
        """It would begin next, if there is room."""
        assert request is self.next_to_begin()
        self.last_chosen = request

    def begun(self, request: Request) -> None:
        asked = self.model(request)
        assert request is self.last_chosen
        assert all(asked.priority <= each.ask.priority for each in self.scheduler.waiting), "a more urgent one waits"
        passed = [self.model(each) for each in [*self.scheduler.waiting] if each.ask.priority == asked.priority]
        for other in passed:
            other.num_overtaken += other.place < asked.place
        assert len(self.scheduler.running) - 1 <= asked.most_others, "it was preempted for one that still runs"
        assert self.memory.limits[request.memory.slot] >= request.shape.num_first_rows
        if asked.num_lost is None:
            self.num_hit += request.memory.length
        else:
            self.num_resumed += asked.num_lost
        asked.began, asked.most_others, asked.num_lost = next(self.counter), math.inf, None
        self.happened = True

    def preempted(self, request: Request) -> None:
        """The last one that began of the lowest priority, and as the last resort."""
        running = [self.model(each) for each in self.scheduler.running]
        last, asked = max(running, key=lambda each: (each.priority, each.began)), self.model(request)
        assert asked is last, "another one is less urgent, or newer"
        assert not self.in_flight, "a step in flight may free what is missing"
        is_for_running = self.memory.refused in [
            sequence for each in self.scheduler.running for sequence in self.scheduler.sequences(each)
        ]
        if is_for_running:
            assert not self.scheduler.held, "one that is held has what is missing"
        else:
            wanting = self.next_to_begin()
            assert wanting.ask.priority < asked.priority, "it is preempted for no more urgent one"
            assert self.may_suffice(wanting), "it is preempted in vain"
            assert all(each.ask.priority <= wanting.ask.priority for each in self.scheduler.held), "a held one has room"
        if not request.shape.samples:
            asked.most_others = len(running) - 1 - is_for_running
        self.begins_again(asked, len(request.confirmed_tokens))
        self.happened = True

    def begins_again(self, asked: Asked, num_lost: int) -> None:
        asked.num_lost, asked.place = num_lost, -next(self.counter)
        self.num_preempted += 1

    def planned(self, step: Step) -> None:
        """Requests that decode come first, and then prompts, the oldest first, as far as there is room."""
        table, lengths = self.scheduler.table, self.memory.lengths
        assert step.slots.tolist() == self.decoding()
        assert (step.ends == lengths[step.slots] + 1).all() and (step.ends <= self.memory.limits[step.slots]).all()
        assert (step.epochs == table.epochs[step.slots]).all()
        num_tokens = len(step.slots) + sum(len(chunk.tokens) for chunk in step.chunks)
        assert num_tokens <= self.step_tokens
        began = [self.model(chunk.request).began for chunk in step.chunks]
        assert began == sorted(began), "an older one comes first"
        num_planned: Counter[Request] = Counter()
        for chunk in step.chunks:
            assert len(chunk.tokens) and chunk.start == chunk.sequence.length
            assert chunk.end <= self.memory.limits[chunk.slot]
            num_planned[chunk.request] += len(chunk.tokens)
            if chunk.is_own:
                first = chunk.start + chunk.request.num_dropped
                assert chunk.tokens.tolist() == chunk.request.tokens[first : first + len(chunk.tokens)].tolist()
                assert chunk.is_last == (first + len(chunk.tokens) == len(chunk.request.tokens))
        if num_tokens < self.step_tokens and not self.happened:
            assert all(num_planned[each] == self.num_pending(each) for each in self.scheduler.running), "room is left"

    def decoding(self) -> list[int]:
        """Slots of the requests that decode, the oldest first, but for those of which the last token is on its way."""
        table, lengths = self.scheduler.table, self.memory.lengths
        slots = [each.memory.slot for each in self.scheduler.running if each.status is Status.DECODING]
        return [s for s in slots if table.num_coming[s] < table.max_tokens[s] and lengths[s] < table.ends[s]]

    def num_pending(self, request: Request) -> int:
        """Tokens of a running request that the host has, and no step was launched for."""
        if not request.shape.samples:
            sequences = self.several.running[request]
            if request.memory.length >= len(request.prompt):
                return sum(request.max_tokens - each.length for each in sequences)
        if request.status is not Status.PREFILLING:
            return 0
        num_known = max(0, len(request.tokens) - request.memory.length - request.num_dropped)
        return num_known if request.shape.keeps_rows else min(num_known, self.drops.room(request))

    # the loop, as in the engine

    def drain(self) -> bool:
        were_any = bool(self.in_flight)
        while self.in_flight:
            self.read()
        return were_any

    def read(self) -> None:
        self.is_reading = True
        self.happened = True
        flight = self.in_flight.popleft()
        self.left = {}
        self.answers.give(flight.step, self.device.read(flight))
        self.is_reading = False
        for request, num_rows in self.left.items():
            if request in self.scheduler.waiting:  # else it has ended
                assert self.memory.refuses_cuts and self.model(request).kind == "gated", "its rows could be taken back"
                self.begins_again(self.model(request), num_rows)

    def take_step(self) -> None:
        self.happened, self.is_planning, self.last_chosen, self.memory.refused = False, True, None, None
        try:
            step = self.scheduler.schedule()
        except CannotRun as error:
            self.is_planning = self.was_idle = False
            self.check_failure(error)
            self.answers.fail([error.request], str(error))
            return
        self.is_planning = False
        self.none_waits_in_vain()
        if step is not None:
            self.launch(step)
        elif self.in_flight:
            self.read()
        else:
            # To find room, steps were read that changed what runs: the next call plans it.
            is_excused = self.happened and not self.was_idle
            assert is_excused or not self.scheduler.running, "nothing is computed any more"
            self.was_idle = bool(self.scheduler.running)
            return
        self.was_idle = False
        while len(self.in_flight) > self.lookahead:
            self.read()

    def launch(self, step: Step) -> None:
        self.scheduler.launched(step)
        flight = self.device.forward(step)
        if self.forces.masks_rows(step):
            self.drain()
        self.device.sample(flight)
        self.in_flight.append(flight)

    def check_failure(self, error: CannotRun) -> None:
        """A request fails for what it is, and not for what the others are."""
        asked, why = self.model(error.request), str(error)
        assert asked.end is None
        if "can never fit" in why:
            assert not self.scheduler.held and {*self.scheduler.running} <= {error.request}, "others have what is missing"
        elif "no memory could be mapped" in why:
            assert self.memory.has_failed
            self.memory.has_failed = False
        else:
            assert asked.kind == "refused" and "it cannot be sampled for" in why

    def none_waits_in_vain(self) -> None:
        """The most urgent request would have begun if it could, by preemption of less urgent ones if need be."""
        queue = self.scheduler.waiting
        if self.happened or not queue or self.num_left() <= 0:
            return
        first = queue.first
        peers = [each for each in queue if each.ask.priority == first.ask.priority]
        if self.memory.shares_prefixes and (len(peers) > 1 or self.is_awaiting(first)):
            return
        is_roomy = self.model(first).kind == "roomy" and self.holds.lacks_room(first)
        if is_roomy or self.holds.is_full(first.ask.priority):
            return
        if len(self.scheduler.running) <= self.model(first).most_others:
            assert not self.could_begin(first), "a request waits that could begin"

    def is_awaiting(self, request: Request) -> bool:
        queue = self.scheduler.waiting
        queue.num_cached(request)
        return self.is_being_computed(request)

    # rules

    @rule(then=turns)
    def go_on(self, then):
        """So many requests for one prompt come, and some steps are taken."""
        ask, count, num_steps = then
        for _ in range(min(count, MOST_ALIVE - len(self.alive()))):
            self.add(ask)
        for _ in range(num_steps):
            self.take_step()
            self.laws_hold()

    def add(self, ask):
        name = str(len(self.asked))
        num_new = min(ask["num_new"], MAX_TOKENS - len(ask["prompt"]))
        message = Generate(
            request_id=name,
            prompt=[*ask["prompt"]],
            params=SamplingParams(max_tokens=num_new, stop_token_ids=sorted(ask["stops"])),
            priority=ask["priority"],
            cache_salt=ask["salt"],
        )
        request = Request(message, ask["stops"])
        self.asked[name] = Asked(request, ask["kind"], next(self.counter))
        if ask["kind"] == "refused":
            self.sampler.refused.add(request)
        self.scheduler.add(request)

    @precondition(lambda self: self.in_flight)
    @rule(then=turns)
    def read_early(self, then):
        self.read()
        self.go_on(then)

    @precondition(lambda self: len(self.alive()) > 2)
    @rule(pick=picks, then=turns)
    def cancel(self, pick, then):
        alive = self.alive()
        asked = alive[pick % len(alive)]
        self.scheduler.finish(self.scheduler.find(asked.request.ask.request_id))
        asked.end = "cancelled"
        self.go_on(then)

    @rule(pages=budgets, then=turns)
    def resize(self, pages, then):
        self.memory.resize(pages)
        self.scheduler.waiting.memory_changed()
        self.go_on(then)

    @precondition(lambda self: self.memory.sequences)
    @rule(fails=st.sampled_from([False, False, False, True]), then=turns)
    def let_a_call_fail(self, fails, then):
        self.memory.fails_next = fails
        self.go_on(then)

    # always

    @invariant()
    def laws_hold(self):
        scheduler, memory, table = self.scheduler, self.memory, self.scheduler.table
        memory.check([sequence for each in scheduler.running for sequence in scheduler.sequences(each)])
        where = [*scheduler.waiting, *scheduler.held, *scheduler.running]
        alive = self.alive()
        assert len(where) == len(alive) and {*where} == {each.request for each in alive}, "forgotten, or twice"
        assert scheduler.has_work == bool(alive) and {*scheduler.held} == {*self.holds.held}
        for name, asked in self.asked.items():
            assert scheduler.find(name) is (asked.request if asked.end is None else None)
        assert [*scheduler.waiting] == sorted(scheduler.waiting, key=lambda each: (each.ask.priority, self.model(each).place))
        assert [*scheduler.running] == sorted(scheduler.running, key=lambda each: self.model(each).began)
        assert all(each.num_overtaken <= waiting.MAX_OVERTAKEN for each in alive)
        num_slots = sum(each.shape.num_slots for each in [*scheduler.running, *scheduler.held])
        assert num_slots <= self.max_sequences
        slots = scheduler.decoding.slots
        assert slots.tolist() == self.decoding()
        assert (scheduler.decoding.epochs == table.epochs[slots]).all()
        assert scheduler.decoding.without_room() == [
            slot for slot in slots.tolist() if memory.limits[slot] <= memory.lengths[slot]
        ]
        counts = scheduler.statistics()
        assert counts.requests_running == len(scheduler.running)
        assert counts.requests_waiting == len(alive) - len(scheduler.running)
        assert (counts.preemptions, counts.hit_tokens.get(DEVICE, 0)) == (self.num_preempted, self.num_hit)
        assert sum(counts.resumed_tokens.values()) == self.num_resumed
        self.tables_say_what_is_so()

    def tables_say_what_is_so(self) -> None:
        table, running = self.scheduler.table, {each.memory.slot: each for each in self.scheduler.running}
        for slot, owner in enumerate(table.requests):
            confirmed, known, coming, end = (
                int(each[slot]) for each in (table.num_confirmed, table.num_known, table.num_coming, table.max_tokens)
            )
            assert owner is running.get(slot)
            if owner is None:
                assert confirmed == known == coming == end == 0
                continue
            position = owner.memory.length + owner.num_dropped
            assert table.num_inserted[slot] <= confirmed <= position and known <= coming <= end == owner.max_tokens
            assert confirmed <= owner.memory.num_read + owner.num_dropped
            if owner.shape.samples:
                assert confirmed <= known and owner.tokens.tolist() == [*owner.prompt, *self.model(owner).answer]
                assert coming == (position + 1 if owner.status is Status.DECODING else known)

    def teardown(self):
        """If nothing else comes, every request ends, and nothing is left."""
        if not hasattr(self, "scheduler") or self.is_planning:  # a law was broken within a call
            return
        num_tokens = sum(each.request.max_tokens for each in self.alive())
        for _ in range(100 + 4 * num_tokens * (1 + len(self.alive()))):
            if not (self.scheduler.has_work or self.in_flight):
                break
            self.take_step()
            self.laws_hold()
        assert all(asked.end for asked in self.asked.values()), "a request never ends"
        assert not self.in_flight and not self.memory.sequences and not self.sampler.assigned
        assert not (self.holds.had or self.holds.held or self.several.running or self.several.done or self.drops.running)
        assert not self.forces.bound


TestScheduler, TestSchedulerAtLength = cases(SchedulerMachine, 60, 1500)


def test_an_overdue_request_is_passed_no_more_behind_one_that_comes_back():
    memory = PlainMemory(budget_pages=4, num_slots=4, max_tokens=MAX_TOKENS, shares_prefixes=True)
    memory.cached[None, STEMS[0][:PAGE_ROWS]] = Page()
    queue = waiting.WaitingQueue(memory)
    prompts = [STEMS[1], STEMS[1], *[STEMS[0]] * (waiting.MAX_OVERTAKEN + 1)]
    came_back, passed, *known = (
        Request(Generate(request_id="", prompt=[*prompt], params=SamplingParams()), frozenset()) for prompt in prompts
    )
    for place, request in enumerate([passed, *known], start=1):
        queue.add(request, place)
    for request in known[:-1]:
        order = queue.order([])
        assert order.next() is request
        order.admitted(request)
        queue.begin(request)
    queue.add(came_back, -1)
    assert queue.order([]).next() is came_back


@pytest.fixture(autouse=True)
def small_limits(monkeypatch):
    """Prompts are short, and few requests wait."""
    monkeypatch.setattr(waiting, "MIN_AWAITED", PAGE_ROWS)
    monkeypatch.setattr(waiting, "MAX_OVERTAKEN", 2)
