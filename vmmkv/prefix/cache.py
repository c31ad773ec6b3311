"""Prefixes shared between sequences: a radix tree over extents, under contiguous addresses.

    attach ──> running ──insert──> running ──park──> kept in its slot ──attach──> running
                  │                                        │
                  └──────────── release ──> extents kept in the tree, evicted from its leaves

What SGLang's RadixAttention and vLLM's prefix caching give a block table is given here to addresses: an extent that the tree
holds is mapped into as many slots as match its tokens. The rows of a node are in extents (full pages, which nobody writes any
more) and, while they last, in the slots of sequences that have or had them: its *residents*.

Only what a caller has confirmed is shared: rows that were computed and read back, not merely launched.
"""

import time
from collections import Counter, defaultdict
from collections.abc import Hashable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.arguments import whole
from vmmkv.cache import KVCache, Sequence
from vmmkv.errors import SequenceTooLong
from vmmkv.memory.memory_map import SlotState
from vmmkv.memory.sharing import Windows
from vmmkv.prefix.attach import Attached, Attacher, AttachMethod, Costs
from vmmkv.prefix.index import Placed, PrefixNodes, Running
from vmmkv.prefix.promotion import HOT, promote_some, resident_of
from vmmkv.prefix.radix_tree import Node, Tokens, pack
from vmmkv.units import counted, format_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """What a prefix cache holds, and what it has done."""

    num_nodes: int
    num_tokens: int
    """On all paths, those of a shared prefix once."""
    held_bytes: int
    """Of extents that the tree holds, whether or not sequences map them too."""
    attached: dict[str, int]
    """How often by each method; an alias of nothing, for less than a page was known, is a copy."""
    attach_us: dict[str, float]
    """How long that took in all."""
    hit_tokens: int
    missed_tokens: int
    """Of the prompts attached: tokens that had to be computed."""
    inserted_pages: int
    duplicate_pages: int
    """Computed by two sequences at once: one copy stays private, and goes with its sequence."""
    evicted_pages: int
    promoted_bytes: int


@dataclass(eq=False, slots=True)
class _Counts:
    attached: Counter[str] = field(default_factory=Counter)
    attach_us: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    hit_tokens: int = 0
    missed_tokens: int = 0
    promoted_bytes: int = 0


class PrefixCache:
    """The prefixes of one cache. It takes the pool's lock for every operation, as the cache does.

    Sequences come from `attach` and end by `park` or `release` (or by their own `close`: then what was inserted stays). The
    cache may have other sequences besides, which the tree does not know. One PrefixCache a cache.
    Cost: measuring a copy, some milliseconds; a reserve. Raises: ValueError if the cache has one.
    """

    def __init__(self, cache: KVCache, costs: Costs | None = None) -> None:
        self.cache = cache
        occupancy = cache._occupancy
        with cache.pool.lock:
            if occupancy.keeper is not None:
                raise ValueError(f"{cache!r} has a prefix cache already")
            self._occupancy = occupancy
            self._memory = occupancy.memory
            self._nodes = PrefixNodes(cache.layout, occupancy)
            self._windows = Windows(self._memory)
            self._ladder = Attacher(cache, self._nodes, self._windows, costs)
            self.costs = self._ladder.costs
            """What decides between the methods; `recompute_us_per_token` is for the owner of the model to set."""
            self._counts = _Counts()
            self._hot: list[Node[Placed]] = []
            """Hit often enough to be promoted, and not looked at since."""
            occupancy.keeper = self._nodes

    # in

    def match(self, tokens: Tokens, *, namespace: Hashable = None) -> int:
        """How many of the first tokens could be attached now, at most all but one. Changes nothing."""
        tokens = _checked(tokens)
        with self.cache.pool.lock:
            self.cache._check_open()
            found = self._ladder.plan(namespace, tokens)
            return found[1].num_tokens if found else 0

    def attach(
        self,
        tokens: Tokens,
        *,
        namespace: Hashable = None,
        max_tokens: int | None = None,
        num_steps: int = 0,
        method: AttachMethod | str | None = None,
    ) -> Attached:
        """A new sequence with as many of a prompt's tokens as are known, at most all but the last: that one is computed.

        The rows attached are to be read only: others have them too. Rows from `num_tokens` on are the sequence's own; whoever
        wants to write before that truncates first. `tokens`: ids as a list, a tuple, or an array or tensor of one dimension; an
        int32 array is the fastest.

        `namespace` is whatever makes equal tokens different: tenant or salt, model, adapter, KV type. It is the sequence's
        tenant. `num_steps`: in about how many steps the prefix will be read (see `Costs`). `method` forces one, if possible;
        else all is computed.
        Cost: what `method` says of the one returned; see `Costs`. Blocks only as `KVCache.open` and `grow` do.
        Who finds no page for the rows that are not shared computes all of them.
        Raises: OutOfSlots, OutOfPages, SequenceTooLong, DriverError; then nothing is attached.
        """
        tokens = _checked(tokens)
        method = None if method is None else AttachMethod(method)
        if len(tokens) < 1:
            raise ValueError("tokens: none; a prompt has at least 1")
        if num_steps < 0:
            raise ValueError(f"num_steps={num_steps}: in how many steps a prefix is read is at least 0")
        with self.cache.pool.lock:
            began_ns = time.perf_counter_ns()
            end = self.cache._check_end(max_tokens)
            if len(tokens) > end:
                raise SequenceTooLong(f"a prompt of {len(tokens)} tokens is attached to a sequence of max_tokens={end}")
            attached = self._ladder.attach(tokens, namespace, method=method, num_steps=num_steps, end=end)
            self._enter(attached, namespace, tokens)
            counts, name = self._counts, attached.was.value
            counts.attached[name] += 1
            counts.attach_us[name] += (time.perf_counter_ns() - began_ns) / 1e3
            counts.hit_tokens += attached.num_tokens
            counts.missed_tokens += len(tokens) - attached.num_tokens
            return attached

    def _enter(self, attached: Attached, namespace: Hashable, tokens: Tokens) -> None:
        """The tree knows the sequence; what was copied for it is shared at once, for it is a copy of what was confirmed."""
        slot, num_tokens = attached.sequence.slot, attached.num_tokens
        self._nodes.running[slot] = Running(namespace, None, 0)
        if num_tokens:
            self._nodes.extend(slot, tokens[:num_tokens], is_known=attached.method is AttachMethod.ADOPT)
            node = self._nodes.running[slot].node
            assert node is not None
            node.num_hits += 1
            if node.num_hits == HOT:
                self._hot.append(node)

    # on and out

    def insert(self, sequence: Sequence, tokens: Tokens) -> None:
        """The first rows of a sequence are confirmed and hold these tokens: from now on they are shared, and not to be written.

        Rows behind those attached may be of other tokens than `attach` was asked for: what is said here counts.
        Cost: host work by the number of tokens; no driver call. Raises ValueError if the sequence has fewer tokens, or did not
        come from `attach`, or had other tokens inserted.
        """
        with self.cache.pool.lock:
            self._insert(sequence, tokens)

    def park(self, sequence: Sequence, tokens: Tokens) -> None:
        """A sequence is over: insert its tokens, and keep its slot as it is, to be adopted by who goes on from there."""
        with self.cache.pool.lock:
            running = self._insert(sequence, tokens)
            if running.node is None:
                sequence.close()
                return
            node, slot = running.node, sequence.slot
            del self._nodes.running[slot]  # so that nobody takes its rows for gone
            try:
                self._occupancy.park(sequence, running.num_tokens)
            except BaseException:
                self._nodes.running[slot] = running
                raise
            self._nodes.tree.unlock(node)
            self._nodes.kept[slot] = node

    def release(self, sequence: Sequence, tokens: Tokens = ()) -> None:
        """A sequence is over, or gives way: insert its tokens, and give its slot back. Full extents stay in the tree.

        Rows in a page that is not full go with the slot: `park` keeps those too. If it raises, the sequence still runs.
        """
        with self.cache.pool.lock:
            if len(tokens):
                self._insert(sequence, tokens)
            sequence.close()

    def _insert(self, sequence: Sequence, tokens: Tokens) -> Running:
        running, tokens = self._known(sequence), _checked(tokens)
        num_tokens = len(tokens)
        if not running.num_tokens <= num_tokens <= sequence.length:
            raise ValueError(
                f"{num_tokens} tokens: the sequence in slot {sequence.slot} has {sequence.length}, of which "
                f"{running.num_tokens} were inserted before; what was inserted stays so, and rows that have been written count "
                f"after advance()"
            )
        if num_tokens > running.num_tokens:
            self._nodes.extend(sequence.slot, tokens)
        else:
            self._nodes.known_path(sequence.slot, tokens)
        return running

    def _known(self, sequence: Sequence) -> Running:
        running = self._nodes.running.get(sequence.slot)
        if running is None or self._occupancy.sequences.get(sequence.slot) is not sequence:
            raise ValueError(
                f"{sequence!r} has ended, or did not come from attach() of this prefix cache; what came from open() or fork() "
                "is no prefix's, and ends by close()"
            )
        return running

    # pins, and the rest

    def pin(self, tokens: Tokens, *, namespace: Hashable = None, ttl_s: float | None = None) -> int:
        """Keep what is known of some tokens for `ttl_s` seconds (for ever if None); how many tokens that are.

        Full extents are kept whatever happens; rows in a page that is not full for as long as the slot that has them is not
        needed for want of any other.
        """
        tokens = _checked(tokens)
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: for how many seconds it is kept is above 0, or None for ever")
        with self.cache.pool.lock:
            self.cache._check_open()
            match = self._nodes.tree.match(namespace, tokens)
            if match.deepest is None:
                return 0
            node = self._nodes.tree.insert(namespace, tokens[: match.num_tokens]).node
            self._nodes.tree.pin(node, float("inf") if ttl_s is None else time.monotonic() + ttl_s)
            return match.num_tokens

    def unpin(self, tokens: Tokens, *, namespace: Hashable = None) -> None:
        """Let it, and whatever is pinned on the way to it, go like everything else."""
        tokens = _checked(tokens)
        with self.cache.pool.lock:
            for node in self._nodes.tree.match(namespace, tokens).path:
                self._nodes.tree.pin(node, None)

    def evict(self, num_pages: int | None = None) -> int:
        """Give up what was used least recently, at least `num_pages` pages if there are so many (all by default)."""
        wanted = None if num_pages is None else whole("num_pages", num_pages)
        with self.cache.pool.lock:
            before = self._nodes.counts.evicted_pages
            while wanted is None or self._nodes.counts.evicted_pages - before < wanted:
                if self._nodes.tree.oldest_evictable() is None:
                    break
                self._nodes.evict_oldest()
            return self._nodes.counts.evicted_pages - before

    def stats(self) -> PrefixStats:
        """What is held and what was done."""
        with self.cache.pool.lock:
            counts, nodes = self._counts, self._nodes
            return PrefixStats(
                num_nodes=self._nodes.tree.num_nodes,
                num_tokens=self._nodes.tree.num_tokens,
                held_bytes=nodes.counts.held_bytes,
                attached={method.value: counts.attached[method.value] for method in AttachMethod},
                attach_us={method.value: counts.attach_us[method.value] for method in AttachMethod},
                hit_tokens=counts.hit_tokens,
                missed_tokens=counts.missed_tokens,
                inserted_pages=nodes.counts.inserted_pages,
                duplicate_pages=nodes.counts.duplicate_pages,
                evicted_pages=nodes.counts.evicted_pages,
                promoted_bytes=counts.promoted_bytes,
            )

    def promote(self, budget_us: float = float("inf")) -> int:
        """Copy hot prefixes into large extents for those who come later, for about that long; the bytes promoted.

        Call it while launched work is queued, as `KVCache.map_ahead`; it takes no page from anybody..
        """
        began_ns, num_bytes = time.perf_counter_ns(), 0
        with self.cache.pool.lock:
            while self._hot and (time.perf_counter_ns() - began_ns) / 1e3 < budget_us:
                node = self._hot[-1]
                source = resident_of(node)
                done = promote_some(self._nodes.tree, self._memory, self._windows, node) if node.parent is not None else 0
                if done and source in self._occupancy.parked:
                    self._occupancy.parked[source].fence = self._memory.fence()
                num_bytes += done
                if not done:
                    self._hot.pop()
            self._counts.promoted_bytes += num_bytes
        return num_bytes

    def free_slots(self, count: int) -> None:
        """Give up parked slots, the oldest first, until `count` are free or closing; the tree keeps their full extents.

        For whoever has more slots than sequences: who attaches by alias wants a bare slot, and unmapping one takes time. No
        driver call: `KVCache.map_ahead` unmaps.
        """
        with self.cache.pool.lock:
            table = self._occupancy.table
            missing = count - len(table.where(SlotState.FREE)) - len(table.where(SlotState.CLOSING))
            unpinned = [parked for slot, parked in self._occupancy.parked.items() if not self._nodes.is_pinned(slot)]
            for parked in unpinned[: max(0, missing)]:
                self._occupancy.evict(parked)

    def __repr__(self) -> str:
        if self.cache.closed:
            return f"<PrefixCache on {self.cache.device}, closed>"
        tokens, held = counted(self._nodes.tree.num_tokens, "token"), format_bytes(self._nodes.counts.held_bytes)
        return f"<PrefixCache on {self.cache.device}: {tokens} in {counted(self._nodes.tree.num_nodes, 'node')}, {held} held>"


def _checked(tokens: Tokens | torch.Tensor) -> npt.NDArray[np.int32]:
    """Token ids as an array. Raises ValueError for what is none."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, str | bytes | bytearray):
        raise ValueError(f"tokens: {type(tokens).__name__}; wanted token ids, as the tokenizer gives them")
    if isinstance(tokens, np.ndarray) and tokens.ndim != 1:
        hint = "; take tokens[0]" if tokens.ndim == 2 and len(tokens) == 1 else ""
        raise ValueError(f"tokens: of shape {tokens.shape}; wanted one dimension{hint}")
    return np.frombuffer(pack(tokens), dtype=np.int32)
