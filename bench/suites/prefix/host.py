"""What the host does between two steps, by size: no model, and a driver that has addresses and no memory.

    tree    the radix tree, and a full garbage collection in the engine's process, by nodes
    host    the scheduler, by requests that run and by tokens of prompts that wait; the cache, by parked slots and by tokens
            of a prompt that a tier has

At every size as much changes, so the figures should be the same. *Growth* is the time at the largest size over that at the
smallest.
"""

import contextlib
import functools
import gc
import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import torch

from bench.harness import Recorder, WrongNumbers, now_us
from bench.workloads import TokenIds
from vmmkv import KVCache, KVLayout, Pool, PrefixCache
from vmmkv import Sequence as VmmSequence
from vmmkv.prefix import AttachMethod, PrefixListener
from vmmkv.prefix.radix_tree import Piece, RadixTree
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES
from vmmkv_server.engine.__main__ import collect_what_is_new, freeze_survivors
from vmmkv_server.engine.group_tensors import GroupTensors, PrefixGroup
from vmmkv_server.engine.kv_backend import PARKED_SLOTS, BackendConfig, SlotBackend, Slots
from vmmkv_server.engine.request import Request, Status
from vmmkv_server.engine.sampler import Sampler
from vmmkv_server.engine.scheduler import Scheduler
from vmmkv_server.engine.step import Step
from vmmkv_server.engine.uploads import Uploads
from vmmkv_server.protocol import Generate
from vmmkv_server.sampling_params import SamplingParams

_VOCABULARY: Final = 128_256


class _Timed:
    """Calls, and the microseconds that each took, by metric."""

    def __init__(self) -> None:
        self.samples: defaultdict[str, list[float]] = defaultdict(list)

    def __call__(self, metric: str, call: Callable[[], Any]) -> Any:
        """What the call gives."""
        began_us = now_us()
        answer = call()
        self.samples[metric].append(now_us() - began_us)
        return answer

    def record(self, recorder: Recorder, workload: str, system: str) -> None:
        """A row of each metric."""
        for metric, samples in self.samples.items():
            recorder.samples(workload, system, metric, "us", samples)


def _add_growth(recorder: Recorder, workloads: Sequence[str]) -> None:
    """Rows of growth from the first of these workloads to the last, by p20: other work on the machine adds to the rest."""
    first = {row.metric: row.summary.p20 for row in recorder.rows if row.workload == workloads[0]}
    for row in [row for row in recorder.rows if row.workload == workloads[-1]]:
        if row.metric in first:
            workload = f"{workloads[0]} to {workloads[-1]}"
            recorder.figure(workload, row.system, f"growth, {row.metric}", "x", row.summary.p20 / first[row.metric])


# the engine

_LAYOUT: Final = KVLayout.uniform(layers=1, kv_heads=16, head_dim=128, dtype=torch.float16)
_PAGE_TOKENS: Final = 256
_STEM_TOKENS: Final = 4 * _PAGE_TOKENS
"""Of the prefix that all prompts share, if they are short."""
_STEP_TOKENS: Final = 8192
_NUM_WAITING: Final = 32
_MAX_NEW: Final = 4096
"""Tokens of an answer: no request ends by itself."""
_POLL_US: Final = 200.0
_CPU: Final = torch.device("cpu")


def measure_engine(recorder: Recorder) -> None:
    """Of each size its own cache and scheduler."""
    quick = recorder.settings.quick
    cases = (
        ("running requests", _time_running, (32, 64) if quick else (256, 1_024, 4_096)),
        ("tokens of each waiting prompt", _time_waiting, (1_000, 10_000) if quick else (1_000, 10_000, 100_000, 1_000_000)),
        ("parked slots", _time_parked, (20, 100) if quick else (100, 1_000, 12_288)),
        ("tokens that a tier has", _time_fetch, (100_000, 200_000) if quick else (100_000, 300_000, 1_000_000)),
    )
    for text, measure, sizes in cases:
        names = [f"{size:,} {text}" for size in sizes]
        for name, size in recorder.track(list(zip(names, sizes, strict=True)), lambda case: case[0]):
            with recorder.guarded(name):
                measure(size, recorder.settings.seed, 10 if quick else 300).record(recorder, name, "vmmkv")
        _add_growth(recorder, names)


class _Prompts:
    """Prompts that begin with the same tokens, and end with a page of their own."""

    def __init__(self, seed: int, num_shared: int) -> None:
        self._rng = np.random.default_rng((seed, num_shared))
        self._firsts = itertools.count(_VOCABULARY)
        self._shared = self.unlike(num_shared)

    def unlike(self, num_tokens: int) -> TokenIds:
        """Random tokens, of which the first has not been anywhere."""
        tokens = self._rng.integers(0, _VOCABULARY, num_tokens, dtype=np.int32)
        tokens[0] = next(self._firsts)
        return tokens

    def next(self) -> TokenIds:
        """Another prompt."""
        return np.concatenate((self._shared, self.unlike(_PAGE_TOKENS)))


class _Engine:
    """The loop of an engine without its model: requests wait, run, and end."""

    def __init__(self, max_sequences: int, max_tokens: int, listener: PrefixListener | None = None) -> None:
        slots = (1 + PARKED_SLOTS) * max_sequences
        self.cache = _open_cache(slots, max_tokens, slots * _LAYOUT.pages_for(max_tokens))
        memory = SlotBackend(
            self.cache,
            BackendConfig(
                layout=_LAYOUT, device=_CPU, max_sequences=max_sequences, max_tokens=max_tokens, step_tokens=_STEP_TOKENS,
                shares_prefixes=True, budget_bytes=None,
            ),
        )  # fmt: skip
        if listener is not None and memory.prefixes is not None:
            memory.prefixes.listen(listener)
        sampler = Sampler(1 + slots, _VOCABULARY, Uploads(_CPU))
        self.scheduler = Scheduler(
            memory,
            sampler,
            step_tokens=_STEP_TOKENS,
            max_sequences=max_sequences,
            drain=lambda: False,
            is_idle=lambda: False,
        )
        self._numbers = itertools.count()

    def request(self, prompt: TokenIds, priority: int = 0) -> Request:
        """A request that does not wait yet."""
        params = SamplingParams(max_tokens=_MAX_NEW, temperature=0.0)
        ask = Generate(request_id=str(next(self._numbers)), prompt=prompt.tolist(), params=params, priority=priority)
        return Request(ask, frozenset())

    def launch(self) -> Step:
        """The next step. Raises: WrongNumbers if there is none."""
        step = self.scheduler.schedule()
        if step is None:
            raise WrongNumbers("there is nothing to compute")
        self.scheduler.launched(step)
        return step

    def read(self, step: Step) -> None:
        """Map ahead while the device computes it; it has sampled token 0 everywhere."""
        self.cache.map_ahead(math.inf, lookahead_tokens=_PAGE_TOKENS // 2)
        table = self.scheduler.table
        table.num_confirmed[step.slots] = step.ends
        for chunk in step.chunks:
            table.num_confirmed[chunk.slot] = chunk.end
            self.scheduler.insert_prefix(chunk.request)
        slots = np.append(step.slots, [chunk.slot for chunk in step.chunks if chunk.is_sampled]).astype(np.int64)
        table.append(slots, np.zeros(len(slots), np.int32))


def _open_cache(slots: int, max_tokens: int, num_pages: int) -> KVCache:
    driver = FakeDriver(memory_bytes=num_pages * PAGE_BYTES + 16 * MIB)  # the null page is beyond the budget
    return KVCache(_LAYOUT, Pool(_CPU, num_pages * PAGE_BYTES, driver=driver), slots=slots, max_tokens=max_tokens)


def _time_running(num_requests: int, seed: int, count: int) -> _Timed:
    """A full batch whose prompts share a prefix: all of one priority, of a quarter as many, and with KV events published."""
    timed, prompts = _Timed(), _Prompts(seed, _STEM_TOKENS)
    _time_batch(timed, "", num_requests, 1, prompts, count)
    _time_batch(timed, ", many priorities", num_requests, num_requests // 4, prompts, count)
    _time_with_events(timed, num_requests, prompts, count)
    return timed


def _time_with_events(timed: _Timed, num_requests: int, prompts: _Prompts, count: int) -> None:
    """A batch of one priority, with KV events published."""
    from vmmkv_server.engine.kv_events import KVEventPublisher

    with contextlib.closing(KVEventPublisher("tcp://127.0.0.1:*")) as events:
        _time_batch(timed, ", KV events", num_requests, 1, prompts, count, events)


def _time_batch(
    timed: _Timed,
    text: str,
    num_requests: int,
    num_priorities: int,
    prompts: _Prompts,
    count: int,
    listener: PrefixListener | None = None,
) -> None:
    max_tokens, draw = _STEM_TOKENS + _PAGE_TOKENS + _MAX_NEW, np.random.default_rng(0)
    engine = _Engine(num_requests, max_tokens, listener)
    scheduler = engine.scheduler
    time_groups = _groups_timer(timed, text, engine, num_requests)

    def request() -> Request:
        return engine.request(prompts.next(), int(draw.integers(num_priorities)))

    def change(ended: Request, begins: Request) -> Step:
        scheduler.finish(ended)
        scheduler.add(begins)
        return engine.launch()

    for _ in range(num_requests):
        scheduler.add(request())
    while scheduler.waiting:
        engine.read(engine.launch())
    for _ in range(count):
        begins = request()
        step = timed(f"one request ends, one begins{text}", functools.partial(change, next(iter(scheduler.running)), begins))
        if [chunk.request for chunk in step.chunks] != [begins] or len(step.slots) != num_requests - 1:
            raise WrongNumbers(f"{len(step.chunks)} requests begin, and {len(step.slots)} go on")
        engine.read(step)
        step = timed(f"a step of the same requests{text}", engine.launch)
        time_groups(step)
        engine.read(step)
        scheduler.add(waits := engine.request(prompts.next(), num_requests))
        engine.read(timed(f"a step while one waits for a slot{text}", engine.launch))
        scheduler.finish(waits)


def _groups_timer(timed: _Timed, text: str, engine: _Engine, num_requests: int) -> Callable[[Step], None]:
    """A function that times the search for groups in a step, in which all requests share a prefix."""
    from vmmkv_server.engine.features.prefix_groups import BatchOrder

    order, groups = BatchOrder(engine.scheduler.table), list[PrefixGroup]()
    tensors, uploads = GroupTensors(num_requests, _CPU), Uploads(_CPU)

    def set_groups(slots: Slots, found: Sequence[PrefixGroup]) -> None:
        groups[:] = found
        tensors.upload(slots, found, uploads)

    def time_groups(step: Step) -> None:
        timed(f"groups, one request is another{text}", lambda: order.arrange(step.slots, set_groups))
        if [len(group.members) for group in groups] != [num_requests]:
            raise WrongNumbers(f"groups of {[len(group.members) for group in groups]}; all {num_requests} share a prefix")

    return time_groups


def _time_waiting(num_tokens: int, seed: int, count: int) -> _Timed:
    """Prompts that share all but their last page with the one that is computed."""
    timed, engine, prompts = _Timed(), _Engine(2, num_tokens + _MAX_NEW), _Prompts(seed, num_tokens - _PAGE_TOKENS)
    scheduler = engine.scheduler
    scheduler.add(first := engine.request(prompts.next()))
    step = engine.launch()
    while first.status is not Status.DECODING:
        engine.read(step)
        step = engine.launch()
    for _ in range(_NUM_WAITING):
        scheduler.add(engine.request(prompts.next()))
    scheduler.schedule()
    for _ in range(count):
        timed("a plan, all wait for the same rows", scheduler.schedule)
    if len(scheduler.waiting) != _NUM_WAITING:
        raise WrongNumbers(f"{len(scheduler.waiting)} wait, and all {_NUM_WAITING} should")
    engine.read(step)
    (chunk,) = engine.launch().chunks
    if chunk.start < num_tokens - _PAGE_TOKENS:
        raise WrongNumbers(f"{chunk.start} tokens of {num_tokens} are attached")
    return timed


def _time_parked(num_parked: int, seed: int, count: int) -> _Timed:
    """All slots but one are parked, with a common prefix and a page of their own each; no page is free."""
    timed, prompts, num_tokens = _Timed(), _Prompts(seed, _STEM_TOKENS), _STEM_TOKENS + _PAGE_TOKENS
    cache = _open_cache(num_parked + 1, num_tokens, _LAYOUT.pages_for(_STEM_TOKENS) + num_parked)
    prefix = PrefixCache(cache)

    def fill(sequence: VmmSequence) -> None:
        sequence.grow(num_tokens)
        sequence.advance(num_tokens - sequence.length)

    running: list[tuple[VmmSequence, TokenIds]] = []
    for index in range(num_parked):
        fill(sequence := prefix.attach(prompt := prompts.next()).sequence)
        if not index:
            prefix.insert(sequence, prompt)
        running.append((sequence, prompt))
    for sequence, prompt in running:
        prefix.park(sequence, prompt)
    for _ in range(count):
        prompt = prompts.next()
        attached = timed("attach, a parked slot is adopted", functools.partial(prefix.attach, prompt))
        if attached.method is not AttachMethod.ADOPT:
            raise WrongNumbers(f"no slot is adopted: {attached}")
        fill(attached.sequence)
        prefix.park(attached.sequence, prompt)
    for _ in range(count):
        timed("free_slots, one is missing", lambda: prefix.free_slots(2))
        cache.drain()
        stats = cache.stats()
        if stats.num_parked != num_parked - 1 or stats.pool_free_bytes:
            raise WrongNumbers(f"{stats.num_parked} slots are parked, and {stats.pool_free_bytes} bytes are free")
        prompt = prompts.next()
        sequence = prefix.attach(prompt, method=AttachMethod.ALIAS).sequence
        timed("grow, no page is free", functools.partial(sequence.grow, num_tokens))
        fill(sequence)
        prefix.park(sequence, prompt)
    return timed


def _time_fetch(num_tokens: int, seed: int, count: int) -> _Timed:
    """Fetches of prompts, each until all of it is found and begun to be loaded."""
    from vmmkv import HostTier

    class Full(HostTier):
        """A tier that says that it has every record, and gives none."""

        def lookup(self, keys: Sequence[bytes]) -> list[bool]:
            return [True] * len(keys)

        def load(self, key: bytes) -> None:
            return None

    timed, prompts, tier = _Timed(), _Prompts(seed, 1), Full(PAGE_BYTES)
    num_records = num_tokens // _PAGE_TOKENS
    with contextlib.closing(tier), _open_cache(1, num_tokens, num_records) as cache:
        prefix = PrefixCache(cache, [tier], fingerprint="random")
        for _ in range(count):
            prompt = prompts.unlike(num_tokens)
            fetch = timed("fetch", functools.partial(prefix.fetch, prompt))
            while not fetch.done and not fetch.size_bytes:
                prefix.poll(_POLL_US)
            if fetch.size_bytes != num_records * PAGE_BYTES:
                raise WrongNumbers(f"{fetch} is begun, and {num_records} records are there")
            fetch.give_up()
    return timed


# the tree

_TURNS: Final = 10
_TURN_TOKENS: Final = (16, 113)
"""From 16 to 112: a question and a short answer; 64 on average."""
_SYSTEM_TOKENS: Final = (200, 500, 1000, 2000)
_PIECE_TOKENS: Final = 16
"""Rows of Llama-3.1-8B in a page, and of a block of most block tables."""
_NEW_NODES: Final = 1_000
_MOST_CHECKED: Final = 50_000
"""Nodes: to recount more takes longer than to measure."""


class Talks:
    """Conversations of random turns behind one of a few system prompts; of the same seed the same."""

    def __init__(self, num_talks: int, seed: int) -> None:
        self._rng = rng = np.random.default_rng(seed)
        # Turns are slices of one text: a million random arrays would take longer than what is measured.
        self._text = rng.integers(0, _VOCABULARY, 1 << 20, dtype=np.int32)
        self._systems = [rng.integers(0, _VOCABULARY, count, dtype=np.int32) for count in _SYSTEM_TOKENS]
        self._begins = rng.integers(0, len(self._text) - _TURN_TOKENS[1], (num_talks, _TURNS), dtype=np.int32)
        self._counts = rng.integers(*_TURN_TOKENS, (num_talks, _TURNS), dtype=np.int32)

    def prompt(self, talk: int, num_turns: int) -> TokenIds:
        """The system prompt and so many turns."""
        places = zip(self._begins[talk, :num_turns].tolist(), self._counts[talk, :num_turns].tolist(), strict=True)
        turns = [self._text[begin : begin + count] for begin, count in places]
        return np.concatenate((self._systems[talk % len(self._systems)], *turns))

    def next_turn(self, talk: int, num_turns: int) -> tuple[TokenIds, int]:
        """That prompt with a turn that no conversation has, and the number of tokens before the turn."""
        turn = self._rng.integers(0, _VOCABULARY, int(self._rng.integers(*_TURN_TOKENS)), dtype=np.int32)
        turn[0] += _VOCABULARY
        known = self.prompt(talk, num_turns)
        return np.concatenate((known, turn)), len(known)

    def pick(self, num_talks: int, count: int) -> list[int]:
        """So many of the first conversations, at random."""
        return [int(talk) for talk in self._rng.integers(0, num_talks, count)]


def measure_tree(recorder: Recorder) -> None:
    """One tree that grows from size to size. Conversations are as long in a large tree as in a small one. Python's garbage
    collector is off while the tree grows; afterwards it is set as in the engine's process."""
    quick, on_gpu = recorder.settings.quick, recorder.settings.on_gpu
    sizes = (1_000, 10_000) if quick else (1_000, 10_000, 100_000) if on_gpu else (1_000, 10_000, 100_000, 1_000_000)
    talks = Talks(max(sizes) // _TURNS, recorder.settings.seed)
    tree: RadixTree[int] = RadixTree(itertools.count().__next__)
    names = [f"a tree of {size:,} nodes" for size in sizes]
    num_talks = 0
    for name, size in recorder.track(list(zip(names, sizes, strict=True)), lambda case: case[0]):
        with recorder.guarded(name):
            gc.disable()
            try:
                for talk in range(num_talks, size // _TURNS):
                    known = 0
                    for num_turns in range(_TURNS + 1):
                        prompt = talks.prompt(talk, num_turns)
                        known = tree.insert(None, prompt, pieces_of(known, len(prompt))).node.end
            finally:
                gc.enable()
            num_talks = size // _TURNS
            if tree.num_nodes < _MOST_CHECKED:
                tree.check()
            with _collecting_as_the_engine():
                timed = _time_tree(tree, talks, num_talks, 100 if quick else 2000)
                _time_collections(timed, tree, talks, num_talks, 2 if quick else 20)
            timed.record(recorder, name, "radix tree")
    _add_growth(recorder, names)


@contextlib.contextmanager
def _collecting_as_the_engine() -> Iterator[None]:
    """Python's garbage collector is set as in the engine's process."""
    thresholds = gc.get_threshold()
    collect_what_is_new()
    try:
        yield
    finally:
        gc.callbacks.remove(freeze_survivors)
        gc.unfreeze()
        gc.set_threshold(*thresholds)


def _time_collections(timed: _Timed, tree: RadixTree[int], talks: Talks, num_talks: int, count: int) -> None:
    """Full collections, each when as many nodes are new. They go again. Raises: WrongNumbers if they are not walked."""
    for _ in range(count):
        nodes = []
        for talk in talks.pick(num_talks, _NEW_NODES):
            prompt, known = talks.next_turn(talk, _TURNS)
            nodes.append(tree.insert(None, prompt, pieces_of(known, len(prompt))).node)
        num_before = len(gc.get_objects())  # without frozen ones: to count those would leave the processor's caches cold
        timed(f"full garbage collection, {_NEW_NODES:,} nodes are new", gc.collect)
        if num_before - len(gc.get_objects()) < _NEW_NODES:
            raise WrongNumbers(f"of {num_before} objects {len(gc.get_objects())} are walked again")
        for node in nodes:
            tree.remove(node)


def _time_tree(tree: RadixTree[int], talks: Talks, num_talks: int, count: int) -> _Timed:
    """Each operation on whole conversations. The tree stays as large. Raises: WrongNumbers."""
    timed = _Timed()
    for metric, num_turns in (("match, next turn", _TURNS), ("match, new conversation", 0)):
        for talk in talks.pick(num_talks, count):
            prompt, known = talks.next_turn(talk, num_turns)
            match = timed(metric, lambda: tree.match(None, prompt))  # noqa: B023
            if match.num_tokens != known:
                raise WrongNumbers(f"{match.num_tokens} tokens of {len(prompt)} match, and {known} are known")
    for talk in talks.pick(num_talks, count):
        prompt, known = talks.next_turn(talk, _TURNS)
        pieces = pieces_of(known, len(prompt))
        inserted = timed("insert, next turn", lambda: tree.insert(None, prompt, pieces))  # noqa: B023
        if len(inserted.duplicates) or (inserted.node.start, inserted.node.end) != (known, len(prompt)):
            raise WrongNumbers(f"{inserted}: wanted [{known}, {len(prompt)}) and no duplicates")
        timed("remove", lambda: tree.remove(inserted.node))  # noqa: B023
    for talk in talks.pick(num_talks, count):
        used = tree.match(None, talks.prompt(talk, _TURNS)).path[-1]
        timed("touch", lambda: tree.touch(used))  # noqa: B023
        oldest = timed("oldest_evictable", tree.eviction.oldest)
        if oldest is None or oldest is used:
            raise WrongNumbers(f"{oldest} is the first to go, and {used} was used last")
        tokens = np.concatenate([node.tokens for node in oldest.path()])
        tree.insert(None, tokens, tree.remove(oldest))
    return timed


def pieces_of(start: int, end: int) -> list[Piece[int]]:
    """Pieces of a path that are new between two of its tokens."""
    numbers = range(start // _PIECE_TOKENS + 1, end // _PIECE_TOKENS + 1)
    return [Piece(number * _PIECE_TOKENS, 0) for number in numbers]
