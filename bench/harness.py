"""What every suite is given: settings, clocks, and a recorder of rows and progress.

settings = Settings(...)                 device, model shape, how long to measure
recorder.track(cases)                    a loop whose progress is shown
with recorder.guarded(workload):         a failure is printed, recorded, and the suite goes on
    check(...)                           wrong numbers raise WrongNumbers, and are not timed
    recorder.samples(workload, system, "step", "us", time_for(run, device, seconds))
"""

import gc
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final, NamedTuple, TypeVar

import torch
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from bench.rows import FAILED, GPU, Row, RowFile, exact, figure, summarize
from vmmkv import KVLayout
from vmmkv.config import KNOWN_VARIABLES, PREFIX
from vmmkv_server.console import die_with_parent

HBM_BYTES_PER_S: Final = 4.5e12
"""What an H200 reads at best: the bound of everything that moves bytes."""
BF16_FLOPS: Final = 7.2e14
"""Dense bf16 operations a second that an H200 reaches at best: the bound of everything that computes."""

_Item = TypeVar("_Item")
_Ready = TypeVar("_Ready")


class WrongNumbers(Exception):
    """What was to be timed gives wrong results. Nothing is reported of it."""


# settings


class Shape(NamedTuple):
    """The parts of a model that a KV cache sees, and the bytes of its weights, which every decode step reads too."""

    name: str
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: torch.dtype
    weight_bytes: int

    @property
    def layout(self) -> KVLayout:
        """One group, all layers in a row."""
        return KVLayout.uniform(layers=self.layers, kv_heads=self.kv_heads, head_dim=self.head_dim, dtype=self.dtype)


_SHAPES = (
    Shape("llama-3.1-8b", 32, 32, 8, 128, torch.bfloat16, 16_060_522_496),
    Shape("qwen3-0.6b", 28, 16, 8, 128, torch.bfloat16, 1_192_099_840),
    Shape("smollm2-135m", 30, 9, 3, 64, torch.bfloat16, 269_030_016),
    # Rows of 64 KiB in one layer: few steps cross many pages, and a CPU still attends to them in milliseconds.
    Shape("wide", 1, 32, 32, 256, torch.float32, 0),
)
SHAPES: Final = {shape.name: shape for shape in _SHAPES}
MODEL_SHAPES: Final = _SHAPES[:3]
"""Those of real models."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """One run. Fields are the command line's options; None and empty leave the choice to the suite.

    Raises: ValueError for GPUs or files that are not there.
    """

    device: torch.device
    shape: Shape
    shapes: tuple[Shape, ...] = ()
    """Of suites that measure several models: those to measure. Empty for `shape` alone."""
    quick: bool = False
    """Measure briefly, to see that everything works. The figures are noise."""
    seed: int = 0
    sequences: int | None = None
    steps: int | None = None
    parts: tuple[str, ...] = ()
    cases: tuple[str, ...] = ()
    fa3: Path | None = None
    """FlashAttention-3's library."""
    repeat: int = 2
    """Timed runs of each serving workload."""
    tensor_parallel_sizes: tuple[int, ...] = ()
    """GPUs of each engine, or processes on a CPU, from `device` on; empty for one."""
    tokenizer: Path | None = None
    dir: Path | None = None
    """Where the disk tier's files go."""

    def __post_init__(self) -> None:
        count = torch.cuda.device_count() - (self.device.index or 0)
        if self.on_gpu and (size := max(self.tensor_parallel_sizes, default=1)) > count:
            raise ValueError(f"--tensor-parallel-size {size}: there are {count} GPUs from {self.device} on")
        if self.fa3 is not None and not self.fa3.is_file():
            raise ValueError(f"--fa3 {self.fa3}: no such file; it is the library _vllm_fa3_C.abi3.so of vLLM's wheel")
        if self.dir is not None and not self.dir.is_dir():
            raise ValueError(f"--dir {self.dir}: no such directory; name one on the disk that is to be measured")

    @property
    def on_gpu(self) -> bool:
        """Whether the device is a GPU."""
        return self.device.type == "cuda"

    @property
    def small(self) -> bool:
        """Whether sizes are such that a CPU is done in seconds."""
        return self.quick or not self.on_gpu

    def wants(self, part: str) -> bool:
        """Whether a part of the suite was asked for, by name or by naming none."""
        return part in self.parts or not self.parts

    def wants_case(self, case: str) -> bool:
        """Whether a case was asked for, by name or by naming none."""
        return case in self.cases or not self.cases


# clocks

_WARM_S: Final = 0.5
"""How long a GPU is kept busy before the first measurement: its clock rises from idle within some 100 ms."""
_LEAST_RUNS: Final = 5
_MOST_RUNS: Final = 500
_HEAD_START_CYCLES: Final = 200_000
"""About 0.1 ms: longer than the host takes to launch a graph."""


def now_us() -> float:
    """A clock in microseconds that never goes back."""
    return time.perf_counter_ns() / 1e3


class Stopwatch:
    """Adds up in `spent_us` what calls take the host."""

    spent_us = 0.0

    def timed(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """A call that is counted."""

        def timed(*arguments: Any, **named: Any) -> Any:
            began_us = now_us()
            try:
                return call(*arguments, **named)
            finally:
                self.spent_us += now_us() - began_us

        return timed


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
    """Keep the current stream busy, and nothing else of the GPU: one thread reads the clock."""
    torch.cuda._sleep(cycles)  # type: ignore[no-untyped-call]


def sleep_cycles(device: torch.device, duration_us: float) -> int:
    """The argument by which `device_sleep` takes this long, measured on a warm clock."""
    probe = 10_000_000
    device_sleep(probe)
    samples_us = [event_us(device, lambda: device_sleep(probe)) for _ in range(5)]
    return int(probe * duration_us / summarize(samples_us).p50)


def time_for(run: Callable[[], object], device: torch.device, seconds: float) -> list[float]:
    """Microseconds of each of as many runs as take about so long, at least 5 of them. `run` has run before.

    On a GPU it is captured as a graph: kernels are timed, and not their launches.
    """
    replay = capture(run, device).replay if device.type == "cuda" else run
    clock = _queued_us if device.type == "cuda" else wall_us
    clock(device, replay)  # to warm up
    estimate_us = clock(device, replay)
    num_runs = int(min(_MOST_RUNS, max(_LEAST_RUNS, seconds * 1e6 / estimate_us)))
    return [clock(device, replay) for _ in range(num_runs)]


def capture(run: Callable[[], object], device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph of what `run` launches. It has run before: what compiles or allocates on first use cannot be captured."""
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
    return event_us(device, run)


def event_us(device: torch.device, run: Callable[[], object]) -> float:
    """What a GPU takes, from the moment that it begins."""
    began, ended = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    began.record(torch.cuda.current_stream(device))
    run()
    ended.record(torch.cuda.current_stream(device))
    ended.synchronize()
    return float(began.elapsed_time(ended)) * 1e3


def wall_us(device: torch.device, run: Callable[[], object]) -> float:
    """What a call takes the host."""
    began_us = now_us()
    run()
    return now_us() - began_us


def synchronize(device: torch.device) -> None:
    """Wait for a GPU. Nothing on a CPU."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def release_memory(device: torch.device) -> None:
    """Collect, and give what torch's allocator keeps back to a GPU: the next user may not be torch."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()


# programs

_START_S: Final = 300.0
_STOP_S: Final = 60.0
_SAID_CHARACTERS: Final = 4096
"""Of the end of what a program has said: what goes with a failure."""


@contextmanager
def started(command: Sequence[str], ready: Callable[[str], _Ready | None], **variables: str) -> Iterator[_Ready]:
    """A program until the block ends, and what `ready` makes of what the program has said, when that is true.

    Raises: WrongNumbers if it does not start. What fails, here or in the block, gets the end of what it has said as a note.
    """
    # Without variables that set options of `vmmkv serve`: the engine in this process reads none of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in KNOWN_VARIABLES}
    with TemporaryFile() as log:
        process = subprocess.Popen(
            command, stdout=log, stderr=log, env=environment | variables, start_new_session=True, preexec_fn=die_with_parent()
        )

        def said() -> str:
            return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")

        try:
            deadline_s = time.monotonic() + _START_S
            while not (answer := ready(said())):
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise WrongNumbers(f"{command[0]} does not start")
                time.sleep(0.1)
            yield answer
        except BaseException as error:
            error.add_note(f"what it said last:\n{said()[-_SAID_CHARACTERS:] or '(nothing)'}")
            raise
        finally:
            process.terminate()
            with suppress(subprocess.TimeoutExpired):
                process.wait(_STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()


# rows and progress

_BOUND_BY_HARDWARE: Final = frozenset({"us", "ms", "s", "tok/s", "GB/s", "TFLOP/s"})


def console(log_columns: int) -> Console:
    """On stdout. Without a terminal rich takes eighty columns, which break a log's tables; COLUMNS is heeded."""
    told = os.environ.get("COLUMNS", "").isdigit()
    return Console(width=None if told or sys.stdout.isatty() else log_columns)


class Recorder:
    """Takes the rows of one suite, prints what is to be said on stdout, and shows progress on stderr, in lines.

    A bar that repaints would take Python's lock in the middle of what is measured.
    """

    def __init__(self, suite: str, settings: Settings, file: RowFile) -> None:
        self.suite: Final = suite
        self.settings: Final = settings
        self.file: Final = file
        self.rows: list[Row] = []
        self._console = console(128)
        self._began_s = time.monotonic()

    @property
    def failed(self) -> list[str]:
        """The workloads that failed."""
        return [row.workload for row in self.rows if row.metric == FAILED]

    def samples(
        self, workload: str, system: str, metric: str, unit: str, samples: Sequence[float], bound: float | None = None
    ) -> None:
        """A row of samples; none if there are none. Bounds of times and rates are an H200's, and left out on a CPU."""
        if len(samples):
            self._add(Row(self.suite, workload, system, metric, unit, summarize(samples), bound))

    def figure(
        self, workload: str, system: str, metric: str, unit: str, value: float, count: int = 1, bound: float | None = None
    ) -> None:
        """A row of a single figure over `count` things."""
        self._add(Row(self.suite, workload, system, metric, unit, exact(value, count), bound))

    def rates(self, workload: str, system: str, num_tokens: int, runs_s: Sequence[float], bound_s: float | None = None) -> None:
        """Rows of the seconds that runs of so many tokens took, and of the tokens of a second."""
        self.samples(workload, system, "total", "s", runs_s, bound_s)
        per_s = [num_tokens / each for each in runs_s]
        self.samples(workload, system, "throughput", "tok/s", per_s, num_tokens / bound_s if bound_s else None)

    def _add(self, row: Row) -> None:
        """Keep a row, and write it through."""
        if row.unit in _BOUND_BY_HARDWARE and not self.settings.on_gpu:
            row = replace(row, bound=None)
        self.rows.append(row)
        self.file.append(row)

    @contextmanager
    def guarded(self, workload: str, system: str = "-") -> Iterator[None]:
        """A failure within is printed, has a row, and the suite goes on; unless the GPU's context is lost."""
        try:
            yield
        except Exception as error:
            self.say(f"\n{workload}, {system} failed:\n{''.join(traceback.format_exception(error))}")
            self._add(Row(self.suite, workload, system, FAILED, "runs", exact(1, 1)))
            # The frames of a traceback hold the memory that the next system needs.
            traceback.clear_frames(error.__traceback__)
        else:
            return
        release_memory(self.settings.device)
        synchronize(self.settings.device)  # raises if the context is lost

    def say(self, text: str) -> None:
        """A line on stdout."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def note(self, text: str) -> None:
        """What goes on now, with the time since the beginning."""
        print(f"{self.suite}: {time.monotonic() - self._began_s:6.1f} s  {text}", file=sys.stderr, flush=True)

    def track(self, items: Iterable[_Item], name: Callable[[_Item], str] = str) -> Iterator[_Item]:
        """The items; a note says which is beginning, by `name`, of how many."""
        items = list(items)
        for number, item in enumerate(items, 1):
            self.note(f"{number}/{len(items)} {name(item)}")
            yield item

    def print_tables(self) -> None:
        """All rows, a table for each workload."""
        provenance = self.file.provenance
        quick = "; quick: figures are noise" if provenance.quick else ""
        for workload in dict.fromkeys(row.workload for row in self.rows):
            self.say(f"\n{self.suite}: {workload} ({provenance.device}, driver {provenance.driver}{quick})")
            rows = [_cells(row) for row in self.rows if row.workload == workload]
            self._console.print(table(("system", "metric"), ("p20", "p50", "p80", "p99", "n", "bound"), rows))


def table(words: Sequence[str], figures: Sequence[str], rows: Iterable[Sequence[str]]) -> Table:
    """Columns of words, of figures, and of units."""
    drawn = Table(box=SIMPLE_HEAD)
    for heading in words:
        drawn.add_column(heading, overflow="fold")
    for heading in figures:
        drawn.add_column(heading, justify="right", no_wrap=True)
    drawn.add_column("unit", no_wrap=True)
    for row in rows:
        drawn.add_row(*row)
    return drawn


def _cells(row: Row) -> list[str]:
    summary, bound = row.summary, "" if row.bound is None else figure(row.bound)
    figures = [figure(value) for value in (summary.p20, summary.median, summary.p80, summary.p99)]
    return [row.system, row.metric, *figures, str(summary.n), bound, row.unit]


# the GPU

_ASKED: Final = {
    "clocks.sm": ("SM clock", "MHz"),
    "clocks.mem": ("memory clock", "MHz"),
    "power.draw": ("power", "W"),
    "temperature.gpu": ("temperature", "°C"),
}
"""By nvidia-smi's name, the metric and its unit."""
_EVERY_S: Final = 5
"""Between samples: what one takes of the driver must not be seen in what is measured."""


@contextmanager
def gpu_watched(recorder: Recorder, workload: str) -> Iterator[None]:
    """Rows of clocks, power and temperature over the block, as nvidia-smi says. None on a CPU, or without nvidia-smi."""
    device = recorder.settings.device
    uuid = getattr(torch.cuda.get_device_properties(device), "uuid", None) if device.type == "cuda" else None
    asked = [f"--id=GPU-{uuid}", f"--query-gpu={','.join(_ASKED)}", "--format=csv,noheader,nounits", f"--loop={_EVERY_S}"]
    with TemporaryFile("w+") as said:
        try:
            process = uuid and subprocess.Popen(["nvidia-smi", *asked], stdout=said, stderr=subprocess.DEVNULL)
        except OSError:
            process = None
        try:
            yield
        finally:
            if process:
                process.kill()
                process.wait(30)
                said.seek(0)
                lines = [line.split(",") for line in said.read().splitlines() if line.count(",") == len(_ASKED) - 1]
                for (metric, unit), column in zip(_ASKED.values(), zip(*lines, strict=True), strict=False):
                    # A value that the GPU does not know is no number.
                    samples = [float(each) for each in column if each.strip().replace(".", "", 1).isdigit()]
                    recorder.samples(f"{workload}: GPU", GPU, metric, unit, samples)
