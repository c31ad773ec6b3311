"""Threads open, write, verify and end sequences of two caches on one pool, with the mapper's thread beside them.

In the manner of mimalloc's stress test: each thread follows its own seed, writes a pattern and verifies it before it
gives the memory up, and hands some of its sequences to others. It is no benchmark. What the threads do is decided by
the seed; how they interleave is not, and the laws hold whichever way.
"""

import random
import threading

import torch

from vmmkv import KVCache, KVLayout, OutOfPages, OutOfSlots, Pool, Sequence
from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

THREADS = 3
TURNS = 150
MAX_TOKENS = 96

# 64 KiB and 96 KiB a row: 32 and 21.3 tokens a page.
LAYOUTS = (
    KVLayout.uniform(layers=2, kv_heads=4, head_dim=1024, dtype=torch.float32, windows=[None, 16]),
    KVLayout.uniform(layers=3, kv_heads=4, head_dim=2048, dtype=torch.bfloat16),
)


class Worker:
    """One thread's sequences, each full of its own number; in `shared`, those that anybody may go on with."""

    def __init__(self, seed: int, caches: list[KVCache], shared: list[tuple[KVCache, Sequence, int]], lock: threading.Lock):
        self.random = random.Random(seed)
        self.tenant = seed
        self.caches = caches
        self.shared, self.lock = shared, lock
        self.held: list[tuple[KVCache, Sequence, int]] = []
        self.failure: BaseException | None = None
        self.refused = 0

    def run(self) -> None:
        try:
            for _ in range(TURNS):
                self.turn()
            while self.held:
                self.end(self.held.pop())
        except BaseException as failure:
            self.failure = failure

    def turn(self) -> None:
        choice = self.random.random()
        if choice < 0.35 or not self.held:
            self.open()
        elif choice < 0.7:
            self.append(self.random.choice(self.held), self.random.randint(1, 40))
        elif choice < 0.85:
            self.end(self.held.pop(self.random.randrange(len(self.held))))
        else:
            self.swap()

    def open(self) -> None:
        cache = self.random.choice(self.caches)
        try:
            sequence = cache.open(tenant=self.tenant)
        except OutOfSlots:
            self.refused += 1
            return
        number = 1 + self.tenant * 80 + self.random.randrange(80)
        self.held.append((cache, sequence, number))
        self.append(self.held[-1], self.random.randint(1, 40))

    def append(self, held: tuple[KVCache, Sequence, int], num_tokens: int) -> None:
        cache, sequence, number = held
        start, end = sequence.length, min(sequence.length + num_tokens, MAX_TOKENS)
        try:
            sequence.grow(end)
        except OutOfPages:
            self.refused += 1
            return
        for layer in cache.layout.group_of:
            for plane in ("k", "v"):
                first = sequence.start(cache.layout.group_of[layer])
                rows = sequence.view(layer, plane)[start - first : end - first, :, ::31]
                own = (rows == 0) | ((rows > sequence.tenant * 80) & (rows <= (sequence.tenant + 1) * 80))
                assert own.all(), "another tenant's bytes"
                sequence.view(layer, plane)[start - first : end - first] = number
        sequence.advance(end - start)
        for group, description in enumerate(cache.layout.groups):
            if description.window is not None:
                sequence.advance_start(group)

    def verify(self, held: tuple[KVCache, Sequence, int]) -> None:
        cache, sequence, number = held
        for layer, group in cache.layout.group_of.items():
            for plane in ("k", "v"):
                rows = sequence.view(layer, plane)[: sequence.length - sequence.start(group)]
                assert (rows == number).all(), f"slot {sequence.slot} lost what was written"

    def end(self, held: tuple[KVCache, Sequence, int]) -> None:
        self.verify(held)
        cache, sequence, _ = held
        choice = self.random.random()
        if choice < 0.5:
            sequence.close()
        elif choice < 0.7:
            sequence.park(0)
        else:
            sequence.park()
        if choice > 0.9:
            cache.check()

    def swap(self) -> None:
        """Give a sequence to whoever comes, and take what somebody gave."""
        mine = self.held.pop(self.random.randrange(len(self.held)))
        self.verify(mine)
        with self.lock:
            self.shared.append(mine)
            theirs = self.shared.pop(0)
        self.verify(theirs)
        self.held.append(theirs)


def test_threads_that_share_a_pool_keep_what_they_wrote_and_leave_nothing():
    below = HostDriver()
    driver = FakeDriver(over=below)
    pool = Pool("cpu", 40 * PAGE_BYTES, driver=driver)
    caches = [KVCache(layout, pool, slots=8, max_tokens=MAX_TOKENS, guard_tokens=2) for layout in LAYOUTS]
    shared: list[tuple[KVCache, Sequence, int]] = []
    lock = threading.Lock()
    workers = [Worker(seed, caches, shared, lock) for seed in range(THREADS)]
    threads = [threading.Thread(target=worker.run) for worker in workers]
    for thread in threads:
        thread.start()
    while any(thread.is_alive() for thread in threads):
        for cache in caches:
            cache.map_ahead(100.0, lookahead_tokens=20)
        for thread in threads:
            thread.join(0.001)
    for worker in workers:
        if worker.failure is not None:
            raise worker.failure
    for held in shared:
        workers[0].verify(held)
    for cache in caches:
        cache.check()
        cache.close()
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)
    below.close()
