"""Kernels run on the GPU where there is one, and else in Triton's interpreter (see tests/conftest.py)."""

import dataclasses
from collections.abc import Callable

import pytest
import torch

from tests.kernels.cases import DEVICE
from vmmkv_kernels import checks
from vmmkv_kernels.attention.cascade import CascadeTiling
from vmmkv_kernels.attention.decode import Tiling, tiling
from vmmkv_kernels.attention.prefill import PrefillTiling

ATTENTION = "vmmkv_kernels.attention"


@pytest.fixture
def device() -> torch.device:
    return DEVICE


@pytest.fixture
def by_pointers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, tiles are loaded as on a GPU without a tensor memory accelerator."""
    return lambda: monkeypatch.setattr(checks, "has_tma", lambda device: False)


@pytest.fixture
def set_splits(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """So many programs for each kv head, of decode and of cascade."""

    def set_splits(num_splits: int) -> None:
        for module in ("cascade", "decode"):
            monkeypatch.setattr(f"{ATTENTION}.{module}.resident_splits", lambda *_: num_splits)

    return set_splits


@pytest.fixture
def cut_decode(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Tiles of 16 rows in small chunks, so that short sequences go through what long ones do."""

    def cut(**changes: int) -> None:
        small = {"tile_rows": 16, "chunk_tiles": 4, "short_tiles": 4, "max_chunks": 4}
        cut: Tiling = dataclasses.replace(tiling(4, 2, 64, 2, 128), **(small | changes))
        monkeypatch.setattr(f"{ATTENTION}.decode.tiling", lambda *shape: cut)

    return cut


@pytest.fixture
def cut_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tiles of 32 by 32, so that short sequences go through what long ones do."""
    cut = PrefillTiling(tokens=32, tile_rows=32, num_warps=4)
    monkeypatch.setattr(f"{ATTENTION}.prefill.prefill_tiling", lambda *shape: cut)


@pytest.fixture
def cut_cascade(monkeypatch: pytest.MonkeyPatch, set_splits: Callable[[int], None]) -> Callable[..., None]:
    """Problems of 8 sequences at most and tiles of 16 rows, so that few rows go through what many do; so many splits."""

    def cut(num_splits: int, **changes: int) -> None:
        small = dataclasses.replace(CascadeTiling(queries=16, tile_rows=16, merged_parts=2), **changes)
        monkeypatch.setattr(f"{ATTENTION}.cascade.cascade_tiling", lambda *shape: small)
        set_splits(num_splits)

    return cut
