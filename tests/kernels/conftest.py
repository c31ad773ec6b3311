"""Kernels run on the GPU where there is one, and else in Triton's interpreter."""

import os
import sys

import pytest
import torch

# Triton reads this when it is first imported, its own library functions included: so here, before any test module is.
if not torch.cuda.is_available() and os.environ.setdefault("TRITON_INTERPRET", "1") == "1" and "triton" in sys.modules:
    import triton

    if not isinstance(triton.language.sum, triton.runtime.interpreter.InterpretedFunction):
        raise pytest.UsageError(
            "triton was imported before tests/kernels/conftest.py could set TRITON_INTERPRET=1; "
            "set it in the environment, or do not import triton while other tests are collected"
        )


@pytest.fixture
def device() -> torch.device:
    return torch.device("cpu") if os.environ.get("TRITON_INTERPRET") == "1" else torch.device("cuda", 0)
