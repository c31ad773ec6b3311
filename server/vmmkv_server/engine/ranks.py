"""Tensor parallelism: one process for each device, of which rank 0 is the engine, and the others do as it does.

    rank 0   engine ── cache ── pool ──> mirrored driver ──> driver           model ──> its part of the weights
                                              │ calls                           │ forward passes, and their inputs
    rank r                                  worker ──────────> driver         worker ──> its part of the weights

Two seams carry all that the others need. A driver's call that succeeded on rank 0 is repeated on every rank, at the same place
of the same reservation, or of a host tier's memory. Rows have one size on all ranks, so page maps agree, whatever decided them.
A forward pass is repeated with the inputs that rank 0's device has. Nothing is decided twice: clocks, fences, requests,
grammars and random numbers are rank 0's alone.

Messages are int64 numbers, in one sequenced socket for each rank. A rank says that it is ready, answers `MEMORY`, and says why
it ends. A rank that fails ends the engine. All waits are bounded:

    for a rank's answer            by the time that `_receive` gives
    for the device, where known    by `wait_for`, which looks at the channels meanwhile
    for the device, in any call    a thread sees a rank that ends, and ends the collectives
"""

import contextlib
import enum
import json
import select
import socket
import subprocess
import sys
import tempfile
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from os import environ
from pathlib import Path
from typing import Any, Final, NoReturn, cast

import msgspec
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from vmmkv.driver.base import Access, Driver, Fence, Handle, MemoryInfo
from vmmkv.errors import DriverError
from vmmkv.units import round_up
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine.attention import AttentionMetadata, SharedPrefixes
from vmmkv_server.engine.collectives import Collectives, in_background
from vmmkv_server.engine.errors import EngineDied
from vmmkv_server.engine.kv_backend import KVBackend
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.uploads import ALIGNED_ELEMENTS

LOAD_S: Final = 1800.0
"""The longest time that a rank may take to load its weights."""
STEP_S: Final = 60.0
"""The longest time that a rank may keep the others waiting."""
MESSAGE_BYTES: Final = 1 << 17
_MAX_LIMITS: Final = 4096
"""Limits in one message."""
LAST_WORDS_S: Final = 3.0
"""Time for a rank that fails to say why."""
_GONE_S: Final = 10.0
"""Time for ranks that have said so to end."""
_NAP_S: Final = 1e-4


class RankFailed(EngineDied):
    """A rank has ended, is late, or could not repeat what rank 0 did. The engine ends."""


class Op(enum.IntEnum):
    """Operation that a message has a rank do, with the numbers behind it. Addresses and handles are rank 0's."""

    CONNECT = enum.auto()
    ROWS = enum.auto()
    """Slots, and tokens of each: the first reservation is their cache's."""
    RESERVE = enum.auto()
    GIVE_BACK = enum.auto()
    """Address, bytes; so do RESERVE, UNMAP and ZERO."""
    CREATE = enum.auto()
    """Handle, bytes."""
    RELEASE = enum.auto()
    MAP = enum.auto()
    """Address, handle, bytes."""
    SET_ACCESS = enum.auto()
    """Address, bytes, 1 to write too."""
    UNMAP = enum.auto()
    ZERO = enum.auto()
    COPY = enum.auto()
    """Target, source, bytes."""
    HOST = enum.auto()
    """Address, bytes: of host memory that rank 0 has for copies from and to its device."""
    LIMITS = enum.auto()
    """A slot and its limit, for each."""
    FENCE = enum.auto()
    """One more fence is made."""
    PASSED = enum.auto()
    """The number of a fence: it has passed, and those before."""
    SYNCHRONIZE = enum.auto()
    MEMORY = enum.auto()
    FORWARD = enum.auto()
    """Elements of each input that is broadcast: see `pass_inputs`."""
    STATES = enum.auto()
    """Elements as behind FORWARD, of a pass whose logits come later."""
    LOGITS = enum.auto()
    """First row, and end, of the last states."""
    CAPTURE = enum.auto()
    """Numbers as behind FORWARD, of a pass that becomes a graph."""
    REPLAY = enum.auto()
    """The number of a graph."""


def pass_inputs(ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> list[torch.Tensor]:
    """The inputs of a forward pass in order, int32; those that it lacks have no elements."""
    parts = [ids_N, step.slots_N, step.rows_N, step.slots_B, step.lengths_B, step.query_starts, last_B]
    shared = step.shared
    parts += [None] * 4 if shared is None else [shared.starts_G1, shared.leaders_G, shared.num_rows_G, shared.firsts_B]
    return [ids_N[:0] if part is None else part.int() for part in parts]


def inputs_of(parts: Sequence[torch.Tensor]) -> tuple[torch.Tensor, AttentionMetadata, torch.Tensor | None]:
    """The inputs of a forward pass that `pass_inputs` gave."""
    ids_N, slots_N, rows_N, slots_B, lengths_B, query_starts, last_B, starts_G1, leaders_G, num_rows_G, firsts_B = parts
    shared = SharedPrefixes(starts_G1=starts_G1, leaders_G=leaders_G, num_rows_G=num_rows_G, firsts_B=firsts_B)
    step = AttentionMetadata(
        slots_N=slots_N, rows_N=rows_N, slots_B=slots_B, lengths_B=lengths_B,
        query_starts=query_starts if len(query_starts) else None,
        shared=shared if len(starts_G1) else None,
    )  # fmt: skip
    return ids_N, step, last_B.long() if len(last_B) else None


@dataclass(slots=True)
class Peer:
    """Another rank, as rank 0 sees it."""

    rank: int
    channel: socket.socket
    process: "subprocess.Popen[bytes] | None" = None
    """Process of the rank; None in a thread of this process."""

    def last_words(self, until_s: float) -> str:
        """Words about the end of a rank: its own, or its exit code. Blocks until a time of time.monotonic() at most."""
        said: object = None
        with contextlib.suppress(OSError, ValueError):
            said = json.loads(self.channel.recv(MESSAGE_BYTES, socket.MSG_DONTWAIT))
        if isinstance(said, str):
            return f"rank {self.rank}: {said}"
        code: int | None = None
        if self.process is not None:
            with contextlib.suppress(subprocess.TimeoutExpired):
                code = self.process.wait(max(0.0, until_s - time.monotonic()))
        return f"rank {self.rank} has ended" + ("" if code is None else f" with exit code {code}")


class Ranks:
    """The other ranks of an engine, as rank 0 sees them. When one fails all are ended, and nothing is sent any more.

    `connect`, `check`, `wait_for`, `ask_memory` and forward passes raise RankFailed from then on; calls of the driver do not.
    """

    def __init__(self, peers: Sequence[Peer], store: Any, *, timeout_s: float = STEP_S) -> None:
        self.collectives: Final = Collectives(0, 1 + len(peers))
        self.peers: Final = peers
        self._store: Final = store
        self.timeout_s = timeout_s
        """Longest wait for another rank, in seconds."""
        self._failure: str | None = None
        self._is_closed = False
        self._num_graphs = 0
        self._num_fences = 0
        self._undo = contextlib.ExitStack()
        self._until_met = contextlib.ExitStack()
        self._padding: torch.Tensor | None = None
        self._device: torch.device | None = None
        self._unwatched, unwatched = socket.socketpair()
        """Socket that is closed when the ranks are ended, which the thread sees that watches them."""
        ends = select.poll()
        ends.register(unwatched, 0)  # it answers when the other end is closed
        for peer in peers:
            peer.channel.settimeout(timeout_s)
            ends.register(peer.channel, 0)
        threading.Thread(target=self._watch, args=(ends, unwatched), name="watch of ranks", daemon=True).start()

    @classmethod
    def start(cls, config: EngineConfig, device: torch.device) -> "Ranks":
        """Start a process for each other rank, which loads its weights on the device of its number. Raises: OSError."""
        with contextlib.ExitStack() as undo, contextlib.ExitStack() as until_met:
            directory = Path(until_met.enter_context(tempfile.TemporaryDirectory(prefix="vmmkv-ranks-")))
            peers: list[Peer] = []
            for rank in range(1, config.tensor_parallel_size):
                ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
                undo.callback(ours.close)
                command = [sys.executable, "-P", "-m", "vmmkv_server.engine.worker", "--store", str(directory / "store")]
                command += ["--rank", str(rank), "--channel", str(theirs.fileno()), "--timeout", str(STEP_S)]
                with theirs:
                    process = subprocess.Popen(
                        command, stdin=subprocess.PIPE, pass_fds=[theirs.fileno()], process_group=0,
                        env={"OMP_WAIT_POLICY": "PASSIVE"} | environ,
                    )  # fmt: skip
                undo.callback(_reap, process)
                assert process.stdin is not None, "it is a pipe"
                with process.stdin:
                    process.stdin.write(msgspec.json.encode(config))
                peers.append(Peer(rank, ours, process))
            store = FileStore(str(directory / "store"), config.tensor_parallel_size)
            ranks = cls(peers, store, timeout_s=STEP_S)
            ranks._undo, ranks._until_met = undo.pop_all(), until_met.pop_all()
        return ranks

    def connect(self, device: torch.device) -> None:
        """Meet the other ranks, once they have loaded their weights."""
        for peer in self.peers:
            self._receive(peer, LOAD_S)
        self.send(Op.CONNECT)
        met: Future[None] = Future()

        def meet() -> None:
            try:
                self.collectives.connect(self._store, device, self.timeout_s)
                met.set_result(None)
            except Exception as error:
                met.set_exception(error)

        in_background("meeting of ranks", meet)  # NCCL may wait without end
        self.wait_for(met.done)
        try:
            met.result()
        except Exception as error:
            self.fail(error)
        self.ask_memory()  # the others have met too
        self._until_met.close()  # a process that is killed leaves no folder
        self._device = device
        self._padding = torch.zeros(ALIGNED_ELEMENTS, dtype=torch.int32, device=device)

    def send(self, op: Op, *numbers: int) -> None:
        """Have all other ranks do something. Cost: some 3 us for each rank. Raises nothing: `check` tells of a failure."""
        if not self.are_ended:
            data = array("q", (op, *numbers)).tobytes()
            try:
                for peer in self.peers:
                    peer.channel.send(data)
            except OSError as error:
                self._give_up(error)

    def have_host_memory(self, address: int, size_bytes: int) -> None:
        """Have each other rank take as much host memory as rank 0 has there, for its part of what is copied from and to it.

        Blocks until it is taken. Raises: RankFailed.
        """
        self.send(Op.HOST, address, size_bytes)
        self.ask_memory()

    def ask_memory(self) -> list[MemoryInfo]:
        """The memory of each other rank; none after `close`. Messages sent before have been handled by then."""
        self.check()
        if self._is_closed:
            return []
        self.send(Op.MEMORY)
        return [MemoryInfo(*self._receive(peer, self.timeout_s)) for peer in self.peers]

    @property
    def are_ended(self) -> bool:
        """Has one failed, or were they closed?"""
        return self._failure is not None or self._is_closed

    def check(self) -> None:
        """Raises: RankFailed if a rank has ended, or failed before."""
        if not self.are_ended and self._have_spoken(0.0):
            self.fail()
        if self._failure is not None:
            raise RankFailed(self._failure)

    def wait_for(self, is_done: Callable[[], bool]) -> None:
        """Wait for this rank's device, which may wait for the others. Its results without them count for nothing."""
        until_s = time.monotonic() + self.timeout_s
        self.check()
        while not is_done():
            if time.monotonic() > until_s:
                self.fail()
            time.sleep(_NAP_S)
            self.check()

    def settle(self) -> None:
        """Wait for all that this rank's device has to do, before a call that would wait for it without end."""
        if self._device is not None and self._device.type == "cuda":
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record()
            self.wait_for(done.query)

    def fail(self, error: BaseException | None = None) -> NoReturn:
        """End all ranks. Blocks for some seconds at most. Raises: RankFailed, saying why; the error if it is an interrupt."""
        if self._failure is None:
            self._give_up(error)
        if error is not None and not isinstance(error, Exception):
            raise error
        raise RankFailed(self._failure) from error

    def _give_up(self, error: BaseException | None) -> None:
        spoken, until_s = self._have_spoken(LAST_WORDS_S), time.monotonic() + _GONE_S
        reasons = [peer.last_words(until_s) for peer in spoken]
        late = f"the ranks have waited for one another for {self.timeout_s:g} s"
        self._failure = "; ".join(reasons) or (
            late if error is None else f"a rank failed, or was late: {str(error) or type(error).__name__}"
        )
        self._end()

    def close(self) -> None:
        """End all ranks; what they have goes with them. Idempotent."""
        if not self._is_closed:
            self._is_closed = True
            self._end()

    def _end(self) -> None:
        self._unwatched.close()
        self.collectives.abort()
        for peer in self.peers:
            peer.channel.close()
        self._until_met.close()
        self._undo.close()

    def _watch(self, ends: "select.poll", unwatched: socket.socket) -> None:
        """End the collectives when a rank ends: rank 0 may be in a call that waits for its device."""
        with unwatched:
            if unwatched.fileno() not in dict(ends.poll()):
                self.collectives.abort()

    def _have_spoken(self, within_s: float) -> list[Peer]:
        """Ranks that have ended, or said why they will: nothing else comes that was not asked for."""
        readable = _readable(self.peers, within_s)
        return [peer for peer in self.peers if peer.channel.fileno() in readable]

    def _receive(self, peer: Peer, within_s: float) -> list[int]:
        if (
            _readable([peer], within_s)
            and (data := peer.channel.recv(MESSAGE_BYTES, socket.MSG_PEEK))
            and isinstance(json.loads(data), list)
        ):
            numbers: list[int] = json.loads(peer.channel.recv(MESSAGE_BYTES))
            return numbers
        self.fail()

    def mirrored(self, driver: Driver) -> Driver:
        """Driver of this rank, whose calls all ranks repeat."""
        mirrored: Any = _MirroredDriver(driver, self)
        return cast(Driver, mirrored)

    def model(self, model: EngineModel, memory: KVBackend) -> "ParallelModel":
        """Part of a model that this rank has, over its memory. All ranks repeat its passes."""
        return ParallelModel(model, memory, self)

    # ------------------------------------------------------------------ forward passes

    @contextlib.contextmanager
    def repeating(
        self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None, *, has_logits: bool
    ) -> Iterator[None]:
        """The other ranks make the forward pass that is made within, or captured, with logits or without.

        Cost: a message, a launch that packs the inputs, and a broadcast.
        """
        assert self._padding is not None, "the ranks have met"
        parts = pass_inputs(ids_N, step, last_B)
        is_captured = ids_N.is_cuda and torch.cuda.is_current_stream_capturing()
        assert has_logits or not is_captured, "graphs give logits"
        with self.together(Op.CAPTURE if is_captured else Op.FORWARD if has_logits else Op.STATES, *map(len, parts)):
            gaps = [self._padding[: round_up(len(part), ALIGNED_ELEMENTS) - len(part)] for part in parts]
            self.collectives.broadcast(torch.cat([each for pair in zip(parts, gaps, strict=True) for each in pair]))
            yield

    @contextlib.contextmanager
    def together(self, op: Op, *numbers: int) -> Iterator[None]:
        """The other ranks do the same as is done within: they wait for it, and all end if it fails."""
        self.check()
        self.send(op, *numbers)
        try:
            yield
        except BaseException as error:
            self.fail(error)

    def replaying(self, replay: Callable[[], None]) -> Callable[[], None]:
        """Replay the graph that was captured last, on all ranks."""
        number, self._num_graphs = self._num_graphs, self._num_graphs + 1

        def replay_all() -> None:
            self.send(Op.REPLAY, number)
            if self._failure is not None:
                raise RankFailed(self._failure)
            replay()

        return replay_all

    # ------------------------------------------------------------------ fences

    def fence(self, fence: Fence) -> "_RanksFence":
        """A fence of rank 0, behind which the others make one too."""
        self.send(Op.FENCE)
        self._num_fences += 1
        return _RanksFence(fence, self._num_fences, self)


def _readable(peers: Sequence[Peer], within_s: float) -> set[int]:
    """The channels from which something can be read, or their end."""
    poll = select.poll()
    for peer in peers:
        poll.register(peer.channel, select.POLLIN)
    return {fd for fd, _ in poll.poll(1000 * within_s)}


def _reap(process: "subprocess.Popen[bytes]") -> None:
    """Let a rank end, whose channel is closed; then make it."""
    with contextlib.suppress(subprocess.TimeoutExpired):
        process.wait(LAST_WORDS_S)
    process.kill()
    process.wait()


class ParallelModel:
    """Rank 0's part of a model. Each of its forward passes is made by all ranks. See EngineModel."""

    def __init__(self, model: EngineModel, memory: KVBackend, ranks: Ranks) -> None:
        self._model = model
        self._ranks = ranks
        self.implementation: Final = model.implementation
        self.capturable: Final = model.capturable
        self.vocabulary_size: Final = model.vocabulary_size
        self.keys: Final = model.keys
        self.check: Final = model.check
        self._states_WE: torch.Tensor | None = None
        ranks.send(Op.ROWS, memory.num_slots, memory.max_tokens)

    def forward(self, ids_N: torch.Tensor, step: AttentionMetadata, last_B: torch.Tensor | None) -> torch.Tensor:
        """Logits of a forward pass, as `EngineModel.forward`."""
        with self._ranks.repeating(ids_N, step, last_B, has_logits=True):
            return self._model.forward(ids_N, step, last_B)

    @property
    def has_states(self) -> bool:
        """Can the model compute in two halves, as `EngineModel.has_states`?"""
        return self._model.has_states

    def states(self, ids_N: torch.Tensor, step: AttentionMetadata, rows_W: torch.Tensor) -> torch.Tensor:
        """Hidden states of some tokens, as `EngineModel.states`."""
        with self._ranks.repeating(ids_N, step, rows_W, has_logits=False):
            self._states_WE = self._model.states(ids_N, step, rows_W)
        return self._states_WE

    def logits(self, states_WE: torch.Tensor) -> torch.Tensor:
        """Logits of hidden states, as `EngineModel.logits`."""
        assert (
            self._states_WE is not None
            and states_WE.untyped_storage().data_ptr() == self._states_WE.untyped_storage().data_ptr()
        )
        first = states_WE.storage_offset() // self._states_WE.stride(0)
        with self._ranks.together(Op.LOGITS, first, first + len(states_WE)):
            return self._model.logits(states_WE)


class _RanksFence:
    """A fence of rank 0. When it is seen to have passed, the other ranks wait for theirs before they go on."""

    def __init__(self, fence: Fence, number: int, ranks: Ranks) -> None:
        self._fence, self._number, self._ranks = fence, number, ranks
        self._has_passed = False

    def done(self) -> bool:
        """Has the fence passed? As `Fence.done`; the other ranks are told."""
        if not self._has_passed and self._fence.done():
            self._has_passed = True
            self._ranks.send(Op.PASSED, self._number)
        return self._has_passed

    def wait(self) -> None:
        """Wait for the fence. Raises: RankFailed, but not once the ranks are ended: then this device waits for none."""
        if self._ranks.are_ended:
            self._fence.wait()
        else:
            self._ranks.wait_for(self.done)

    def order(self, streams: Sequence[torch.Stream] = ()) -> None:
        """Order streams behind the fence, as `Fence.order`. The other ranks have one stream."""
        self._fence.order(streams)


class _MirroredDriver:
    """Rank 0's driver, whose calls the other ranks repeat once they have succeeded. See Driver.

    Memory that other processes share has no mirror, and is refused.
    """

    _HERE: Final = ("calls", "creates_zeroed", "device", "has_addresses", "is_capturing", "new_stream", "on", "order")
    _REPEATED: Final = ("copy", "give_back", "map", "release", "synchronize", "unmap", "zero")
    """Calls that the other ranks repeat with the same numbers."""

    def __init__(self, driver: Driver, ranks: Ranks) -> None:
        self.over: Final = driver
        """Driver of this process."""
        self._ranks: Final = ranks
        for name in self._HERE:
            setattr(self, name, getattr(driver, name))
        for name in self._REPEATED:
            setattr(self, name, partial(self._repeat, name))
        for name in ("export_fd", "gather", "import_fd"):
            setattr(self, name, partial(self._refuse, name))

    def _repeat(self, call: str, *numbers: int) -> None:
        getattr(self.over, call)(*numbers)
        self._ranks.send(Op[call.upper()], *numbers)

    def _refuse(self, call: str, *_: object) -> NoReturn:
        raise DriverError(f"{call}: the other ranks cannot repeat this", call=call, code="EINVAL")

    def reserve(self, size_bytes: int) -> int:
        address = self.over.reserve(size_bytes)
        self._ranks.send(Op.RESERVE, address, size_bytes)
        return address

    def create(self, size_bytes: int) -> Handle:
        handle = self.over.create(size_bytes)
        self._ranks.send(Op.CREATE, handle, size_bytes)
        return handle

    def set_access(self, address: int, size_bytes: int, access: Access) -> None:
        self.over.set_access(address, size_bytes, access)
        self._ranks.send(Op.SET_ACCESS, address, size_bytes, access is Access.READ_WRITE)

    def write(self, tensor: torch.Tensor, values: Mapping[int, int]) -> None:
        self.over.write(tensor, values)
        self._send_limits(values)

    def write_behind(self, tensor: torch.Tensor, values: Mapping[int, int], streams: Sequence[torch.Stream] = ()) -> Fence:
        fence = self.over.write_behind(tensor, values, streams)
        self._send_limits(values)
        return self._ranks.fence(fence)

    def fence(self, streams: Sequence[torch.Stream] = ()) -> Fence:
        return self._ranks.fence(self.over.fence(streams))

    def memory(self) -> MemoryInfo:
        """The least of all ranks; on a host, which they share, a part of it."""
        infos = [self.over.memory(), *self._ranks.ask_memory()]
        share = 1 if self.over.device.type == "cuda" else len(infos)
        return MemoryInfo(min(info.free_bytes for info in infos) // share, min(info.total_bytes for info in infos))

    def _send_limits(self, values: Mapping[int, int]) -> None:
        numbers = [number for pair in values.items() for number in pair]
        for first in range(0, len(numbers), 2 * _MAX_LIMITS):
            self._ranks.send(Op.LIMITS, *numbers[first : first + 2 * _MAX_LIMITS])
