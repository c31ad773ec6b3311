"""Schedule: which requests of another engine load, store and wait, by their tokens. It knows no memory and no vLLM.

    matched ──may wait──> allocated ──> plan ──> (the worker loads) ──> loaded
    scheduled ──────────────────────> plan ──> (the worker stores)            ended

A *record* is the KV of `record_tokens` tokens, a whole number of the engine's blocks; its key hashes all tokens up to its end.
While one request loads or computes a record, others that need it next wait: the engine's own prefix cache has it then.

Layers of an engine may be in groups, each with blocks of its own for the same tokens. Those of a group with a window see no
tokens before it, and the engine takes their blocks back. A record has a part for each group, under a key of its own. It is
there if all parts are; of groups with a window only the last window of what is loaded is loaded.
"""

import itertools
from collections import Counter
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple, Protocol

import numpy as np

from vmmkv.adapters.vllm.worth import Worth
from vmmkv.tiers.keys import KeyChain

RecordBlocks = tuple[bytes, list[int]]
"""Key of a group's part of a record, and its blocks; -1 for one that is not moved."""

GroupBlocks = Sequence[Sequence[int]]
"""Blocks of each group, one for each `block_tokens` tokens. Those that the engine has taken back may be any."""


def of_group(key: bytes, group: int) -> bytes:
    """The key of a group's part of a record, below 256 of them."""
    return key[:-3] + bytes([key[-3] ^ group]) + key[-2:]


class PlannedLoad(NamedTuple):
    """Records that a request loads, within a time."""

    request: str
    records: list[RecordBlocks]
    timeout_s: float


@dataclass(slots=True)
class StepPlan:
    """The worker's part of a step."""

    loads: list[PlannedLoad] = field(default_factory=list)
    stores: list[RecordBlocks] = field(default_factory=list)
    """Parts of records whose last token the step computes."""
    written: list[int] = field(default_factory=list)
    """Blocks that were allocated for the step: what they held before must have been read."""
    computes: bool = False
    """Does the step compute tokens?"""
    measured: int | None = None
    """Number of a step that measures the rate of prefill: the worker says when it has ended."""


class Tokens(Protocol):
    """Tokens of a request, prompt and answer; the engine adds to them."""

    def __len__(self) -> int: ...

    def __getitem__(self, part: slice) -> Sequence[int]: ...


@dataclass(slots=True, kw_only=True)
class _Request:
    """A request that the engine has, as far as records go."""

    tokens: Tokens
    chain: KeyChain
    blocks: list[list[int]] = field(default_factory=list)
    num_on_device: int = 0
    """Tokens that the device had when the engine asked last."""
    num_stored: int = 0
    """Records that are stored, or being stored, or were loaded."""
    found: list[str] = field(default_factory=list)
    """Tiers of the records that it may load next, one for each."""
    loading: list[str] = field(default_factory=list)
    """Tiers of the records that it loads, one for each."""
    has_declined: bool = False
    """Has it left records out, since it is faster to compute them?"""
    claims: list[bytes] = field(default_factory=list)
    """Keys of records that it loads or computes, the last one first."""
    has_failed: bool = False
    """Has a load of it failed? Then it computes: what says that there are records may be wrong for long."""


class Schedule:
    """Plans of what requests load, store and wait for.

    `lookup` names the tier that has each record, "" for none, or is None while it finds out. `may_wait`: whether the engine
    shares what it has computed; else each request computes for itself. `windows`: tokens that layers of each group see, the
    one that is computed among them; None for all.
    """

    def __init__(
        self,
        identity: str,
        *,
        block_tokens: int,
        record_tokens: int,
        lookup: Callable[[Sequence[bytes]], list[str] | None],
        worth: Worth,
        may_wait: bool = True,
        windows: Sequence[int | None] = (None,),
    ) -> None:
        self.block_tokens: Final = block_tokens
        self.record_tokens: Final = record_tokens
        self._start = KeyChain(identity, every=record_tokens)
        self.worth: Final = worth
        self.counts: Final = Counter[str]()
        """Questions of requests that had to wait, requests that load, and requests that compute what is slower to load."""
        self.loaded_tokens: Final = Counter[str]()
        """Tokens that requests have loaded, by tier."""
        self._lookup, self._may_wait, self._windows = lookup, may_wait, windows
        self._prompt_tokens = self._number = 0
        """Tokens of the step that are computed several at a time, for one request; number of the step."""
        self._requests: dict[str, _Request] = {}
        self._claimed: dict[bytes, str] = {}
        """Request that loads or computes a record, by its key."""
        self._plan = StepPlan()

    def matched(
        self,
        name: str,
        tokens: Tokens,
        namespace: Hashable,
        num_on_device: int,
        *,
        beside: Callable[[int], bytes] | None = None,
        may_load: bool = True,
    ) -> int | None:
        """Number of tokens, behind those on the device, that tiers have of a request; None for a request that has to wait.

        It may be asked again, also of a request that was preempted. The last token is always computed; all are for a request
        that may not load: one for log-probabilities of its prompt, say. `beside`: see `KeyChain.of`; the first one counts.
        """
        request = self._requests.get(name)
        if request is None:
            chain = self._start.of(np.empty(0, np.int32), namespace, beside)
            request = self._requests[name] = _Request(tokens=tokens, chain=chain)
        self._give_up_claims(request)
        request.num_on_device = num_on_device
        first = num_on_device // self.record_tokens
        keys = self._keys(request, len(tokens) - 1)
        request.found = []
        if len(keys) <= first or request.has_failed or not may_load:
            return 0
        is_claimed = self._may_wait and self._claimed.get(keys[first], name) != name
        found = None if is_claimed else self._lookup(keys[first:])
        if found is None:
            self.counts["waits"] += 1
            return None
        tiers = list(itertools.takewhile(bool, found))
        request.found = tiers[: self.worth.most(tiers, hopes=not request.has_declined)]
        if len(request.found) < len(tiers) and not request.has_declined:
            request.has_declined = True
            self.counts["declined"] += 1
        return max(0, (first + len(request.found)) * self.record_tokens - num_on_device) if request.found else 0

    def allocated(self, name: str, blocks: GroupBlocks, num_tokens: int) -> None:
        """The engine has given a request blocks, for so many tokens that are to be loaded behind those on the device."""
        if num_tokens <= 0:
            return
        request = self._requests[name]
        first, last = (tokens // self.record_tokens for tokens in (request.num_on_device, request.num_on_device + num_tokens))
        num_kept = request.num_on_device // self.block_tokens
        keys = request.chain.keys()
        loads: list[RecordBlocks] = []
        for group, of_this in enumerate(blocks):
            seen = max(num_kept, self._first_seen(group, last))
            for number in range(max(first, seen * self.block_tokens // self.record_tokens), last):
                loads.append((of_group(keys[number], group), self._blocks_of(of_this, number, seen)))
            self._plan.written += of_this[num_kept:]
        self._plan.loads.append(PlannedLoad(name, loads, self.worth.timeout_s(last - first)))
        self.counts["loads"] += 1
        request.loading = request.found[: last - first]
        self.worth.load_begins(name, request.loading)
        request.num_stored = last
        self._claim(name, request, keys[first:last])

    def scheduled(self, name: str, new_blocks: GroupBlocks, num_computed: int, num_new: int, *, is_new: bool) -> None:
        """A step computes `num_new` tokens of a request behind `num_computed`. `is_new`: its blocks are these alone."""
        self._plan.computes = True
        for new in new_blocks:
            self._plan.written += new[num_computed // self.block_tokens :] if is_new else new  # others have tokens
        self._prompt_tokens += num_new if num_new > 1 else 0
        request = self._requests.get(name)
        if request is None:
            return
        if is_new:
            request.blocks = [[] for _ in self._windows]
            request.num_stored = num_computed // self.record_tokens  # loaded, or computed by a request that stored it
        for blocks, new in zip(request.blocks, new_blocks, strict=False):  # a step that gets no blocks has no groups
            blocks += new
        end = min(num_computed + num_new, len(request.tokens))
        num_whole = end // self.record_tokens
        if is_new and self._may_wait:
            self._claim(name, request, self._keys(request, len(request.tokens))[num_whole:])
        if num_whole <= request.num_stored:
            return
        keys = self._keys(request, end)
        for number in range(request.num_stored, num_whole):
            for group, blocks in enumerate(request.blocks):
                seen = self._first_seen(group, number + 1)
                self._plan.stores.append((of_group(keys[number], group), self._blocks_of(blocks, number, seen)))
        request.num_stored = num_whole
        while request.claims and request.claims[-1] in keys[:num_whole]:
            self._claimed.pop(request.claims.pop(), None)

    def go_on(
        self,
        names: Sequence[str],
        new_blocks: Sequence[GroupBlocks],
        num_computed: Sequence[int],
        num_new: Mapping[str, int],
        resumed: Collection[str],
    ) -> None:
        """A step computes tokens of requests that ran before; `resumed` ones begin anew. See `scheduled`.

        Cost: some 0.3 us for a request that decodes in the middle of a block.
        """
        for name, blocks, computed in zip(names, new_blocks, num_computed, strict=True):
            request = self._requests.get(name)
            end = 0 if request is None else (request.num_stored + 1) * self.record_tokens
            if num_new[name] == 1 and not blocks and computed + 1 < end:
                continue
            self.scheduled(name, blocks, computed, num_new[name], is_new=name in resumed)
        self._plan.computes = self._plan.computes or bool(names)

    def take_plan(self) -> StepPlan:
        """The plan of the step, which begins another one."""
        plan, self._plan = self._plan, StepPlan()
        self._number += 1
        if self.worth.step_begins(self._number, self._prompt_tokens):
            plan.measured = self._number
        self._prompt_tokens = 0
        return plan

    def failed(self, names: Iterable[str]) -> None:
        """Loads of these requests have failed: they compute when they are loaded, and ask no tier again."""
        for name in names:
            if (request := self._requests.get(name)) is not None:
                request.has_failed = True

    def loaded(self, name: str) -> None:
        """The worker has loaded a request's records, or failed to: requests that wait for it are asked again."""
        if (request := self._requests.get(name)) is not None:
            self.worth.load_ends(name, has_failed=request.has_failed)
            for tier in request.loading if not request.has_failed else ():
                self.loaded_tokens[tier] += self.record_tokens
            request.loading = []
            self._give_up_claims(request)

    def preempted(self, name: str) -> None:
        """The engine has taken back the blocks of a request that ran: others need not wait for what it was to compute."""
        if (request := self._requests.get(name)) is not None:
            self._give_up_claims(request)

    def ended(self, name: str) -> None:
        """The engine has ended a request."""
        if (request := self._requests.pop(name, None)) is not None:
            self.worth.given_up(name)
            self._give_up_claims(request)

    def _keys(self, request: _Request, num_tokens: int) -> list[bytes]:
        """Keys of the whole records in so many tokens of a request. Cost: for new ones some 3 us, and a copy of the tokens."""
        num_records = num_tokens // self.record_tokens
        num_known = len(request.chain.tokens)
        if num_records * self.record_tokens > num_known:
            more = np.array(request.tokens[num_known : num_records * self.record_tokens], np.int32)
            grown = request.chain.grown(np.concatenate((request.chain.tokens, more)))
            assert grown is not None, "the tokens of a request only grow"
            request.chain = grown
        return request.chain.keys()[:num_records]

    def _first_seen(self, group: int, num_records: int) -> int:
        """The first block of a group that the token behind so many records sees."""
        window = self._windows[group]
        return 0 if window is None else max(0, num_records * self.record_tokens - window + 1) // self.block_tokens

    def _blocks_of(self, blocks: Sequence[int], record: int, first: int) -> list[int]:
        """Blocks of a record in a group; -1 for those before block `first`."""
        per_record = self.record_tokens // self.block_tokens
        return [blocks[at] if at >= first else -1 for at in range(record * per_record, (record + 1) * per_record)]

    def _claim(self, name: str, request: _Request, keys: Sequence[bytes]) -> None:
        for key in keys:
            if self._claimed.setdefault(key, name) == name:
                request.claims.insert(0, key)

    def _give_up_claims(self, request: _Request) -> None:
        for key in request.claims:
            self._claimed.pop(key, None)
        request.claims.clear()
