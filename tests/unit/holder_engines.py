"""The processes of the tests of a holder: itself, and engines that write rows which tell their tokens.

A row of a token is filled with a number made of the namespace, the tokens before it and its own: a row of another prefix, of
another tenant, or not yet written, differs.
"""

import contextlib
import multiprocessing
import os
import random
import signal
import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from collections.abc import Sequence as Seq
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.unit.support import LAYOUT, WINDOWED
from vmmkv import HolderUnavailable, HostTier, KVCache, OutOfPages, Pool, PrefixCache, Sequence
from vmmkv.driver import open_driver
from vmmkv.driver.base import Driver
from vmmkv.driver.host import HostDriver
from vmmkv.holder import process
from vmmkv.layout import KVLayout
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.tier import Tier
from vmmkv.units import PAGE_BYTES

BUDGET_BYTES = 48 * PAGE_BYTES
PROMPT = [7 * token % 251 for token in range(100)]
"""Six full pages of 16 tokens, in extents of four, one and one, and a rest of 4."""
LONG = [3] * 330
"""More than a large extent."""


def hold(path: Path, ready: Connection, device: str) -> None:
    """A holder, which sends what it reports."""
    process.run(path, BUDGET_BYTES, open_driver(device), ready.send)


def values(namespace: Hashable, tokens: list[int], first: int = 0) -> torch.Tensor:
    """[tokens] what the rows of some tokens are filled with, from row `first` on."""
    checksum, found = zlib.crc32(repr(namespace).encode()), []
    for token in tokens:
        checksum = zlib.crc32(token.to_bytes(4, "little"), checksum)
        found.append(1 + checksum % (1 << 20))  # exact in float32, and not zero
    return torch.tensor(found[first:], dtype=torch.float32)


def write(sequence: Sequence, namespace: Hashable, tokens: list[int], first: int) -> None:
    """Compute the rows from `first` on."""
    sequence.grow(len(tokens))
    rows = values(namespace, tokens, first).to(sequence.live.slots.pool.device)
    for layer in range(4):
        start = sequence.start(sequence.live.slots.layout.group_of[layer])
        for plane in "kv":
            sequence.view(layer, plane)[first - start : len(tokens) - start] = rows[:, None, None]
    sequence.advance(len(tokens) - first)


def wrong_rows(sequence: Sequence, namespace: Hashable, tokens: list[int], num_tokens: int) -> int:
    """How many of the first rows are not those of these tokens."""
    wanted = values(namespace, tokens[:num_tokens]).to(sequence.live.slots.pool.device)[:, None, None]
    found = torch.zeros(num_tokens, dtype=torch.bool, device=sequence.live.slots.pool.device)
    for layer in range(4):
        start = sequence.start(sequence.live.slots.layout.group_of[layer])
        for plane in "kv":
            rows = sequence.view(layer, plane)[: num_tokens - start]
            found[start:] |= (rows != wanted[start:]).flatten(1).any(1)
    return int(found.sum())


class Engine:
    """A pool over a holder, a cache and its prefixes; with `borrows` those of the holder's engine."""

    def __init__(
        self,
        path: Path,
        *,
        device: str = "cpu",
        fingerprint: str = "model",
        layout: KVLayout = LAYOUT,
        pages: int = 32,
        driver: Driver | None = None,
        tiers: Seq[Tier] = (),
        borrows: bool = False,
    ) -> None:
        self.pool = Pool(device, pages * PAGE_BYTES, driver=driver, **{"lender" if borrows else "holder": path})
        self.cache = KVCache(layout, self.pool, slots=6, max_tokens=512)
        self.prefix = PrefixCache(self.cache, tiers, fingerprint=fingerprint)

    def serve(self, tokens: list[int], namespace: Hashable = None, *, ends: bool = True) -> tuple[int, int]:
        """A prompt: tokens that were attached, and wrong rows among them; the others are computed, and all inserted."""
        self.prefix.borrow(tokens, namespace=namespace)
        attached = self.prefix.attach(tokens, namespace=namespace)
        sequence, num_tokens = attached.sequence, attached.num_tokens
        wrong = wrong_rows(sequence, namespace, tokens, num_tokens)
        try:
            write(sequence, namespace, tokens, num_tokens)
        except BaseException:
            sequence.close()
            raise
        self.prefix.insert(sequence, tokens)
        if ends:
            self.prefix.park(sequence, tokens)
        return num_tokens, wrong

    def prepare_all(self, **options: Any) -> None:
        """Prepare until nothing is left, in the smallest pieces."""
        while self.prefix.prepare(0, **options):
            self.cache.check()

    def has_sealed(self) -> bool:
        """Has it sealed anything, or borrowed what is sealed?"""
        if self.pool.holder is not None:
            return bool(self.pool.holder.log.read().live)
        return any(extent.lent and extent.imported for extent in self.pool.extents())

    def give_up(self) -> None:
        """All prefixes and parked slots, and what was mapped there."""
        self.prefix.evict()
        self.prefix.free_slots(6)
        self.settle()

    def settle(self) -> None:
        """Wait for all work, and do what waits for it."""
        self.pool.driver.fence().wait()
        self.cache.drain()

    def spin(self, namespace: Hashable = None) -> None:
        """On a GPU: a kernel that runs for seconds, and behind it one that writes rows of a sequence of its own."""
        sequence = self.cache.open(tenant=namespace)
        sequence.grow(64)
        with torch.cuda.device(self.cache.device):
            torch.cuda._sleep(8_000_000_000)
        sequence.k(0)[:64] = float("nan")

    def close(self) -> None:
        self.cache.close()
        self.pool.close()


def engine(path: Path, pipe: Connection, options: dict[str, Any]) -> None:
    """An engine that does what it is told, by name and arguments, and sends the result or the error's text; `close` ends it."""
    try:
        one = Engine(path, **options)
    except Exception as error:
        pipe.send(error_text(error))
        return
    pipe.send("ready")
    calls: dict[str, Callable[..., Any]] = {
        "serve": one.serve,
        "check": one.cache.check,
        "close": one.close,
        "match": one.prefix.match,
        "evict": one.prefix.evict,
        "give_up": one.give_up,
        "prepare": one.prefix.prepare,
        "imports": lambda: one.pool.driver.calls["import_fd"],
        "held": lambda: (one.pool.created_bytes // PAGE_BYTES, one.pool.holder and one.pool.holder.held_bytes() // PAGE_BYTES),
        "settle": one.settle,
        "spin": one.spin,
    }
    while True:
        name, *arguments = pipe.recv()
        try:
            pipe.send(calls[name](*arguments))
        except Exception as error:
            pipe.send(error_text(error))
        if name == "close":
            return


def error_text(error: Exception) -> str:
    """An error as the test reads it."""
    return f"{type(error).__name__}: {error}"


PROMPTS = [[seed * 31 % 7] * 40 + [(seed * 17 + 3 * place) % 97 for place in range(120)] for seed in range(12)]
PROMPTS += [[seed] * 330 for seed in range(2)]
"""Some share their first 40 tokens; the last ones take large extents."""


def busy_engine(
    path: Path, pipe: Connection, seed: int, seconds: float, windowed: bool = False, device: str = "cpu", borrows: bool = False
) -> None:
    """Attach, compute, share, park and evict prompts of three tenants under pressure; report what was wrong."""
    draw, tenants = random.Random(seed), (None, "red", ("blue", 1))
    tiers = [HostTier(64 * PAGE_BYTES)] if seed % 2 else []
    one = Engine(path, pages=40, layout=WINDOWED if windowed else LAYOUT, device=device, tiers=tiers, borrows=borrows)
    one.cache.check()
    pipe.send(sum(one.prefix.match(tokens, namespace=name) for tokens in PROMPTS for name in tenants))
    end, has_sealed = time.monotonic() + seconds, False
    while not has_sealed or time.monotonic() < end:
        tokens, namespace, wrong = draw.choice(PROMPTS)[: draw.randint(2, 330)], draw.choice(tenants), 0
        if draw.random() < 0.5:
            one.prefix.fetch(tokens, namespace=namespace)
            one.prefix.poll()
        with contextlib.suppress(OutOfPages):
            _, wrong = one.serve(tokens, namespace, ends=draw.random() < 0.9)
        if wrong:
            pipe.send(f"{wrong} wrong rows")
        if not has_sealed and one.has_sealed():
            has_sealed = True
            pipe.send("sealed")
        if draw.random() < 0.3:
            one.prefix.prepare(0)
        if draw.random() < 0.1:
            one.prefix.evict(draw.randint(1, 8))
        if draw.random() < 0.1 or len(one.cache.sequences) > 2:
            for sequence in list(one.cache.sequences.values()):
                sequence.close()
    one.cache.check()
    pipe.send("served on")
    pipe.recv()


def engine_as(path: Path, pipe: Connection, uid: int) -> None:
    """An engine of another user."""
    os.setuid(uid)
    try:
        Pool("cpu", PAGE_BYTES, holder=path)
    except HolderUnavailable as error:
        pipe.send(str(error))


# the test's end of the processes


def until(condition: Callable[[], bool]) -> None:
    """Wait for what another process does."""
    end = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.01)


processes = multiprocessing.get_context("forkserver")
processes.set_forkserver_preload(["tests.unit.holder_engines"])


def with_parent(function: Callable[..., None], *arguments: Any) -> None:
    """Call it, and end when the test's process has ended, which may have been killed."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    threading.Thread(target=lambda: (wait([parent.sentinel]), os._exit(1)), daemon=True).start()
    function(*arguments)


class Process:
    """A process of a test, and the pipe to it."""

    def __init__(self, function: Any, path: Path, *arguments: Any) -> None:
        self.pipe: Connection
        self.pipe, theirs = processes.Pipe()
        self.process = processes.Process(target=with_parent, args=(function, path, theirs, *arguments), daemon=True)
        self.process.start()
        theirs.close()

    @property
    def pid(self) -> int:
        return self.process.pid or 0

    def get(self) -> Any:
        assert self.pipe.poll(60), "no answer in a minute"
        return self.pipe.recv()

    def ask(self, *request: Any) -> Any:
        self.pipe.send(request)
        return self.get()

    def kill(self, number: int = signal.SIGKILL) -> int | None:
        if self.process.is_alive():
            os.kill(self.pid, number)
        self.process.join(60)
        return self.process.exitcode


def start_holder(path: Path, device: str = "cpu") -> Process:
    """A holder that listens."""
    process = Process(hold, path, device)
    assert str(path) in process.get()
    return process


def start(path: Path, **options: Any) -> Process:
    """An engine that is ready."""
    started = Process(engine, path, options)
    assert started.get() == "ready"
    return started


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """The socket of `holder`."""
    return tmp_path / "kv.sock"


@pytest.fixture
def holder(path: Path) -> Iterator[Process]:
    """Of handles in host memory."""
    process = start_holder(path)
    yield process
    process.kill()


@pytest.fixture
def opened(path: Path, holder: Process) -> Iterator[Callable[..., Engine]]:
    """An engine in the test's own process. Its books are right when the test ends, and it leaves nothing in its driver."""
    engines: list[Engine] = []

    def opened(**options: Any) -> Engine:
        engines.append(Engine(path, driver=FakeDriver(over=HostDriver()), **options))
        return engines[-1]

    yield opened
    for engine in engines:
        engine.cache.check()
        engine.close()
        assert (engine.pool.driver.live_handles, engine.pool.driver.live_mappings) == (0, 0)
