"""vLLM with vmmkv's tiers behind it, against vLLM alone, each in a process of its own, one after the other.

    nano      requests without reuse: what tiers cost that nobody needs, in throughput, and in the host's time for each step
    shared    requests that share a prefix: computed, out of vLLM's own cache, and with that emptied, out of the host tier
    first     the first token of a long prompt, in the same three ways

vLLM's own cache is emptied by `reset_prefix_cache`, when the tiers have what they were given.
"""

import multiprocessing
import os
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from importlib import import_module
from typing import Any, Final, NamedTuple

import numpy as np

from bench.figures import Drawing, Question
from bench.harness import Recorder, Settings, WrongNumbers, now_us
from bench.systems import lacks_vllm
from bench.systems.models import ServedModel, model_of
from bench.systems.outside import Vllm
from bench.systems.runs import ServedRun
from bench.workloads import Workload, at_once, uniform
from vmmkv_server.console import end

PARTS: Final = ("nano", "shared", "first")
ALONE, TIERED = "vLLM", "vLLM, vmmkv's tiers"
QUESTIONS: Final = (
    Question("vLLM with tiers that nobody needs, against vLLM alone", "throughput", ALONE, ours=TIERED, part="nano"),
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
_HOST_BUDGET: Final = "32GiB"
_SHARED_TOKENS, _OWN_TOKENS, _LONG_TOKENS = 4096, 64, 8192
_OUT_TOKENS: Final = 32
_FIRSTS: Final = 5
_WORKER_CALLS: Final = (
    *("handle_preemptions", "start_load_kv", "wait_for_save"),
    *("get_finished", "build_connector_worker_meta"),
)
_SCHEDULER_CALLS: Final = (
    *("get_num_new_matched_tokens", "update_state_after_alloc"),
    *("build_connector_meta", "update_connector_output"),
)
_END_S: Final = 60.0
_QUIET_S: Final = 0.1
"""Behind the last store: the scheduler does not trust what it was told for so long."""


class Measured(NamedTuple):
    """Samples of a metric, as a process sends them; None for `metric`: a failure, whose text is `unit`."""

    workload: str
    metric: str
    unit: str
    samples: list[float]


def cases_of(settings: Settings) -> dict[str, tuple[str, ...]]:
    """The systems, for each part."""
    return dict.fromkeys(PARTS, (ALONE, TIERED))


def check(settings: Settings) -> None:
    """Raises: ValueError where vLLM cannot run."""
    if why := lacks_vllm(settings):
        raise ValueError(f"engines needs vLLM on a GPU: {why}")


def run(recorder: Recorder) -> None:
    """Each system, in a process of its own: vLLM takes all memory, and gives none back before its process ends."""
    settings = recorder.settings
    for system in recorder.track([each for each in (ALONE, TIERED) if settings.wants_case(each)]):
        with recorder.guarded(settings.shape.name, system):
            for measured in _measured_apart(settings, system):
                recorder.samples(measured.workload, system, measured.metric, measured.unit, measured.samples)
                recorder.note(f"{measured.workload}: {measured.metric}")


def _measured_apart(settings: Settings, system: str) -> Iterator[Measured]:
    """What another process measures, as it comes. Raises: WrongNumbers, telling its error."""
    context = multiprocessing.get_context("spawn")
    receiver, sender = context.Pipe(duplex=False)
    process = context.Process(target=_measure, args=(sender, settings, system))
    process.start()
    sender.close()
    try:
        while (received := receiver.recv()) is not None:
            if isinstance(received, str):
                raise WrongNumbers(received)
            yield received
    except EOFError:
        raise WrongNumbers(f"the process of {system} has ended in the middle") from None
    finally:
        process.join(_END_S)
        process.kill()


def _measure(sender: Any, settings: Settings, system: str) -> None:
    """In a process of its own: measure everything that was asked for, and send it."""
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # the connector is here, and is asked when it is done
    try:
        model = model_of(settings.shape.name, tiny=settings.small)
        extra = {"kv_connector_extra_config": {"kv_host_budget": _HOST_BUDGET, "fingerprint": "bench"}}
        options: dict[str, Any] = {"kv_transfer_config": {**_CONNECTOR, **extra}} if system == TIERED else {}
        vllm = Vllm(model, settings, load_format="dummy", **options)
        parts = {"nano": _nano, "shared": _shared, "first": _first}
        for part in PARTS:
            for measured in parts[part](vllm, model, settings, system == TIERED) if settings.wants(part) else ():
                sender.send(measured)
        sender.send(None)
    except BaseException as error:
        sender.send(f"{type(error).__name__}: {error}")
        raise
    finally:
        sender.close()
        end(0)


def _nano(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Requests without reuse: other ones in each run."""
    count, name = settings.sequences or 256, ""
    seconds: list[float] = []
    watch = _Watch() if has_tiers else None
    for number in range(settings.repeat + 1):
        workload = uniform(seed=settings.seed + number, vocabulary=model.prompt_ids, count=count, max_tokens=2048)
        name = f"{model.name} nano: {count} requests, {workload.text}"
        if watch is not None:
            watch.clear()
        ran = vllm.run(workload)
        num_tokens = sum(ask.num_out for ask in workload.asks)
        if number:  # the first one compiles
            seconds.append(num_tokens / ran.seconds)
    yield Measured(name, "throughput", "tok/s", seconds)
    if watch is not None:
        yield Measured(name, "host time of tiers, a step", "us", watch.worker_us)
        yield Measured(name, "host time of tiers, a step without stores", "us", watch.idle_us)
        yield Measured(name, "host time of tiers in the scheduler, a step", "us", watch.scheduler_us)


def _shared(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """Requests that share a prefix, three times."""
    count = min(settings.sequences or 128, 128)
    name = f"{model.name} shared: {count} requests, {_SHARED_TOKENS} shared + {_OWN_TOKENS} in, {_OUT_TOKENS} out"
    ways: dict[str, list[float]] = {}
    for number in range(settings.repeat + 1):
        prefix = model.tokens(settings.seed, _SHARED_TOKENS, 1, number).tolist()
        own = [model.tokens(settings.seed, _OWN_TOKENS, 2, number, each).tolist() for each in range(count)]
        workload = _prompts([prefix + each for each in own], _OUT_TOKENS)
        for way, ran in _three_ways(vllm, workload, has_tiers):
            _check_cached(name, way, ran, count * _SHARED_TOKENS)
            if number:
                ways.setdefault(way, []).append(ran.seconds)
    for way, runs_s in ways.items():
        yield Measured(f"{name}, {way}", "total", "s", runs_s)


def _first(vllm: Vllm, model: ServedModel, settings: Settings, has_tiers: bool) -> Iterator[Measured]:
    """One request of a long prompt, three times."""
    ways: dict[str, list[float]] = {}
    name = f"{model.name} first: a prompt of {_LONG_TOKENS}"
    for number in range(_FIRSTS + 1):
        workload = _prompts([model.tokens(settings.seed, _LONG_TOKENS, 3, number).tolist()], 2)
        tokens: dict[str, list[int]] = {}
        for way, ran in _three_ways(vllm, workload, has_tiers):
            _check_cached(name, way, ran, _LONG_TOKENS - 16)
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


def _three_ways(vllm: Vllm, workload: Workload, has_tiers: bool) -> Iterator[tuple[str, ServedRun]]:
    yield _COMPUTED, vllm.run(workload)
    yield _WARM, vllm.run(workload, keep=True)
    if has_tiers:
        _flush()
        yield _HOST, vllm.run(workload)  # which empties the cache first


def _flush() -> None:
    """Wait until the tiers have what they were given. Raises: WrongNumbers."""
    connector = import_module("vllm.distributed.kv_transfer").get_kv_transfer_group()
    if not connector._store.flush(_END_S):
        raise WrongNumbers("the tiers have not got what they were given")
    time.sleep(_QUIET_S)


def _check_cached(name: str, way: str, ran: ServedRun, tokens: int) -> None:
    least = {_COMPUTED: 0, _WARM: 0.98 * tokens, _HOST: 0.9 * tokens}[way]
    if ran.cached_tokens < least:
        raise WrongNumbers(f"{name}, {way}: {ran.cached_tokens} tokens were cached, of {tokens}")


def _prompts(prompts: list[list[int]], num_out: int) -> Workload:
    return at_once([np.array(prompt, np.int32) for prompt in prompts], num_out)


class _Watch:
    """The host's time in the connector's calls, by step."""

    def __init__(self) -> None:
        self.worker_us: list[float] = []
        self.idle_us: list[float] = []
        self.scheduler_us: list[float] = []
        self._step = defaultdict[str, float](float)
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
                if name == _WORKER_CALLS[-1]:
                    self.worker_us.append(self._step.pop("worker", 0))
                    if not connector._mover.is_busy:
                        self.idle_us.append(self.worker_us[-1])
                elif name == _SCHEDULER_CALLS[-1]:
                    self.scheduler_us.append(self._step.pop("scheduler", 0))

        return timed
