"""Prefixes under random use: prompts that collide, every way in and out, forks, a tiny budget, work in flight and failures.

Against a dictionary (`Texts`): whatever a sequence was given, copied or mapped, it reads the bytes that were
written for its tokens in its namespace, and nothing that was not confirmed is shared.
"""

import contextlib
from collections.abc import Iterable

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from tests.laws.machine import MAX_TOKENS, SLOTS, LawMachine, cases, picks, seeds
from tests.laws.model import (
    LAYOUTS,
    PREFIX_LAYOUTS,
    SAMPLE,
    TENANTS,
    Live,
    Texts,
    large_extents,
    num_common,
    opened,
    verify_written,
)
from vmmkv import OutOfPages, OutOfSlots, RowsUnmapped, Sequence
from vmmkv.prefix import AttachMethod, PrefixCache
from vmmkv.units import PAGE_BYTES

namespaces = st.sampled_from(["red", "red", "blue"])
counts = st.integers(0, MAX_TOKENS)
words = st.lists(st.sampled_from([5, 5, 6, 7]), min_size=1, max_size=8)
methods = st.sampled_from([None, None, None, *AttachMethod, AttachMethod.ALIAS])


class PrefixMachine(LawMachine):
    """A cache with prefixes, and another one that wants the same pages."""

    shares_pages = True
    most_pages = 40

    @initialize(
        layout=st.sampled_from(sorted(PREFIX_LAYOUTS)),
        guard=st.sampled_from([0, 2]),
        pages=st.integers(8, 40),
        large=st.sampled_from([2, 4]),
        seed=seeds,
    )
    def make(self, layout, guard, pages, large, seed):
        self.closing = contextlib.ExitStack()
        self.closing.enter_context(large_extents(large))
        self.open_device(seed, pages)
        self.cache = self.new_cache(PREFIX_LAYOUTS[layout], self.pool, slots=SLOTS, max_tokens=MAX_TOKENS, guard_tokens=guard)
        self.prefix = self.new_prefix(seed)
        self.rival = self.new_cache(LAYOUTS["one_group"], self.pool, slots=1, max_tokens=MAX_TOKENS)
        self.rivals: list[Sequence] = []
        self.caches = [self.cache, self.rival]
        self.texts = Texts()
        self.said: list[tuple[str, list[int]]] = [("red", [5, 5, 5])]
        """What was inserted, in which namespace; the newest last."""
        self.pinned = False
        self.pins: dict[tuple[str, tuple[int, ...]], set[tuple[int, int]]] = {}
        """By namespace and tokens: where the full extents end that were there when these were pinned, by group."""

    def new_prefix(self, seed: int) -> PrefixCache:
        return PrefixCache(self.cache)

    def loading_bytes(self) -> int:
        """Of extents that are in the tree only when they are loaded."""
        return 0

    def state(self):
        attached = self.prefix.stats()
        return [*super().state(), attached.attached, attached.hit_tokens]

    def pick_live(self, pick: int, *, known: bool = False) -> Live | None:
        live = [live for live in self.live if live.inserted is not None or not known]
        return live[pick % len(live)] if live else None

    def opened(self, sequence: Sequence, tokens: list[int], *, inserted: int | None, stamps: list[int] | None = None) -> Live:
        assert sequence.length == len(tokens)
        stamps = self.texts.stamps(sequence.tenant, tokens) if stamps is None else stamps
        live = opened(self.cache, sequence, owner=TENANTS.index(sequence.tenant), stamps=stamps)
        live.tokens, live.inserted = list(tokens), inserted
        self.live.append(live)
        self.forget_evicted()
        self.verify([live])
        return live

    @rule(pick=picks, common=counts, own=words, other=st.sampled_from([None, None, *TENANTS]), method=methods, confirmed=counts)
    def attach(self, pick, common, own, other, method, confirmed):
        """A prompt that begins as something that was said, perhaps in another namespace."""
        namespace, said = self.said[-1 - pick % len(self.said)]
        live = self.begin(said[:common] + own, other or namespace, method)
        if live is not None:
            self.insert_first(live, live.inserted + confirmed)

    @rule(pick=picks, own=words, method=methods)
    def attach_beside(self, pick, own, method):
        """A prompt that begins as a running sequence does."""
        live = self.live[pick % len(self.live)] if self.live else None
        known, namespace = ([], "red") if live is None else (live.tokens, live.sequence.tenant)
        live = self.begin(known[: len(known) * (pick % 4 + 1) // 4] + own, namespace, method)
        if live is not None:
            self.insert_first(live, max(live.inserted, len(live.tokens) - pick % 3))

    @rule(pick=picks, own=words, method=methods, end=st.sampled_from(["park", "release", "stay", "stay"]))
    def turn(self, pick, own, method, end):
        """A conversation goes on, from its first turn to its last."""
        namespace, said = self.said[-1 - pick % min(4, len(self.said))]
        live = self.begin((said + own)[-MAX_TOKENS:] if pick == 11 else said[: MAX_TOKENS - 1] + own, namespace, method)
        if live is not None:
            if end == "park":
                self.park_known(live, MAX_TOKENS)
            elif end == "release":
                self.release_known(live, MAX_TOKENS)
            else:
                self.insert_first(live, MAX_TOKENS)

    def begin(self, prompt: list[int], namespace: str, method: AttachMethod | None) -> Live | None:
        """Attach a prompt and compute what is missing, as far as there is room."""
        prompt = prompt[:MAX_TOKENS]
        known = self.prefix.match(prompt, namespace=namespace)
        assert known <= self.texts.num_confirmed(namespace, prompt[:-1]), "what was never confirmed is shared"
        assert known >= self.least_known(namespace, prompt), "what a running sequence has inserted cannot be had"
        try:
            attached = self.attempt(lambda: self.prefix.attach(prompt, namespace=namespace, method=method))
        except OutOfSlots:
            assert len(self.live) == SLOTS
            return None
        except OutOfPages:
            assert known or self.cache.guard_tokens
            return None
        num_tokens = attached.num_tokens
        assert num_tokens <= known
        assert attached.method is AttachMethod.ALIAS or not attached.num_aliased
        assert (num_tokens == 0) == (attached.method is AttachMethod.COMPUTE)
        assert method in (None, attached.method) or attached.method is AttachMethod.COMPUTE
        live = self.opened(attached.sequence, prompt[:num_tokens], inserted=num_tokens)
        for start, group in zip(live.starts, self.cache.layout.groups, strict=True):
            latest = self.cache.layout.start_for(group, num_tokens)
            assert start <= latest if attached.method is AttachMethod.ADOPT else start == latest
        self.say(live, prompt[num_tokens:])
        return live

    def least_known(self, namespace: str, prompt: list[int]) -> int:
        """What running sequences have inserted stays theirs, so it can be had."""
        least = 0
        for live in self.live:
            if live.inserted and live.sequence.tenant == namespace:
                common = num_common(live.tokens[: live.inserted], prompt[:-1])
                starts = [self.cache.layout.start_for(group, common) for group in self.cache.layout.groups]
                if all(have <= need for have, need in zip(live.starts, starts, strict=True)):
                    least = max(least, common)
        return least

    @rule(namespace=namespaces, tokens=words)
    def open_unknown(self, namespace, tokens):
        """A sequence that the prefix cache does not know, perhaps in a slot whose rows it does know."""
        try:
            sequence = self.attempt(lambda: self.cache.open(tenant=namespace))
        except OutOfSlots:
            assert len(self.live) == SLOTS
        except OutOfPages:  # what is mapped there is shared, and has to be exchanged
            assert self.cache.guard_tokens
        else:
            self.say(self.opened(sequence, [], inserted=None), tokens)

    @precondition(lambda self: self.live)
    @rule(pick=picks, count=st.integers(1, 2), tokens=words)
    def fork(self, pick, count, tokens):
        live = self.live[pick % len(self.live)]
        self.say(live, tokens)
        try:
            forks = self.attempt(lambda: self.cache.fork(live.sequence, count))
        except OutOfSlots:
            assert len(self.live) + count > SLOTS
        except OutOfPages:
            pass
        else:
            for fork in forks:
                self.opened(fork, live.tokens, inserted=None, stamps=live.stamps)
                assert self.live[-1].starts == live.starts
                live.number()
                self.live[-1].at = live.at

    # on

    @precondition(lambda self: self.live)
    @rule(pick=picks, tokens=words)
    def append(self, pick, tokens):
        self.say(self.live[pick % len(self.live)], tokens)

    def say(self, live: Live, tokens: list[int]) -> None:
        """As many of these tokens as find memory are computed."""
        sequence = live.sequence
        wanted = min(sequence.length + len(tokens), sequence.max_tokens)
        one_by_one = range(sequence.length + 1, wanted + 1)  # in pages, where a prompt is laid in large extents
        try:
            for length in one_by_one if len(tokens) % 2 else [wanted]:
                self.attempt(lambda length=length: sequence.grow(length))
        except OutOfPages:
            wanted = min(sequence.limit, wanted)
        self.forget_evicted()
        new = range(sequence.length, wanted)
        live.tokens += tokens[: len(new)]
        text = (sequence.tenant, *live.stamps) if live.is_compacted else sequence.tenant
        live.stamps += self.texts.stamps(text, live.tokens)[sequence.length :]
        self.compute(live, new)
        sequence.advance(len(new))

    @precondition(lambda self: self.live)
    @rule(pick=picks, tokens=words)
    def overrun(self, pick, tokens):
        """Rows are written past the length, of tokens that then turn out to be others."""
        live = self.live[pick % len(self.live)]
        self.say(live, tokens)
        num_tokens = max(live.sequence.length - len(tokens), live.inserted or 0)
        self.cut(live, num_tokens)

    @precondition(lambda self: self.pick_live(0, known=True))
    @rule(pick=picks, more=counts)
    def insert(self, pick, more):
        live = self.pick_live(pick, known=True)
        self.insert_first(live, live.inserted + more)

    def insert_first(self, live: Live, num_tokens: int) -> None:
        num_tokens = min(num_tokens, live.sequence.length)
        self.confirm(live, num_tokens - live.inserted)
        calls = self.driver.num_calls
        self.prefix.insert(live.sequence, live.tokens[:num_tokens])
        assert self.driver.num_calls == calls
        live.inserted = num_tokens

    @precondition(lambda self: self.pick_live(0, known=True))
    @rule(pick=picks, at=picks)
    def insert_something_else(self, pick, at):
        live = self.pick_live(pick, known=True)
        if 0 < live.inserted < live.sequence.length:
            tokens = live.tokens.copy()
            tokens[at % live.inserted] = 8
            with pytest.raises(ValueError, match="other tokens were inserted"):
                self.prefix.insert(live.sequence, tokens)

    @precondition(lambda self: len(self.live) > 1)
    @rule(pick=picks, other=picks, first=counts, more=counts)
    def copy_rows(self, pick, other, first, more):
        """A beam goes on from another: what they have in common stays."""
        source, target = self.live[pick % len(self.live)], self.live[other % len(self.live)]
        if source is target:
            return
        if source.sequence.tenant != target.sequence.tenant:
            if not any(source.starts) and not any(target.starts):
                with pytest.raises(ValueError, match="two tenants"):
                    self.cache.copy_rows([(source.sequence, target.sequence)], 0, 0)
            return
        first = min(first, num_common(source.stamps, target.stamps))
        end = min(first + more, len(source.tokens), target.sequence.limit)
        try:
            self.attempt(lambda: self.cache.copy_rows([(source.sequence, target.sequence)], first, end))
        except RowsUnmapped:
            assert any(source.starts) or any(target.starts)
        except ValueError as error:
            assert "shares a page" in str(error)
        else:
            target.tokens = source.tokens[:end]
            target.stamps = source.stamps[:end]
            target.starts = [max(pair) for pair in zip(source.starts, target.starts, strict=True)]
            source.number()
            target.at = source.at[: end + 1]
            if target.inserted is not None:
                target.inserted = None if source.is_compacted else min(target.inserted, first)

    # the tree

    @rule(pick=picks, common=counts, namespace=namespaces, ttl_s=st.sampled_from([None, 1e-9, 1e6, "unpin"]))
    def pin(self, pick, common, namespace, ttl_s):
        prompt = self.said[-1 - pick % len(self.said)][1][:common]
        if ttl_s == "unpin":
            self.prefix.unpin(prompt, namespace=namespace)
            self.pins.pop((namespace, tuple(prompt)), None)
            return
        pinned = self.prefix.pin(prompt, namespace=namespace, ttl_s=ttl_s)
        self.pinned |= pinned > 0
        if ttl_s != 1e-9:
            self.pins.setdefault((namespace, tuple(prompt)), set()).update(self.ends_of_extents(namespace, prompt))
        assert pinned <= self.texts.num_confirmed(namespace, prompt)

    def ends_of_extents(self, namespace: str, prompt: Iterable[int]) -> set[tuple[int, int]]:
        path, num_tokens = self.prefix.index.tree.match(namespace, list(prompt))
        pieces = [piece for node in path for piece in node.pieces]
        return {(piece.group, piece.end_token) for piece in pieces if piece.end_token <= num_tokens}

    @invariant()
    def full_extents_stay_while_they_are_pinned(self):
        for (namespace, prompt), ends in self.pins.items():
            assert ends <= self.ends_of_extents(namespace, prompt)

    @rule(num_pages=st.none() | st.integers(0, 3))
    def evict(self, num_pages):
        calls = self.driver.num_calls
        held = self.prefix.stats().held_bytes
        gone = self.prefix.evict(num_pages)
        assert self.prefix.stats().held_bytes == held - gone * PAGE_BYTES
        assert self.driver.num_calls == calls

    @rule(count=st.integers(0, SLOTS))
    def free_slots(self, count):
        calls = self.driver.num_calls
        self.prefix.free_slots(count)
        assert self.driver.num_calls == calls
        self.forget_evicted()
        assert len(self.kept) <= max(SLOTS - count - len(self.live), 0) or self.pinned

    @rule(num_tokens=counts)
    def rival_takes(self, num_tokens):
        """Another cache of the pool wants pages, or has no more use for its own."""
        if self.rivals and not num_tokens:
            self.attempt(self.rivals[0].close)
            self.rivals.pop()
            return
        try:
            if not self.rivals:
                self.rivals.append(self.attempt(self.rival.open))
            self.attempt(lambda: self.rivals[0].grow(num_tokens))
        except OutOfPages:
            pass

    # out

    @precondition(lambda self: self.pick_live(0, known=True))
    @rule(pick=picks, more=counts)
    def park(self, pick, more):
        self.park_known(self.pick_live(pick, known=True), more)

    def park_known(self, live: Live, more: int) -> None:
        tokens = self.confirm(live, more)
        self.attempt(lambda: self.prefix.park(live.sequence, tokens))
        if tokens:
            self.rests(live, next(each for each in self.cache.parked() if each.slot == live.sequence.slot))
            assert self.kept[-1].tokens == tokens
        else:
            self.over(live)

    @precondition(lambda self: self.pick_live(0, known=True))
    @rule(pick=picks, more=st.none() | counts)
    def release(self, pick, more):
        self.release_known(self.pick_live(pick, known=True), more)

    def release_known(self, live: Live, more: int | None) -> None:
        tokens = [] if more is None else self.confirm(live, more)
        self.attempt(lambda: self.prefix.release(live.sequence, tokens))
        self.over(live)

    def confirm(self, live: Live, more: int) -> list[int]:
        """What is inserted with some more tokens."""
        self.read_back(live)
        tokens = live.tokens[: live.inserted + more]
        self.said.append((live.sequence.tenant, tokens))
        self.texts.confirm(live.sequence.tenant, tokens)
        return tokens

    # always

    def sequences(self):
        return [*super().sequences(), *self.rivals]

    @invariant()
    def what_is_kept_for_a_prompt_can_still_be_read(self):
        assert all(len(live.tokens) == live.sequence.length for live in self.live)
        mapped = [stats.mapped_bytes + stats.pending_reclaim_bytes for stats in (self.cache.stats(), self.rival.stats())]
        assert self.pool.held_bytes <= sum(mapped) + self.prefix.stats().held_bytes + self.loading_bytes()
        for kept in self.kept:
            for group, base, start in zip(self.cache.layout.groups, kept.bases, kept.starts, strict=True):
                kept_bytes = (kept.parked.length - start) * group.row_bytes
                assert kept_bytes <= 0 or self.driver.is_accessible(base + start * group.row_bytes, kept_bytes)
            if self.real_memory:
                verify_written(kept, SAMPLE)

    def teardown(self):
        if hasattr(self, "closing"):
            with self.closing:
                super().teardown()


TestOnASimulatedDevice, TestOnASimulatedDeviceAtLength = cases(PrefixMachine, 200, 1000)
TestOnHostMemory, TestOnHostMemoryAtLength = cases(PrefixMachine, 8, 1000, real_memory=True)
