"""The engine's harness, and a model's directory, for tests of answers that follow a grammar."""

from pathlib import Path

import pytest

from tests.engine.conftest import harness
from tests.server.tiny import byte_tokenizer

__all__ = ["harness", "model_dir"]


@pytest.fixture(scope="module")
def model_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("models") / "tiny"
    byte_tokenizer().save_pretrained(path)
    (path / "config.json").write_text('{"model_type": "llama", "vocab_size": 258}')
    return path
