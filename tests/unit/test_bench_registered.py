"""What is in bench/suites is registered, and what is registered is there."""

import pkgutil

import pytest

from bench import suites
from bench.figures import Drawing, Question
from bench.suites import SUITES, load


def test_each_suite_is_a_module_and_a_line() -> None:
    assert {module.name for module in pkgutil.iter_modules(suites.__path__)} == set(SUITES)


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_says_what_is_drawn_of_its_rows(name: str) -> None:
    suite = load(name)
    assert callable(suite.run)
    figures = getattr(suite, "FIGURES", ())
    assert all(isinstance(each, Drawing) for each in figures)
    assert len({each.slug for each in figures}) == len(figures)
    assert all(isinstance(each, Question) for each in getattr(suite, "QUESTIONS", ()))
