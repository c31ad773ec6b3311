"""Laws of KV events: a subscriber knows what the prefix tree and tiers have, after a gap too, and nothing that is gone."""

import contextlib
import dataclasses
import itertools
import random
import threading
import time
from collections import Counter
from collections.abc import Callable, Hashable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import msgspec
import numpy as np
import pytest
import torch
import zmq

from tests.end_to_end.small import until
from tests.engine.conftest import tiny_model
from tests.unit.support import LAYOUT, WINDOWED
from vmmkv import DiskTier, HostTier, KVCache, KVLayout, Pool, PrefixCache
from vmmkv.prefix.radix_tree import RadixTree
from vmmkv.tiers.keys import PageKeys
from vmmkv.tiers.record import RECORD_BYTES
from vmmkv.units import MIB, PAGE_BYTES
from vmmkv_server.config import EngineConfig
from vmmkv_server.engine import kv_events
from vmmkv_server.engine.kv_events import KVEventPublisher, block_hashes
from vmmkv_server.engine.loading import load
from vmmkv_server.protocol import BLOCK_TOKENS, Generate, KVEventSource
from vmmkv_server.sampling_params import SamplingParams

WAIT_S = 60.0
Block = tuple[str | None, tuple[int, ...]]
"""The salt of a prefix, and all its tokens up to the end of a block."""


class Router:
    """A subscriber, written after vLLM's: it reads batches, asks for those that it has missed, and keeps an index."""

    def __init__(self, source: KVEventSource) -> None:
        self.context = zmq.Context()
        self.subscriber = self.context.socket(zmq.SUB)
        self.subscriber.setsockopt_string(zmq.SUBSCRIBE, source.topic)
        self.subscriber.connect(source.endpoint)
        self.replay = self.context.socket(zmq.DEALER)
        if source.replay_endpoint is not None:
            self.replay.connect(source.replay_endpoint)
        self.next_number = 0
        self.known: dict[int, Block] = {}
        """All blocks of which it has heard since it was told that all are gone."""
        self.held: dict[str, set[int]] = {"GPU": set(), "CPU": set(), "STORAGE": set()}
        """Those that are there now, by medium."""
        self.events: list[dict[str, Any]] = []
        self.num_heard = self.num_gaps = 0
        self.is_deaf = False

    def close(self) -> None:
        self.context.destroy(linger=0)

    def at(self, medium: str) -> set[Block]:
        return {self.known[each] for each in self.held[medium]}

    @property
    def blocks(self) -> dict[int, Block]:
        return {each: self.known[each] for each in self.held["GPU"]}

    def listen(self, until: Callable[[], bool]) -> None:
        """Apply what comes, until that is so."""
        end_s = time.monotonic() + WAIT_S
        while not until():
            assert time.monotonic() < end_s, f"after {self.next_number} batches: {self.held}"
            if not self.subscriber.poll(20):
                continue
            _, number, batch = self.subscriber.recv_multipart()
            self.num_heard += 1
            if not self.is_deaf:
                self.take(int.from_bytes(number, "big"), batch)

    def take(self, number: int, batch: bytes) -> None:
        if number > self.next_number:
            self.num_gaps += 1
            if not self.replay.closed:
                self.ask()
        if number >= self.next_number:
            self.next_number = number + 1
            self.apply(batch)

    def ask(self) -> None:
        """All batches from the next one on, again."""
        self.replay.send_multipart((b"", self.next_number.to_bytes(8, "big")))
        more = True
        while more:
            assert self.replay.poll(WAIT_S * 1000)
            _, _, number, batch = self.replay.recv_multipart()
            more = number != kv_events.LAST_NUMBER
            if more:
                assert int.from_bytes(number, "big") == self.next_number
                self.next_number += 1
                self.apply(batch)

    def apply(self, batch: bytes) -> None:
        _, events, rank = msgspec.msgpack.decode(batch)
        assert rank == 0 and len(events) <= kv_events.MOST_EVENTS
        self.events += events
        for event in events:
            if event["type"] == "AllBlocksCleared":
                self.known.clear()
                for held in self.held.values():
                    held.clear()
            elif event["type"] == "BlockRemoved":
                self.held[event["medium"]].difference_update(event["block_hashes"])
            else:
                self.store(event)

    def store(self, event: dict[str, Any]) -> None:
        parent, tokens = event["parent_block_hash"], event["token_ids"]
        assert len(tokens) == len(event["block_hashes"]) * BLOCK_TOKENS == len(event["extra_keys"]) * event["block_size"]
        salt, before = self.known.get(parent, (None, None)) if parent is not None else (None, ())
        if before is None:
            return  # what it goes on from was lost
        if parent is None:
            salt = event["extra_keys"][0] and event["extra_keys"][0][0]
        for index, each in enumerate(event["block_hashes"]):
            assert each not in self.held[event["medium"]], f"stored twice: {event}"
            before += tuple(tokens[index * BLOCK_TOKENS : (index + 1) * BLOCK_TOKENS])
            assert self.known.setdefault(each, (salt, before)) == (salt, before)
            self.held[event["medium"]].add(each)


@contextlib.contextmanager
def published(tmp_path: Path, topic: str = "") -> Iterator[tuple[KVEventPublisher, Router]]:
    """A router that hears everything: what is published before it has connected is lost."""
    publisher = KVEventPublisher(f"ipc://{tmp_path}/events", f"ipc://{tmp_path}/replay", topic)
    router, num_sent, edges = Router(publisher.source), 1, [bytes(64)]

    def hears() -> bool:
        nonlocal num_sent
        if not router.num_heard:
            publisher.stored(None, edges)
            publisher.removed(None, edges)
            num_sent += 2
        return bool(router.num_heard) and len(router.events) == num_sent

    try:
        router.listen(hears)
        assert not router.blocks
        del router.events[1:]
        router.num_gaps = 0
        yield publisher, router
    finally:
        publisher.close()
        router.close()


def known(tree: RadixTree[Any]) -> set[Block]:
    """The blocks of a tree."""
    blocks = set()
    for node in tree.nodes():
        tokens = tuple(np.concatenate([each.tokens for each in node.path()]).tolist())
        salt = tree.namespace_of(node)
        ends = range(BLOCK_TOKENS, len(tokens) + 1, BLOCK_TOKENS)
        blocks |= {(salt and str(salt).removeprefix("salt:"), tokens[:end]) for end in ends}
    return blocks


def walk(tree: RadixTree[int], rng: random.Random, num_steps: int) -> Iterator[int]:
    """Insert prompts that share prefixes, and evict some."""
    prompts: list[tuple[Hashable, list[int]]] = [(None, []), ("salt:red", [])]
    for step in range(num_steps):
        namespace, prompt = rng.choice(prompts)
        prompt = prompt[: rng.randint(0, len(prompt))] + [rng.randrange(50) for _ in range(rng.choice((1, 15, 16, 40, 1200)))]
        tree.insert(namespace, prompt)
        prompts.append((namespace, prompt))
        if len(prompts) > 20:
            del prompts[rng.randrange(2, len(prompts))]
        for _ in range(rng.choice((0, 0, 1, 3))):
            if (leaf := tree.eviction.oldest()) is not None:
                tree.remove(leaf)
        yield step


def clocked_tree() -> RadixTree[int]:
    return RadixTree(iter(range(1 << 60)).__next__)


@pytest.mark.parametrize("seed", range(2))
def test_a_router_has_the_tree_after_a_walk_and_after_a_gap(tmp_path: Path, seed: int) -> None:
    tree, rng = clocked_tree(), random.Random(seed)
    for _ in walk(tree, rng, 10):
        pass  # what an earlier process left
    with published(tmp_path) as (publisher, router):
        tree.listen(publisher)
        for step in walk(tree, rng, 200):
            if step % 20 == 19:
                router.is_deaf = step % 40 == 19
                before = router.num_heard
                router.listen(lambda before=before: router.num_heard > before)
        router.is_deaf = False
        tree.insert(None, range(64))  # what comes next shows that batches were missed
        wanted = known(tree)
        router.listen(lambda: len(router.blocks) == len(wanted) and set(router.blocks.values()) == wanted)
        assert router.num_gaps and router.events[0] == {"type": "AllBlocksCleared"}
        while (leaf := tree.eviction.oldest()) is not None:
            tree.remove(leaf)
        router.listen(lambda: not router.blocks)


def stall(patch: pytest.MonkeyPatch, goes_on: threading.Event, waits: threading.Event | None = None) -> None:
    """The publisher's thread waits, with the next change of a tree."""
    hashed = kv_events.block_hashes

    def slowly(*given: Any) -> Any:
        if waits is not None:
            waits.set()
        goes_on.wait(WAIT_S)
        return hashed(*given)

    patch.setattr(kv_events, "block_hashes", slowly)


def test_changes_that_were_dropped_leave_a_gap_and_no_block_that_is_gone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    tree, rng, goes_on = clocked_tree(), random.Random(0), threading.Event()
    with published(tmp_path) as (publisher, router):
        monkeypatch.setattr(kv_events, "KV_EVENTS_PENDING", 8)
        stall(monkeypatch, goes_on)
        router.replay.close()
        tree.listen(publisher)
        for _ in walk(tree, rng, 300):
            pass
        goes_on.set()
        last = tree.insert(None, range(100, 116)).node
        router.listen(lambda: (None, tuple(range(100, 116))) in router.blocks.values())
        assert {"type": "AllBlocksCleared"} in router.events[1:]
        assert router.num_gaps
        assert set(router.blocks.values()) <= known(tree)
        tree.remove(last)
        router.listen(lambda: (None, tuple(range(100, 116))) not in router.blocks.values())


def test_events_on_the_wire_are_vllms(tmp_path: Path) -> None:
    tree, tokens = clocked_tree(), list(range(40))
    with published(tmp_path, "kv@here") as (publisher, router):
        tree.listen(publisher)
        tree.insert("salt:red", tokens[:20])
        tree.remove(tree.insert("salt:red", tokens).node)
        router.listen(lambda: len(router.events) == 4)
        first, second = block_hashes("salt:red", np.array(tokens, np.int32)).tolist()
        common = {"block_size": 16, "lora_id": None, "lora_name": None, "medium": "GPU", "group_idx": 0}
        common["kv_cache_spec_kind"] = "full_attention"
        assert router.events[1:] == [
            {"type": "BlockStored", "block_hashes": [first], "parent_block_hash": None, "token_ids": tokens[:16],
             "extra_keys": [["red"]], **common},
            {"type": "BlockStored", "block_hashes": [second], "parent_block_hash": first, "token_ids": tokens[16:32],
             "extra_keys": [None], **common},
            {"type": "BlockRemoved", "block_hashes": [second], "medium": "GPU", "group_idx": 0},
        ]  # fmt: skip
        publisher.close()
        assert router.subscriber.poll(WAIT_S * 1000)
        topic, number, batch = router.subscriber.recv_multipart()
        assert (topic, int.from_bytes(number, "big")) == (b"kv@here", router.next_number)
        assert msgspec.msgpack.decode(batch)[1:] == [[{"type": "AllBlocksCleared"}], 0]


def test_hashes_are_of_all_tokens_before_their_order_and_the_namespace() -> None:
    tokens = np.arange(64, dtype=np.int32)
    swapped, late = tokens.copy(), tokens.copy()
    swapped[:32] = np.concatenate([tokens[16:32], tokens[:16]])
    late[1], late[0] = tokens[0], tokens[1]
    found = [block_hashes(None, tokens), block_hashes("red", tokens), block_hashes(None, swapped), block_hashes(None, late)]
    assert len({int(each) for hashes in found for each in hashes}) == 16
    assert block_hashes(None, tokens[:47]).tolist() == found[0][:2].tolist()


def test_what_an_engine_has_cached_is_what_a_router_knows(tmp_path: Path) -> None:
    tiny_model().save_pretrained(tmp_path)
    options: Any = {"device": "cpu", "max_num_seqs": 2, "max_tokens": 256, "kv_budget_bytes": 64 * MIB}
    events = {"kv_events": "tcp://*:0", "kv_events_replay": "tcp://*:0", "kv_events_topic": "kv"}
    loaded = load(EngineConfig(model=str(tmp_path), **options, **events), lambda _: None)
    assert loaded.events is not None and loaded.ready.kv_events == loaded.events.source
    prefixes: Any = loaded.memory.prefixes
    with contextlib.closing(loaded), contextlib.closing(Router(loaded.events.source)) as router:
        prompts = [[*range(100), *range(number)] for number in (0, 30, 60)]
        for prompt in prompts:
            params = SamplingParams(max_tokens=40, temperature=0.0, seed=0)
            loaded.engine.receive(Generate(request_id=str(len(prompt)), prompt=prompt, params=params, cache_salt="salt:s"))
            while loaded.engine.has_work:
                loaded.engine.step()
        tree = prefixes.index.tree
        assert {("s", tuple(prompt[:96])) for prompt in prompts} <= known(tree)
        router.listen(lambda: (router.ask(), set(router.blocks.values()) == known(tree))[1])
        prefixes.evict()
        router.listen(lambda: (router.ask(), not router.blocks and not known(tree))[1])


class Tiered:
    """A prefix cache over tiers, so small that all of them evict, whose changes a router hears."""

    def __init__(self, path: Path, layout: KVLayout, publisher: KVEventPublisher, *, records: int = 9) -> None:
        self.stack = contextlib.ExitStack()
        self.pool = self.stack.enter_context(Pool("cpu", 64 * PAGE_BYTES))
        self.host, self.disk = HostTier(records * RECORD_BYTES), DiskTier(path, 2 * records * RECORD_BYTES)
        for tier in (self.host, self.disk):
            self.stack.callback(tier.close)
        cache = self.stack.enter_context(KVCache(layout, self.pool, slots=4, max_tokens=512))
        self.prefix = PrefixCache(cache, tiers=[self.host, self.disk], fingerprint="one")
        self.prompts: list[tuple[Hashable, list[int]]] = [(None, []), ("salt:red", [])]
        self.prefix.listen(publisher)

    def insert(self, namespace: Hashable, prompt: list[int]) -> None:
        sequence = self.prefix.attach(prompt, namespace=namespace).sequence
        sequence.grow(len(prompt))
        sequence.advance(len(prompt) - sequence.length)
        self.prefix.release(sequence, prompt)
        self.prompts.append((namespace, prompt))

    def flush(self) -> None:
        assert self.prefix.flush()

    def held(self) -> dict[str, set[Block]]:
        """The blocks that there are, by medium."""
        keys, layout = self.prefix.transfers.keys, self.prefix.cache.layout  # type: ignore[union-attr]
        found: dict[str, set[Block]] = {"GPU": known(self.prefix.index.tree), "CPU": set(), "STORAGE": set()}
        for namespace, prompt in self.prompts:
            path = keys.of(prompt, namespace)
            path.hash_some(None)
            for end in range(BLOCK_TOKENS, len(prompt) + 1, BLOCK_TOKENS):
                needed = set()
                for group, of_group in zip(layout.groups, path.by_group, strict=True):
                    first, last = (end - BLOCK_TOKENS) * group.row_bytes, end * group.row_bytes - 1
                    if group.window is None:
                        needed |= {*[*of_group, b"a page that is not full"][first // PAGE_BYTES : last // PAGE_BYTES + 1]}
                for medium, tier in (("CPU", self.host), ("STORAGE", self.disk)):
                    if all(tier.lookup([*needed])):
                        found[medium].add((namespace and "red", tuple(prompt[:end])))
        return found

    def walk(self, rng: random.Random, num_steps: int) -> None:
        """Prompts that share prefixes come and go, and come back from tiers."""
        for _ in range(num_steps):
            namespace, prompt = rng.choice(self.prompts)
            prompt = prompt[: rng.randint(0, len(prompt))] + [rng.randrange(50) for _ in range(rng.choice((1, 40, 100)))]
            self.insert(namespace, prompt[:300])
            self.prefix.poll(rng.choice((0.0, 1e3, 1e6)))
            if rng.random() < 0.3:
                self.prefix.evict(rng.choice((1, 4, None)))
            if rng.random() < 0.3:
                namespace, prompt = rng.choice(self.prompts)
                self.prefix.fetch(prompt, namespace=namespace)


PAGE_A_BLOCK = KVLayout.uniform(layers=32, kv_heads=8, head_dim=128, dtype=torch.bfloat16)
LAYOUTS = {
    "42.7 tokens a page": KVLayout.uniform(layers=3, kv_heads=4, head_dim=512, dtype=torch.float32),
    "6.4 tokens a page": KVLayout.uniform(layers=5, kv_heads=8, head_dim=1024, dtype=torch.float32),
    "a window": WINDOWED,
    "two groups": dataclasses.replace(
        WINDOWED, groups=tuple(dataclasses.replace(each, window=None) for each in WINDOWED.groups)
    ),
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_router_has_the_blocks_of_device_and_tiers_by_medium(tmp_path: Path, layout: str) -> None:
    rng, num_held = random.Random(layout), Counter[str]()
    with published(tmp_path) as (publisher, router):
        tiered = Tiered(tmp_path / "disk", LAYOUTS[layout], publisher)
        with tiered.stack:
            for step in range(12):
                router.is_deaf = step % 4 == 2  # the replay tells it of tiers too
                tiered.walk(rng, 6)
                tiered.flush()
                if router.is_deaf:
                    before = router.num_heard
                    router.listen(lambda before=before: router.num_heard > before)
                    continue
                held = tiered.held()
                num_held += Counter({medium: len(blocks) for medium, blocks in held.items()})
                router.listen(lambda held=held: held == {medium: router.at(medium) for medium in held})
            assert router.num_gaps and min(num_held.values()) > 10, num_held
            assert any(tier.stats().evicted_records for tier in (tiered.host, tiered.disk))
            tiered.prefix.evict()
            held = tiered.held()
            router.listen(lambda: held == {medium: router.at(medium) for medium in held})
            assert not held["GPU"] and held["CPU"]


def test_a_record_left_on_a_disk_is_told_when_its_path_is_known_again(tmp_path: Path) -> None:
    prompt = list(range(50))
    for times in range(2):
        (tmp_path / str(times)).mkdir()
        with published(tmp_path / str(times)) as (publisher, router):
            tiered = Tiered(tmp_path / "disk", LAYOUT, publisher)
            with tiered.stack:
                tiered.insert("salt:red", prompt)
                tiered.flush()
                blocks = {("red", tuple(prompt[:end])) for end in (16, 32, 48)}
                router.listen(lambda router=router, blocks=blocks: router.at("STORAGE") == router.at("CPU") == blocks)
                assert bool(tiered.disk.stats().stored_bytes) != times, "it is not stored again"


def test_tiers_on_the_wire_are_as_vllms_connector_tells_them(tmp_path: Path) -> None:
    """vLLM's own `medium`s; and with tokens and parents, without which Dynamo takes no notice."""
    prompt = list(range(50))
    with published(tmp_path) as (publisher, router):
        tiered = Tiered(tmp_path / "disk", LAYOUT, publisher, records=2)
        with tiered.stack:
            tiered.insert("salt:red", prompt[:40])
            tiered.flush()
            tiered.prefix.evict()
            tiered.insert("salt:red", [50, *prompt[1:20]])
            tiered.flush()
            router.listen(lambda: sum(event.get("medium") == "CPU" for event in router.events) == 4)
        first, second = block_hashes("salt:red", np.array(prompt, np.int32)).tolist()[:2]
        common = {"block_size": 16, "lora_id": None, "lora_name": None, "medium": "CPU", "group_idx": 0}
        common["kv_cache_spec_kind"] = "full_attention"
        assert [event for event in router.events if event.get("medium") == "CPU"][:3] == [
            {"type": "BlockStored", "block_hashes": [second], "parent_block_hash": first, "token_ids": prompt[16:32],
             "extra_keys": [None], **common},
            {"type": "BlockStored", "block_hashes": [first], "parent_block_hash": None, "token_ids": prompt[:16],
             "extra_keys": [["red"]], **common},
            {"type": "BlockRemoved", "block_hashes": [second], "medium": "CPU", "group_idx": 0},
        ]  # fmt: skip
        assert {event.get("medium") for event in router.events} == {None, "GPU", "CPU", "STORAGE"}


def test_what_a_tier_could_not_store_is_not_told_and_not_remembered(tmp_path: Path) -> None:
    with published(tmp_path) as (publisher, router):
        tiered = Tiered(tmp_path / "disk", LAYOUT, publisher)
        with tiered.stack, pytest.MonkeyPatch.context() as patch:
            patch.setattr(tiered.disk, "write_at", Mock(side_effect=OSError))
            tiered.insert(None, list(range(50)))
            tiered.flush()
            patch.undo()
            tiered.prefix.evict()
            tiered.insert(None, list(range(60, 76)))
            tiered.flush()
            router.listen(lambda: len(router.held["STORAGE"]) == 1 and len(router.held["CPU"]) == 4)
            assert router.at("STORAGE") == {(None, tuple(range(60, 76)))}
            assert publisher.tiers["disk"].num_records == 1


def test_records_that_stay_are_told_again_after_changes_were_lost(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    prompt, goes_on, waits = list(range(50)), threading.Event(), threading.Event()
    blocks = {(None, tuple(prompt[:end])) for end in (16, 32, 48)}
    with published(tmp_path) as (publisher, router):
        router.replay.close()
        tiered = Tiered(tmp_path / "disk", LAYOUT, publisher)
        with tiered.stack:
            tiered.insert(None, prompt)
            tiered.flush()
            router.listen(lambda: router.at("CPU") == router.at("STORAGE") == blocks)
            with monkeypatch.context() as patch:
                patch.setattr(kv_events, "KV_EVENTS_PENDING", 50)
                stall(patch, goes_on, waits)
                publisher.stored("another", [bytes(64)])
                assert waits.wait(WAIT_S)
                for _ in range(60):
                    publisher.held("host", [b"another"], True)
            goes_on.set()
            router.listen(lambda: not router.held["CPU"])
            tiered.insert(None, prompt)
            tiered.flush()
            router.listen(lambda: router.at("CPU") == router.at("STORAGE") == blocks)


def test_the_publisher_rests_by_the_time_it_worked_not_by_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a clock of its own: each reading takes a tenth of a pause, and a change is one or two readings."""
    now_s, pauses = itertools.count(1.0, kv_events.PAUSE_S / 10), []
    clock = Mock(wraps=time, perf_counter=lambda: next(now_s), sleep=pauses.append)
    monkeypatch.setattr(kv_events, "time", clock)
    with contextlib.closing(KVEventPublisher("tcp://127.0.0.1:*")) as publisher:
        for number in range(3000):
            publisher.held("host", [number.to_bytes(4, "big")], number % 2 == 0)
        until(lambda: not publisher.num_pending)
    assert 3000 // 12 <= len(pauses) <= 2 * 3000 // 10


def path_of(layout: KVLayout, num_tokens: int) -> PageKeys:
    path = PageKeys(layout, "one").of(np.arange(num_tokens, dtype=np.int32))
    path.hash_some(None)
    return path


def test_a_path_is_hashed_and_looked_at_in_pieces_and_only_where_it_is_new(monkeypatch: pytest.MonkeyPatch) -> None:
    hashed: list[int] = []

    def counting(namespace: Hashable, tokens: Any, known: Any) -> Any:
        hashed.append(len(tokens) // BLOCK_TOKENS)
        return block_hashes(namespace, tokens, known)

    num_blocks = 3 * kv_events.PIECE
    blocks, path = kv_events.TierBlocks("CPU"), path_of(PAGE_A_BLOCK, num_blocks * BLOCK_TOKENS)
    grown = path_of(PAGE_A_BLOCK, (num_blocks + 1) * BLOCK_TOKENS)
    monkeypatch.setattr(kv_events, "block_hashes", counting)
    assert not any(blocks.hold(path.in_order, is_held=True))
    said = list(blocks.describe(path, None))
    assert hashed == [kv_events.PIECE] * 3 and said[:6] == [None] * 6
    assert [event.block_hashes for event in said[6:]] == [[each] for each in block_hashes(None, path.tokens).tolist()]
    assert not [*blocks.describe(path, None)], "nothing is new"
    assert not any(blocks.describe(grown, [(0, num_blocks)])) and hashed[3:] == [1]
    (_, event) = blocks.hold(grown.in_order[-1:], is_held=True)
    assert event.block_hashes == block_hashes(None, grown.tokens).tolist()[-1:]  # type: ignore[union-attr]


def test_a_change_of_many_events_is_published_in_batches(tmp_path: Path) -> None:
    path = path_of(PAGE_A_BLOCK, 50 * BLOCK_TOKENS)
    with published(tmp_path) as (publisher, router):
        publisher.held("host", path.in_order, True)
        publisher.described(HostTier(RECORD_BYTES), path, None)
        router.listen(lambda: len(router.held["CPU"]) == 50)


def test_a_record_that_is_told_twice_is_removed_by_once() -> None:
    blocks, path = kv_events.TierBlocks("CPU"), path_of(PAGE_A_BLOCK, BLOCK_TOKENS)
    said = [*blocks.describe(path, [(0, 0)])]
    for is_held in (True, True, False, False):
        said += blocks.hold(path.in_order, is_held=is_held)
    assert [type(event) for event in said if event] == [kv_events.BlockStored, kv_events.BlockRemoved]


def test_two_blocks_of_one_record_may_have_one_hash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "block_hashes", lambda namespace, tokens, known: np.full(len(tokens) // 16, 7, np.uint64))
    blocks, path = kv_events.TierBlocks("CPU"), path_of(LAYOUTS["two groups"], 512)
    for is_held in (True, False):
        for event in blocks.hold(path.in_order, is_held=is_held):
            assert event is None or event.block_hashes
        if is_held:
            assert any(blocks.describe(path, None))
    assert not blocks.num_records


def test_a_change_that_fails_is_logged_and_clears_what_routers_know(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    with published(tmp_path) as (publisher, router):
        router.replay.close()
        with monkeypatch.context() as patch:
            patch.setattr(publisher.tiers["host"], "hold", Mock(side_effect=KeyError("a defect")))
            publisher.held("host", [b"key"], True)
            router.listen(lambda: {"type": "AllBlocksCleared"} in router.events[1:])
        assert "a change could not be told" in caplog.text and "a defect" in caplog.text
        publisher.stored(None, [bytes(64)])
        router.listen(lambda: len(router.blocks) == 1)


def test_the_engine_never_waits_for_a_publisher_that_is_stalled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    goes_on = threading.Event()
    with published(tmp_path) as (publisher, router):
        monkeypatch.setattr(kv_events, "KV_EVENTS_PENDING", 50)
        stall(monkeypatch, goes_on)
        router.replay.close()
        tiered = Tiered(tmp_path / "disk", LAYOUT, publisher)
        with tiered.stack:
            start_s = time.monotonic()
            tiered.walk(random.Random(0), 60)
            tiered.flush()
            assert time.monotonic() - start_s < WAIT_S / 2 and publisher.num_pending <= 51
            monkeypatch.undo()
            goes_on.set()
            for seed in range(2):
                tiered.walk(random.Random(seed), 20)
                last = list(range(100 + 16 * seed, 116 + 16 * seed))
                tiered.insert(None, last)
                tiered.flush()
                router.listen(lambda last=last: all((None, tuple(last)) in router.at(medium) for medium in router.held))
                held = tiered.held()
                assert all(router.at(medium) <= held[medium] for medium in held), "none that is gone"
            assert {"type": "AllBlocksCleared"} in router.events[1:]


@pytest.mark.parametrize("replay_endpoint", [None, "tcp://127.0.0.1:*"])
def test_a_publisher_with_nothing_to_tell_rests(monkeypatch: pytest.MonkeyPatch, replay_endpoint: str | None) -> None:
    polled, poll = Counter[str](), zmq.Poller.poll

    def counted(poller: zmq.Poller, timeout: int) -> Any:
        polled[threading.current_thread().name] += 1
        return poll(poller, timeout)

    monkeypatch.setattr(zmq.Poller, "poll", counted)
    before = set(threading.enumerate())
    publisher = KVEventPublisher("tcp://127.0.0.1:*", replay_endpoint)
    (thread,) = set(threading.enumerate()) - before
    thread.name = "this one"
    time.sleep(5 * kv_events.PERIOD_MS / 1e3)
    publisher.close()
    assert 1 <= polled["this one"] < 100, "some five; without a rest thousands"


def test_an_endpoint_that_is_taken_is_refused_and_port_0_is_any() -> None:
    with contextlib.closing(KVEventPublisher("tcp://*:0")) as publisher:
        port = publisher.source.endpoint.rpartition(":")[2]
        assert publisher.source.endpoint.startswith("tcp://0.0.0.0:") and int(port)
        with pytest.raises(ValueError, match=rf"kv_events='tcp://\*:{port}' cannot be had: Address already in use"):
            KVEventPublisher(f"tcp://*:{port}")
        with pytest.raises(ValueError, match="kv_events_replay='tcp://here' cannot be had"):
            KVEventPublisher("tcp://*:0", "tcp://here")


@contextlib.contextmanager
def large_batches(endpoint: str, num_batches: int) -> Iterator[KVEventPublisher]:
    """A publisher that has sent so many batches, each but the first of some 5 KiB."""
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.closing(KVEventPublisher("tcp://127.0.0.1:*", endpoint)) as publisher,
    ):
        patch.setattr(kv_events, "MOST_EVENTS", 1)
        patch.setattr(kv_events, "PERIOD_MS", 0)
        num_tokens = (num_batches - 1) * kv_events.MOST_BLOCKS * BLOCK_TOKENS
        publisher.stored(None, [np.arange(num_tokens, dtype=np.int32).tobytes()])
        until(lambda: publisher.number == num_batches - 1)
        yield publisher


@contextlib.contextmanager
def asking(publisher: KVEventPublisher, frames: list[bytes]) -> Iterator["zmq.Socket[bytes]"]:
    """A client that asks for a replay, with room for one batch."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as client:
        client.linger = 0
        client.set_hwm(1)
        client.rcvbuf = 4096
        client.connect(publisher.source.replay_endpoint or "")
        client.send_multipart(frames)
        yield client


def replayed(client: "zmq.Socket[bytes]") -> list[int]:
    """The numbers of the batches up to the end of a replay."""
    numbers = []
    while True:
        assert client.poll(WAIT_S * 1000)
        number = client.recv_multipart()[2]
        if number == kv_events.LAST_NUMBER:
            return numbers
        numbers.append(int.from_bytes(number, "big"))


def test_a_client_that_does_not_read_its_replays_holds_up_a_few_batches_and_no_other_client(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    num_batches, asked = 600, [b"", bytes(8)]
    with large_batches(f"ipc://{tmp_path}/replay", num_batches) as publisher:
        with asking(publisher, asked) as deaf:
            until(lambda: bool(publisher.replays))
            for _ in range(60):
                deaf.send_multipart(asked)
            with asking(publisher, asked) as client:
                assert replayed(client) == [*range(num_batches)]
                client.send_multipart((b"", (num_batches - 2).to_bytes(8, "big")))
                assert replayed(client) == [num_batches - 2, num_batches - 1]
            turns, bisect = itertools.count(), kv_events.bisect_left
            monkeypatch.setattr(kv_events, "bisect_left", lambda *given, **how: (next(turns), bisect(*given, **how))[1])
            until(lambda: next(turns) > num_batches)  # more than would send all
            (start,) = publisher.replays.values()
            assert start < num_batches // 2, "a queue, and the buffers of the kernel"
            numbers = replayed(deaf)
            assert numbers[-1] == num_batches - 1 and len(numbers) < 2 * num_batches, (
                "asking again begins anew, and adds nothing"
            )
        with asking(publisher, asked) as gone:
            until(lambda: bool(publisher.replays))
            gone.close()
            until(lambda: not publisher.replays)


@pytest.mark.parametrize("frames", [[b"", b"short"], [b"no", bytes(8)], [b"", bytes(8), b""], [b""], [b"", b"\xff" * 8]])
def test_what_is_no_request_for_a_replay_has_no_answer_and_past_the_last_batch_is_the_end(
    tmp_path: Path, frames: list[bytes]
) -> None:
    with large_batches(f"ipc://{tmp_path}/replay", 3) as publisher, asking(publisher, frames) as client:
        client.send_multipart((b"", bytes(8)))
        assert replayed(client) == ([] if frames[-1] == b"\xff" * 8 else [0, 1, 2])


@pytest.mark.parametrize(
    ("name", "most", "num_left"), [("KV_EVENTS_REPLAYED", 7, 7), ("KV_EVENTS_REPLAYED_BYTES", 40_000, None)]
)
def test_batches_for_replays_are_bounded_by_number_and_by_bytes_and_the_oldest_go_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, most: int, num_left: int | None
) -> None:
    monkeypatch.setattr(kv_events, name, most)
    num_batches = 50
    with large_batches(f"ipc://{tmp_path}/replay", num_batches) as publisher:
        sizes = [len(batch) for _, batch in publisher.sent]
        assert len(sizes) == num_left or most - max(sizes) < sum(sizes) <= most
        with asking(publisher, [b"", bytes(8)]) as client:
            assert replayed(client) == [*range(num_batches - len(sizes), num_batches)]


def test_a_peer_that_reads_nothing_or_sends_too_much_loses_its_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_events, "UNREAD_MS", 100)
    with large_batches("tcp://127.0.0.1:*", 1500) as publisher:
        assert publisher.replayer is not None
        monitor = publisher.replayer.get_monitor_socket(zmq.EVENT_DISCONNECTED)
        with asking(publisher, [b"", bytes(8)]):
            assert monitor.poll(WAIT_S * 1000) and monitor.recv_multipart()
            until(lambda: not publisher.replays)
        with asking(publisher, [b"", bytes(1 << 20)]):
            assert monitor.poll(WAIT_S * 1000)
        publisher.replayer.disable_monitor()
