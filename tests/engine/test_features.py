"""The socket of features."""

from typing import Annotated, Any

import msgspec
import pytest

from tests.server.fake_engine import READY, FakeEngine
from vmmkv_server.engine.feature import Feature, Features, metrics_of
from vmmkv_server.engine_client import EngineClient
from vmmkv_server.metrics import Metrics
from vmmkv_server.protocol import Ready, decode_from_engine, encode
from vmmkv_server.statistics import Statistics, counter, gauge


def test_features_are_told_in_order_and_only_of_what_they_define() -> None:
    told: list[str] = []

    class Working(Feature):
        def poll(self) -> None:
            told.append("working")

    class Resting(Working):
        def poll(self) -> None:
            told.append("resting")

        def close(self) -> None:
            told.append("closed")

    features = Features()
    assert not features.having(Feature.poll)
    features.plug_in([Resting(None), Working(None), Feature(None)])
    for feature in features.having(Feature.poll):
        feature.poll()
    for feature in features.having(Feature.close):
        feature.close()
    assert told == ["resting", "working", "closed"] and not features.having(Feature.shape)
    assert type(features.of(Resting)) is Resting


def test_only_one_feature_says_which_tokens_may_come_and_what_follows_them() -> None:
    class Masking(Feature):
        def masks(self, step: Any) -> None:
            return None

    with pytest.raises(TypeError, match="Masking and Masking define masks, which one feature of an engine can"):
        Features().plug_in([Masking(None), Masking(None)])


class Lookups(Statistics):
    lookups: Annotated[dict[str, int], counter("Lookups by outcome.", "outcome")] = msgspec.field(default_factory=dict)
    lookup_ratio: Annotated[float, gauge("Lookups that found something.")] = 0.0


class Looking(Feature):
    def __init__(self, core: Any) -> None:
        self.counts = Lookups()

    def statistics(self) -> Lookups:
        return self.counts


def test_a_number_that_a_feature_declares_is_exported_without_a_line_elsewhere() -> None:
    feature = Looking(None)
    feature.counts.lookups["found"] = 3
    told = msgspec.structs.replace(READY, feature_metrics=metrics_of([Feature, Looking]))
    ready = decode_from_engine(encode(told))
    snapshot = msgspec.structs.replace(FakeEngine("ipc://nowhere").snapshot(), features=feature.statistics().values())
    feature.counts.lookups["found"] = 4  # of the next snapshot
    client = EngineClient("ipc://nowhere")
    assert isinstance(ready, Ready)
    client.snapshot, client.feature_metrics = snapshot, ready.feature_metrics
    text = Metrics(client, "tiny").render().decode()
    assert 'vmmkv_lookups_total{outcome="found"} 3.0' in text and "# TYPE vmmkv_lookup_ratio gauge" in text
    assert "vmmkv_fetches" not in text, "no other feature is named in the exporter"
