"""What must be settled before any test module is imported."""

import gc
import os
import signal
from pathlib import Path

# Read when torch is imported, here and by what tests start. Tensors are small and tests run side by side: a second thread
# would wait for a core at each barrier, which doubled the time of tests/engine.
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest
import torch
from hypothesis import Phase, settings

from tests.sources import SOURCE_ROOTS

# `make nightly`: more steps than `make test` takes, and other ones each time (see tests/laws/test_prefix_machine.py).
settings.register_profile("nightly")
# tests/mutants.py: a failure is enough, and need not be made small.
settings.register_profile("mutants", phases=[Phase.generate], database=None)

# What a test starts finds the packages where the test does, installed or not.
os.environ["PYTHONPATH"] = os.pathsep.join([*map(str, SOURCE_ROOTS), *filter(None, [os.environ.get("PYTHONPATH")])])

# A shell has what it runs in the background ignore Ctrl-C, and so would all that a test starts and interrupts.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# Triton reads this when it is first imported, its own library functions included. Some packages import it on their way.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
    from tests import interpreter

    interpreter.hasten()


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """A test's random numbers are its own, whatever ran before it in the same process."""
    torch.manual_seed(0)


gc.disable()  # until all tests are imported, which takes a third less time so


def pytest_collection_finish() -> None:
    """What is imported stays: each full collection went over it for 0.3 s, and some tests have thirty."""
    gc.freeze()
    gc.enable()


def pytest_unconfigure() -> None:
    """Or Triton's bindings report all of it as leaked at the end."""
    gc.unfreeze()


@pytest.fixture(scope="session")
def anyio_backend() -> str:
    """The event loop of async tests."""
    return "asyncio"


@pytest.fixture(scope="session")
def smollm2() -> Path:
    """The directory of SmolLM2-135M-Instruct; fetched if it is not here yet."""
    from vmmkv_server.models import resolve  # not before a test wants it

    return resolve("smollm2-135m")
