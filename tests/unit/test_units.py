"""Bytes in numbers and in words."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.units import GIB, KIB, MIB, TIB, ceil_div, counted, format_bytes, parse_bytes, round_up


def test_one_thing_is_singular() -> None:
    assert [counted(number, "token", ",") for number in (0, 1, 2048)] == ["0 tokens", "1 token", "2,048 tokens"]
    assert counted(2048, "page") == "2048 pages"


@given(numerator=st.integers(0, 2**80), denominator=st.integers(1, 2**40))
def test_ceil_div_is_the_least_integer_that_covers(numerator: int, denominator: int) -> None:
    quotient = ceil_div(numerator, denominator)
    assert (quotient - 1) * denominator < numerator <= quotient * denominator


@given(value=st.integers(0, 2**80), multiple=st.integers(1, 2**40))
def test_round_up_is_the_least_multiple_not_below(value: int, multiple: int) -> None:
    rounded = round_up(value, multiple)
    assert rounded % multiple == 0
    assert value <= rounded < value + multiple


@pytest.mark.parametrize(
    ("text", "size_bytes"),
    [
        ("0", 0),
        ("4096", 4096),
        ("4096B", 4096),
        ("80GiB", 80 * GIB),
        ("80 gib", 80 * GIB),
        ("1.5 GB", 1_500_000_000),
        (" 0.5KiB ", KIB // 2),
        ("2TiB", 2 * TIB),
        ("3MB", 3_000_000),
    ],
)
def test_sizes_are_read_with_units_of_1000_and_1024(text: str, size_bytes: int) -> None:
    assert parse_bytes(text) == size_bytes


@pytest.mark.parametrize("text", ["", "GiB", "-1GiB", "80G", "1e9", "80 GiB free", "1.GiB", "1,5GB"])
def test_what_is_no_size_is_refused_with_the_units_there_are(text: str) -> None:
    with pytest.raises(ValueError, match="KiB, MiB, GiB or TiB"):
        parse_bytes(text)


@pytest.mark.parametrize(
    ("size_bytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (KIB, "1.0 KiB"),
        (3 * MIB, "3.0 MiB"),
        (320 * GIB, "320.0 GiB"),
        (64 * TIB, "64.0 TiB"),
        (-MIB, "-1.0 MiB"),
    ],
)
def test_sizes_are_written_in_binary_units(size_bytes: int, text: str) -> None:
    assert format_bytes(size_bytes) == text


@given(st.integers(0, 2**50))
def test_what_is_written_reads_back_to_a_digit(size_bytes: int) -> None:
    assert abs(parse_bytes(format_bytes(size_bytes)) - size_bytes) <= max(1, size_bytes * 0.05)
