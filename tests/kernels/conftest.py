"""Kernels run on the GPU where there is one, and else in Triton's interpreter (see tests/conftest.py)."""

import os
from collections.abc import Callable

import pytest
import torch

from vmmkv.kernels import checks


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu") if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)


@pytest.fixture
def by_pointers(monkeypatch: pytest.MonkeyPatch) -> Callable[[], None]:
    """From now on, tiles are loaded as on a GPU without a tensor memory accelerator."""
    return lambda: monkeypatch.setattr(checks, "has_tma", lambda device: False)
