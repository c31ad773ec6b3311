"""No kernel touches a row past the length or the limit, or before the window, and none depends on the physical pages."""

import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.kernels.cases import DEVICE, FP16
from tests.kernels.guarded import STRAYS
from vmmkv import KVCache, KVLayout, Pool
from vmmkv.driver import open_driver
from vmmkv.kernels.attention.append import append
from vmmkv.kernels.attention.decode import decode
from vmmkv.kernels.attention.prefill import prefill
from vmmkv.layout import KVType
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES

ROOT = Path(__file__).parents[2]


def release(package: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version(package).split(".")[:2])


pytestmark = pytest.mark.skipif(
    release("triton") < (3, 7) and release("numpy") >= (2, 4), reason="the interpreter of triton 3.6 breaks with numpy 2.4"
)


def run_guarded(what: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.kernels.guarded", what]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120, cwd=ROOT)


@pytest.fixture(scope="module")
def signals() -> dict[str, str]:
    """How each stray access ended."""
    child = run_guarded("strays")
    assert child.returncode == 0, child.stderr
    return dict(line.split() for line in child.stdout.splitlines())


@pytest.mark.parametrize("what", ["within", pytest.param("within-wide", marks=pytest.mark.nightly)])
def test_kernels_stay_within_mapped_memory(what: str) -> None:
    child = run_guarded(what)
    assert child.returncode == 0, child.stderr
    assert child.stdout == "done\n"


@pytest.mark.parametrize("what", STRAYS)
def test_the_guard_sees_a_stray_access(what: str, signals: dict[str, str]) -> None:
    assert signals[what] == str(int(signal.SIGSEGV))


LAYERS, LAYER, KV_HEADS, HEAD_DIM = 32, 17, 2, 64
LENGTHS = (600, 1, 129)
NEW = 3
"""Queries of each sequence in prefill, at most."""


@contextmanager
def cache_of_pages(dtype: torch.dtype | KVType, *, shuffled: bool) -> Iterator[KVCache]:
    """A cache whose sequences take handles in the order of their creation, or in a random order."""
    layout = KVLayout.uniform(layers=LAYERS, kv_heads=KV_HEADS, head_dim=HEAD_DIM, dtype=dtype)
    driver = FakeDriver(over=open_driver(DEVICE), memory_bytes=2**50)
    with Pool(DEVICE, 64 * MIB, driver=driver) as pool:
        extents = pool.acquire(24)
        # The newest free extent is taken first.
        extents.reverse()
        if shuffled:
            random.Random(1).shuffle(extents)
        for extent in extents:
            pool.drop(extent)
        with KVCache(layout, pool, slots=len(LENGTHS), max_tokens=4096) as cache:
            yield cache


def handles_of(cache: KVCache) -> list[int]:
    """The handles under the sequences, by address."""
    driver = cache.pool.driver
    assert isinstance(driver, FakeDriver)
    mapped = driver._mapped
    first_slot = cache.k(0)[1].data_ptr()
    return [int(mapped[address].handle) for address in sorted(mapped) if address > first_slot - PAGE_BYTES]


def attend(cache: KVCache, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """Append random rows to sequences of LENGTHS, of which some grow in turns; then decode and prefill over them."""
    generator = torch.Generator().manual_seed(0)
    sequences = [cache.open() for _ in LENGTHS]
    for part in (0.4, 0.8, 1.0):
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            sequence.grow(max(1, int(length * part)))
    scales = {}
    if not cache.k(LAYER).dtype.is_floating_point or cache.k(LAYER).dtype.itemsize == 1:
        scales = {"k_scale": cache.k_scale(LAYER), "v_scale": cache.v_scale(LAYER)}
    views = cache.k(LAYER), cache.v(LAYER)
    for sequence, length in zip(sequences, LENGTHS, strict=True):
        new_NKD = torch.randn(2, length, KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE, dtype)
        positions_N = torch.arange(length, device=DEVICE)
        slots_N = torch.full_like(positions_N, sequence.slot)
        append(*new_NKD, *views, slots_N, positions_N, cache.limit, **scales)
        sequence.advance(length)
    lengths_B = torch.tensor(LENGTHS, dtype=torch.int32, device=DEVICE)
    slots_B = torch.tensor([sequence.slot for sequence in sequences], device=DEVICE)
    q_NHD = torch.randn(NEW * len(LENGTHS), 2 * KV_HEADS, HEAD_DIM, generator=generator).to(DEVICE, dtype)
    counts_B = lengths_B.clamp(max=NEW)
    starts = torch.cat([counts_B.new_zeros(1), counts_B.cumsum(0).int()])
    used = sum(min(length, NEW) for length in LENGTHS)
    return (
        decode(q_NHD[: len(LENGTHS)], *views, lengths_B, slots_B, limit_S=cache.limit, **scales),
        prefill(q_NHD, *views, starts, lengths_B, slots_B, limit_S=cache.limit, **scales)[:used],
    )


def assert_shuffled_pages_give_the_same_bits(dtype: torch.dtype, kv_type: KVType | None) -> None:
    """Append, decode and prefill do not depend on where the physical pages are."""
    outputs, handles = [], []
    for shuffled in (False, True):
        with cache_of_pages(kv_type or dtype, shuffled=shuffled) as cache:
            try:
                outputs.append(attend(cache, dtype))
            except Exception as error:
                # pytest would print the tensors that the failed call was given, and most of their memory is not mapped.
                raise AssertionError(repr(error)) from None
            handles.append(handles_of(cache))
    assert len(handles[1]) == len(handles[0]) > len(LENGTHS)
    assert handles[1] != handles[0]
    for in_order, shuffled_out in zip(*outputs, strict=True):
        assert in_order.isfinite().all()
        assert torch.equal(in_order, shuffled_out)


@pytest.mark.parametrize("kind", [None, pytest.param("int4", marks=pytest.mark.nightly)])
def test_shuffled_physical_pages_give_the_bits_of_ordered_ones(kind: str | None) -> None:
    assert_shuffled_pages_give_the_same_bits(FP16, KVType(kind) if kind else None)
