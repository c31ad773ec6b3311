"""Kernels run on the GPU where there is one, and else in Triton's interpreter (see tests/conftest.py)."""

import os

import pytest
import torch


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu") if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)
