"""The HiCache storage without SGLang, over a stand-in for its memory: what comes back, what is a miss, what is refused."""

import gc
import importlib
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace

import pytest
import torch

from tests.adapters.host_pool import EXTRA, RANK, HostPool, server_args
from tests.laws.faulty_tier import FaultyTier
from vmmkv.adapters.tier_options import TierOptions
from vmmkv.tiers import HostTier

LAYOUTS = "layer_first", "page_first", "page_first_direct", "page_head"
KEYS = [f"{number:064x}" for number in range(8)]


class Storage:
    """SGLang's base class of a storage, as far as ours needs it."""

    def register_mem_pool_host(self, mem_pool_host):
        self.mem_pool_host = mem_pool_host


@pytest.fixture
def hicache() -> Iterator[ModuleType]:
    """The module, over names of SGLang's that are there for its import alone."""
    name = "vmmkv.adapters.sglang.hicache"
    storage, context = ModuleType("hicache_storage"), ModuleType("runtime_context")
    storage.HiCacheStorage, context.get_server_args = Storage, server_args
    with pytest.MonkeyPatch.context() as patched:
        for package in ("sglang", "sglang.srt", "sglang.srt.mem_cache"):
            patched.setitem(sys.modules, package, ModuleType(package))
        patched.setitem(sys.modules, "sglang.srt.mem_cache.hicache_storage", storage)
        patched.setitem(sys.modules, "sglang.srt.runtime_context", context)
        module = importlib.import_module(name)
    yield module
    del sys.modules[name]


Opens = Callable[..., tuple]


@pytest.fixture
def opens(hicache: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Opens]:
    """Opens a storage over some memory, by default on a disk."""
    opened = []

    def open_one(pool: HostPool | None = None, *, args: dict | None = None, extra: dict | None = None, **rank) -> tuple:
        pool = pool or HostPool()
        options = {"kv_disk": str(tmp_path / "kv"), "kv_disk_budget": "1MiB"} if extra is None else extra
        monkeypatch.setattr(hicache, "get_server_args", lambda: server_args(**args or {}))
        storage = hicache.VmmkvHiCache(SimpleNamespace(**RANK | rank, extra_config=EXTRA | options), {})
        opened.append(storage)
        storage.register_mem_pool_host(pool)
        return storage, pool

    yield open_one
    for storage in opened:
        storage.close()


def fill(pool: HostPool) -> list[torch.Tensor]:
    """Random pages; copies of them."""
    pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape))
    return [pool.page(number).clone() for number in range(len(KEYS))]


def await_pages(storage, keys: list[str]) -> None:
    """Wait until pages that were stored are on the disk."""
    while not all(map(storage.exists, keys)):
        time.sleep(0.001)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_pages_come_back_after_a_restart_wherever_they_are_wanted(opens, layout):
    storage, pool = opens(HostPool(layout))
    pages = fill(pool)
    assert storage.batch_set_v1(KEYS, pool.indices(*range(8))) == [True] * 8
    storage.close()
    storage, pool = opens(HostPool(layout, num_pages=16))
    assert storage.batch_exists(KEYS) == 8
    assert storage.batch_get_v1(KEYS, pool.indices(*range(15, 7, -1))) == [True] * 8
    assert all(torch.equal(pool.page(15 - number), page) for number, page in enumerate(pages))
    assert not pool.kv_buffer.any() or not any(pool.page(number).any() for number in range(8)), "and nothing lies elsewhere"


def test_a_damaged_record_is_a_miss_and_stored_again(opens, tmp_path):
    storage, pool = opens()
    pages = fill(pool)
    storage.batch_set_v1(KEYS[:1], pool.indices(0))
    storage.close()
    with open(tmp_path / "kv" / "records", "r+b") as records:
        records.seek(1000)
        records.write(b"xxxx")
    storage, _ = opens(pool)
    assert storage.batch_set_v1(KEYS[1:], pool.indices(*range(1, 8))) == [True] * 7
    await_pages(storage, KEYS)
    pool.kv_buffer.zero_()
    assert storage.batch_get_v1(KEYS, pool.indices(*range(8))) == [False] + [True] * 7
    assert all(torch.equal(pool.page(number), pages[number]) for number in range(1, 8))
    pool.page(0).copy_(pages[0])
    assert storage.batch_exists(KEYS) == 0
    assert storage.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]
    await_pages(storage, KEYS)
    assert storage.batch_get_v1(KEYS[:1], pool.indices(7)) == [True]
    assert torch.equal(pool.page(7), pages[0])


def test_only_the_first_pages_without_a_gap_are_there(opens):
    storage, pool = opens(extra={"kv_host_budget": "1MiB"})
    assert (storage.batch_exists(KEYS), storage.batch_exists([])) == (0, 0)
    assert storage.batch_set_v1([], pool.indices(0)[:0]) == storage.batch_get_v1([], pool.indices(0)[:0]) == []
    storage.batch_set_v1([KEYS[0], KEYS[1], KEYS[3]], pool.indices(0, 1, 3))
    assert (storage.batch_exists(KEYS), storage.batch_exists(KEYS[1:]), storage.batch_exists(KEYS[2:])) == (2, 1, 0)
    assert (storage.exists(KEYS[3]), storage.exists(KEYS[2])) == (True, False)
    assert storage.batch_set_v1(KEYS[:4], pool.indices(0, 1, 2, 3)) == [True] * 4, "what is there already is there"
    assert storage.batch_exists(KEYS) == 4


@pytest.mark.parametrize(
    ("pool", "args", "rank"),
    [
        *((HostPool(layout), {}, {}) for layout in LAYOUTS if layout != "page_first"),
        (HostPool(dtype=torch.bfloat16), {}, {}),
        *(
            (HostPool(), {name: value}, {})
            for name, value in {
                **{"model_path": "org/other", "revision": "abc", "dtype": "bfloat16", "kv_cache_dtype": "fp8_e5m2"},
                **{"quantization": "fp8", "quantization_param_path": "/scales", "json_model_override_args": '{"a": 1}'},
            }.items()
        ),
        *((HostPool(), {}, {f"{kind}_rank": 1}) for kind in ("tp", "pp", "attn_cp")),
        *((HostPool(), {}, {f"{kind}_size": 4}) for kind in ("tp", "pp", "attn_cp")),
        (HostPool(), {}, {"extra": {"fingerprint": "other"}}),
    ],
    ids=str,
)
def test_engines_and_ranks_whose_bytes_differ_share_no_page(opens, tmp_path, pool, args, rank):
    storage, one = opens()
    fill(one)
    assert all(storage.batch_set_v1(KEYS, one.indices(*range(8))))
    await_pages(storage, KEYS)
    disk = {"kv_disk": str(tmp_path / "kv"), "kv_disk_budget": "1MiB"}
    other, _ = opens(pool, args=args, **rank | {"extra": disk | rank.get("extra", {})})
    assert other.batch_exists(KEYS) == 0 and not any(other.batch_get_v1(KEYS, pool.indices(*range(8))))
    again, _ = opens(HostPool())
    assert again.batch_exists(KEYS) == 8


def test_ranks_with_the_same_bytes_share_pages(opens):
    """With MLA one of them stores, for all."""
    first, pool = opens(is_mla_model=True)
    assert all(first.batch_set_v1(KEYS, pool.indices(*range(8))))
    await_pages(first, KEYS)
    second, _ = opens(is_mla_model=True, tp_rank=1)
    assert second.batch_exists(KEYS) == 8
    assert opens(args={"model_path": "/elsewhere"}, extra={"fingerprint": "one", "kv_host_budget": "1MiB"})


@pytest.mark.parametrize(
    ("changed", "said"),
    [
        ({"extra": {"kv_disks": "/kv"}}, "--hicache-storage-backend-extra-config has no 'kv_disks'; .*did you mean kv_disk?"),
        ({"extra": {}}, "names no tier; give kv_host_budget"),
        ({"extra": {"kv_host_budget": "1MiB", "interface_v1": 0}}, 'needs "interface_v1": 1'),
        ({"pool": HostPool("page_unified")}, "pages of --hicache-mem-layout page_unified; use layer_first, page_first"),
        ({"args": {"enable_lora": True}}, "does not serve LoRA yet"),
        ({"args": {"lora_paths": ["a=b"]}}, "does not serve LoRA yet"),
        ({"args": {"speculative_algorithm": "EAGLE"}}, "does not serve speculative decoding yet"),
        ({"args": {"get_model_config": lambda: SimpleNamespace(is_multimodal=True)}}, "serve models of images or sound yet"),
        ({"should_split_heads": True}, "by tp_lcm_size yet"),
    ],
)
def test_what_is_not_understood_is_refused_at_the_start(opens, changed, said):
    with pytest.raises(ValueError, match=said):
        opens(**changed)


def test_memory_whose_pages_are_not_where_it_says_is_refused(opens):
    lacking, uneven = HostPool(), HostPool()
    lacking.size_per_token += 4  # scales that lie elsewhere
    uneven.get_page_buffer_meta = lambda indices: ([1, 2, 3, 4], [10240, 0, 10240, 1])
    for pool in (lacking, uneven):
        with pytest.raises(ValueError, match=r"of SGLang's HostPool has 10\d+ bytes.* does not know this memory"):
            opens(pool)


def test_more_memory_than_that_of_attention_is_refused(opens):
    storage, pool = opens()
    storage.register_mem_host_pool_v2(pool, "kv")
    with pytest.raises(ValueError, match="memory 'mamba' yet, of layers that are not full attention"):
        storage.register_mem_host_pool_v2(HostPool(), "mamba")


def test_words_of_sglang_are_no_options_of_ours(opens):
    own = {"prefetch_threshold": 256, "prefetch_timeout_base": 1, "hicache_storage_pass_prefix_keys": False, "tp_lcm_size": 8}
    assert opens(extra={"kv_host_budget": "1MiB", **own})


@pytest.mark.parametrize("fault", ["slow", "asks", "refuses", "raises"])
def test_no_call_waits_for_a_tier_without_end(opens, hicache, monkeypatch, fault):
    tier = FaultyTier(HostTier(1 << 20, record_bytes=12288), seed=0, faults=())
    monkeypatch.setattr(TierOptions, "tiers", lambda self, record_bytes, has_host: [tier])
    storage, pool = opens()
    pages = fill(pool)
    assert all(storage.batch_set_v1(KEYS[:4], pool.indices(0, 1, 2, 3)))
    monkeypatch.setattr(hicache, "TIMEOUT_S", 0.02)
    tier.faults, tier.chance = {fault}, 1.0
    stored = storage.batch_set_v1(KEYS[4:], pool.indices(4, 5, 6, 7))
    pool.kv_buffer.zero_()
    found = storage.batch_exists(KEYS)
    assert storage.batch_get_v1(KEYS[:4], pool.indices(0, 1, 2, 3)) == [False] * 4
    assert (stored, found) == {
        **{"slow": ([True] * 4, 8), "refuses": ([False] * 4, 4)},
        **{"asks": ([False] * 4, 0), "raises": ([False] * 4, 0)},
    }[fault]
    tier.hurry()
    tier.faults = set()
    storage.batch_exists(KEYS)
    assert not pool.kv_buffer.any(), "what comes late is written nowhere"
    assert storage.batch_get_v1(KEYS[:4], pool.indices(0, 1, 2, 3)) == [True] * 4
    assert all(torch.equal(pool.page(number), pages[number]) for number in range(4))


def test_an_error_is_a_miss_and_not_the_end_of_sglangs_thread(opens, caplog):
    storage, pool = opens()
    assert storage.batch_set_v1(KEYS[:2], pool.indices(0, 1)[:-1]) == [False, False], "half a page"
    assert storage.batch_get_v1(KEYS[:2], pool.indices(0)) == [False, False], "a page for two keys"
    assert caplog.text.count("are not stored, or are misses") == 2
    assert storage.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]


def test_backups_and_prefetches_go_on_side_by_side(opens):
    storage, pool = opens(HostPool(num_pages=16))
    pages = fill(pool)
    wrong = []

    def back_up() -> None:
        for number in range(8):
            if storage.batch_set_v1(KEYS[number : number + 1], pool.indices(number)) != [True]:
                wrong.append(("set", number))

    def prefetch() -> None:
        for _ in range(20):
            count = storage.batch_exists(KEYS)
            if count and not all(storage.batch_get_v1(KEYS[:count], pool.indices(*range(8, 8 + count)))):
                wrong.append(("get", count))
            wrong.extend(("bytes", at) for at in range(count) if not torch.equal(pool.page(8 + at), pages[at]))

    threads = [threading.Thread(target=each) for each in (back_up, prefetch)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []
    await_pages(storage, KEYS)


def test_a_closed_storage_has_nothing_open_and_no_pages(opens):
    def things() -> tuple[int, int]:
        gc.collect()
        return len(os.listdir("/proc/self/fd")), threading.active_count()

    opens()[0].close()  # modules that it imports, and the driver, stay
    before = things()
    storage, pool = opens()
    assert storage.batch_set_v1(KEYS[:1], pool.indices(0)) == [True] and things() > before
    storage.close()
    storage.close()
    assert things() == before
    assert (storage.batch_set_v1(KEYS[:1], pool.indices(0)), storage.batch_get_v1(KEYS[:1], pool.indices(0))) == (
        [False],
        [False],
    )
    assert storage.batch_exists(KEYS) == 0


def test_after_a_clear_no_page_of_before_is_there_but_for_other_engines(opens):
    """A storage is cleared when its weights may be others since."""
    storage, pool = opens()
    pages = fill(pool)
    storage.batch_set_v1(KEYS, pool.indices(*range(8)))
    await_pages(storage, KEYS)
    storage.clear()
    assert storage.batch_exists(KEYS) == 0 and not any(storage.batch_get_v1(KEYS, pool.indices(*range(8))))
    pool.kv_buffer.zero_()
    assert storage.batch_set_v1(KEYS[:1], pool.indices(0)) == [True]
    await_pages(storage, KEYS[:1])
    other, pool = opens()
    assert other.batch_get_v1(KEYS, pool.indices(*range(8))) == [True] * 8
    assert all(torch.equal(pool.page(number), page) for number, page in enumerate(pages))


def test_the_interface_before_v1_has_no_pages(opens):
    storage, pool = opens()
    storage.batch_set_v1(KEYS[:1], pool.indices(0))
    await_pages(storage, KEYS[:1])
    assert storage.get(KEYS[0]) is None and storage.batch_get(KEYS[:2]) == [None, None]
    assert storage.set(KEYS[1], pool.page(0)) is False and storage.batch_set(KEYS[1:2], [pool.page(0)]) is False
    assert not storage.exists(KEYS[1])
