"""Bytes of saved sequences, changed at random, with their checksums made right. `test_fuzz_tiers` does so to tiers.

What is read is what was written, or damage. Damage is said once, is a miss or a refusal, and leaves all else as it was. It is
never another error, a wrong byte, or memory that the bytes ask for.
"""

import json
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.laws.machine import NIGHTLY
from tests.unit.support import LAYOUT, PROMPT, WINDOWED, assert_reads, write
from vmmkv import KVCache, SequenceTooLong
from vmmkv.units import MIB

TEXT = PROMPT[:45]

MOST_BYTES = 16 * MIB
"""Of Python's memory."""

lengths = pytest.mark.parametrize("num_examples", [15, pytest.param(2000, marks=pytest.mark.nightly)])

near = st.integers(-2, 5) | st.sampled_from(
    [5, 6, 44, 45, 46, 512, 513, 1 << 31, (1 << 31) - 1, 1 << 32, 1 << 63, 1 << 64, 1 << 200]
)
unsigned = st.integers(0, 3) | st.integers(0, (1 << 64) - 1) | st.sampled_from([(1 << 63) - 1, 1 << 63, (1 << 64) - 1])
values = st.recursive(
    st.none() | st.booleans() | near | st.floats() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=3), inner, max_size=2),
    max_leaves=6,
)


def fuzz(num_examples, strategy, check):
    """Try so many examples: the same ones in each run, and new ones nightly."""
    tracemalloc.start()
    try:
        settings(
            max_examples=num_examples,
            deadline=None,
            derandomize=not NIGHTLY,
            database=None,
            suppress_health_check=list(HealthCheck),
        )(given(strategy)(check))()
    finally:
        tracemalloc.stop()


def changed(data: bytes, edit: tuple[str, int, bytes]) -> bytes:
    """Some bytes cut, put in, or written over, at a place."""
    kind, at, new = edit
    at %= len(data) + 1
    return {"cut": data[:at], "put in": data[:at] + new + data[at:], "write": data[:at] + new + data[at + len(new) :]}[kind]


edits = st.tuples(st.sampled_from(["cut", "put in", "write"]), st.integers(0, 1 << 30), st.binary(min_size=1, max_size=70))


# saved sequences


@st.composite
def headers(draw):
    """Fields of a header that take the place of the right ones."""
    fields = draw(st.dictionaries(st.sampled_from(["identity", "num_tokens", "starts", "positions", "x"]), values, max_size=2))
    if draw(st.booleans()):
        fields["num_tokens"] = draw(near)
    if draw(st.booleans()):
        fields["starts"] = draw(st.lists(near, max_size=3))
    if draw(st.booleans()):
        fields["positions"] = draw(st.lists(near, max_size=4) | st.lists(st.integers(0, 300), max_size=47).map(sorted))
    return fields


@lengths
@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["one group", "windowed"])
def test_a_saved_sequence_is_restored_as_it_was_or_refused(pool, tmp_path, layout, num_examples):
    with KVCache(layout, pool, slots=2, max_tokens=512) as cache:
        sequence = cache.open()
        write(sequence, TEXT)
        if layout is WINDOWED:
            sequence.advance_start(1)
        sequence.save(tmp_path / "one")
        sequence.close()
        cache.drain()
        whole = (tmp_path / "one").read_bytes()
        (size,) = struct.unpack_from("<I", whole, 16)
        right, rows = json.loads(whole[20 : 20 + size]), whole[24 + size :]

        def check(change):
            fields, size_bytes, edit_text, edit_all = change
            text = json.dumps(right | fields).encode()
            if edit_text is not None:
                text = changed(text, edit_text)
            size_bytes = len(text) if size_bytes is None else size_bytes
            content = whole[:16] + struct.pack("<I", size_bytes) + text + struct.pack("<I", zlib.crc32(text)) + rows
            if edit_all is not None:
                content = changed(content, edit_all)
            (tmp_path / "one").write_bytes(content)
            del content
            tracemalloc.reset_peak()
            try:
                again = cache.restore(tmp_path / "one")
            except (ValueError, SequenceTooLong) as error:
                assert type(error) in (ValueError, SequenceTooLong) and str(tmp_path / "one") in str(error)
                assert len(str(error)) < 500 + len(str(tmp_path))
            else:
                assert_reads(again, TEXT)
                positions = again.positions()
                assert len(positions) == len(TEXT) and (positions[1:] > positions[:-1]).all() and again.position > positions[-1]
                write(again, [*TEXT, 1])
                again.close()
            assert tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0] < MOST_BYTES
            cache.drain()
            cache.check()
            assert cache.stats().num_sequences == 0 and pool.stats().held_bytes == 0

        sizes = st.none() | st.integers(0, (1 << 32) - 1)
        often_none = st.none() | st.none() | edits
        fuzz(num_examples, st.tuples(st.just({}) | headers(), st.none() | st.none() | sizes, often_none, often_none), check)
