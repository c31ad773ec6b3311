"""KV events: what the prefix tree gains and loses, published over ZeroMQ as vLLM does, for routers that follow an engine.

    tree ── stored, removed ── pending, bounded ── thread: hash, pack ── PUB      topic, number, batch
                                                         └── the last batches ── ROUTER      a number in, those since out

The tree has no blocks: an event names the blocks of BLOCK_TOKENS tokens whose last token came or went. The engine's thread
appends references to the tokens, and nothing else: beside a busy thread a driver call takes 5 ms, so this one works in pieces.

The first batch, the last one, and the next one after changes were lost say that all blocks are gone.
"""

import hashlib
import threading
import time
from collections import deque
from collections.abc import Hashable, Iterator
from typing import Final, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt
import zmq

from vmmkv.server.protocol import BLOCK_TOKENS, KV_EVENTS_HWM, KV_EVENTS_PENDING, KV_EVENTS_REPLAYED, KVEventSource

PERIOD_MS: Final = 20
"""Between two looks at what is pending."""
PAUSE_S: Final = 5e-5
"""After each event, without the interpreter's lock."""
MOST_BLOCKS: Final = 64
"""Of one event: its tokens are packed in some 20 us."""
MOST_EVENTS: Final = 16
"""Of one batch, but for the rest of a change."""
LAST_NUMBER: Final = (-1).to_bytes(8, "big", signed=True)
"""In place of a batch's number: a replay has ended."""
LINGER_MS: Final = 200
"""For the last batches to leave."""

_FACTORS: Final = np.random.default_rng(16).integers(1 << 63, size=BLOCK_TOKENS, dtype=np.uint64) * np.uint64(2) + np.uint64(1)
_STEP, _MIX_1, _MIX_2 = map(np.uint64, (0x9E3779B97F4A7C15, 0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53))


class Event(msgspec.Struct, tag=True, gc=False):
    """On the wire a map with the class's name as its `type`."""


class BlockStored(Event):
    """Consecutive blocks of one prefix are known."""

    block_hashes: list[int]
    parent_block_hash: int | None
    """Of the block before the first one; None for none."""
    token_ids: list[int]
    block_size: int
    lora_id: None
    medium: str
    lora_name: None
    extra_keys: list[tuple[str] | None]
    """Of each block: in a prefix's first one its namespace, a request's `cache_salt`."""
    group_idx: int
    kv_cache_spec_kind: str


class BlockRemoved(Event):
    """Blocks are not known any more."""

    block_hashes: list[int]
    medium: str
    group_idx: int


class AllBlocksCleared(Event):
    """No block is known."""


class Batch(msgspec.Struct, array_like=True, gc=False):
    """On the wire an array."""

    time_s: float
    events: list[Event]
    data_parallel_rank: int = 0


class _Change(NamedTuple):
    is_stored: bool
    namespace: Hashable
    edges: list[bytes]
    """The tokens of a path, as int32; the tree has gained or lost those of the last edge."""


class KVEventPublisher:
    """A listener of one prefix tree, and the thread that publishes what it hears.

    An endpoint with `*` or `::`, or of ipc, is bound; another one is connected to. If more than KV_EVENTS_PENDING changes wait,
    all are dropped: a batch's number is left out then, and what subscribers know is cleared.
    Raises: ValueError for an endpoint that cannot be had.
    """

    def __init__(self, endpoint: str, replay_endpoint: str | None = None, topic: str = "") -> None:
        self._topic = topic.encode()
        self._pending: deque[_Change | None] = deque()
        """None: what came before is lost."""
        self._number = -1
        """Of the last batch."""
        self._sent: deque[tuple[bytes, bytes]] = deque(maxlen=KV_EVENTS_REPLAYED)
        self._encoder = msgspec.msgpack.Encoder()
        self._context = zmq.Context()
        self._context.linger = LINGER_MS
        try:
            self._publisher, endpoint = self._open("kv_events", zmq.PUB, endpoint, KV_EVENTS_HWM)
            self._replayer = None
            if replay_endpoint is not None:
                self._replayer, replay_endpoint = self._open("kv_events_replay", zmq.ROUTER, replay_endpoint, 0)
        except ValueError:
            self._context.destroy()
            raise
        self.source: Final = KVEventSource(endpoint=endpoint, replay_endpoint=replay_endpoint, topic=topic)
        """Where it publishes, with the port that 0 became."""
        self._is_closing = False
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        self._thread.start()

    def stored(self, namespace: Hashable, edges: list[bytes]) -> None:
        """The tree has another leaf, at the end of these edges. For the engine's thread."""
        self._add(_Change(True, namespace, edges))

    def removed(self, namespace: Hashable, edges: list[bytes]) -> None:
        """The tree has lost the leaf at the end of these edges. For the engine's thread."""
        self._add(_Change(False, namespace, edges))

    def close(self) -> None:
        """Publish that all is gone, in place of what waits. Idempotent."""
        self._is_closing = True
        self._thread.join()
        self._context.destroy()

    def _add(self, change: _Change) -> None:
        if len(self._pending) >= KV_EVENTS_PENDING:
            self._pending.clear()
            self._pending.append(None)
        self._pending.append(change)

    def _open(self, option: str, kind: int, endpoint: str, most_waiting: int) -> "tuple[zmq.Socket[bytes], str]":
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        socket.set_hwm(most_waiting)
        try:
            if "*" not in endpoint and "::" not in endpoint and not endpoint.startswith("ipc://"):
                socket.connect(endpoint)
                return socket, endpoint
            socket.bind(endpoint)
        except zmq.ZMQError as error:
            raise ValueError(f"{option}={endpoint!r} cannot be had: {error}; use a free port, as tcp://*:5557") from error
        return socket, socket.get_string(zmq.LAST_ENDPOINT)

    # in the thread

    def _run(self) -> None:
        poller = zmq.Poller()
        if self._replayer is not None:
            poller.register(self._replayer, zmq.POLLIN)
        self._send([AllBlocksCleared()])
        while not self._is_closing:
            if poller.poll(0 if self._pending else PERIOD_MS):
                self._replay()
            if events := self._next_events():
                self._send(events)
        self._send([AllBlocksCleared()])

    def _next_events(self) -> list[Event]:
        events: list[Event] = []
        while len(events) < MOST_EVENTS:
            try:
                change = self._pending.popleft()
            except IndexError:
                break
            if change is None:
                self._number += 1  # a gap stands for what was lost
                events = [AllBlocksCleared()]
                continue
            for event in _events(change):
                events.append(event)
                time.sleep(PAUSE_S)
        return events

    def _send(self, events: list[Event]) -> None:
        self._number += 1
        number, batch = self._number.to_bytes(8, "big"), self._encoder.encode(Batch(time.time(), events))
        self._publisher.send_multipart((self._topic, number, batch))
        if self._replayer is not None:
            self._sent.append((number, batch))

    def _replay(self) -> None:
        """Answer one request for the batches from a number on. What is no such request has no answer."""
        assert self._replayer is not None
        client, *frames = self._replayer.recv_multipart()
        if len(frames) != 2 or len(frames[1]) != len(LAST_NUMBER):
            return
        for number, batch in self._sent:
            if number >= frames[1]:
                self._replayer.send_multipart((client, b"", self._topic, number, batch))
        self._replayer.send_multipart((client, b"", b"", LAST_NUMBER, b""))


def _events(change: _Change) -> Iterator[Event]:
    """The events of a change, of MOST_BLOCKS blocks at most."""
    tokens = np.frombuffer(b"".join(change.edges), np.int32)
    first = (len(tokens) - len(change.edges[-1]) // tokens.itemsize) // BLOCK_TOKENS
    hashes = block_hashes(change.namespace, tokens)
    for start in range(first, len(hashes), MOST_BLOCKS):
        some = hashes[start : start + MOST_BLOCKS].tolist()
        if not change.is_stored:
            yield BlockRemoved(block_hashes=some, medium="GPU", group_idx=0)
            continue
        extra_keys: list[tuple[str] | None] = [None] * len(some)
        if not start and change.namespace is not None:
            extra_keys[0] = (str(change.namespace).removeprefix("salt:"),)
        yield BlockStored(
            block_hashes=some,
            parent_block_hash=int(hashes[start - 1]) if start else None,
            token_ids=tokens[start * BLOCK_TOKENS : (start + len(some)) * BLOCK_TOKENS].tolist(),
            block_size=BLOCK_TOKENS,
            lora_id=None,
            medium="GPU",
            lora_name=None,
            extra_keys=extra_keys,
            group_idx=0,
            kv_cache_spec_kind="full_attention",
        )


def block_hashes(namespace: Hashable, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.uint64]:
    """A hash of 64 bits for each whole block of a prefix, of all tokens up to its end. The same in every process.

    It is a sum over blocks, each mixed with its place, so that numpy takes them all at once: 1 us for 100 tokens.
    """
    blocks = tokens[: len(tokens) // BLOCK_TOKENS * BLOCK_TOKENS].reshape(-1, BLOCK_TOKENS).astype(np.uint64) + np.uint64(1)
    mixed = (blocks * _FACTORS).sum(axis=1, dtype=np.uint64) + np.arange(1, len(blocks) + 1, dtype=np.uint64) * _STEP
    for factor in (_MIX_1, _MIX_2):
        mixed = (mixed ^ (mixed >> np.uint64(33))) * factor
    root = hashlib.blake2b(repr(namespace).encode(), digest_size=8).digest()
    sums: npt.NDArray[np.uint64] = np.cumsum(mixed ^ (mixed >> np.uint64(33)), dtype=np.uint64)
    return sums + np.frombuffer(root, np.uint64)
