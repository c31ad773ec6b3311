"""The socket of features."""

from typing import Any

import pytest

from vmmkv_server.engine.feature import Feature, Features


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
