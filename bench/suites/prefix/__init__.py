"""What sharing a prefix costs and saves: over slots, over blocks, and without sharing.

    requests     requests that share a prefix, cold and warm, by the engine over each memory
    attach       attaching a prefix of each length, by adoption and by aliases; no model
    tree, host   what the host does between two steps, by size: see bench.suites.prefix.host; no model, no device

Attention over shared rows is in the suite kernels, part `shared`.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np
import torch

from bench import systems
from bench.baselines import COMMON_PREFILL
from bench.figures import PAGED, Drawing, Question
from bench.harness import Recorder, Settings, Stopwatch, WrongNumbers, now_us, release_memory, synchronize
from bench.suites.prefix import host
from bench.systems import MEMORIES, NO_SHARING, Context
from bench.systems.runs import SharedSystem, checked, share_same, take_turns
from bench.workloads import TokenIds, Workload, at_once
from vmmkv import KVCache, Pool, PrefixCache
from vmmkv.driver import Driver, open_driver
from vmmkv.units import GIB, MIB, PAGE_BYTES

QUESTIONS: Final = (
    Question("Requests that share a prefix", "total", PAGED),
    Question("Memory of shared prefixes", "memory, held", PAGED),
    Question("Blocks of 16, by the same kernels, and a shared prefix", "total", "paged 16", COMMON_PREFILL),
)
_SHARED: Final = r".*?requests of (?P<group>\d+) \+.*?(?P<state>, (?:cold|warm))"
FIGURES: Final = (
    Drawing("total", "Requests that share a prefix: time until the last answer", ("total",), _SHARED),
    Drawing("memory", "Requests that share a prefix: memory that is held", ("memory, held",), _SHARED),
    Drawing(
        *("attach", "Attaching a prefix", ("in the driver", "until the device is done")),
        *(r"attach (?P<x>\d+) tokens$", "tokens"),
    ),
    Drawing("tree", "The radix tree alone", (), r"(?P<panel>a tree) of (?P<x>[\d,]+) nodes$", "nodes"),
)

PARTS: Final = ("requests", "attach", "tree", "host")
SYSTEMS: Final = (*(name for name in MEMORIES if name != "static"), NO_SHARING)
"""What `requests` compares. Static slots share nothing."""
_PLAIN: Final = "llama-3.1-8b"
"""The shape whose workloads are named without it."""


def absent(settings: Settings) -> dict[str, str]:
    """Systems that are left out because something that they need is missing, and why."""
    return systems.absent(settings, SYSTEMS) if settings.wants("requests") else {}


def run(recorder: Recorder) -> None:
    """Every part that is wanted. On a CPU, prefixes of a few pages of the tiny model, and one below a page."""
    settings = recorder.settings
    small = settings.small
    if settings.wants("requests"):
        context = Context(recorder, settings.shape)
        prefix = "" if context.model.name == _PLAIN else f"{context.model.name} "
        sizes = (64 * MIB, 2048, 8, 256) if small else (16 * GIB, 8192, 128, 8192)
        limits = dict(zip(("kv_budget_bytes", "max_tokens", "max_num_seqs", "max_num_batched_tokens"), sizes, strict=True))
        with recorder.guarded(f"{prefix}requests"), context.beside(limits, SYSTEMS) as opened:
            lengths = (1200, 100) if small else (4096, 200, 1000, 4000)
            rounds = 1 if small else 2
            # A round without rows: the first creates memory that later ones find.
            warming = [_wave(context, min(lengths), rounds, number) for number in range(2)]
            take_turns(recorder, opened, [warming], ["warming up"])
            for tokens in recorder.track(lengths, lambda tokens: f"{tokens} tokens shared"):
                _measure_requests(context, opened, tokens, rounds, prefix)
    if settings.wants("attach"):
        named = "" if settings.shape.name == _PLAIN else f"{settings.shape.name} "
        prefixes = (64, 1024) if small else (1024, 4096, 16384, 65536, 131072)
        for tokens in recorder.track(prefixes, lambda tokens: f"attach {tokens} tokens"):
            with recorder.guarded(name := f"{named}attach {tokens} tokens"):
                _measure_attach(recorder, name, tokens, 0.02 if small else 0.7)
            release_memory(settings.device)
    if settings.wants("tree"):
        host.measure_tree(recorder)
    if settings.wants("host"):
        host.measure_engine(recorder)


# requests, by the engine


def _request_sizes(settings: Settings) -> tuple[int, int, int]:
    """Tokens of a prompt behind its prefix, tokens of an answer, and requests of a run."""
    own, out, requests = (12, 4, 4) if settings.small else (128, 64, 128)
    return own, out, settings.sequences or requests


def _measure_requests(context: Context, opened: Sequence[SharedSystem], prefix_tokens: int, rounds: int, prefix: str) -> None:
    """Cold: nothing is known, and all requests are there at once. Warm: other requests come with the same prefix.

    Without sharing each run computes every prompt: one run of each state takes longer than all others, and is enough.
    """
    recorder, settings, first = context.recorder, context.settings, opened[0].name
    own, out, requests = _request_sizes(settings)
    text = f"{prefix}{requests} requests of {prefix_tokens} + {own} tokens, {out} out"
    names = [f"{text}, {state}" for state in ("cold", "warm")]
    num_waves = 2 if settings.small else 3  # of a round: a cold one, then warm ones with other tokens behind the same prefix
    with recorder.guarded(names[0]):
        waves = [[_wave(context, prefix_tokens, round_, number) for number in range(num_waves)] for round_ in range(rounds)]
        offs = checked(opened, waves[0][0], 2, context.model, settings.seed)

        def leaves_out(system: str, round_: int, place: int) -> bool:
            return system == NO_SHARING and (round_ > 0 or place > 1)

        by_state = take_turns(recorder, opened, waves, names, leaves_out=leaves_out)
        for name, runs in zip(names, by_state, strict=True):
            for system, of_system in runs.items():
                pairs = zip(of_system, runs[first], strict=system != NO_SHARING)
                sames = [share_same([run], wanted, strict=not settings.on_gpu) for run, wanted in pairs]
                recorder.samples(name, system, "total", "s", [run.seconds for run in of_system])
                firsts_ms = [1e3 * each.first_s for run in of_system for each in run.served]
                recorder.samples(name, system, "first token", "ms", firsts_ms)
                attached = [100 * run.cached_tokens / run.prompt_tokens for run in of_system]
                recorder.samples(name, system, "prompt tokens attached", "%", attached)
                if system != NO_SHARING:  # behind the first such run, by sequences that have ended too
                    recorder.figure(name, system, "memory, held", "GiB", of_system[0].held_bytes / GIB)
                if system != first:
                    recorder.samples(name, system, f"same answers as {first}", "%", [100 * same for same in sames])
                    recorder.figure(name, system, "first tokens off by", "% of other prompts'", 100 * offs[system])


def _wave(context: Context, prefix_tokens: int, round_: int, number: int) -> Workload:
    """The round's prefix, and other tokens in each run of it."""

    def tokens(count: int, *names: int) -> TokenIds:
        rng = np.random.default_rng((context.settings.seed, prefix_tokens, round_, *names))
        return rng.integers(0, context.model.vocabulary, count, dtype=np.int32)

    own, out, requests = _request_sizes(context.settings)
    prefix = tokens(prefix_tokens)
    prompts = [np.concatenate((prefix, tokens(own, 1 + number, index))) for index in range(requests)]
    return at_once(prompts, out)


# attaching


class _TimedDriver(Stopwatch):
    """Wraps a driver, whose calls are counted: the driver's share of an operation."""

    def __init__(self, driver: Driver) -> None:
        self._driver = driver

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._driver, name)
        return self.timed(found) if callable(found) else found


def _measure_attach(recorder: Recorder, name: str, num_tokens: int, seconds: float) -> None:
    """Each way to attach one prefix, again and again. Driver time is the host's; the device's copies are in the other figure.

    Raises: WrongNumbers if another number of tokens is attached, or other rows than those of the prefix.
    """
    settings, most = recorder.settings, num_tokens + 16
    device, layout = settings.device, settings.shape.layout
    tokens = np.random.default_rng((settings.seed, num_tokens)).integers(0, 100_000, num_tokens + 1, dtype=np.int32)
    driver = _TimedDriver(open_driver(device))
    # The source, one that attaches, and some that wait to be unmapped.
    budget_bytes = (5 * layout.pages_for(most) + 64) * PAGE_BYTES
    with Pool(device, budget_bytes, driver=cast(Driver, driver)) as pool:
        cache = KVCache(layout, pool, slots=8, max_tokens=most)
        prefix = PrefixCache(cache)
        source = prefix.attach(tokens, max_tokens=most).sequence
        source.grow(num_tokens)
        source.advance(num_tokens)
        planes = [view(layer) for layer in range(settings.shape.layers) for view in (cache.k, cache.v)]
        generator = torch.Generator(device).manual_seed(settings.seed)
        for plane in planes:
            plane[source.slot, :num_tokens].normal_(generator=generator)
        synchronize(device)  # confirmed, and not only launched
        prefix.insert(source, tokens[:-1])
        for way in ("alias", "adopt"):
            if way == "adopt":
                prefix.park(source, tokens[:-1])
            driver_us: list[float] = []
            whole_us: list[float] = []
            until_us = now_us() + 1e6 * seconds
            while len(driver_us) < 3 or (now_us() < until_us and len(driver_us) < 300):
                synchronize(device)
                spent_us, began_us = driver.spent_us, now_us()
                attached = prefix.attach(tokens, max_tokens=most)
                driver_us.append(driver.spent_us - spent_us)
                synchronize(device)
                whole_us.append(now_us() - began_us)
                if attached.num_tokens != num_tokens:
                    raise WrongNumbers(f"{way}: {attached.num_tokens} tokens are attached, and not {num_tokens}")
                if way == "adopt":
                    prefix.park(attached.sequence, tokens[:-1])
                else:
                    pairs = ((plane[attached.sequence.slot], plane[source.slot]) for plane in planes)
                    if len(driver_us) == 1 and not all(torch.equal(a[:num_tokens], b[:num_tokens]) for a, b in pairs):
                        raise WrongNumbers("attached rows differ from those of the prefix")
                    attached.sequence.close()
                synchronize(device)
                cache.drain()
            recorder.samples(name, way, "in the driver", "us", driver_us)
            recorder.samples(name, way, "until the device is done", "us", whole_us)
