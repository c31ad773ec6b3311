"""vLLM with vmmkv's tiers behind it, or with elastic memory, against vLLM alone, each in processes of its own.

    nano      requests without reuse: what tiers cost that nobody needs, in throughput, and in the host's time for each step
    shared    requests that share a prefix: computed, out of vLLM's own cache, and with that emptied, out of the host tier
    first     the first token of a long prompt, in the same three ways
    restart   both kinds of prompts behind a restart of vLLM, out of the disk tier of the process before, or a holder's memory
    elastic   the requests of nano with elastic memory and without; seconds to give memory back, and to take it again
    conversations   four times as many tokens as vLLM's own cache has, also with vLLM's own offloading to the host
    turns     two engines on one GPU, with bursts of requests in turn: half of the memory for each, or elastic memory

vLLM's own cache is emptied by `reset_prefix_cache`, when the tiers have what they were given.
"""

import multiprocessing
import os
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import ExitStack, closing, contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from itertools import chain
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final, NamedTuple

import numpy as np

from bench.figures import Drawing, Question
from bench.harness import Recorder, Settings, WrongNumbers, now_us, synchronize
from bench.systems import lacks_vllm
from bench.systems.conversations import SHARE, Conversations, in_rounds
from bench.systems.models import ServedModel, model_of
from bench.systems.outside import Vllm
from bench.systems.runs import ServedRun
from bench.workloads import Workload, at_once, uniform
from vmmkv.units import GIB, MIB, format_bytes, parse_bytes
from vmmkv_server.console import end

PARTS: Final = ("nano", "shared", "first", "restart", "conversations", "elastic", "turns")
ALONE, TIERED, OFFLOADING = "vLLM", "vLLM, vmmkv's tiers", "vLLM, its own offloading"
ELASTIC, HALVES = "vLLM, elastic memory", "vLLM, a fixed half each"
QUESTIONS: Final = (
    Question("vLLM with tiers that nobody needs, against vLLM alone", "throughput", ALONE, ours=TIERED, part="nano"),
    *(
        Question(f"Conversations beyond vLLM's memory, {TIERED}", "throughput", other, ours=TIERED, part="conversations")
        for other in (ALONE, OFFLOADING)
    ),
    Question("vLLM with elastic memory, against vLLM alone", "throughput", ALONE, ours=ELASTIC, part="nano"),
    Question("Two of vLLM that share elastic memory, against a fixed half each", "goodput", HALVES, ours=ELASTIC, part="turns"),
)
FIGURES: Final = (
    Drawing("engines-shared", "Requests that share a prefix, under vLLM", ("total",), r".+ shared: (?P<group>.+)"),
)

_CONNECTOR: Final = {
    "kv_connector": "VmmkvConnector",
    "kv_connector_module_path": "vmmkv.adapters.vllm.connector",
    "kv_role": "kv_both",
    "kv_load_failure_policy": "recompute",
}
_HOLDER, _HELD = "holder", "16GiB"
"""Name of a holder's socket in the directory of a group of processes; memory of the one behind which vLLM restarts."""
_HOST_GIB: Final = 32
_HOST_BUDGET, _DISK_BUDGET = f"{_HOST_GIB}GiB", "16GiB"
_SHARED_TOKENS, _OWN_TOKENS, _LONG_TOKENS = 4096, 64, 8192
_OUT_TOKENS: Final = 32
_SHARING: Final = 128
_SHARED_TEXT: Final = f"{_SHARING} requests, {_SHARED_TOKENS} shared + {_OWN_TOKENS} in, {_OUT_TOKENS} out"
_FIRSTS: Final = 5
_WORKER_CALLS: Final = (
    *("handle_preemptions", "start_load_kv", "wait_for_save"),
    *("get_finished", "build_connector_worker_meta"),
)
_SCHEDULER_CALLS: Final = (
    *("get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output"),
)
_RESIZED_BYTES: Final = 32 * GIB
_BURST_IN, _BURST_OUT = 1024, 512
_FIRST_WITHIN_S: Final = 5.0
"""Limit of goodput. To compute all prompts of a burst of Llama-3.1-8B takes about 3 s of an H200, whatever the memory."""
_BESIDE_KV: Final = 0.2
"""Part of the GPU that must be free when one of two engines starts: for weights and activations."""
_END_S: Final = 60.0
_QUIET_S: Final = 0.1
"""Behind the last store: the scheduler does not trust what it was told for so long."""


class Measured(NamedTuple):
    """Samples of a metric, as a process sends them."""

    workload: str
    metric: str
    unit: str
    samples: list[float]


@dataclass(frozen=True)
class Process:
    """A process of vLLM: what it measures, its tiers, if any, and further options of `vllm.LLM`."""

    parts: tuple[Callable[..., Iterator[Measured]], ...]
    tiers: dict[str, str]
    options: dict[str, Any] = field(default_factory=dict)
    in_turns: bool = False
    """Does it live beside the others of its group, which have their turns between its own?"""


def cases_of(settings: Settings) -> dict[str, tuple[str, ...]]:
    """The systems, for each part."""
    return dict.fromkeys(PARTS, (ALONE, TIERED)) | {
        "restart": (TIERED, ELASTIC),
        "conversations": (ALONE, TIERED, OFFLOADING),
        "elastic": (ALONE, ELASTIC),
        "turns": (HALVES, ELASTIC),
    }


def check(settings: Settings) -> None:
    """Raises: ValueError where vLLM cannot run."""
    if why := lacks_vllm(settings):
        raise ValueError(f"engines needs vLLM on a GPU: {why}")


def run(recorder: Recorder) -> None:
    """Each system, in processes of its own: vLLM gives no memory back before its process ends."""
    settings = recorder.settings
    systems = (ALONE, TIERED, OFFLOADING, HALVES, ELASTIC)
    for system in recorder.track([each for each in systems if settings.wants_case(each)]):
        with recorder.guarded(settings.shape.name, system):
            for kind in processes_of(system, settings):
                with (
                    TemporaryDirectory(prefix="vmmkv-bench-", dir=settings.dir) as folder,
                    _holder(kind, settings, Path(folder)),
                ):
                    in_order = in_turns if any(each.in_turns for each in kind) else chain.from_iterable
                    for measured in in_order([_measured_apart(settings, process, Path(folder)) for process in kind]):
                        recorder.samples(measured.workload, system, measured.metric, measured.unit, measured.samples)
                        recorder.note(f"{measured.workload}: {measured.metric}")


def processes_of(system: str, settings: Settings) -> Iterator[tuple[Process, ...]]:
    """Processes that measure a system: those of a group share a directory."""
    host = {"kv_host_budget": _HOST_BUDGET}
    parts = {"nano": measure_nano, "shared": measure_shared, "first": measure_first}
    wanted = tuple(parts[part] for part in parts if settings.wants(part))
    if system == ELASTIC:
        if settings.wants("elastic"):
            yield (Process((measure_nano, measure_resizes), {}, {"additional_config": {"vmmkv_elastic": {}}}),)
        if settings.wants("restart"):
            option = {"holder": _HOLDER, "budget": _HELD, "fingerprint": "bench"}
            held = {"kv_cache_memory_bytes": parse_bytes(_HELD), "additional_config": {"vmmkv_elastic": option}}
            yield Process((measure_before_restart,), {}, held), Process((measure_behind_restart,), {}, held)
    if system in (ELASTIC, HALVES):
        if settings.wants("turns"):
            yield (_of_turns(settings, is_elastic=system == ELASTIC),) * 2
        return
    if system == ALONE and settings.wants("elastic") and measure_nano not in wanted:
        wanted = (measure_nano, *wanted)
    if wanted and system != OFFLOADING:
        yield (Process(wanted, host if system == TIERED else {}),)
    if system == TIERED and settings.wants("restart"):
        disk = {**host, "kv_disk": "kv", "kv_disk_budget": _DISK_BUDGET}
        yield Process((measure_before_restart,), disk), Process((measure_behind_restart,), disk)
    if settings.wants("conversations"):
        own = {"kv_offloading_size": _HOST_GIB} if system == OFFLOADING else {}
        little = {"kv_cache_memory_bytes": _quarter_bytes(settings)}
        yield (Process((measure_conversations,), host if system == TIERED else {}, {**little, **own}),)


def _of_turns(settings: Settings, *, is_elastic: bool) -> Process:
    """One of the two engines that have bursts in turn: addresses for all of their memory, or half of the memory."""
    model, total_bytes = model_of(settings.shape.name, tiny=settings.small), bytes_of_turns(settings)
    options: dict[str, Any] = {
        "gpu_memory_utilization": _BESIDE_KV,
        "kv_cache_memory_bytes": total_bytes if is_elastic else total_bytes // 2,
        "max_model_len": _BURST_IN + _BURST_OUT,
        "max_num_seqs": requests_of_burst(total_bytes, model.row_bytes),
    }
    if is_elastic:
        options["additional_config"] = {"vmmkv_elastic": {"arbiter": _HOLDER, "floor": str(total_bytes // 16)}}
    return Process((measure_bursts,), {}, options, in_turns=True)


def bytes_of_turns(settings: Settings) -> int:
    """KV memory of both engines that have bursts in turn."""
    return 128 * MIB if settings.small else 24 * GIB


def requests_of_burst(total_bytes: int, row_bytes: int) -> int:
    """Requests of a burst: at their end they fill 7/8 of all memory, which leaves the other engine its floor."""
    return total_bytes * 7 // 8 // ((_BURST_IN + _BURST_OUT) * row_bytes)


def _elastic_of(options: dict[str, Any]) -> dict[str, str]:
    return options.get("additional_config", {}).get("vmmkv_elastic", {})  # type: ignore[no-any-return]


@contextmanager
def _holder(processes: tuple[Process, ...], settings: Settings, folder: Path) -> Iterator[None]:
    """A holder process for those that name one, with as much memory as each has addresses.

    Raises: WrongNumbers if it does not start.
    """
    budgets = [each.options["kv_cache_memory_bytes"] for each in processes if _HOLDER in _elastic_of(each.options).values()]
    if not budgets:
        yield
        return
    path = folder / _HOLDER
    command = [
        sys.executable,
        "-m",
        "vmmkv",
        "hold",
        "--socket",
        str(path),
        "--budget",
        str(max(budgets)),
        "--device",
        str(settings.device),
    ]
    with subprocess.Popen(command) as holder:
        try:
            until_s = time.monotonic() + _END_S
            while not path.is_socket():
                if holder.poll() is not None or time.monotonic() > until_s:
                    raise WrongNumbers("the holder does not start")
                time.sleep(0.1)
            yield
        finally:
            holder.terminate()


def _quarter_bytes(settings: Settings) -> int:
    """Memory for a quarter of the conversations."""
    sizes = Conversations.of(small=settings.small)
    num_tokens = sizes.num_tokens(sizes.drawn(settings.seed, 1, model_of(settings.shape.name, tiny=settings.small).prompt_ids))
    return num_tokens * settings.shape.layout.row_bytes // SHARE


def in_turns(processes: Iterable[Generator[Measured]]) -> Iterator[Measured]:
    """Yield the samples of processes that live at the same time, all together at the end.

    Only one process at a time starts, or goes on to its next sample.
    """
    samples: dict[tuple[str, str, str], list[float]] = {}
    with ExitStack() as stack:
        for turn in zip(*(stack.enter_context(closing(each)) for each in processes), strict=True):
            for measured in turn:
                samples.setdefault((measured.workload, measured.metric, measured.unit), []).extend(measured.samples)
    yield from (Measured(*names, found) for names, found in samples.items())


def _measured_apart(settings: Settings, process: Process, folder: Path) -> Generator[Measured]:
    """Yield what another process measures, as it comes. The process goes on when the next is asked for.

    Raises: WrongNumbers, telling its error.
    """
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    child = context.Process(target=_measure, args=(theirs, settings, process, folder))
    child.start()
    theirs.close()
    try:
        while (received := ours.recv()) is not None:
            if isinstance(received, str):
                raise WrongNumbers(received)
            yield received
            ours.send("go on")
    except (EOFError, ConnectionError):
        raise WrongNumbers("a process of vLLM has ended in the middle") from None
    finally:
        ours.close()  # by which one that waits for its turn ends
        child.join(_END_S)
        child.kill()


def _measure(connection: Any, settings: Settings, process: Process, folder: Path) -> None:
    """In a process of its own: measure everything that was asked for, send it, and go on when told to."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the connector is here, and is asked when it is done
    try:
        model = model_of(settings.shape.name, tiny=settings.small)
        tiers = process.tiers | ({"kv_disk": str(folder / process.tiers["kv_disk"])} if "kv_disk" in process.tiers else {})
        extra = {"kv_connector_extra_config": {**tiers, "fingerprint": "bench"}}
        options: dict[str, Any] = {"kv_transfer_config": {**_CONNECTOR, **extra}} if process.tiers else {}
        options |= process.options
        if "additional_config" in options:
            elastic = _elastic_of(options)
            sockets = {name: str(folder / _HOLDER) for name, value in elastic.items() if value == _HOLDER}
            options["additional_config"] = {"vmmkv_elastic": {**elastic, **sockets}}
            import_module("vmmkv.adapters.vllm.elastic").install()  # where vmmkv is on the path and not installed
        vllm = Vllm(model, settings, load_format="dummy", **options)
        for part in process.parts:
            for measured in part(vllm, model, settings, bool(process.tiers)):
                connection.send(measured)
                connection.recv()
        vllm.close()  # by which the tiers keep what they have
        connection.send(None)
    except BaseException as error:
        connection.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        connection.close()
        end(0)


def measure_nano(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Requests without reuse: other ones in each run."""
    count, name = settings.sequences or 256, ""
    seconds: list[float] = []
    watch = _Watch() if has_tiers else None
    for number in range(settings.repeat + 1):
        workload = uniform(seed=settings.seed + number, vocabulary=model.prompt_ids, count=count, max_tokens=2048)
        name = f"{model.name} nano: {workload.text}"
        if watch is not None:
            watch.clear()
        ran = vllm.run(workload)
        num_tokens = sum(ask.num_out for ask in workload.asks)
        if number:  # the first one compiles
            seconds.append(num_tokens / ran.seconds)
    yield Measured(name, "throughput", "tok/s", seconds)
    if watch is not None:
        yield Measured(name, "host time of tiers, a step", "us", watch.worker_us)
        yield Measured(name, "host time of tiers, a step without work for them", "us", watch.idle_us)
        yield Measured(name, "host time of tiers in the scheduler, a step", "us", watch.scheduler_us)


def measure_resizes(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Give memory of an idle engine back, all groups of blocks but one, and take it again."""
    vllm.forget()
    pool = vllm.block_pool()
    memory = pool.memory
    num_groups = min(_RESIZED_BYTES, memory.reserved_bytes // 2) // memory.group_bytes
    size_bytes, num_blocks = num_groups * memory.group_bytes, num_groups * memory.group_blocks
    given_s, taken_s = list[float](), list[float]()
    for number in range(settings.repeat + 1):
        for seconds, budget_bytes, wanted in (
            (taken_s, size_bytes + memory.group_bytes, num_blocks),
            (given_s, memory.group_bytes, 0),
        ):
            began_us = now_us()
            memory.set_budget(budget_bytes)
            pool.settle()
            pool.prepare(wanted)
            while memory.is_leaving:
                pool.settle()
            synchronize(memory.device)
            if number:  # at first some memory is mapped
                seconds.append(1e-6 * (now_us() - began_us))
        if memory.state().mapped_bytes != memory.group_bytes:
            raise WrongNumbers(f"{memory.state()} when all but one group were to go")
    name = f"{model.name} resize: {format_bytes(size_bytes)}, {format_bytes(memory.group_bytes)} at a time"
    yield Measured(f"{name}, given back", "total", "s", given_s)
    yield Measured(f"{name}, taken", "total", "s", taken_s)


def measure_shared(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Requests that share a prefix, three times."""
    name = f"{model.name} shared: {_SHARED_TEXT}"
    ways: dict[str, list[float]] = {}
    for number in range(settings.repeat + 1):
        prefix = model.tokens(settings.seed, _SHARED_TOKENS, 1, number).tolist()
        own = [model.tokens(settings.seed, _OWN_TOKENS, 2, number, each).tolist() for each in range(_SHARING)]
        workload = _prompts([prefix + each for each in own], _OUT_TOKENS)
        for way, ran in _three_ways(vllm, workload, has_tiers):
            _check_cached(vllm, name, way, ran, _SHARING * _SHARED_TOKENS)
            if number:
                ways.setdefault(way, []).append(ran.seconds)
    for way, runs_s in ways.items():
        yield Measured(f"{name}, {way}", "total", "s", runs_s)


def measure_first(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """One request of a long prompt, three times."""
    ways: dict[str, list[float]] = {}
    name = f"{model.name} first: a prompt of {_LONG_TOKENS}"
    for number in range(_FIRSTS + 1):
        workload = _prompts([model.tokens(settings.seed, _LONG_TOKENS, 3, number).tolist()], 2)
        tokens: dict[str, list[int]] = {}
        for way, ran in _three_ways(vllm, workload, has_tiers):
            _check_cached(vllm, name, way, ran, _LONG_TOKENS - 16)
            tokens[way] = ran.served[0].tokens
            if number:
                ways.setdefault(way, []).append(1e3 * ran.served[0].first_s)
        if tokens.get(_HOST, tokens[_WARM]) != tokens[_WARM]:
            raise WrongNumbers(f"{name}: {tokens} by two ways to have the same prefix")
    for way, first_ms in ways.items():
        yield Measured(f"{name}, {way}", "first token", "ms", first_ms)


_COMPUTED, _WARM, _HOST = "computed", "vLLM's own cache", "that cache emptied"
WAYS: Final = (_COMPUTED, _WARM, _HOST)
"""How a prefix comes: the last one needs tiers."""


def _of_restart(model: ServedModel, settings: Settings, number: int) -> tuple[Workload, Workload]:
    """Requests that share a prefix, and one long prompt: the same ones in each process."""
    prefix = model.tokens(settings.seed, _SHARED_TOKENS, 4, number).tolist()
    shared = [prefix + model.tokens(settings.seed, _OWN_TOKENS, 5, number, each).tolist() for each in range(_SHARING)]
    long_prompt = model.tokens(settings.seed, _LONG_TOKENS, 6, number).tolist()
    return _prompts(shared, _OUT_TOKENS), _prompts([long_prompt], 2)


def measure_before_restart(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Compute the prompts, and serve them out of vLLM's own cache: what a restart is held against."""
    for number in range(settings.repeat + 1):
        for workload in _of_restart(model, settings, number):
            vllm.run(workload, keep=True)
    yield from _served_again(vllm, model, settings, "vLLM's own cache, before it")
    if has_tiers:
        flush_tiers()


def measure_behind_restart(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Serve the same prompts, which the disk tier has, or a holder."""
    yield from _served_again(vllm, model, settings, "disk tier" if has_tiers else "memory of a holder")


def _served_again(vllm: Vllm, model: ServedModel, settings: Settings, way: str) -> Iterator[Measured]:
    name, seconds, first_ms = f"{model.name} restart", list[float](), list[float]()
    for number in range(settings.repeat + 1):
        shared, long_prompt = (vllm.run(workload, keep=True) for workload in _of_restart(model, settings, number))
        _check_cached(vllm, name, _HOST, shared, len(shared.served) * _SHARED_TOKENS)
        _check_cached(vllm, name, _HOST, long_prompt, _LONG_TOKENS)
        seconds.append(shared.seconds)
        first_ms.append(1e3 * long_prompt.served[0].first_s)
    yield Measured(f"{name}: {_SHARED_TEXT}, {way}", "total", "s", seconds[1:])
    yield Measured(f"{name}: a prompt of {_LONG_TOKENS}, {way}", "first token", "ms", first_ms[1:])


def measure_conversations(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Conversations in rounds, other ones in each run."""
    sizes = Conversations.of(small=settings.small)
    talks = [sizes.drawn(settings.seed, number, model.prompt_ids) for number in range(1 + settings.repeat)]
    runs = [in_rounds(vllm, talk, sizes.out) for talk in talks][1:]
    name = f"{model.name} conversations: {sizes.text(talks[1])}"
    num_out = sizes.count * sizes.turns * sizes.out
    yield Measured(name, "throughput", "tok/s", [num_out / run.seconds for run in runs])
    yield Measured(name, "tokens cached", "%", [100 * run.cached_tokens / run.prompt_tokens for run in runs])


def measure_bursts(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Bursts of requests that were never there before. Behind each, another engine may have its turn.

    The first one compiles, and has no samples.
    """
    total_bytes = bytes_of_turns(settings)
    count = requests_of_burst(total_bytes, model.row_bytes)
    burst_bytes = count * (_BURST_IN + _BURST_OUT) * model.row_bytes
    name = (
        f"{model.name} turns: bursts of {count} requests, {_BURST_IN} in, {_BURST_OUT} out, "
        f"{format_bytes(burst_bytes)} of {format_bytes(total_bytes)}, first tokens within {_FIRST_WITHIN_S:g} s"
    )
    for number in range(settings.repeat + 1):
        prompts = [model.tokens(settings.seed, _BURST_IN, 7, number, each).tolist() for each in range(count)]
        ran = vllm.run(_prompts(prompts, _BURST_OUT), keep=True)
        for metric, unit, samples in (
            ("goodput", "tok/s", [goodput(ran, _FIRST_WITHIN_S)]),
            ("throughput", "tok/s", [count * _BURST_OUT / ran.seconds]),
            ("first token", "ms", [1e3 * each.first_s for each in ran.served]),
        ):
            yield Measured(name, metric, unit, samples if number else [])


def goodput(ran: ServedRun, first_within_s: float) -> float:
    """Output tokens a second of the requests whose first token came within a limit."""
    return sum(len(each.tokens) for each in ran.served if each.first_s <= first_within_s) / ran.seconds


def _three_ways(vllm: Vllm, workload: Workload, has_tiers: bool) -> Iterator[tuple[str, ServedRun]]:
    yield _COMPUTED, vllm.run(workload)
    yield _WARM, vllm.run(workload, keep=True)
    if has_tiers:
        flush_tiers()
        yield _HOST, vllm.run(workload)  # which empties the cache first


def flush_tiers() -> None:
    """Wait until the tiers have what they were given. Raises: WrongNumbers."""
    connector = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
    if not connector._store.flush(_END_S):
        raise WrongNumbers("the tiers have not got what they were given")
    time.sleep(_QUIET_S)


def _check_cached(vllm: Vllm, name: str, way: str, ran: ServedRun, tokens: int) -> None:
    least = {_COMPUTED: 0, _WARM: 0.98 * tokens, _HOST: 0.9 * tokens}[way]
    if ran.cached_tokens < least:
        raise WrongNumbers(f"{name}, {way}: {ran.cached_tokens} tokens were cached, of {tokens}; {vllm.connector_counts()}")


def _prompts(prompts: list[list[int]], num_out: int) -> Workload:
    return at_once([np.array(prompt, np.int32) for prompt in prompts], num_out)


class _Watch:
    """The host's time in the connector's calls, by step."""

    def __init__(self) -> None:
        self.worker_us: list[float] = []
        self.idle_us: list[float] = []
        self.scheduler_us: list[float] = []
        self._step, self._was_busy = defaultdict[str, float](float), False
        connector = import_module("vmmkv.adapters.vllm.connector").VmmkvConnector
        for name in (*_WORKER_CALLS, *_SCHEDULER_CALLS):
            setattr(connector, name, self._timed(name, getattr(connector, name)))

    def clear(self) -> None:
        """Forget what was seen."""
        self.worker_us.clear()
        self.idle_us.clear()
        self.scheduler_us.clear()

    def _timed(self, name: str, call: Callable[..., Any]) -> Callable[..., Any]:
        side = "worker" if name in _WORKER_CALLS else "scheduler"

        def timed(connector: Any, *arguments: Any, **named: Any) -> Any:
            began_us = now_us()
            try:
                return call(connector, *arguments, **named)
            finally:
                self._step[side] += now_us() - began_us
                if name == _WORKER_CALLS[0]:
                    self._was_busy = connector._mover.is_busy
                if name == _WORKER_CALLS[-1]:
                    self.worker_us.append(self._step.pop("worker", 0))
                    plan = connector._bound.plan
                    if not (self._was_busy or connector._mover.is_busy or plan.stores or plan.loads):
                        self.idle_us.append(self.worker_us[-1])
                elif name == _SCHEDULER_CALLS[-1]:
                    self.scheduler_us.append(self._step.pop("scheduler", 0))

        return timed
