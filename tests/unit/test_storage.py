"""Views that torch saves, pickles, deep-copies, shares or sends: right values, or a refusal by name. Never a signal."""

import copy
import io
import json
import pickle
import re
import subprocess
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from vmmkv import PAGE_BYTES, KVCache, KVLayout, Pool, ViewNotCloned
from vmmkv.memory.storage import MappedStorage, ReservedStorage

ROOT = Path(__file__).parents[2]

CHILD = """
import copy, io, json, pickle, warnings
import torch, torch.multiprocessing as mp
from vmmkv import KVCache, KVLayout, KVType, MIB, Pool, VmmkvError

def saved(view, **options):
    file = io.BytesIO()
    torch.save([view], file, **options)
    file.seek(0)
    return torch.load(file)[0]

def sent(view):
    queue = mp.SimpleQueue()
    queue.put(view)
    return queue.get()

def set_on(view):
    storage = copy.copy(view.untyped_storage())
    return torch.empty(0, dtype=view.dtype).set_(storage, view.storage_offset(), view.shape, view.stride())

WAYS = {
    "save": saved,
    "old save": lambda view: saved(view, _use_new_zipfile_serialization=False),
    "pickle": lambda view: pickle.loads(pickle.dumps(view)),
    "deepcopy": copy.deepcopy,
    "queue": sent,
    "copy of the storage": set_on,
    "share": lambda view: view.share_memory_(),
}

def end_of(way, take, rows):
    was = rows(take()).clone()
    try:
        copied = rows(way(take()))
    except VmmkvError as error:
        return type(error).__name__
    right = torch.equal(copied.float(), was.float())
    copied.zero_()
    return right and torch.equal(rows(take()).float(), was.float())

def main(dtype):
    layout = KVLayout.uniform(layers=2, kv_heads=2, head_dim=64, dtype=dtype)
    with Pool("cpu", 64 * MIB) as pool, KVCache(layout, pool, slots=4, max_tokens=4096) as cache:
        sequence = cache.open()
        sequence.grow(100)
        for plane in layout.groups[0].planes:
            for layer in (0, 1):
                view = sequence.view(layer, plane.name)
                view[:] = torch.arange(view.numel()).view(view.shape) % 100 + 1 + layer
        views = {
            "sequence.k": lambda: sequence.k(0),
            "a part of sequence.v": lambda: sequence.v(1)[5:10],
            "cache.k": lambda: cache.k(0),
            "a part of cache.v": lambda: cache.v(0)[sequence.slot, :100],
        }
        if dtype is not torch.float32:
            views |= {"sequence.k_scale": lambda: sequence.k_scale(0), "cache.v_scale": lambda: cache.v_scale(0)}
        for name, take in views.items():
            rows = (lambda view: view[sequence.slot, :100]) if name in ("cache.k", "cache.v_scale") else (lambda view: view)
            for way, function in WAYS.items():
                print(json.dumps([name, way, end_of(function, take, rows)]), flush=True)

warnings.simplefilter("ignore")
"""


@pytest.mark.parametrize(
    "dtype", ["torch.float32", *(pytest.param(f"KVType({kind!r})", marks=pytest.mark.nightly) for kind in ("int8", "fp8"))]
)
def test_a_view_is_copied_right_or_refused_by_name_whatever_torch_does_with_it(dtype: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", f"{CHILD}main({dtype})"], cwd=ROOT, capture_output=True, text=True, check=False
    )
    ends = [json.loads(line) for line in child.stdout.splitlines()]
    assert child.returncode == 0, (child.returncode, ends[-1:], child.stderr)
    for name, way, end in ends:
        is_pickled = way in ("save", "old save", "pickle") and "fp8" in dtype and "scale" not in name  # see MappedStorage
        assert end == ("ViewNotCloned" if "cache" in name or is_pickled else True), (name, way)


@pytest.fixture
def cache(pool: Pool) -> Iterator[KVCache]:
    layout = KVLayout.uniform(layers=4, kv_heads=8, head_dim=512, dtype=torch.float32)
    with KVCache(layout, pool, slots=4, max_tokens=128) as cache:
        yield cache


def test_what_a_sequence_writes_after_its_views_were_shared_is_in_the_cache(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.grow(1)
    before = sequence.k(0)
    with pytest.warns(UserWarning, match="does not reach the cache"):
        sequence.v(0)[:1].share_memory_()
    assert before.is_shared() and type(before.untyped_storage()) is torch.UntypedStorage
    sequence.k(0)[0] = 5.0
    sequence.advance()
    (fork,) = cache.fork(sequence)
    assert cache.k(0)[sequence.slot, 0, 0, 0] == fork.k(0)[0, 0, 0] == 5.0


def test_a_storage_is_shown_without_its_bytes(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.grow(1)
    assert str(sequence.k(0).untyped_storage()) == f"<MappedStorage of {PAGE_BYTES} bytes on cpu>"
    assert re.fullmatch(r"<ReservedStorage of \d+ bytes on cpu>", repr(cache.k(0).untyped_storage()))


def test_no_view_of_a_cache_has_a_storage_of_torch_itself(cache: KVCache) -> None:
    sequence = cache.open()
    sequence.grow(1)
    for view in (sequence.k(0), sequence.v(3)[:1].transpose(0, 1), sequence.k(0).view(torch.uint8)):
        assert type(view.untyped_storage()) is MappedStorage
    for view in (cache.k(0), cache.v(3)[1, :1].transpose(0, 1)):
        assert type(view.untyped_storage()) is ReservedStorage
    assert type(sequence.k(0).clone().untyped_storage()) is torch.UntypedStorage


@pytest.mark.parametrize("way", [pickle.dumps, copy.deepcopy, lambda view: torch.save(view, io.BytesIO())])
def test_a_refusal_says_what_to_copy_and_how(cache: KVCache, way: Callable[[torch.Tensor], object]) -> None:
    with pytest.raises(ViewNotCloned, match=r"cache\.k\(layer\)\[slot, :length\]\.clone\(\)"):
        way(cache.k(0))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sequence = cache.open()
        way(sequence.k(0))
        sequence.grow(1)
        way(sequence.k(0))
