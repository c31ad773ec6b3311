"""How a `kv_policy` is given, and what is refused."""

import re
from typing import Any

import pytest

from vmmkv_server.config import EngineConfig
from vmmkv_server.kv_policy import Eviction
from vmmkv_server.sampling_params import InvalidParam, SamplingParams


@pytest.mark.parametrize(
    ("given", "reason"),
    [
        (7, "is 7; wanted an object such as"),
        ({}, "is of type None; the types are streaming_llm, h2o, snapkv, tova, none"),
        ("h20", "is of type 'h20'; the types are"),
        ("h20:256", "is of type 'h20'; the types are"),
        ({"type": "h2o", "budget": 9}, "is of type h2o, which needs recent too, in rows, as in h2o:budget=256,recent=128"),
        ("h2o", "is of type h2o, which needs budget and recent, in rows, as in h2o:budget=256,recent=128"),
        ({"type": "tova", "budgets": 9}, "is of type tova, which has no option budgets; did you mean budget?"),
        ({"type": "snapkv", "budget": 99, "every": 9}, "is of type snapkv, which has no option every; it has"),
        ({"type": "tova", "budget": 0}, "is of type tova: budget=0: give 1 or more"),
        ({"type": "tova", "budget": 2.5}, "is of type tova: budget=2.5 is not a whole number"),
        ({"type": "tova", "budget": 2**31}, "is of type tova: budget is 2147483648: less than 2147483648"),
        ({"type": "tova", "budget": 9, "every": 0}, "is of type tova: every=0: give 1 or more"),
        ({"type": "tova", "budget": 9, "positions": "turned"}, "has positions='turned'; wanted rerotated or original"),
        ({"type": "tova", "budget": 9, "share_prompt": 1}, "has share_prompt=1; wanted true or false"),
        ("tova:256", "has '256'; wanted NAME=VALUE, as in tova:budget=256"),
        ("tova:budget=9,positions=orig", "has positions='orig'; wanted rerotated or original"),
        ("tova:budget=9,share_prompt=no", "has share_prompt='no'; wanted true or false"),
        ("tova:budget=many", "is of type tova: budget='many' is not a whole number"),
        ('{"type"', "is not JSON"),
    ],
)
def test_a_policy_that_cannot_be_is_refused(given: Any, reason: str) -> None:
    with pytest.raises(InvalidParam, match=re.escape(f"kv_policy {reason}")):
        SamplingParams(kv_policy=given)


def test_a_policy_may_be_short_or_json() -> None:
    wanted = Eviction.of({"type": "h2o", "budget": 24, "recent": 10, "every": 9, "share_prompt": False})
    assert Eviction.of("h2o: budget=24, recent=10, every=9, share_prompt=false") == wanted
    assert Eviction.of('{"type": "h2o", "budget": 24, "recent": 10, "every": 9, "share_prompt": false}') == wanted
    assert Eviction.of("none") is None
    short, long = "snapkv:budget=99,positions=original", {"type": "snapkv", "budget": 99, "positions": "original"}
    assert (kept := Eviction.of(short)) == Eviction.of(long) and kept is not None and kept.keeps_positions
    assert Eviction.of("snapkv:budget=99,positions=rerotated") == Eviction.of("snapkv:budget=99") != kept


def test_the_default_of_a_server_is_checked_as_it_starts() -> None:
    with pytest.raises(ValueError, match="kv_policy is of type 'lru'"):
        EngineConfig(kv_policy="lru")


@pytest.mark.parametrize(
    ("given", "num_prompt", "num_tokens", "rows"),
    [
        ("tova:budget=100,every=20", 50, 90, 90),
        ("tova:budget=100,every=20", 50, 900, 120),
        ("tova:budget=100,every=20", 500, 900, 500),
        ("snapkv:budget=100", 50, 900, 900),
        ("snapkv:budget=100", 500, 600, 500),
        ("snapkv:budget=100", 500, 1000, 600),
    ],
)
def test_the_most_rows_of_a_request(given: str, num_prompt: int, num_tokens: int, rows: int) -> None:
    eviction = Eviction.of(given)
    assert eviction is not None and eviction.most_rows(num_prompt, num_tokens) == rows
