"""Sums, gathers and broadcasts over ranks, each a process with a GPU of its own, by size and by way.

    sum          by NCCL, and where the GPUs map each other's memory by `sum_ranks`
    gather       of parts of logits, by NCCL
    broadcast    of a step's inputs, by NCCL

On a GPU they are timed within graphs, as in a step: `_REPEATS` in each. On CPUs there is gloo, and the time is the host's.
"""

import multiprocessing
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Final, NamedTuple

import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from bench.figures import Drawing
from bench.harness import Recorder, Settings, WrongNumbers, event_us, synchronize, wall_us
from vmmkv.units import KIB, MIB, format_bytes
from vmmkv_server.console import end
from vmmkv_server.engine.collectives import SYMMETRIC_BYTES, Collectives

FIGURES: Final = tuple(
    Drawing(what, f"{what}s over ranks", (what,), rf"(?P<panel>.+): {what} of (?P<x>[\d.]+) KiB", "KiB")
    for what in ("sum", "gather", "broadcast")
)

_WIDTH: Final = 4096
_SUMS_BYTES: Final = tuple(2 * _WIDTH << shift for shift in range(11))
"""8 KiB to 8 MiB: a step of Llama-3.1-8B has 8 KiB for each token."""
_BROADCAST_BYTES: Final = (256, 16 * KIB, 256 * KIB)
"""About those of a decode step of one row, of one of 256, and of a prefill of 8,192 tokens."""
_GATHERS_BYTES: Final = (128 * KIB, 8 * MIB, 32 * MIB)
"""Of each of two ranks, for 1, 64 and 256 rows of Llama-3.1-8B's logits."""
_REPEATS: Final = 20
_WARM: Final = 2
"""Samples that are left out."""
_MEET_S: Final = 60.0
_SPAWN: Final = multiprocessing.get_context("spawn")


class Way(NamedTuple):
    """One way to do it."""

    operation: str
    system: str
    size_bytes: int
    launch: Callable[[torch.Tensor], torch.Tensor]
    """Gives the result; of sums and broadcasts in place."""


def check(settings: Settings) -> None:
    """Raises: ValueError where there are no two GPUs."""
    if settings.on_gpu and torch.cuda.device_count() < 2:
        raise ValueError("collectives needs two GPUs, and there is one; --device cpu runs it over processes")


def run(recorder: Recorder) -> None:
    """All ways by each number of ranks. Rank 0 is this process."""
    settings = recorder.settings
    for num_ranks in settings.tensor_parallel_sizes or (2,):
        with recorder.guarded(f"{num_ranks} ranks"), ExitStack() as undo:
            path = Path(undo.enter_context(TemporaryDirectory(prefix="vmmkv-bench-"))) / "store"
            for rank in range(1, num_ranks):
                process = _SPAWN.Process(target=_measure_too, args=(rank, num_ranks, path, settings), daemon=True)
                process.start()
                undo.callback(process.kill)
                undo.callback(process.join, _MEET_S)  # before: it ends behind the last measurement
            collectives = _connected(undo, 0, num_ranks, path, settings.device)
            for way, samples_us in _measured(collectives, settings.device, settings.small):
                workload = f"{num_ranks} ranks: {way.operation} of {way.size_bytes / KIB:g} KiB"
                recorder.samples(workload, way.system, way.operation, "us", samples_us)


def _measure_too(rank: int, num_ranks: int, path: Path, settings: Settings) -> None:
    """Another rank: it measures the same, and says nothing."""
    device = torch.device("cuda", (settings.device.index or 0) + rank) if settings.on_gpu else settings.device
    with ExitStack() as undo:
        for _ in _measured(_connected(undo, rank, num_ranks, path, device), device, settings.small):
            pass
        synchronize(device)
    end(0)  # not in the order in which Python forgets what NCCL waits for


def _connected(undo: ExitStack, rank: int, num_ranks: int, path: Path, device: torch.device) -> Collectives:
    if device.type == "cuda":
        undo.enter_context(torch.cuda.device(device))
    collectives = Collectives(rank, num_ranks)
    collectives.connect(FileStore(str(path), num_ranks), device, _MEET_S)
    undo.callback(collectives.abort)
    return collectives


def _ways(collectives: Collectives, device: torch.device) -> Iterator[Way]:
    """The same on all ranks, in order."""
    library, symmetric = "NCCL" if device.type == "cuda" else "gloo", collectives.symmetric
    for size_bytes in _SUMS_BYTES if device.type == "cuda" else _SUMS_BYTES[:3]:
        yield Way("sum", library, size_bytes, collectives.sum_by_group)
        if symmetric is not None and size_bytes * (collectives.num_ranks - 1) <= SYMMETRIC_BYTES:
            yield Way("sum", "symmetric memory", size_bytes, lambda tensor: symmetric.sum(tensor.view(-1, _WIDTH)).flatten())
    for size_bytes in _GATHERS_BYTES if device.type == "cuda" else _GATHERS_BYTES[:1]:
        yield Way("gather", library, size_bytes, collectives.gather)
    for size_bytes in _BROADCAST_BYTES:
        yield Way("broadcast", library, size_bytes, collectives.broadcast)


def _measured(collectives: Collectives, device: torch.device, small: bool) -> Iterator[tuple[Way, list[float]]]:
    """Each way, checked and then timed, in us of one. Raises: WrongNumbers."""
    clock, num_samples = event_us if device.type == "cuda" else wall_us, 5 if small else 50
    for way in _ways(collectives, device):
        check_way(collectives, device, way)
        tensor = torch.zeros(way.size_bytes // 2, dtype=torch.bfloat16, device=device)

        def repeat(tensor: torch.Tensor = tensor, way: Way = way) -> None:
            for _ in range(_REPEATS):
                way.launch(tensor)

        graph = torch.cuda.CUDAGraph() if device.type == "cuda" else None
        if graph is not None:
            with torch.cuda.graph(graph, capture_error_mode="thread_local"):
                repeat()
        call = repeat if graph is None else graph.replay
        yield way, [clock(device, call) / _REPEATS for _ in range(_WARM + num_samples)][_WARM:]
        if graph is not None:
            graph.reset()


def check_way(collectives: Collectives, device: torch.device, way: Way) -> None:
    """Small whole numbers: all ways have the same sum of them."""
    places = torch.arange(way.size_bytes // 2, device=device) % 17  # whole numbers below 256 are exact
    of_ranks = torch.stack([(places + 3 * rank).to(torch.bfloat16) for rank in range(collectives.num_ranks)])
    wanted = {"sum": of_ranks.sum(0), "broadcast": of_ranks[0], "gather": of_ranks}[way.operation]
    for _ in range(3):  # kernels over one buffer, one behind the other
        if not torch.equal(way.launch(of_ranks[collectives.rank].clone()), wanted):
            raise WrongNumbers(f"{way.operation} by {way.system} of {format_bytes(way.size_bytes)} is not that of the ranks")
