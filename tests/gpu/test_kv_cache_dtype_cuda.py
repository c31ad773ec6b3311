"""Quantised rows served on a GPU: what holds of exact ones, by graphs and by transformers' own code."""

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch

from tests.engine.conftest import Harness, making
from tests.engine.test_transformers import RIGHT, assert_tokens_are_those_of_transformers
from tests.gpu import test_decode_steps_cuda as steps
from tests.gpu import test_engine_cuda as engine
from vmmkv.layout import KV_KINDS
from vmmkv_kernels.quantise import Kind


@pytest.fixture(params=KV_KINDS)
def harness(request: pytest.FixtureRequest) -> Iterator[Callable[..., Harness]]:
    yield from making(request.param)


@pytest.mark.parametrize("family", ["llama3", "mistral, window of 100", "qwen3"])
def test_tokens_are_those_of_transformers_over_rows_kept_so(harness: Callable[..., Harness], family: str) -> None:
    steps.test_tokens_are_those_of_transformers(harness, family, capture=True)


def test_graphs_change_no_bit(harness: Callable[..., Harness]) -> None:
    steps.test_graphs_change_no_bit(harness, torch.bfloat16)


def test_attached_prefixes_give_the_same_tokens(harness: Callable[..., Harness]) -> None:
    engine.test_shared_prefixes_give_the_same_tokens(harness)


def test_the_newest_is_preempted_and_computed_again(harness: Callable[..., Harness]) -> None:
    engine.test_the_newest_is_preempted_and_computed_again(harness)


@pytest.mark.parametrize("kind", KV_KINDS)
@pytest.mark.parametrize("name", [name for name in RIGHT if "bigcode" in name or name == "olmoe"])
def test_unmodified_models(tmp_path: Path, name: str, kind: Kind) -> None:
    assert_tokens_are_those_of_transformers(RIGHT[name](), tmp_path, engine.DEVICE, kv_cache_dtype=kind)
