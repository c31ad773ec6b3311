"""Threads open, write, verify and end sequences of two caches on one pool, while another maps ahead.

In the manner of mimalloc's stress test: each thread follows its own seed, verifies what it wrote before it gives the memory
up, and hands some of its sequences to others. The seeds decide what the threads do, and not how they interleave: the laws
hold whichever way.
"""

import random
import threading
from concurrent.futures import ThreadPoolExecutor, wait

import torch

from tests.laws.model import Live, opened, verify_unwritten, verify_written, write
from vmmkv import KVCache, KVLayout, OutOfPages, OutOfSlots, Pool
from vmmkv.driver.host import HostDriver
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import PAGE_BYTES

THREADS = 3
TURNS = 150
MAX_TOKENS = 96
EVERY = 31
"""One number of so many of each head is verified."""

# 64 KiB and 96 KiB a row: 32 and 21.3 tokens a page.
LAYOUTS = (
    KVLayout.uniform(layers=2, kv_heads=4, head_dim=1024, dtype=torch.float32, windows=[None, 16]),
    KVLayout.uniform(layers=3, kv_heads=4, head_dim=2048, dtype=torch.bfloat16),
)


class Worker:
    """One thread's sequences; in `shared`, those that any thread may go on with."""

    def __init__(self, seed: int, caches: list[KVCache], shared: list[Live], lock: threading.Lock) -> None:
        self.random, self.tenant, self.caches = random.Random(seed), seed, caches
        self.shared, self.lock = shared, lock
        self.held: list[Live] = []

    def run(self) -> None:
        for _ in range(TURNS):
            choice = self.random.random()
            if choice < 0.35 or not self.held:
                self.open()
            elif choice < 0.7:
                self.append(self.random.choice(self.held))
            elif choice < 0.85:
                self.end(self.pick())
            else:
                self.swap()
        while self.held:
            self.end(self.pick())

    def pick(self) -> Live:
        live = self.held.pop(self.random.randrange(len(self.held)))
        verify_written(live, EVERY)
        return live

    def open(self) -> None:
        cache = self.random.choice(self.caches)
        try:
            sequence = cache.open(tenant=self.tenant)
        except OutOfSlots:
            return
        self.held.append(opened(cache, sequence, owner=self.tenant))
        self.append(self.held[-1])

    def append(self, live: Live) -> None:
        sequence, num_tokens = live.sequence, self.random.randint(1, 40)
        new = range(sequence.length, min(sequence.length + num_tokens, MAX_TOKENS))
        try:
            sequence.grow(new.stop)
        except OutOfPages:
            return
        verify_unwritten(live)
        live.stamps += [self.random.randrange(1000) for _ in new]
        write(live, new, through_arena=bool(num_tokens % 2))
        sequence.advance(len(new))
        for group, description in enumerate(live.cache.layout.groups):
            if description.window is not None:
                sequence.advance_start(group)
                live.starts[group] = sequence.start(group)

    def end(self, live: Live) -> None:
        choice = self.random.random()
        if choice < 0.5:
            live.sequence.close()
        else:
            live.sequence.park(0 if choice < 0.7 else None)
        if choice > 0.9:
            live.cache.check()

    def swap(self) -> None:
        """Give a sequence to the others, and take one of theirs."""
        mine = self.pick()
        with self.lock:
            self.shared.append(mine)
            theirs = self.shared.pop(0)
        verify_written(theirs, EVERY)
        self.held.append(theirs)


def test_threads_that_share_a_pool_keep_what_they_wrote_and_leave_nothing():
    below = HostDriver()
    driver = FakeDriver(over=below)
    pool = Pool("cpu", 40 * PAGE_BYTES, driver=driver)
    caches = [KVCache(layout, pool, slots=8, max_tokens=MAX_TOKENS, guard_tokens=2) for layout in LAYOUTS]
    shared: list[Live] = []
    lock = threading.Lock()
    with ThreadPoolExecutor(THREADS) as threads:
        running = [threads.submit(Worker(seed, caches, shared, lock).run) for seed in range(THREADS)]
        while wait(running, timeout=0.001).not_done:
            for cache in caches:
                cache.map_ahead(100.0, lookahead_tokens=20)
    for each in running:
        each.result()
    for live in shared:
        verify_written(live, EVERY)
    for cache in caches:
        cache.check()
        cache.close()
    pool.close()
    assert (driver.live_handles, driver.live_mappings, driver.used_bytes) == (0, 0, 0)
    below.close()
