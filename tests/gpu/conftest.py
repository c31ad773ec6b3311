"""Tests that need a GPU: all of this folder, skipped with the reason where there is none."""

from pathlib import Path

import pytest
import torch
from hypothesis import HealthCheck, settings

from vmmkv.driver import Driver, open_driver
from vmmkv.errors import DriverUnavailable

HERE = Path(__file__).parent

WALK = settings(deadline=None, derandomize=True, stateful_step_count=40, suppress_health_check=list(HealthCheck))
"""Of state machines over CUDA."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ours = [item for item in items if HERE in item.path.parents]
    if not ours:
        return
    marks = [pytest.mark.gpu]
    try:
        open_driver("cuda")
    except DriverUnavailable as error:
        marks.append(pytest.mark.skip(reason=f"no GPU to test on: {str(error).split(';')[0]}"))
    for item in ours:
        for mark in marks:
            item.add_marker(mark)


@pytest.fixture(scope="session")
def gpu() -> torch.device:
    """The GPU to test on."""
    return open_driver("cuda").device


@pytest.fixture
def driver(gpu: torch.device) -> Driver:
    """A driver of its own for each test."""
    return open_driver(gpu)


@pytest.fixture(autouse=True)
def full_precision() -> None:
    """float32 is multiplied as float32."""
    torch.backends.cuda.matmul.allow_tf32 = False
