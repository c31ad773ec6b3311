"""KV that leaves the device and comes back: what tiers move, and what they save.

bandwidth    stores into a tier and loads from it by PrefixCache, beside bare copies over the link; no model
first        the first token of a prompt that is computed, or known to the device, or to a tier
beside       decoding alone, and beside loads and stores
working_set  conversations that take four times the device's memory, by what tiers there are
swap         requests that are preempted: computed again, or loaded
restart      first tokens behind an engine that was killed, and left its rows with a holder

Cases: `none`, `host`, `disk`, `redis`, `vllm`. Only `working_set` has `vllm`, with its own offloading to host memory. There a
disk tier lies behind a host tier; elsewhere each tier is alone.
"""

import math
import multiprocessing
import random
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, closing, contextmanager, suppress
from importlib.util import find_spec
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Self
from unittest.mock import patch

import numpy as np
import torch

from bench.figures import Drawing, Question
from bench.harness import MODEL_SHAPES, Recorder, Settings, Shape, WrongNumbers, release_memory, started, synchronize
from bench.systems import Context, lacks_vllm
from bench.systems.conversations import SHARE, Conversations, Talks, in_rounds
from bench.systems.engine import EngineSystem, Options, Said, params_of
from bench.systems.models import Weights, prefill_s
from bench.systems.runs import LIKELIEST, LogProbs, ServedRun, share_off, share_same
from bench.workloads import TokenIds, at_once
from vmmkv import KVCache, Pool, PrefixCache
from vmmkv.driver.pinned import host_memory
from vmmkv.memory.address_space import wrap
from vmmkv.prefix import Fetch
from vmmkv.tiers import DiskTier, HostTier, Tier, TierStats, open_store
from vmmkv.units import GIB, MIB, PAGE_BYTES, ceil_div, format_bytes
from vmmkv_server import LLM
from vmmkv_server.engine.features.fetches import Fetches
from vmmkv_server.engine.loading import choose_dtype

if TYPE_CHECKING:
    from bench.systems.outside import Vllm

QUESTIONS: Final = tuple(
    Question(f"{text}, {ours}", metric, other, ours)
    for text, metric, other, systems in (
        ("Conversations beyond the device's memory", "throughput", "no tier", ("host tier", "host and disk tiers")),
        ("A known prompt's first token", "first token", "computed", ("device", "host tier", "disk tier")),
        ("Decoding", "throughput", "alone", ("beside loads", "beside stores", "beside both")),
        ("Preemption", "throughput", "recompute", ("swap",)),
        ("Behind an engine that was killed, first token", "first token", "warm", ("restarted",)),
        ("Loads", "load", "one copy", ("host tier",)),
    )
    for ours in systems
)
FIGURES: Final = (
    Drawing("bandwidth", "Stores and loads", ("store", "load"), r"(?P<group>.+)"),
    Drawing("conversations", "Conversations beyond the device's memory", ("throughput",), r"(?P<group>.+) working_set"),
    Drawing(
        *("first", "First token of a prompt: computed, or known to the device or a tier", ("first token",)),
        *(r"(?P<panel>.+) first: (?P<x>\d+) tokens in", "tokens"),
    ),
)

CASES: Final = ("none", "host", "disk", "redis", "vllm")
_OWN_TOKENS: Final = 16
"""Of a prompt, left when the others are replaced to see that they matter."""


def cases_of(settings: Settings) -> dict[str, Sequence[str]]:
    """The same of each part."""
    return {"tiers": CASES}


def check(settings: Settings) -> None:
    """Raises: ValueError for cases that cannot run."""
    for case, why in absent(settings).items():
        if case in settings.cases:
            raise ValueError(f"the case {case} cannot run: {why}")


def absent(settings: Settings) -> dict[str, str]:
    """What is left out because something that it needs is missing, and why."""
    lacking = {"vllm": lacks_vllm(settings)}
    if shutil.which("redis-server") is None:
        lacking["redis"] = "there is no program redis-server"
    elif find_spec("redis") is None:
        lacking["redis"] = "the package redis is not installed"
    return {case: why for case, why in lacking.items() if why}


def _cases(settings: Settings, *cases: str) -> list[str]:
    """Those that are wanted and can run."""
    return [case for case in cases if settings.wants_case(case) and case not in absent(settings)]


def run(recorder: Recorder) -> None:
    """Every part that is wanted, for every shape."""
    settings = recorder.settings
    steps = [(shape, part) for shape in (settings.shapes and MODEL_SHAPES[:2]) or [settings.shape] for part in PARTS]
    wanted = [(shape, part) for shape, part in steps if settings.wants(part)]
    for shape, part in recorder.track(wanted, lambda step: f"{step[0].name} {step[1]}"):
        context = Context(recorder, shape)
        with recorder.guarded(context.name(part, "all")):
            PARTS[part](context, shape)
        release_memory(settings.device)


@contextmanager
def _opened(settings: Settings, sizes: Mapping[str, int]) -> Iterator[list[Tier]]:
    """Tiers by their cases, each of so many bytes. They are closed at the end, if nothing else has closed them."""
    with ExitStack() as stack:
        tiers: list[Tier] = []
        for case, size_bytes in sizes.items():
            if case == "host":
                tiers.append(HostTier(size_bytes))
            elif case == "redis":
                tiers.append(open_store(stack.enter_context(_redis(size_bytes))))
            else:
                path = stack.enter_context(TemporaryDirectory(prefix="vmmkv-bench-", dir=settings.dir))
                tiers.append(DiskTier(path, size_bytes))
            stack.callback(tiers[-1].close)
        yield tiers


@contextmanager
def _redis(size_bytes: int) -> Iterator[str]:
    """The URL of a server that keeps so many bytes in memory."""
    port = str(random.randrange(10_000, 30_000))  # below those that the kernel gives out
    most_bytes = size_bytes * 3 // 2 + 64 * MIB  # a record takes 2.5 MiB there, and connections have buffers
    limits = ["--save", "", "--maxmemory", str(most_bytes), "--maxmemory-policy", "allkeys-lru"]
    command = ["redis-server", "--port", port, "--bind", "127.0.0.1", *limits]
    with started(command, lambda said: "Ready to accept connections" in said):
        yield f"redis://127.0.0.1:{port}/0"


# bandwidth


def _bandwidth(context: Context, shape: Shape) -> None:
    """The link alone; then each tier, by whole prefixes."""
    settings, recorder = context.settings, context.recorder
    for case in _cases(settings, *CASES):
        num_tokens = 64 if settings.small else 16_384 if case in ("none", "host") else 4096
        num_bytes = num_tokens * shape.layout.row_bytes
        name = f"{shape.name} bandwidth: prefixes of {format_bytes(num_bytes)}"
        with recorder.guarded(name, case):
            if case == "none":
                _measure_link(recorder, name, num_bytes)
            else:
                _measure_tier(recorder, name, shape, case, num_tokens)


def _measure_link(recorder: Recorder, name: str, size_bytes: int) -> None:
    """Copies in one piece, and in those of a record; and a kernel that reads host memory at its own address."""
    device, repeat = recorder.settings.device, recorder.settings.repeat
    host, rows = host_memory(size_bytes, device), torch.empty(size_bytes, dtype=torch.uint8, device=device)
    host.random_(0, 256, generator=torch.Generator().manual_seed(recorder.settings.seed))
    in_place = wrap(host.data_ptr(), size_bytes, device)

    def copy(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        return lambda: target.copy_(source, non_blocking=True)

    def pieces(target: torch.Tensor, source: torch.Tensor) -> Callable[[], object]:
        pairs = list(zip(torch.split(target, PAGE_BYTES), torch.split(source, PAGE_BYTES), strict=True))
        return lambda: [part.copy_(of, non_blocking=True) for part, of in pairs]

    for system, metric, move in (
        ("one copy", "load", copy(rows, host)),
        ("one copy", "store", copy(host, rows)),
        (f"copies of {format_bytes(PAGE_BYTES)}", "load", pieces(rows, host)),
        (f"copies of {format_bytes(PAGE_BYTES)}", "store", pieces(host, rows)),
        ("a kernel that reads it in place", "load", lambda: torch.bitwise_not(in_place, out=rows)),
    ):
        samples = [_seconds(device, move) for _ in range(1 + repeat)]
        wanted = host.bitwise_not() if "kernel" in system else host
        if not torch.equal(rows.cpu(), wanted):
            raise WrongNumbers(f"{system}, {metric}: other bytes than were copied")
        recorder.samples(name, system, metric, "GB/s", [size_bytes / 1e9 / seconds for seconds in samples[1:]])


def _seconds(device: torch.device, work: Callable[[], object]) -> float:
    synchronize(device)
    began_s = time.perf_counter()
    work()
    synchronize(device)
    return time.perf_counter() - began_s


def _measure_tier(recorder: Recorder, name: str, shape: Shape, case: str, num_tokens: int) -> None:
    """From `insert` until all is stored, and from `fetch` until it can be attached; rows are compared."""
    settings, layout = recorder.settings, shape.layout
    rates: defaultdict[str, list[float]] = defaultdict(list)
    num_pages = layout.pages_for(num_tokens + 1)
    with (
        _opened(settings, {case: 2 * num_pages * PAGE_BYTES}) as tiers,
        Pool(settings.device, (3 * num_pages + 64) * PAGE_BYTES) as pool,
        KVCache(layout, pool, slots=4, max_tokens=num_tokens + 1) as cache,
    ):
        prefix = PrefixCache(cache, tiers, fingerprint="bench")
        planes = [view(layer) for layer in range(shape.layers) for view in (cache.k, cache.v)]

        def settle() -> None:
            if not prefix.flush():
                raise WrongNumbers(f"the {case} tier has not done in a minute what it was asked")

        for number in range(1 + settings.repeat):
            tokens = np.random.default_rng((settings.seed, number)).integers(0, 10_000, num_tokens + 1, dtype=np.int32)
            sequence = prefix.attach(tokens).sequence
            sequence.grow(num_tokens)
            sequence.advance(num_tokens)
            for rows, wanted in _random_rows(planes, sequence.slot, num_tokens, number):
                rows.copy_(wanted)
            synchronize(settings.device)
            began_s = time.perf_counter()
            prefix.insert(sequence, tokens[:-1])
            settle()
            stored_s = time.perf_counter() - began_s
            sequence.close()
            prefix.evict()
            cache.drain()
            began_s = time.perf_counter()
            fetch = prefix.fetch(tokens)
            settle()
            loaded_s = time.perf_counter() - began_s
            attached = prefix.attach(tokens)
            if fetch is None or attached.num_tokens != num_tokens:
                raise WrongNumbers(f"{attached.num_tokens} of {num_tokens} tokens are attached: {fetch}")
            for rows, wanted in _random_rows(planes, attached.sequence.slot, num_tokens, number):
                if not torch.equal(rows, wanted):
                    raise WrongNumbers(f"rows from the {case} tier are not those that it was given")
            attached.sequence.close()
            prefix.evict()
            if number:  # the first warms up
                for metric, seconds in (("store", stored_s), ("load", loaded_s)):
                    rates[metric].append(fetch.size_bytes / 1e9 / seconds)
    for metric, samples in rates.items():
        recorder.samples(name, f"{case} tier", metric, "GB/s", samples)


def _random_rows(
    planes: Sequence[torch.Tensor], slot: int, num_tokens: int, seed: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Of each plane the rows of a slot, and what they are to hold."""
    generator = torch.Generator(planes[0].device).manual_seed(seed)
    for plane in planes:
        rows = plane[slot, :num_tokens]
        yield rows, torch.randn(rows.shape, dtype=rows.dtype, device=rows.device, generator=generator)


# engines


class _Engine(EngineSystem):
    """An engine over tiers, which have what the device forgets."""

    def __init__(self, weights: Weights, limits: Options, tiers: Sequence[Tier]) -> None:
        super().__init__(weights, limits, tiers=tiers)
        self.tiers: Final = tiers

    def forget(self) -> None:
        """Empty the prefix cache, when the tiers have what is in it."""
        prefixes = self.loaded.memory.prefixes
        assert isinstance(prefixes, PrefixCache) and prefixes.flush(math.inf), "all is stored"
        super().forget()


def _check(context: Context, engine: "_Engine | Vllm", prompts: Sequence[TokenIds]) -> None:
    """Hold first tokens of prompts that only the tiers know against those before. Raises: WrongNumbers."""
    others = context.model.behind_others(context.settings.seed, prompts, _OWN_TOKENS)
    moved, right, again = map(engine.likeliest, (others, prompts, prompts))
    share_off(right, again, moved, engine.dtype, "first tokens of prompts that tiers have")


def _prompt(context: Context, length: int, *names: int) -> TokenIds:
    """Random tokens; of the same length and names the same, else with no beginning in common."""
    return context.model.tokens(context.settings.seed, length, *names, length)


@contextmanager
def engine_over(context: Context, weights: Weights, limits: Options, sizes: Mapping[str, int]) -> Iterator[_Engine]:
    """An engine with tiers of so many bytes."""
    context.recorder.note(f"{context.model.name}: the engine starts, over {' and '.join(sizes) or 'no tier'}")
    with _opened(context.settings, sizes) as tiers, closing(_Engine(weights, limits, tiers)) as engine:
        yield engine
    release_memory(context.settings.device)


def _loading(engine: _Engine) -> AbstractContextManager[object]:
    """Within, what a tier has is loaded, whether computing is faster or not."""
    return patch.object(engine.loop.features.of(Fetches), "computing_s", lambda *_: math.inf)


def _first(context: Context, shape: Shape) -> None:
    """Of each length and tier: a new prompt is computed, is on the device, and when that has forgotten it, in the tier.

    There it is loaded or computed, as the engine decides; and loaded from a disk or store for which it may decide against that.
    """
    settings = context.settings
    lengths = (1100,) if settings.small else (4096, 8192, 32_768)
    limits = {"kv_budget_bytes": 64 * MIB if settings.small else 12 * GIB, "max_tokens": max(lengths) + _OWN_TOKENS}
    limits["max_num_seqs"] = 8
    cases = _cases(settings, "host", "disk", "redis")
    with closing(Weights(context.model, settings)) as weights:
        for case in cases:
            with engine_over(context, weights, limits, {case: 32 * MIB if settings.small else 8 * GIB}) as engine:
                assert engine.loaded.memory.prefixes is not None, "tiers are of a prefix cache"
                engine.loaded.memory.prefixes.store_if(lambda tier: True)
                for length in lengths:
                    name = context.name("first", f"{length} tokens in, 1 out")
                    context.recorder.note(f"{name}, {case}")
                    with context.recorder.guarded(name, case):
                        _measure_first(context, engine, name, length, f"{case} tier", without_tier=case is cases[0])


def _measure_first(context: Context, engine: _Engine, name: str, length: int, tier: str, *, without_tier: bool) -> None:
    prompts = [_prompt(context, length, 10, number) for number in range(1 + context.settings.repeat)]
    forced = f"{tier}, loaded"
    with _loading(engine):
        _check(context, engine, prompts[:1])
    runs: defaultdict[str, list[ServedRun]] = defaultdict(list)
    for prompt in prompts[1:]:
        for source in ("computed", "device", tier):
            runs[source].append(engine.run(at_once([prompt], 1), keep=source == "device"))
        if tier != "host tier":
            with _loading(engine):
                runs[forced].append(engine.run(at_once([prompt], 1)))
    for source, of_source in runs.items():
        if source not in (tier, forced) and not without_tier:
            continue
        if source == "computed" and any(run.cached_tokens for run in of_source):
            raise WrongNumbers("a prompt that was to be computed was known in part")
        bound_s = prefill_s(context.model, 0, length) if source == "computed" else None
        add = context.recorder.samples
        add(name, source, "first token", "ms", [1e3 * run.served[0].first_s for run in of_source], bound_s and 1e3 * bound_s)
        attached = [100 * run.cached_by_source.get(source.partition(" tier")[0], 0) / length for run in of_source]
        if source != "computed":
            add(name, source, "prompt tokens attached", "%", attached)


def _working_set(context: Context, shape: Shape) -> None:
    """Conversations that take four times the device's memory, in rounds."""
    settings = context.settings
    sizes = Conversations.of(small=settings.small)
    talks = [sizes.drawn(settings.seed, number, context.model.prompt_ids) for number in range(1 + settings.repeat)]
    with closing(Weights(context.model, settings)) as weights:
        pages = ceil_div(sizes.num_tokens(talks[1]) * weights.source.layout.row_bytes, PAGE_BYTES)
        budget_bytes, most = pages // SHARE * PAGE_BYTES, 2 if settings.small else 64
        limits = {"kv_budget_bytes": budget_bytes, "max_tokens": sizes.max_tokens, "max_num_seqs": most}
        name = context.name("working_set", sizes.text(talks[1]))
        systems = {
            "none": ("no tier", {}),
            "host": ("host tier", {"host": pages * PAGE_BYTES}),
            "disk": ("host and disk tiers", {"host": pages // 2 * PAGE_BYTES, "disk": pages * PAGE_BYTES}),
        }

        def serve(engine: _Engine) -> list[ServedRun]:
            if engine.tiers:
                _check(context, engine, talks[0][0][:2])
            return [in_rounds(engine, talk, sizes.out) for talk in talks[1:]]

        if served := compare_tiers(context, name, weights, limits, systems, serve):
            with engine_over(context, weights, limits, {}) as alone:
                for system, run in served.items():
                    _compare_with_alone(context, name, system, alone, talks[-1], run)
    if _cases(settings, "vllm"):
        from bench.systems.outside import Vllm

        del weights  # vLLM wants their memory
        release_memory(settings.device)
        with context.recorder.guarded(name, "vLLM"):
            context.recorder.note(f"{name}, vLLM")
            host_gib = pages * PAGE_BYTES / GIB
            vllm = Vllm(context.model, settings, kv_cache_memory_bytes=budget_bytes, kv_offloading_size=host_gib)
            with closing(vllm):
                _check(context, vllm, talks[0][0][:2])
                runs = [in_rounds(vllm, talk, sizes.out) for talk in talks[1:]]
                _add_runs(context.recorder, name, f"{vllm.name}, offloading to the host", runs)
        release_memory(settings.device)


def _compare_with_alone(context: Context, name: str, system: str, engine: _Engine, talks: Talks, run: ServedRun) -> None:
    """Of each turn of a run: how many first tokens are those of the prompt computed alone. Near-ties make some others."""
    so_far, served = [np.empty(0, np.int32)] * len(talks[0]), iter(run.served)
    for turn, news in enumerate(talks, 1):
        prompts, said = [np.concatenate(parts) for parts in zip(so_far, news, strict=True)], [next(served).tokens for _ in news]
        alone = [engine.run(at_once([prompt], 1)).served[0].tokens for prompt in prompts]
        same = sum(tokens[:1] == first for tokens, first in zip(said, alone, strict=True)) / len(news)
        context.recorder.figure(name, system, f"first tokens as computed alone, turn {turn}", "%", 100 * same, len(news))
        so_far = [np.array([*prompt, *tokens], np.int32) for prompt, tokens in zip(prompts, said, strict=True)]


def compare_tiers(
    context: Context,
    name: str,
    weights: Weights,
    limits: Options,
    systems: Mapping[str, tuple[str, Mapping[str, int]]],
    serve: Callable[[_Engine], list[ServedRun]],
) -> dict[str, ServedRun]:
    """The rows of engines that are alike but for their tiers. `systems`: by case, their name, and the bytes of tiers.

    Returns the last run of each system.
    """
    recorder, first, last = context.recorder, list[ServedRun](), dict[str, ServedRun]()
    for case, (system, sizes) in systems.items():
        if not context.settings.wants_case(case):
            continue
        with recorder.guarded(name, system), engine_over(context, weights, limits, sizes) as engine:
            recorder.note(f"{name}, {system}")
            runs = serve(engine)
            strict = not context.settings.on_gpu
            same = [share_same([run], wanted, strict=strict) for run, wanted in zip(runs, first or runs, strict=True)]
            _add_runs(recorder, name, system, runs)
            if first:
                recorder.samples(name, system, "same answers as the first system", "%", [100 * each for each in same])
            first, last[system] = first or runs, runs[-1]
            assert engine.snapshot is not None, "it tells after each run"
            counts, fetches = engine.snapshot.scheduler, engine.snapshot.features["fetches"]
            assert isinstance(fetches, dict), "by outcome"
            recorder.figure(name, system, "preempted", "requests", counts.preemptions / len(runs), len(runs))
            for how, num_requests in sorted(fetches.items()):
                recorder.figure(name, system, f"waits for tiers, {how}", "requests", num_requests / len(runs), len(runs))
            num_lost = sum(counts.resumed_tokens.values())
            for source, num_tokens in counts.resumed_tokens.items():
                recorder.figure(name, system, f"rows of preempted requests, {source}", "%", 100 * num_tokens / num_lost)
    return last


def _add_runs(recorder: Recorder, name: str, system: str, runs: Sequence[ServedRun]) -> None:
    rows = {
        ("throughput", "tok/s"): [sum(len(each.tokens) for each in run.served) / run.seconds for run in runs],
        ("total", "s"): [run.seconds for run in runs],
        ("first token", "ms"): [1e3 * each.first_s for run in runs for each in run.served],
        ("prompt tokens attached", "%"): [100 * run.cached_tokens / run.prompt_tokens for run in runs],
    }
    for source in dict.fromkeys(source for run in runs for source in run.cached_by_source):
        found = [100 * run.cached_by_source.get(source, 0) / run.prompt_tokens for run in runs]
        rows[f"prompt tokens attached, {source}", "%"] = found
    for (metric, unit), samples in rows.items():
        recorder.samples(name, system, metric, unit, samples)


def _beside(context: Context, shape: Shape) -> None:
    """Sequences that decode: alone, and while rows of others are loaded and stored without a pause."""
    settings, recorder = context.settings, context.recorder
    count, begin, out, known, num_stores = (4, 32, 24, 1025, 2) if settings.small else (32, 128, 384, 8193, 24)
    draw = np.random.default_rng((settings.seed, 13)).integers
    vocabulary = context.model.prompt_ids
    decoding = at_once((draw(0, vocabulary, begin, dtype=np.int32) for _ in range(count)), out)
    prompt = draw(0, vocabulary, known, dtype=np.int32)
    name = context.name("beside", f"{count} requests of {begin} tokens in, {out} out; copies of {known - 1} tokens")
    with closing(Weights(context.model, settings)) as weights:
        layout = weights.source.layout
        num_pages = count * layout.pages_for(begin + out) + (2 + num_stores) * layout.pages_for(known)
        limits = {"kv_budget_bytes": num_pages * PAGE_BYTES, "max_tokens": known + _OWN_TOKENS, "max_num_seqs": count}
        with engine_over(context, weights, limits, {"host": 8 * layout.pages_for(known) * PAGE_BYTES}) as engine:
            _check(context, engine, [prompt])
            rows: defaultdict[tuple[str, str, str], list[float]] = defaultdict(list)
            first: ServedRun | None = None
            for number in range(1 + settings.repeat):
                for system, loads, stores in (
                    ("alone", False, False),
                    ("beside loads", True, False),
                    ("beside stores", False, True),
                    ("beside both", True, True),
                ):
                    recorder.note(f"{name}, {system}, run {number} of {settings.repeat}")
                    engine.run(at_once([prompt], 1))
                    engine.forget()
                    stored = [draw(0, vocabulary, known - 1, dtype=np.int32) for _ in range(num_stores if stores else 0)]
                    with _Copies(engine, prompt if loads else None, stored, count) as copies:
                        run = engine.run(decoding, keep=True)
                        moved = copies.rates()
                    first = first or run
                    share_same([run], first, strict=not settings.on_gpu)
                    if number:  # the first warms up
                        begun_s, ended_s = (max(each.token_s[at] for each in run.served) for at in (0, -1))
                        num_decoded = sum(token_s > begun_s for each in run.served for token_s in each.token_s)
                        rows[system, "throughput", "tok/s"].append(num_decoded / (ended_s - begun_s))
                        for metric, rate in moved.items():
                            rows[system, metric, "GB/s"].append(rate)
            for (system, metric, unit), samples in rows.items():
                recorder.samples(name, system, metric, unit, samples)


class _Copies:
    """Loads of one prompt, again and again, and stores of sequences that were never computed, behind an engine's steps.

    They begin when so many requests have had their first tokens, and end with the block.
    """

    def __init__(self, engine: _Engine, prompt: TokenIds | None, stores: list[TokenIds], num_decoding: int) -> None:
        memory = engine.loaded.memory
        assert memory.prefixes is not None, "an engine with a prefix cache"
        self._engine, self._prefix, self._tier, self._prompt = engine, memory.prefixes, engine.tiers[0], prompt
        self._num_decoding, self._begun = num_decoding, set[int]()
        self._fetch: Fetch | None = None
        self._stores = [(tokens, self._prefix.attach(tokens).sequence) for tokens in stores]
        for tokens, sequence in self._stores:
            sequence.grow(len(tokens))
            sequence.advance(len(tokens))
        self._num_inserted = 0
        self._seen: list[tuple[float, TierStats]] = []
        """When copies began, and behind the last step: the time, and what the tier had done."""
        engine.beside = self._go_on

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self._engine.beside = lambda said: None
        if self._fetch is not None and not self._fetch.done:
            self._fetch.give_up()
        for _, sequence in self._stores:
            sequence.close()

    def _go_on(self, said: Sequence[Said]) -> None:
        self._begun.update(index for index, tokens, _ in said if len(tokens))
        if len(self._begun) < self._num_decoding:
            return
        self._seen[1:] = [(time.perf_counter(), self._tier.stats())]
        if self._prompt is not None and (self._fetch is None or self._fetch.done):
            self._prefix.evict()
            self._fetch = self._prefix.fetch(self._prompt)
        if self._num_inserted < len(self._stores):
            tokens, sequence = self._stores[self._num_inserted]
            record_bytes = len(tokens) * self._prefix.cache.layout.row_bytes // PAGE_BYTES * PAGE_BYTES
            if self._seen[-1][1].stored_bytes - self._seen[0][1].stored_bytes >= (self._num_inserted - 1) * record_bytes:
                self._prefix.insert(sequence, tokens)  # while the one before is being stored
                self._num_inserted += 1

    def rates(self) -> dict[str, float]:
        """GB/s by `load` and `store`, of those that there were."""
        (began_s, before), (ended_s, behind) = self._seen
        moved_bytes = {}
        if self._prompt is not None:
            moved_bytes["load"] = behind.loaded_bytes - before.loaded_bytes
        if self._stores:
            moved_bytes["store"] = behind.stored_bytes - before.stored_bytes
        return {metric: num_bytes / 1e9 / (ended_s - began_s) for metric, num_bytes in moved_bytes.items()}


def _swap(context: Context, shape: Shape) -> None:
    """Requests whose prompts fit side by side, and whose answers do not: the newest are preempted, and begin again."""
    settings = context.settings
    count, length, out, num_fitting = (5, 1010, 40, 4) if settings.small else (32, 4096, 512, 14)
    runs = [[_prompt(context, length, 15, number, index) for index in range(count)] for number in range(settings.repeat)]

    def serve(engine: _Engine) -> list[ServedRun]:
        return [engine.run(at_once(prompts, out)) for prompts in runs]

    with closing(Weights(context.model, settings)) as weights:
        layout = weights.source.layout
        budget_bytes = layout.pages_for(num_fitting * (length + out)) * PAGE_BYTES
        limits = {"kv_budget_bytes": budget_bytes, "max_tokens": length + out, "max_num_seqs": count}
        tier_bytes = count * layout.pages_for(length + out) * PAGE_BYTES
        name = context.name("swap", f"{count} requests of {length} tokens in, {out} out, room for {num_fitting}")
        systems = {"none": ("recompute", {}), "host": ("swap", {"host": tier_bytes})}
        compare_tiers(context, name, weights, limits, systems, serve)


# engines that are killed


def _restart(context: Context, shape: Shape) -> None:
    """An engine over a holder is killed while it computes; the next one is asked what that one knew."""
    settings, recorder = context.settings, context.recorder
    count, length, budget_bytes = (2, 1100, 64 * MIB) if settings.small else (4, 8192, 12 * GIB)
    *prompts, last = [_prompt(context, length, 14, number) for number in range(count + 1)]
    name = context.name("restart", f"{count} prompts of {length} tokens, 1 out, each alone")
    with ExitStack() as stack:
        folder = Path(stack.enter_context(TemporaryDirectory(prefix="vmmkv-bench-")))
        path, device = folder / "kv.sock", str(settings.device)
        holder = [sys.executable, "-m", "vmmkv", "hold", "--socket", str(path), "--budget", str(budget_bytes)]
        stack.enter_context(started([*holder, "--device", device], lambda said: path.exists()))
        options: dict[str, Any] = {"device": device, "kv_holder": path, "load_format": "dummy", "seed": settings.seed}
        options |= {"max_num_seqs": 8, "max_tokens": length + _OWN_TOKENS}
        options["model"] = stack.enter_context(context.model.directory())
        recorder.note(f"{name}: the first engine starts")
        first = _Killable(stack, options)
        answers = {system: [first.ask(each) for each in prompts] for system in ("computed", "warm")}
        others = context.model.behind_others(settings.seed, prompts, _OWN_TOKENS)
        moved = [first.ask(each).likeliest for each in others]
        first.connection.send(last)
        first.kill()
        recorder.note(f"{name}: the next engine starts")
        second = _Killable(stack, options)
        answers |= {system: [second.ask(each) for each in prompts] for system in ("restarted", "restarted, warm")}
        dtype = choose_dtype("auto", settings.device)
        right = [answer.likeliest for answer in answers["computed"]]
        for system, of_system in answers.items():
            share_off(right, [answer.likeliest for answer in of_system], moved, dtype, f"first tokens, {system},")
            recorder.samples(name, system, "first token", "ms", [1e3 * answer.first_s for answer in of_system])
            attached = [100 * answer.cached_tokens / length for answer in of_system]
            recorder.samples(name, system, "prompt tokens attached", "%", attached)
        for system in ("computed", "restarted"):
            recorder.figure(name, system, "first token of the first prompt", "ms", 1e3 * answers[system][0].first_s)
            recorder.figure(name, system, "from the start to the first token", "s", answers[system][0].since_start_s)


class _Answer(NamedTuple):
    """The first token of a prompt."""

    likeliest: LogProbs
    first_s: float
    cached_tokens: int
    since_start_s: float
    """Since the engine's process was started."""


class _Killable:
    """An engine in a process of its own."""

    def __init__(self, stack: ExitStack, options: Mapping[str, Any]) -> None:
        self._began_s = time.monotonic()  # of all processes
        self.connection, theirs = _SPAWN.Pipe()
        self._process = _SPAWN.Process(target=_answer, args=(theirs, self._began_s, options), daemon=True)
        self._process.start()
        stack.callback(self.kill)
        theirs.close()

    def ask(self, prompt: TokenIds) -> _Answer:
        """Raises: EOFError if the engine has ended."""
        self.connection.send(prompt)
        answer: _Answer = self.connection.recv()
        return answer

    def kill(self) -> None:
        """By SIGKILL."""
        self._process.kill()
        self._process.join()


_SPAWN: Final = multiprocessing.get_context("spawn")  # a copy of this process would have its CUDA context


def _answer(connection: Connection, began_s: float, options: Mapping[str, Any]) -> None:
    """Answer prompts until the process is killed, or nothing asks any more."""
    with suppress(EOFError), LLM(**options) as llm:
        while True:
            (output,) = llm.generate(connection.recv(), params_of(1, num_logprobs=LIKELIEST), progress=False)
            if output.error is not None or output.first_token_s is None:
                raise WrongNumbers(f"the request failed: {output.error}")
            (likeliest,) = output.outputs[0].top_logprobs or [{}]
            since_start_s = time.monotonic() - began_s
            connection.send(_Answer(likeliest, output.first_token_s, output.cached_tokens, since_start_s))


PARTS: Final[Mapping[str, Callable[[Context, Shape], None]]] = {
    "bandwidth": _bandwidth,
    "first": _first,
    "beside": _beside,
    "working_set": _working_set,
    "swap": _swap,
    "restart": _restart,
}
