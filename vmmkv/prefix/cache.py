"""Prefixes shared between sequences: a radix tree over extents, under contiguous addresses.

    attach ──> running ──insert──> running ──park──> parked in its slot ──attach──> running
                  │                                        │
                  └──────────── release ──> extents kept in the tree, evicted from its leaves

SGLang's RadixAttention and vLLM's prefix caching share blocks through block tables. Here an extent that the tree holds is
mapped into every slot that matches its tokens.

Only confirmed rows are shared: rows that were computed and read back by the host, not merely launched.
"""

import itertools
import time
from collections import Counter
from collections.abc import Callable, Hashable
from collections.abc import Sequence as Seq
from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

import numpy as np
import numpy.typing as npt
import torch

from vmmkv.arguments import checked_name, instance, whole
from vmmkv.cache import KVCache
from vmmkv.errors import SequenceTooLong
from vmmkv.memory.slots import LiveSlot, all_or_none
from vmmkv.memory.states import SlotState
from vmmkv.prefix.attach import Attached, Attacher, AttachMethod
from vmmkv.prefix.index import Placed, PrefixIndex
from vmmkv.prefix.radix_tree import Lookup, Node, Tokens, pack
from vmmkv.prefix.restored import RestoredPrefixes
from vmmkv.prefix.tiered import Fetch, PrefixListener
from vmmkv.sequence import Sequence, live_slot
from vmmkv.tier import Tier, TierStats
from vmmkv.units import PAGE_BYTES, counted, format_bytes

if TYPE_CHECKING:
    from vmmkv.holder.borrowed import BorrowedPrefixes
    from vmmkv.tiers.transfers import Transfers

_LENDER: Final = "lender"
"""The other engine, where tokens are counted by their source."""


@dataclass(frozen=True, slots=True)
class Borrowed:
    """A part of a prompt that was borrowed, or for which there was no room."""

    known_tokens: int
    """Tokens that `attach` would have found without."""
    num_tokens: int
    """Tokens that it finds now, or without room would have found."""
    loaded_bytes: Counter[str]
    """Bytes by their source; empty if there was no room."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefixStats:
    """Contents and counts of a prefix cache at one moment."""

    num_nodes: int
    num_tokens: int
    """Tokens on all paths; those of a shared prefix count once."""
    held_bytes: int
    """Bytes of the extents that the tree holds, whether or not sequences map them too."""
    attached: dict[str, int]
    """Sequences attached, by method."""
    attach_us: dict[str, float]
    """Host time that attaching took in all, by method."""
    hit_tokens: int
    missed_tokens: int
    """Tokens of attached prompts that had to be computed: the last of each at least."""
    inserted_pages: int
    duplicate_pages: int
    """Pages that two sequences computed at once: one copy stays private, and goes with its sequence."""
    evicted_pages: int
    fetched_tokens: int = 0
    """Tokens that came back from tiers; when they are attached they are hit tokens too."""
    tiers: tuple[TierStats, ...] = ()
    """Counts of the tiers that answer."""
    tier_errors: int = 0
    """Calls of tiers that raised, beside the errors that they count themselves: all are misses."""


class PrefixCache:
    """Prompt prefixes of one cache, shared between its sequences. A cache has one PrefixCache at most.

        sequence = prefix.attach(prompt).sequence    rows [0, sequence.length) are there already
        sequence.grow(len(prompt))                   memory for the rest
        ...                                          compute the rest, and the answer
        prefix.park(sequence, tokens)                later prompts can attach all of it

    Sequences come from `attach` and end by `park`, `release` or their own `close`; what was inserted stays until it is
    evicted. The cache may have other sequences too, which are not shared. Every operation takes the pool's lock.

    `tiers`: where copies of rows are kept, the fastest first; the caller closes them, after the cache.
    If the pool has a holder process, full extents outlive this process, and those that an earlier one left can be attached.
    If it has a lender, `borrow` takes prefixes of the lender's engine.

    With tiers, a holder or a lender, `fingerprint` must differ between models whose rows differ: weights, rotary settings,
    static scales, the rank among several GPUs. A namespace is text, bytes, an integer, None, or a tuple of these.
    Cost: a reserve, and opening the tiers; with a holder, host work by the extents that were left.
    Raises: ValueError if the cache has one, for any of these without a fingerprint, for a tier whose records are no pages, or
    if another cache uses the holder.
    """

    def __init__(self, cache: KVCache, tiers: Seq[Tier] = (), *, fingerprint: str = "") -> None:
        instance("cache", cache, KVCache, "a KVCache")
        self.cache = cache
        self._slots = slots = cache.slots
        holder, lender = cache.pool.holder, cache.pool.lender
        if (tiers or holder is not None or lender is not None) and not fingerprint:
            raise ValueError(
                "fingerprint: none; with tiers, a holder or a lender it names the model, so that no other model reads its rows"
            )
        for tier in tiers:
            if tier.record_bytes != PAGE_BYTES:
                raise ValueError(
                    f"{tier!r} has records of {tier.record_bytes} bytes; those of a prefix cache are its pages: make the tier "
                    f"with record_bytes={PAGE_BYTES}, or without"
                )
        if tiers:
            with cache.pool.lock:
                slots.check_capture()
        for tier in tiers:  # without the lock: pinning takes seconds
            tier.open(cache.device)
        with cache.pool.lock:
            if isinstance(slots.keeper, PrefixIndex):
                raise ValueError(f"{cache!r} has a prefix cache already")
            if holder is not None and holder.has_prefixes:
                raise ValueError(f"the holder at {holder.path} keeps the prefixes of one cache, and another one has it")
            self.index: Final = PrefixIndex(slots)
            """Tree of prefixes, and the parked slots that keep them."""
            self._attacher = Attacher(slots, self.index)
            self._restored = None if holder is None else RestoredPrefixes(slots, self.index, self._attacher)
            self.transfers: Final = self._follow_tiers(tiers, fingerprint)
            """Stores and loads of tiers; None without tiers."""
            self._attached: Counter[AttachMethod] = Counter()
            self._attach_ns: Counter[AttachMethod] = Counter()
            self._hit_tokens = self._missed_tokens = 0
            slots.keeper = self.index
            cache.pool.reclaimers.append(self.index)
            identity = cache.layout.identity(fingerprint)
            self._borrowed = self._follow_holder(identity)

    def _follow_tiers(self, tiers: Seq[Tier], fingerprint: str) -> "Transfers | None":
        """Store in tiers what is inserted, and load from them what is fetched."""
        if not tiers:
            return None
        from vmmkv.tiers.transfers import follow_tree

        return follow_tree(self._slots, self.index, self._attacher.windows, tiers, fingerprint)

    def _follow_holder(self, identity: bytes) -> "BorrowedPrefixes | None":
        """Take what the pool's holder process has kept, and keep what is inserted there; or what its lender lends."""
        pool = self.cache.pool
        if pool.holder is None and pool.lender is None:
            return None
        from vmmkv.holder.borrowed import follow

        return follow(self.index, self.cache.layout, pool, identity)

    # in

    def match(self, tokens: Tokens, *, namespace: Hashable = None) -> int:
        """Number of first tokens that could be attached now, at most all but the last. Changes nothing."""
        return self.lookup(tokens, namespace=namespace)()

    def lookup(self, tokens: Tokens, *, namespace: Hashable = None) -> Callable[[], int]:
        """`match` of the same tokens, to be called again and again: a call looks at what has changed since the last one."""
        lookup: Lookup[Placed] = Lookup(checked_name("namespace", namespace), _checked_tokens(tokens))
        most = len(tokens) - 1

        def match() -> int:
            with self.cache.pool.lock:
                self._slots.check_open()
                hit = self._attacher.hit(self.index.tree.resume(lookup), most)
                return 0 if hit is None else hit.num_tokens

        return match

    def attach(
        self,
        tokens: Tokens,
        *,
        namespace: Hashable = None,
        max_tokens: int | None = None,
        method: AttachMethod | str | None = None,
    ) -> Attached:
        """A new sequence with the longest cached prefix of a prompt. The last token is always left to be computed.

        Only the attached rows have memory: call `sequence.grow` before you compute the rest. Attached rows may be shared. To
        write them, first call `sequence.truncate(n)`, which gives it pages of its own from row `n` on. `tokens`: ids as
        a list, a tuple, or an array or tensor of one dimension; an int32 array is the fastest.

        `namespace` separates equal tokens whose rows differ or must not be shared: by tenant or salt, model, adapter, KV type.
        It is the sequence's tenant. `method` forces a method, or computing if it is not possible; see `vmmkv.prefix.attach`
        for the rule without it. An alias copies the rows of a page that is matched in part; if no page is free for
        these, nothing is attached, and this raises nothing.

        Cost: adopt, a write of the limit; alias, a map and an access call for each extent and a copy; compute, as
        `KVCache.open`. Blocks only as `KVCache.open` and `grow` do.
        Raises: ValueError for no tokens; OutOfSlots; OutOfPages if not even an empty sequence can be opened; SequenceTooLong,
        DriverError, GraphCapture. Then nothing is attached; cached prefixes may have been evicted.
        """
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        method = None if method is None else AttachMethod(method)
        if len(tokens) < 1:
            raise ValueError("tokens: none; a prompt has at least 1")
        with all_or_none() as begun, self.cache.pool.lock:
            began_ns = time.perf_counter_ns()
            end = self._slots.check_end(max_tokens)
            self._slots.check_capture()
            if len(tokens) > end:
                raise SequenceTooLong(f"a prompt of {len(tokens)} tokens is attached to a sequence of max_tokens={end}")
            attached = self._attacher.attach(tokens, namespace, method=method, end=end)
            begun.append(attached.sequence.live)
            slot, num_tokens = attached.sequence.slot, attached.num_tokens
            self.index.running[slot] = None  # it has no confirmed tokens yet
            if num_tokens:  # copied rows are shared at once, for they are copies of confirmed ones
                self.index.extend(slot, tokens[:num_tokens], is_known=attached.method is AttachMethod.ADOPT)
            self._attached[attached.method] += 1
            self._attach_ns[attached.method] += time.perf_counter_ns() - began_ns
            self._hit_tokens += num_tokens
            self._missed_tokens += len(tokens) - num_tokens
            return attached

    # on and out

    def insert(self, sequence: Sequence, tokens: Tokens, *, is_written: bool = False) -> None:
        """Share the first rows of a sequence, which hold these tokens. They must be confirmed, and not be written any more.

        Rows past the attached ones may be of other tokens than `attach` was given: what is inserted counts.
        `is_written`: the device has ended the work that wrote them. A holder's log then names them at once, and not behind all
        that is launched, which may be a long step.
        Cost: host work by the number of tokens; no driver call, but else a fence with a holder.
        Raises: ValueError if the sequence has fewer tokens, did not come from `attach`, was compacted, or had other tokens
        inserted; Closed if it has ended; GraphCapture.
        """
        with self.cache.pool.lock:
            self._slots.check_capture()
            self._insert(live_slot(sequence, self._slots), tokens, is_written=is_written)

    def park(self, sequence: Sequence, tokens: Tokens) -> None:
        """End a sequence: insert its tokens, and keep its slot, which a prompt that continues them can adopt."""
        with self.cache.pool.lock:
            self._slots.check_capture()
            live = live_slot(sequence, self._slots)
            if self._insert(live, tokens) is None:
                self._slots.end(live)
            else:
                self.index.park(live)

    def release(self, sequence: Sequence, tokens: Tokens = ()) -> None:
        """End or preempt a sequence: insert its tokens, and free its slot. Full extents stay in the tree.

        Rows in a page that is not full are lost; `park` keeps those too. If they are pinned, and in no other slot, this one is
        parked with them. If this raises, the sequence still runs.
        """
        with self.cache.pool.lock:
            self._slots.check_capture()
            live = live_slot(sequence, self._slots)
            if len(tokens):
                self._insert(live, tokens)
            self._slots.end(live)

    def _insert(self, live: LiveSlot, tokens: Tokens, *, is_written: bool = False) -> Node[Placed] | None:
        """The node where the tokens end; None for no tokens."""
        slot = live.slot
        if slot not in self.index.running:
            raise ValueError(
                f"{live!r} did not come from attach() of this prefix cache; what came from open() or fork() is no "
                "prefix's, and ends by close()"
            )
        if live.positions is not None:
            raise ValueError(f"{live!r} was compacted, so its rows are no prefix; end it by release() without tokens")
        tokens = _checked_tokens(tokens)
        num_tokens, num_inserted = len(tokens), self.index.num_inserted(slot)
        if not num_inserted <= num_tokens <= live.length:
            raise ValueError(
                f"{num_tokens} tokens: the sequence in slot {slot} has {live.length}, of which {num_inserted} were "
                f"inserted before; what was inserted stays so, and rows that have been written count after advance()"
            )
        if num_tokens > num_inserted:
            self.index.extend(slot, tokens, is_written=is_written)
        else:
            self.index.known_path(slot, tokens)
        return self.index.running[slot]

    # other engines

    def borrow(self, tokens: Tokens, *, namespace: Hashable = None, room_pages: int = 0) -> Borrowed | None:
        """Take what the lender's engine has of a prompt past what this one has, for `attach` to find. No byte is copied.

        None if it has no more. There is room if `room_pages`, those of the prompt included, are free, evictable, or of the
        prompt and in use, and what it borrows can be had at once. Its pages are mapped read-only when they are attached, and
        given back when they are evicted.
        Cost: 1 us for each 1,000 tokens, some 5 us for each extent, and what evicting takes. Does not block.
        Raises: DriverError, GraphCapture.
        """
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        with self.cache.pool.lock:
            self._slots.check_open()
            self._slots.check_capture()
            if self._borrowed is None or len(tokens) < 2:
                return None
            known = self._attachable(namespace, tokens)
            room_pages -= self.index.used_pages(namespace, tokens)
            num_tokens, taken_bytes = self._borrowed.borrow(namespace, tokens, known, room_pages)
            if taken_bytes:
                num_tokens = self._attachable(namespace, tokens)
            return Borrowed(known, num_tokens, +Counter({_LENDER: taken_bytes})) if num_tokens > known else None

    def _attachable(self, namespace: Hashable, tokens: npt.NDArray[np.int32]) -> int:
        hit = self._attacher.find(namespace, tokens)
        return 0 if hit is None else hit.num_tokens

    # tiers

    @property
    def has_tiers(self) -> bool:
        """Is what is inserted stored in tiers?"""
        return self.transfers is not None

    def fetch(
        self,
        tokens: Tokens,
        *,
        namespace: Hashable = None,
        least_tokens: int = 1,
        room_pages: int = 0,
        worth: Callable[[Fetch], bool] | None = None,
    ) -> Fetch | None:
        """Start to load what tiers have of a prompt past what the device has, if that is `least_tokens` at least.

        None if there is less, if `worth` says no, or if there is no room on the device: attach then. There is room if what it
        loads can be had at once, and `room_pages`, those it loads included, are free, evictable, or of the prompt and in use.

        Else go on with other work, call `poll`, and attach when the fetch is done; a fetch that is late can be given up. Calls
        for the same records get the same fetch. After one that loaded a part of what is known, another may go on. Where a tier
        must be asked over a network, or more than 250 pages are to be looked up, the fetch finds in `poll` what there is, and
        is done if that is nothing.

        `worth` is asked about a fetch before it starts: is it faster than computing these tokens? If not, it is asked about
        what comes before the first record of the last of these tiers, and so on. It must not use the cache.
        Cost: 1 us for each 1,000 tokens, and 3 us for each of up to 250 pages that tiers may have; and what evicting takes to
        make room. Blocks, on fences to make room, only if nothing runs or is loaded.
        Raises: DriverError, GraphCapture.
        """
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        with self.cache.pool.lock:
            self._slots.check_open()
            self._slots.check_capture()
            transfers = self.transfers
            if transfers is None or len(tokens) < 2:
                return None
            known = self._attachable(namespace, tokens)
            room_pages -= self.index.used_pages(namespace, tokens)
            return transfers.fetch(namespace, tokens, known, least_tokens, room_pages, worth)

    def has_room(self, tokens: Tokens, *, namespace: Hashable = None, room_pages: int) -> bool:
        """Are so many pages free, evictable, or of the prompt and in use, as `fetch` and `borrow` want? No driver call."""
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        with self.cache.pool.lock:
            pool = self.cache.pool
            return room_pages <= pool.spare_pages + pool.kept_pages + self.index.used_pages(namespace, tokens)

    def poll(self, budget_us: float = float("inf")) -> bool:
        """Go on with stores and loads for about `budget_us`, in slack, as `KVCache.map_ahead`; False if there is nothing left.

        Rows are stored behind the work of the current stream and of recorded ones, as `KVCache.record_stream` says: call it
        where the stream that wrote them is either.
        Cost: for each extent a map, an access call, a fence, and a copy for each run of records; an unmap later. Blocks only
        as `fetch`.
        Raises: DriverError, and the work before it stays done; GraphCapture.
        """
        with self.cache.pool.lock:
            transfers = self.transfers
            if transfers is None or transfers.is_idle:
                return False
            self._slots.check_open()
            self._slots.check_capture()
            transfers.poll(budget_us)
            return not transfers.is_idle

    def flush(self, timeout_s: float = 60.0) -> bool:
        """Wait until tiers keep all that was inserted and have given all that is fetched; False if the time is over first."""
        return self.transfers is None or self.transfers.flush(self.poll, timeout_s)

    # what an earlier process left

    def prepare(self, budget_us: float = float("inf"), *, free_slots: int = 0) -> bool:
        """Park what an earlier engine left with the holder, for about `budget_us`, as if its sequences had just ended here.

        Each prefix gets a slot while more than `free_slots` are free, the last used one first. A prompt then adopts a slot,
        and otherwise imports and maps each extent. Call it while nothing else is to do; False if there is nothing left. What
        the holder has lost, or no page is free for, is left out.
        Cost: for each extent an import, a map and an access call; for each prefix as `attach` by alias. It goes on for
        8 extents, or a new path, at least; it blocks only as `Sequence.grow` does.
        Raises: DriverError, and what was parked before stays; GraphCapture.
        """
        with self.cache.pool.lock:
            self._slots.check_open()
            self._slots.check_capture()
            return self._restored is not None and self._restored.prepare(budget_us, free_slots)

    # pins, and the rest

    def pin(self, tokens: Tokens, *, namespace: Hashable = None, ttl_s: float | None = None) -> int:
        """Protect the cached prefix of some tokens from eviction for `ttl_s` seconds (forever if None). Returns its length.

        Full extents are never evicted, nor one that the last rows share with tokens of another prompt. Rows in a page that is
        not full are kept, in a parked slot, until no other slot or page can be taken: a prompt that continues them aliases, and
        does not adopt that slot. Tokens that are not cached yet are not kept when they are. What is pinned a second time is
        kept until the later of the two ends.
        """
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        if ttl_s is not None and not ttl_s > 0:
            raise ValueError(f"ttl_s={ttl_s}: for how many seconds it is kept is above 0, or None for ever")
        with self.cache.pool.lock:
            self._slots.check_open()
            return self.index.pin(namespace, tokens, float("inf") if ttl_s is None else time.monotonic() + ttl_s)

    def unpin(self, tokens: Tokens, *, namespace: Hashable = None) -> None:
        """Take back what `pin` did for exactly these tokens. Other pins stay, also those of prompts that begin alike."""
        tokens, namespace = _checked_tokens(tokens), checked_name("namespace", namespace)
        with self.cache.pool.lock:
            self.index.tree.unpin(namespace, tokens)

    def evict(self, num_pages: int | None = None) -> int:
        """Evict the least recently used leaves, at least `num_pages` pages if there are so many (all by default)."""
        wanted = None if num_pages is None else whole("num_pages", num_pages)
        with self.cache.pool.lock:
            before = self.index.evicted_pages
            while wanted is None or self.index.evicted_pages - before < wanted:
                leaf = self.index.tree.eviction.oldest()
                if leaf is None:
                    break
                self.index.evict_leaf(leaf)
            return self.index.evicted_pages - before

    def stats(self) -> PrefixStats:
        """The prefix cache at this moment."""
        with self.cache.pool.lock:
            index = self.index
            transfers = self.transfers
            return PrefixStats(
                num_nodes=index.tree.num_nodes,
                num_tokens=index.tree.num_tokens,
                held_bytes=index.held_bytes,
                attached={method.value: self._attached[method] for method in AttachMethod},
                attach_us={method.value: self._attach_ns[method] / 1e3 for method in AttachMethod},
                hit_tokens=self._hit_tokens,
                missed_tokens=self._missed_tokens,
                inserted_pages=index.inserted_pages,
                duplicate_pages=index.duplicate_pages,
                evicted_pages=index.evicted_pages,
                fetched_tokens=0 if transfers is None else transfers.fetched_tokens,
                tiers=() if transfers is None else transfers.stats(),
                tier_errors=0 if transfers is None else transfers.errors,
            )

    def store_if(self, worth: Callable[[str], bool]) -> None:
        """Ask `worth`, by a tier's name, whether to store a path there. Without this call all paths are stored in all tiers.

        It is asked once for a sequence, and not of tiers that other engines may load from.
        """
        if self.transfers is not None:
            self.transfers.store_if(worth)

    def listen(self, listener: PrefixListener) -> None:
        """Tell one listener which tokens become known and which are forgotten, at first all that are known; and so of tiers.

        It is called under locks of the pool and of tiers. Cost: host work by the number of nodes and records, now, and at each
        leaf and record that comes or goes.
        """
        with self.cache.pool.lock:
            self.index.tree.listen(listener)
            if self.transfers is not None:
                self.transfers.listen(listener)

    def free_slots(self, count: int) -> None:
        """Evict parked slots, the oldest first, until `count` slots are free or closing; the tree keeps their full extents.

        For caches with more slots than sequences: an alias needs a bare slot, and unmapping one takes time. Pinned slots
        stay. No driver call: `KVCache.map_ahead` unmaps.
        """
        with self.cache.pool.lock:
            slots = self._slots
            missing = count - slots.table.num(SlotState.FREE, SlotState.CLOSING)
            for parked in list(itertools.islice(slots.unpinned(slots.parked_slots.values()), max(0, missing))):
                slots.evict(parked)

    def __repr__(self) -> str:
        if self.cache.closed:
            return f"<PrefixCache on {self.cache.device}, closed>"
        tree = self.index.tree
        tokens, held = counted(tree.num_tokens, "token"), format_bytes(self.index.held_bytes)
        return f"<PrefixCache on {self.cache.device}: {tokens} in {counted(tree.num_nodes, 'node')}, {held} held>"


def _checked_tokens(tokens: Tokens | torch.Tensor) -> npt.NDArray[np.int32]:
    """Token ids as an array. Raises ValueError for anything else."""
    if isinstance(tokens, torch.Tensor):
        tokens = tokens.detach().cpu().numpy()
    if isinstance(tokens, str | bytes | bytearray):
        raise ValueError(f"tokens: {type(tokens).__name__}; wanted token ids, as the tokenizer gives them")
    if isinstance(tokens, np.ndarray) and tokens.ndim != 1:
        hint = "; take tokens[0]" if tokens.ndim == 2 and len(tokens) == 1 else ""
        raise ValueError(f"tokens: of shape {tokens.shape}; wanted one dimension{hint}")
    return np.frombuffer(pack(tokens), dtype=np.int32)
