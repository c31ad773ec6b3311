"""Tests that need a GPU: all of this folder, skipped with the reason where there is none."""

from pathlib import Path

import pytest
import torch

from vmmkv.driver import Driver, open_driver
from vmmkv.errors import DriverUnavailable

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


@pytest.fixture(scope="session", autouse=True)
def gpu() -> torch.device:
    """The GPU to test on."""
    try:
        return open_driver("cuda").device
    except DriverUnavailable as error:
        pytest.skip(f"no GPU to test on: {error}")


@pytest.fixture
def driver(gpu: torch.device) -> Driver:
    """A driver of its own for each test."""
    return open_driver(gpu)
