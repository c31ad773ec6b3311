"""VmmkvHiCache: a storage backend of SGLang's HiCache over a Store. A page of SGLang's host memory is a record.

SGLang makes one in the scheduler's process of each rank, and calls it from threads of its own, for backups and for prefetches.
So calls wait, for `TIMEOUT_S` at most. A page that is not stored by then is not stored, and one that is not loaded is a miss.
"""

import hashlib
import logging
import os
import time
from collections.abc import Callable, Sequence
from typing import Any, Final, TypeVar

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage
from sglang.srt.runtime_context import get_server_args

from vmmkv.adapters.tier_options import TierOptions, fingerprint_of
from vmmkv.tier import Refusal, Tier
from vmmkv.tiers import Get, Put, Store
from vmmkv.tiers.record import ALIGNMENT_BYTES, KEY_BYTES

MoveT = TypeVar("MoveT", Put, Get)

log = logging.getLogger(__name__)

TIMEOUT_S: Final = 8.0
"""Most time that a call waits. SGLang gives its threads 10 s to end when it detaches a storage."""

_LOOK_S: Final = 0.0005
"""Time between two looks at tiers while a call waits."""

_WHERE: Final = "--hicache-storage-backend-extra-config"

_OPTIONS_OF_SGLANG: Final = frozenset(
    (
        *("backend_name", "module_path", "class_name", "interface_v1", "allocator", "tp_lcm_size"),
        *("prefetch_threshold", "prefetch_timeout_base", "prefetch_timeout_per_ki_token", "prefetch_timeout_max"),
        "hicache_storage_pass_prefix_keys",
    )
)
"""Words that SGLang reads in its extra configuration, all or some of which it leaves there."""

_LAYOUTS: Final = ("layer_first", "page_first", "page_first_direct", "page_head")


class VmmkvHiCache(HiCacheStorage):  # type: ignore[misc]
    """Pages of SGLang in vmmkv's tiers. `--hicache-storage-backend-extra-config`: see `TierOptions`.

    Raises: ValueError, TierUnavailable and BudgetError at the start, for what it cannot serve, in a sentence.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:
        given = storage_config.extra_config
        self._options: Final = TierOptions.of(
            {name: value for name, value in given.items() if name not in _OPTIONS_OF_SGLANG}, where=_WHERE
        )
        if not given.get("interface_v1"):
            raise ValueError(f'{_WHERE} needs "interface_v1": 1: the vmmkv storage reads and writes pages where they lie')
        args = get_server_args()
        for feature, is_on in _unserved(storage_config, args).items():
            if is_on:
                raise ValueError(f"the vmmkv storage does not serve {feature} yet: start SGLang without one of the two")
        # SGLang's own keys are hashes of tokens. What else must agree for bytes to be the same:
        self._identity: Final = (
            self._options.fingerprint or fingerprint_of(args.model_path, args.revision),
            *(args.dtype, args.kv_cache_dtype, args.quantization, args.quantization_param_path, args.json_model_override_args),
            *(storage_config.pp_rank, storage_config.pp_size, storage_config.attn_cp_rank, storage_config.attn_cp_size),
            # with MLA all ranks have the same pages, and the first one stores them
            None if storage_config.is_mla_model else (storage_config.tp_rank, storage_config.tp_size),
        )
        self._seed = b""
        """Hash of all that keys depend on, besides SGLang's own."""
        self._tiers: list[Tier] = []
        self._store: Store | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Begin with SGLang's host memory: open the tiers. See HiCacheStorage. Raises: ValueError, as the class."""
        super().register_mem_pool_host(mem_pool_host)
        pool, page_bytes = mem_pool_host, mem_pool_host.page_size * mem_pool_host.size_per_token
        if pool.layout not in _LAYOUTS:
            raise ValueError(
                f"the vmmkv storage does not know pages of --hicache-mem-layout {pool.layout}; use {', '.join(_LAYOUTS)}"
            )
        self._filling = torch.zeros(-page_bytes % ALIGNMENT_BYTES, dtype=torch.uint8)
        """Memory for the bytes of a record behind its page."""
        record_bytes = page_bytes + len(self._filling)
        pages = [[size_bytes for _, size_bytes in spans] for spans in self._spans(torch.arange(2 * pool.page_size), 2)]
        if pages[0] != pages[1] or sum(pages[0]) != record_bytes:
            raise ValueError(
                f"a page of SGLang's {type(pool).__name__} has {page_bytes} bytes, and other ones by its addresses: the vmmkv "
                "storage does not know this memory"
            )
        layout = type(pool).__name__, pool.layout, str(pool.dtype), pool.page_size, pool.start_layer, pool.end_layer, pages[0]
        self._seed = hashlib.blake2b(repr((self._identity, layout)).encode(), digest_size=KEY_BYTES).digest()
        self._tiers = self._options.tiers(record_bytes, has_host=True)
        self._store = Store(self._tiers)
        names = ", ".join(tier.name for tier in self._tiers)
        log.info("vmmkv: tiers: %s; a page has %d bytes, its record %d", names, page_bytes, record_bytes)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: str) -> None:
        """Take note of the memory of attention over all tokens, again. See HiCacheStorage. Raises: ValueError for another."""
        if host_pool_name != "kv":
            raise ValueError(
                f"the vmmkv storage does not serve SGLang's memory {str(host_pool_name)!r} yet, of layers that are not full "
                "attention or MLA alone: start SGLang without --hicache-storage-backend"
            )

    # pages

    def batch_set_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Store pages; which of them a tier has now. See HiCacheStorage."""
        return self._moved(keys, host_indices, Store.put, lambda put: Refusal.THERE in put.answers.values())

    def batch_get_v1(self, keys: Sequence[str], host_indices: torch.Tensor, extra_info: Any = None) -> list[bool]:
        """Load pages; which of them are in SGLang's memory now. See HiCacheStorage."""
        return self._moved(keys, host_indices, Store.get, lambda get: bool(get.found))

    def batch_exists(self, keys: Sequence[str], extra_info: Any = None) -> int:
        """Count the first pages that tiers have, up to one that none has. See HiCacheStorage."""
        found, until_s = None, time.monotonic() + TIMEOUT_S
        hashed = [self._key(key) for key in keys]
        while (store := self._store) is not None and (found := store.lookup(hashed)) is None and time.monotonic() < until_s:
            time.sleep(_LOOK_S)
        return [*(found or ()), False].index(False)

    def exists(self, key: str) -> bool:
        """Has a tier this page? See HiCacheStorage."""
        return self.batch_exists([key]) == 1

    def clear(self) -> None:
        """Forget all pages: no key of before is used again by this engine. Others keep them. See HiCacheStorage."""
        self._seed = hashlib.blake2b(self._seed + os.urandom(KEY_BYTES), digest_size=KEY_BYTES).digest()

    def close(self) -> None:
        """Give up what is under way, and close the tiers, which keep what they were given. Idempotent."""
        store, self._store = self._store, None
        if store is not None:
            store.close()
        for tier in self._tiers:
            tier.close()

    # the interface before v1, which SGLang calls for no page here

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:
        """Nothing: a miss."""

    def batch_get(self, keys: Sequence[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:
        """Nothing: misses."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:
        """Store nothing."""
        return False

    def batch_set(
        self, keys: Sequence[str], values: Any = None, target_locations: Any = None, target_sizes: Any = None
    ) -> bool:
        """Store nothing."""
        return False

    # inside

    def _moved(
        self, keys: Sequence[str], host_indices: torch.Tensor, begin: Callable[..., MoveT], is_good: Callable[[MoveT], bool]
    ) -> list[bool]:
        """Begin to put or get each page, and wait until all are done; which of them are good. An error is none of them."""
        moves: list[MoveT] = []
        try:
            store = self._store
            if store is None or not keys:
                return [False] * len(keys)
            for key, spans in zip(keys, self._spans(host_indices, len(keys)), strict=True):
                moves.append(begin(store, self._key(key), spans, timeout_s=TIMEOUT_S))
            while not all(move.done for move in moves):
                store.poll()
                time.sleep(_LOOK_S)
            return [is_good(move) for move in moves]
        except Exception:  # it would end SGLang's thread, which then stores and loads no more
            log.exception("vmmkv: %d pages of SGLang are not stored, or are misses", len(keys))
            return [False] * len(keys)
        finally:
            for move in moves:
                if not move.done:
                    move.give_up()

    def _spans(self, host_indices: torch.Tensor, num_pages: int) -> list[list[tuple[int, int]]]:
        """The spans of each page, filled up to a record."""
        pointers, sizes = self.mem_pool_host.get_page_buffer_meta(host_indices)
        spans, count = list(zip(pointers, sizes, strict=True)), len(pointers) // num_pages
        filling = [(self._filling.data_ptr(), len(self._filling))] if len(self._filling) else []
        return [[*spans[page * count : (page + 1) * count], *filling] for page in range(num_pages)]

    def _key(self, key: str) -> bytes:
        """The key of a page's record."""
        return hashlib.blake2b(self._seed + key.encode(), digest_size=KEY_BYTES).digest()


def _unserved(storage_config: Any, args: Any) -> dict[str, bool]:
    """Features by which KV differs beyond its key, or lies elsewhere than in one page of host memory; is each on?"""
    return {
        "LoRA": bool(args.enable_lora or args.lora_paths),
        "speculative decoding": args.speculative_algorithm is not None,
        "heads that are split for engines of other sizes, by tp_lcm_size": storage_config.should_split_heads,
        # SGLang that has this method knows an image by 30 bits of its hash
        "models of images or sound": hasattr(args, "get_model_config") and bool(args.get_model_config().is_multimodal),
    }
