"""Statistics: each number has a metric of its own, and a copy is of its moment."""

from typing import get_args, get_origin, get_type_hints

import msgspec
import pytest

from vmmkv_server.engine.engine import FEATURES
from vmmkv_server.protocol import Snapshot
from vmmkv_server.statistics import Metric, SchedulerStatistics, Statistics, TierStatistics

HINTS = [*get_type_hints(Snapshot).values(), *(get_type_hints(feature.statistics)["return"] for feature in FEATURES)]
PARTS = list(dict.fromkeys(kind for kind in HINTS if isinstance(kind, type) and issubclass(kind, Statistics)))


@pytest.mark.parametrize("part", [*PARTS, TierStatistics], ids=lambda part: part.__name__)
def test_each_number_has_a_metric_and_a_label_where_it_is_a_dict(part: type[Statistics]) -> None:
    for field in msgspec.structs.fields(part):
        kind, metric = get_args(field.type)
        assert isinstance(metric, Metric), field.name
        assert (metric.label is not None) == issubclass(get_origin(kind) or object, dict), field.name


def test_no_two_numbers_of_an_engine_have_the_same_name() -> None:
    names = [name for part in PARTS for name in part.metrics()] + [f"tier_{name}" for name in TierStatistics.metrics()]
    assert len(names) == len({*names}) > 30


def test_a_copy_does_not_change_with_later_counts() -> None:
    counts = SchedulerStatistics(hit_tokens={"device": 1})
    copy = counts.copy()
    counts.hit_tokens["device"] += 1
    counts.preemptions += 1
    assert copy == SchedulerStatistics(hit_tokens={"device": 1}) != counts
