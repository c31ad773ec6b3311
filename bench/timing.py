"""Samples, their percentiles, and the clocks that take them."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np
import torch

_WARM_S: Final = 0.5
"""How long a GPU is kept busy before the first measurement: its clock rises from idle within some 100 ms."""

_LEAST_RUNS: Final = 5
_MOST_RUNS: Final = 500

_HEAD_START_CYCLES: Final = 200_000
"""About 0.1 ms: longer than the host takes to launch a graph."""


class WrongNumbers(Exception):
    """What was to be timed gives wrong results. Nothing is reported of it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """Percentiles of `n` samples."""

    p20: float
    p50: float
    p80: float
    p99: float
    n: int


def summarize(samples: Sequence[float]) -> Summary:
    """The percentiles, without interpolation: each is a sample that was seen. Raises ValueError if there is none."""
    if not len(samples):
        raise ValueError("there are no samples to summarize")
    p20, p50, p80, p99 = np.percentile(np.asarray(samples, dtype=np.float64), (20, 50, 80, 99), method="inverted_cdf")
    return Summary(p20=float(p20), p50=float(p50), p80=float(p80), p99=float(p99), n=len(samples))


def exact(value: float, n: int) -> Summary:
    """A count or a total over `n` samples: it has no distribution."""
    return Summary(p20=value, p50=value, p80=value, p99=value, n=n)


def middle(summary: Summary) -> float:
    """The median; of two samples, their mean."""
    return (summary.p20 + summary.p80) / 2 if summary.n == 2 else summary.p50


def now_us() -> float:
    """A clock in microseconds that never goes back."""
    return time.perf_counter_ns() / 1e3


def warm_clock(device: torch.device) -> None:
    """Keep a GPU busy until its clock is up. Nothing on a CPU."""
    if device.type != "cuda":
        return
    matrix = torch.ones(4096, 4096, dtype=torch.bfloat16, device=device)
    until_us = now_us() + _WARM_S * 1e6
    while now_us() < until_us:
        for _ in range(16):
            torch.mm(matrix, matrix)
        torch.cuda.synchronize(device)


def device_sleep(cycles: int) -> None:
    """Keep the current stream busy, and nothing else of the GPU: one thread that reads the clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def sleep_cycles(device: torch.device, duration_us: float) -> int:
    """The argument by which `device_sleep` takes this long, measured on a warm clock."""
    probe = 10_000_000
    device_sleep(probe)
    samples_us = [_event_us(device, lambda: device_sleep(probe)) for _ in range(5)]
    return int(probe * duration_us / summarize(samples_us).p50)


def time_for(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Microseconds of each of as many runs as take about so long, and at least _LEAST_RUNS of them. `run` has run before.

    On a GPU it is captured as a graph, so that it is the kernels that are timed and not their launches.
    """
    replay = capture(run, device).replay if device.type == "cuda" else run
    clock = _queued_us if device.type == "cuda" else _wall_us
    clock(device, replay)  # to warm up
    estimate_us = clock(device, replay)
    num_runs = int(min(_MOST_RUNS, max(_LEAST_RUNS, seconds * 1e6 / estimate_us)))
    return [clock(device, replay) for _ in range(num_runs)]


def capture(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches; it has run before, since what compiles or allocates on first use cannot be captured."""
    stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
    stream.wait_stream(torch.cuda.current_stream(device))
    with torch.cuda.stream(stream):
        run()
    torch.cuda.current_stream(device).wait_stream(stream)
    torch.cuda.synchronize(device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        run()
    return graph


def _queued_us(device: torch.device, run: Callable[[], object]) -> float:
    """Behind a kernel that spins for longer than a launch takes, so that the GPU does not wait for the host meanwhile."""
    device_sleep(_HEAD_START_CYCLES)
    return _event_us(device, run)


def _event_us(device: torch.device, run: Callable[[], object]) -> float:
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record(torch.cuda.current_stream(device))
    run()
    ended.record(torch.cuda.current_stream(device))
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e3


def _wall_us(device: torch.device, run: Callable[[], object]) -> float:
    began_us = now_us()
    run()
    return now_us() - began_us
