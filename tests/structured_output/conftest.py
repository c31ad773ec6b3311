"""The engine's harness, for tests of answers that follow a grammar."""

from tests.engine.conftest import harness, smollm2

__all__ = ["harness", "smollm2"]
