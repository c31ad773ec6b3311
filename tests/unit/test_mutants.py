"""The faults of tests/mutants.py: each text that one replaces is there once."""

import pytest

from tests.mutants import MUTANTS, Mutant
from tests.sources import ROOT


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_each_fault_applies_to_the_source_as_it_is(mutant: Mutant) -> None:
    for file, old, _ in mutant.edits:
        assert (ROOT / file).read_text(encoding="utf-8").count(old) == 1, f"{file} has {old!r} not once"
