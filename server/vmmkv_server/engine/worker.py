"""A rank other than 0: `python -m vmmkv_server.engine.worker`, started by `Ranks.start`. It does what rank 0 says, in order.

Its input is the engine's EngineConfig as JSON. It ends with its channel: when rank 0 closes it or ends, or when it fails.
"""

import argparse
import json
import logging
import os
import select
import socket
import sys
import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, Final

import msgspec
import torch
from torch.distributed import FileStore  # type: ignore[attr-defined]

from vmmkv.driver import open_driver
from vmmkv.driver.base import Access, Driver, Fence
from vmmkv.driver.pinned import host_memory
from vmmkv.layout import KVLayout
from vmmkv.memory.address_space import Arena
from vmmkv.sequence import Planes
from vmmkv_server.config import EngineConfig
from vmmkv_server.console import end
from vmmkv_server.engine.attention import KVRows
from vmmkv_server.engine.collectives import Collectives
from vmmkv_server.engine.loading import ModelSource, choose_device, choose_dtype
from vmmkv_server.engine.models import EngineModel
from vmmkv_server.engine.ranks import MESSAGE_BYTES, Op, inputs_of
from vmmkv_server.engine.runner import capture_graph
from vmmkv_server.engine.uploads import aligned_parts, packed_size
from vmmkv_server.logs import configure_logging

log = logging.getLogger("vmmkv_server.engine.worker")

_NAP_S: Final = 1e-4
_END_S: Final = 5.0
"""Time to end for a rank whose channel is closed."""
_MAX_WORDS: Final = 2000
_PARENT_S: Final = 0.2
"""Time for a rank 0 that was killed to be gone, once its sockets are closed."""


def words(error: Exception) -> str:
    """An error in words for rank 0."""
    return f"{type(error).__name__}: {error}"[:_MAX_WORDS]


class Rows(Planes):
    """Rank 0's cache at this rank's addresses: what a model needs of it. The pages under it come and go by messages."""

    def __init__(self, layout: KVLayout, driver: Driver, address: int, *, slots: int, max_tokens: int) -> None:
        self.layout, self.device, self.max_tokens = layout, driver.device, max_tokens
        self.limit = torch.zeros(1 + slots, dtype=torch.int32, device=driver.device)
        self._arenas: list[Arena] = []
        for index, group in enumerate(layout.groups):
            self._arenas.append(Arena(driver, address, index, group, slots=slots, max_rows=max_tokens))
            address += self._arenas[-1].reserved_bytes

    def view(self, layer: int, plane: str) -> torch.Tensor:
        """View of a plane of a layer, as `Planes.view`."""
        return self._arenas[self.layout.group_of[layer]].view(layer, plane)


class Worker:
    """One rank's model, driver and rows, and what rank 0 calls its addresses, handles and graphs."""

    def __init__(
        self,
        channel: socket.socket,
        store: Any,
        collectives: Collectives,
        source: ModelSource,
        driver: Driver,
        *,
        timeout_s: float,
    ) -> None:
        self.driver: Final = driver
        self.handles: Final[dict[int, int]] = {}
        self._channel = channel
        self._store = store
        self._collectives = collectives
        self._source = source
        self._timeout_s = timeout_s
        self.model: EngineModel | None = None
        self.rows: KVRows | None = None
        """Rows of this rank's heads."""
        self._states_WE: torch.Tensor | None = None
        self.limit: torch.Tensor | None = None
        self._reserved: dict[int, tuple[int, int]] = {}
        """Own address and size of each reservation, by rank 0's address."""
        self._beside: dict[int, torch.Tensor] = {}
        """Copies of rows that are in no reservation, by rank 0's address."""
        self.host_memory: torch.Tensor | None = None
        """Memory of this rank beside that of the host tier, as large."""
        self._host_spans = range(0)
        """Rank 0's addresses of the same."""
        self._copies: Final[Sequence[torch.Stream]] = [driver.new_stream()]
        """Streams of copies from and to the host, beside the model's work."""
        self._fences: deque[tuple[int, Fence]] = deque()
        self._num_fences = 0
        self._cuda_graphs: list[torch.cuda.CUDAGraph] = []
        self._graph_pool = torch.cuda.graph_pool_handle() if driver.device.type == "cuda" else None
        self._do: Final[dict[int, Callable[..., None]]] = {op: getattr(self, f"_{op.name.lower()}") for op in Op}

    @torch.inference_mode()
    def run(self) -> None:
        """Do what rank 0 says, until it closes the channel or ends. Raises what goes wrong; rank 0 is told."""
        try:
            self._answer([])
            while data := self._channel.recv(MESSAGE_BYTES):
                op, *numbers = array("q", data)
                self._do[op](*numbers)
        except Exception as error:
            is_told = self._answer(words(error))
            self._collectives.abort()  # rank 0 may wait in one
            if is_told:
                raise
            log.debug("rank 0 has ended", exc_info=True)

    def _answer(self, answer: object) -> bool:
        """Answer rank 0. Returns False if it is gone, which the next message shows too."""
        self._channel.settimeout(self._timeout_s)
        try:
            self._channel.send(json.dumps(answer).encode())
        except OSError:
            return False
        finally:
            self._channel.settimeout(None)
        return True

    def _connect(self) -> None:
        self._collectives.connect(self._store, self.driver.device, self._timeout_s)

    def _rows(self, slots: int, max_tokens: int) -> None:
        address, _ = next(iter(self._reserved.values()))
        cache = Rows(self._source.layout, self.driver, address, slots=slots, max_tokens=max_tokens)
        self.limit, self.rows = cache.limit, KVRows(cache)
        self.model = self._source.over(self.rows)

    # memory

    def _reserve(self, address: int, size_bytes: int) -> None:
        self._reserved[address] = self.driver.reserve(size_bytes), size_bytes

    def _give_back(self, address: int, size_bytes: int) -> None:
        self.driver.give_back(*self._reserved.pop(address))

    def _create(self, handle: int, size_bytes: int) -> None:
        self.handles[handle] = self.driver.create(size_bytes)

    def _release(self, handle: int) -> None:
        self.driver.release(self.handles.pop(handle))

    def _map(self, address: int, handle: int, size_bytes: int) -> None:
        self.driver.map(self._at(address), self.handles[handle], size_bytes)

    def _set_access(self, address: int, size_bytes: int, may_write: int) -> None:
        self.driver.set_access(self._at(address), size_bytes, Access.READ_WRITE if may_write else Access.READ)

    def _unmap(self, address: int, size_bytes: int) -> None:
        self.driver.unmap(self._at(address), size_bytes)

    def _zero(self, address: int, size_bytes: int) -> None:
        self.driver.zero(self._at(address), size_bytes)

    def _host(self, address: int, size_bytes: int) -> None:
        self.host_memory = host_memory(size_bytes, self.driver.device)
        self._host_spans = range(address, address + size_bytes)

    def _copy(self, target: int, source: int, size_bytes: int) -> None:
        if target in self._host_spans or source in self._host_spans:
            self.driver.order(self._copies)
            behind = self.driver.fence()  # the rows of steps that are under way
            with self.driver.on(self._copies[0]):
                behind.order()
                self.driver.copy(self._at(target), self._at(source), size_bytes)
            return
        if not self._is_reserved(target):
            self._beside[target] = torch.empty(size_bytes, dtype=torch.uint8, device=self.driver.device)
        self.driver.order()
        self.driver.copy(self._at(target), self._at(source), size_bytes)
        self._beside.pop(source, None)

    def _limits(self, *numbers: int) -> None:
        assert self.limit is not None, "limits are of rows"
        self.driver.write_behind(self.limit, dict(zip(numbers[::2], numbers[1::2], strict=True)))

    def _fence(self) -> None:
        self._num_fences += 1
        self._fences.append((self._num_fences, self.driver.fence(self._copies)))

    def _passed(self, number: int) -> None:
        """Wait for this rank's work before a fence. All have the same streams, so a later one passes behind those before."""
        fence: Fence | None = None
        while self._fences and self._fences[0][0] <= number:
            _, fence = self._fences.popleft()
        until_s = time.monotonic() + self._timeout_s
        while fence is not None and not fence.done():
            if time.monotonic() > until_s:
                raise TimeoutError(f"the device has not ended its work in {self._timeout_s:g} s")
            time.sleep(_NAP_S)

    def _synchronize(self) -> None:
        self.driver.synchronize()

    def _memory(self) -> None:
        self._answer(list(self.driver.memory()))

    def _is_reserved(self, address: int) -> bool:
        return any(start <= address < start + size_bytes for start, (_, size_bytes) in self._reserved.items())

    def _at(self, address: int) -> int:
        """Address in this rank that stands for one of rank 0's."""
        for start, (own, size_bytes) in self._reserved.items():
            if start <= address < start + size_bytes:
                return own + address - start
        if self.host_memory is not None and address in self._host_spans:
            return self.host_memory.data_ptr() + address - self._host_spans.start
        return self._beside[address].data_ptr()

    # forward passes

    def _forward(self, *sizes: int) -> None:
        self.driver.order()
        self._pass("forward", sizes)

    def _states(self, *sizes: int) -> None:
        self.driver.order()
        self._states_WE = self._pass("states", sizes)

    def _logits(self, first: int, end: int) -> None:
        assert self.model is not None and self._states_WE is not None, "states come before their logits"
        self.model.logits(self._states_WE[first:end])

    def _capture(self, *sizes: int) -> None:
        self._cuda_graphs.append(graph := torch.cuda.CUDAGraph())
        capture_graph(graph, lambda: self._pass("forward", sizes), self._graph_pool)

    def _replay(self, number: int) -> None:
        self.driver.order()
        self._cuda_graphs[number].replay()

    def _pass(self, method: str, sizes: tuple[int, ...]) -> torch.Tensor:
        assert self.model is not None, "rows come before passes"
        packed = torch.empty(packed_size(sizes), dtype=torch.int32, device=self.driver.device)
        inputs = inputs_of(aligned_parts(self._collectives.broadcast(packed), sizes))
        states_or_logits: torch.Tensor = getattr(self.model, method)(*inputs)
        return states_or_logits


def load(config: EngineConfig, rank: int, channel: socket.socket, store: Any, timeout_s: float) -> Worker:
    """Load a rank's part of the model. Raises what goes wrong; rank 0 is told."""
    try:
        device = choose_device(config.device, rank)
        if device.type == "cuda":
            torch.cuda.set_device(device)  # first: what pins host memory takes memory of the current GPU
        collectives = Collectives(rank, config.tensor_parallel_size)
        source = ModelSource(config, device, choose_dtype(config.dtype, device), collectives)
        return Worker(channel, store, collectives, source, open_driver(device), timeout_s=timeout_s)
    except Exception as error:
        channel.send(json.dumps(words(error)).encode())
        raise


def end_with(channel: socket.socket) -> None:
    """End this process some seconds after its channel: it may be in a call that waits for a device, and that for rank 0."""
    poll = select.poll()
    poll.register(channel, 0)  # whose other end is closed
    poll.poll()
    time.sleep(_END_S)
    end(1)


def main() -> None:
    """Load this rank's part of the model, then do what rank 0 says."""
    parser = argparse.ArgumentParser(prog="python -m vmmkv_server.engine.worker", description=__doc__)
    parser.add_argument("--rank", type=int, required=True)
    parser.add_argument("--channel", type=int, required=True, help="the file descriptor of the socket to rank 0")
    parser.add_argument("--store", required=True, help="the file by which the ranks meet")
    parser.add_argument("--timeout", type=float, required=True, help="seconds that the others may keep this one waiting")
    arguments = parser.parse_args()
    config = msgspec.json.decode(sys.stdin.buffer.read(), type=EngineConfig)
    configure_logging(config.log_level, config.log_format)
    torch.set_num_threads(max(1, torch.get_num_threads() // config.tensor_parallel_size))
    with socket.socket(fileno=arguments.channel) as channel:
        threading.Thread(target=end_with, args=(channel,), name="end with rank 0", daemon=True).start()
        store = FileStore(arguments.store, config.tensor_parallel_size)
        load(config, arguments.rank, channel, store, arguments.timeout).run()


if __name__ == "__main__":
    code, parent = 0, os.getppid()
    try:
        main()
    except Exception:
        time.sleep(_PARENT_S)
        if os.getppid() == parent:
            log.exception("a rank ends")
        code = 1
    end(code)
