"""Options of the adapters for vLLM and SGLang: which tiers there are, and a name for the weights."""

import pytest
import torch

from vmmkv import BudgetError
from vmmkv.adapters.tier_options import TierOptions, fingerprint_of


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({}, "names no tier; give kv_host_budget"),
        ({"kv_disk": "/kv"}, "needs both kv_disk, a directory, and kv_disk_budget"),
        ({"kv_disk_budget": "1GiB", "kv_host_budget": "1GiB"}, "needs both"),
        ({"kv_disk": "kv", "kv_disk_budget": "1GiB"}, "kv_disk='kv' depends on the folder that an engine starts in"),
        ({"kv_host": "1GiB"}, "has no 'kv_host'; there are .*kv_host_budget"),
        ({"kv_host_budget": 1 << 30}, "kv_host_budget=1073741824 is no text"),
        ({"kv_host_budget": "16 gigs"}, "kv_host_budget='16 gigs': "),
        ({"kv_disk": "/kv", "kv_disk_budget": "much"}, "kv_disk_budget='much': "),
        ({"kv_store": "rediss:host"}, "no store has the scheme ''; "),
    ],
)
def test_options_that_are_not_understood_are_refused_by_name(given, said):
    with pytest.raises(ValueError, match=said):
        TierOptions.of(given)


def test_the_scheduler_opens_no_host_memory(tmp_path):
    options = TierOptions.of({"kv_host_budget": "1MiB", "kv_disk": str(tmp_path), "kv_disk_budget": "1MiB"})
    names = []
    for has_host in (True, False):
        tiers = options.tiers(1 << 16, has_host=has_host)
        names.append([tier.name for tier in tiers])
        assert {tier.record_bytes for tier in tiers} == {1 << 16}
        for tier in tiers:
            tier.close()
    assert names == [["host", "disk"], ["disk"]]


def test_other_weights_have_another_fingerprint_wherever_they_lie(tmp_path):
    prints = []
    for name, weights in (("one", b"1"), ("copy", b"1"), ("other", b"2")):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
        (tmp_path / name / "model.safetensors").write_bytes(weights * 100_000)
        prints.append(fingerprint_of(str(tmp_path / name), None))
    assert prints[0] == prints[1] != prints[2]
    assert fingerprint_of("org/model", "abc") == "org/model@abc"
    (tmp_path / "copy" / "preprocessor_config.json").write_text('{"image_mean": 0.5}')
    assert fingerprint_of(str(tmp_path / "copy"), None) != prints[0], "images are read otherwise"


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"kv_host_budget": "1MiB"}, "kv_host_budget/2=524288 of host memory is below one record"),
        ({"kv_host_budget": "4096GiB"}, r"at most kv_host_budget/2=\d+ .* works"),
        ({"kv_disk_budget": "1MiB"}, "kv_disk_budget=1048576 of a disk tier is below one record"),
        ({"kv_disk_budget": "4096TiB"}, r"at most kv_disk_budget=\d+ .* works"),
    ],
)
def test_a_size_that_does_not_fit_is_refused_by_the_name_of_its_option(given, said, tmp_path):
    options = TierOptions.of({"kv_disk": str(tmp_path), "kv_disk_budget": "8MiB", **given})
    with pytest.raises(BudgetError, match=said):
        for tier in options.tiers(2 << 20, has_host=True, num_ranks=2):
            tier.open(torch.device("cpu"))


def test_a_home_directory_is_that_of_the_user(monkeypatch, tmp_path):
    monkeypatch.setenv("HOME", str(tmp_path))
    assert TierOptions.of({"kv_disk": "~/kv", "kv_disk_budget": "1MiB"}).kv_disk == str(tmp_path / "kv")
