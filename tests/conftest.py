"""What must be settled before any test module is imported."""

import os

import torch
from hypothesis import settings

# `make nightly`: more steps than `make test` takes, and other ones each time (see tests/laws/test_prefix_machine.py).
settings.register_profile("nightly")

# Triton reads this when it is first imported, its own library functions included. Some packages import it on their way.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")
