"""python sglang_process.py FOLDER DISK store|load: pages of each layout through SGLang's own factory of storages, over DISK.

Runs beside the sources of one version of SGLang, which cannot be installed here. They are themselves:

- StorageBackendFactory, with the classes HiCacheStorage and HiCacheStorageConfig, and what these import;
- `get_page_buffer_meta` of the memory of pages, for attention with keys and values and for MLA.

Stand-ins: the rest of that memory, and the server's arguments, which nothing has parsed.
"""

import ast
import contextlib
import dataclasses
import inspect
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from sglang.srt import runtime_context
from sglang.srt.mem_cache import hicache_storage
from sglang.srt.mem_cache.storage import StorageBackendFactory

from tests.adapters.host_pool import EXTRA, RANK, HostPool, server_args

KEYS = [f"{number:064x}" for number in range(8)]
PAGES = list(range(8))


class LatentPool(HostPool):
    """Pages of MLA: one plane, of 3 layers with rows of 72."""

    dcp_size, kv_cache_dim = 1, 72

    def __init__(self, layout: str) -> None:
        super().__init__(layout)
        self.layer_num, self.end_layer, self.logical_page_size = 3, 2, self.page_size
        self.size_per_token = self.layer_num * self.kv_cache_dim * self.dtype.itemsize
        is_layer_first = layout == "layer_first"
        self.kv_buffer = torch.zeros(1, *((3, self.size) if is_layer_first else (self.size, 3)), 72, dtype=self.dtype)


def borrow(kind: type[HostPool], source: Path, name: str) -> type[HostPool]:
    """A kind of memory with the methods that say where pages are of a class of SGLang's."""
    (found,) = [node for node in ast.parse(source.read_text()).body if isinstance(node, ast.ClassDef) and node.name == name]
    wanted = "get_page_buffer_meta", "_storage_page_index"
    found.body = [node for node in found.body if isinstance(node, ast.FunctionDef) and node.name in wanted]
    found.bases, names = [ast.Name("Base", ast.Load())], {"Base": kind, "torch": torch}
    assert "get_page_buffer_meta" in [node.name for node in found.body]
    exec(compile(ast.fix_missing_locations(ast.Module([found], [])), str(source), "exec"), names)
    borrowed: type[HostPool] = names[name]
    return borrowed


def pools(folder: Path) -> Iterator[HostPool]:
    """Memory of each kind and layout, with other random pages in each."""
    sources = folder / "sglang" / "srt" / "mem_cache" / "pool_host"
    heads = borrow(HostPool, sources / "mha.py", "MHATokenToKVPoolHost")
    latent = borrow(LatentPool, sources / "mla.py", "MLATokenToKVPoolHost")
    random = torch.Generator().manual_seed(0)
    for kind, layout in [
        *((heads, layout) for layout in ("layer_first", "page_first", "page_first_direct", "page_head")),
        *((latent, layout) for layout in ("layer_first", "page_first")),
    ]:
        pool = kind(layout)
        pool.kv_buffer.copy_(torch.rand(pool.kv_buffer.shape, generator=random))
        yield pool


def opened(pool: HostPool, options: dict[str, Any]) -> Any:
    """A storage by SGLang's factory, as its controllers begin with one."""
    rank = RANK | {"is_mla_model": isinstance(pool, LatentPool)}
    config = hicache_storage.HiCacheStorageConfig(**rank, extra_config=EXTRA | options)
    storage = StorageBackendFactory.create_backend("dynamic", config, pool)
    storage.register_mem_pool_host(pool)
    storage.register_mem_host_pool_v2(pool, hicache_storage.PoolName.KV)
    if hasattr(storage, "on_host_pools_registered"):
        storage.on_host_pools_registered()
    return storage


@contextlib.contextmanager
def refused(said: str) -> Iterator[None]:
    """Check that what is done within is refused by a sentence with these words."""
    try:
        yield
    except ValueError as error:
        assert said in str(error), error
    else:
        raise AssertionError(f"not refused: {said}")


def check_refusals() -> None:
    """Check that what cannot be served is refused, by the factory or when more memory is registered."""
    with refused("has no 'kv_disks'"):
        opened(HostPool(), {"kv_disks": "/kv"})
    with refused("interface_v1"):
        opened(HostPool(), {"kv_host_budget": "1MiB", "interface_v1": 0})
    storage = opened(HostPool(), {"kv_host_budget": "1MiB"})
    with refused("memory 'mamba'"):
        storage.register_mem_host_pool_v2(HostPool(), hicache_storage.PoolName.MAMBA)
    storage.close()


def check_names(folder: Path) -> None:
    """Check that SGLang has what the storage reads, and calls it as it is declared."""
    from vmmkv.adapters.sglang.hicache import VmmkvHiCache

    base = hicache_storage.HiCacheStorage
    for name in {*vars(VmmkvHiCache)} & {*vars(base)} - {"__init__"}:
        ours, theirs = getattr(VmmkvHiCache, name), getattr(base, name)
        if inspect.isfunction(ours):
            assert [*inspect.signature(ours).parameters] == [*inspect.signature(theirs).parameters], name
    assert {*RANK} <= {field.name for field in dataclasses.fields(hicache_storage.HiCacheStorageConfig)}
    files = [folder / "sglang" / "srt" / "server_args.py", *(folder / "sglang" / "srt" / "arg_groups").rglob("*.py")]
    declared = {
        node.target.id
        for file in files
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
    }
    assert {*vars(server_args())} <= declared, {*vars(server_args())} - declared


def main(folder: Path, disk: str, turn: str) -> None:
    """Store pages, or load them in another process."""
    runtime_context.get_context()._server_args = server_args()
    check_refusals()
    check_names(folder)
    extra_info = hicache_storage.HiCacheStorageExtraInfo(prefix_keys=None)
    for pool in pools(folder):
        options = {"kv_disk": f"{disk}/{type(pool).__name__}", "kv_disk_budget": "1MiB"}
        storage, wanted = opened(pool, options), pool.kv_buffer.clone()
        if turn == "store":
            assert storage.batch_exists(KEYS, extra_info) == 0
            assert storage.batch_set_v1(KEYS, pool.indices(*PAGES), extra_info) == [True] * 8
        else:
            assert storage.batch_exists([*KEYS, "f" * 64], extra_info) == 8 and not storage.exists("f" * 64)
            pool.kv_buffer.zero_()
            assert storage.batch_get_v1(["f" * 64, *KEYS[1:]], pool.indices(*PAGES), extra_info) == [False] + [True] * 7
            assert storage.batch_get_v1(KEYS[:1], pool.indices(0), extra_info) == [True]
            assert torch.equal(pool.kv_buffer, wanted), (type(pool), pool.layout)
        storage.close()
        print(turn, type(pool).__name__, pool.layout)


if __name__ == "__main__":
    main(Path(sys.argv[1]), *sys.argv[2:])
