"""Bytes that tiers and saved sequences read, changed at random, with their checksums made right.

What is read is what was written, or damage. Damage is said once, is a miss or a refusal, and leaves all else as it was. It is
never another error, a wrong byte, or memory that the bytes ask for.
"""

import ctypes
import json
import logging
import struct
import tracemalloc
import zlib

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.laws.faulty_tier import FaultyStore, index_entry
from tests.laws.machine import NIGHTLY
from tests.laws.test_stores import is_left_alone
from tests.laws.test_tiers import CPU, found, key_of, load, payload, store
from tests.unit.support import LAYOUT, WINDOWED
from tests.unit.test_tiers import PROMPT, assert_reads, write
from vmmkv import DiskTier, KVCache, SequenceTooLong
from vmmkv.tiers.record import RECORD_BYTES, checksum_of
from vmmkv.units import MIB

TEXT = PROMPT[:45]

HEADER = struct.Struct("<8sQI")
MAGIC = b"vmmkv 1\0"

MOST_BYTES = 16 * MIB
"""Of Python's memory, beside the buffers of tiers."""

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


# the disk

NUM_SLOTS = 4

entries = st.lists(
    st.tuples(
        st.integers(0, NUM_SLOTS + 2),
        unsigned,
        st.integers(0, NUM_SLOTS).map(key_of) | st.binary(min_size=32, max_size=32),
        st.none() | st.integers(0, (1 << 32) - 1),
        st.booleans(),
    ),
    max_size=6,
)
"""Of each: slot, generation, key; checksum of the record, or that of record 1, which no other key has; is its own right?"""


@lengths
def test_what_a_changed_disk_tier_finds_is_right_or_a_miss_and_it_goes_on(tmp_path, caplog, num_examples):
    path = tmp_path / "tier"
    tier = DiskTier(path, NUM_SLOTS * RECORD_BYTES)
    tier.open(CPU)
    assert all(store(tier, number) for number in range(3))
    tier.close()
    index, records = path / "index", path / "records"
    right, size_bytes = index.read_bytes(), records.stat().st_size

    def check(change):
        new, edit, num_slots, cut_bytes, byte = change
        content = bytearray(right)
        for number, generation, key, checksum, is_right in new:
            checksum = checksum_of(key_of(1), memoryview(payload(1))) if checksum is None else checksum
            at, entry = index_entry(number, generation, key, checksum, is_whole=is_right)
            content[at : at + len(entry)] = entry
        index.write_bytes(bytes(content) if edit is None else changed(bytes(content), edit))
        with open(records, "r+b") as file:
            file.truncate(size_bytes if cut_bytes is None else cut_bytes)
            file.seek(byte)
            file.write(b"x")
        caplog.clear()
        tracemalloc.reset_peak()
        tier = DiskTier(path, num_slots * RECORD_BYTES)
        tier.open(CPU)
        assert len(caplog.records) <= 1
        known = [number for number in range(NUM_SLOTS + 1) if found(tier, number) == [True]]
        assert len(known) <= num_slots
        for number in range(NUM_SLOTS + 1):  # `load` asserts that the bytes are right
            load(tier, number)
        assert all(store(tier, number) and load(tier, number) for number in range(20, 20 + num_slots))
        tier.close()
        again = DiskTier(path, num_slots * RECORD_BYTES)
        again.open(CPU)
        assert len(caplog.records) <= 1, "it is said again"
        assert all(load(again, number) for number in range(20, 20 + num_slots))
        again.close()
        assert tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0] < 2 * MOST_BYTES
        whole = DiskTier(path, NUM_SLOTS * RECORD_BYTES)  # as before, for the next one
        whole.open(CPU)
        assert all(found(whole, number) == [True] or store(whole, number) for number in range(3))
        whole.close()
        index.write_bytes(right)

    fuzz(
        num_examples,
        st.tuples(
            entries,
            st.none() | edits,
            st.integers(1, NUM_SLOTS + 1),
            st.none() | st.none() | st.integers(0, size_bytes + RECORD_BYTES),
            st.integers(0, size_bytes),
        ),
        check,
    )


# stores


@lengths
def test_what_a_store_gives_is_the_record_or_a_miss_and_is_removed(num_examples, caplog):
    tier = FaultyStore(100)
    tier.open(CPU)
    name = f"vmmkv:{key_of(1).hex()}"

    def check(change):
        magic, length, checksum, number, edit = change
        record = payload(number)
        checksum = checksum_of(key_of(1), memoryview(record)) if checksum is None else checksum
        value = HEADER.pack(magic, length, checksum) + record
        value = value if edit is None else changed(value, edit)
        tier.values[name] = value
        is_right = value[: HEADER.size] == HEADER.pack(
            MAGIC, RECORD_BYTES, checksum_of(key_of(1), memoryview(value)[HEADER.size :])
        )
        transfer = tier.load(key_of(1))
        assert transfer is not None and transfer.future is not None
        transfer.future.exception(60)
        if transfer.missed:
            assert not is_right and name not in tier.values
            tier.drop(transfer)
        else:
            assert ctypes.string_at(transfer.address, RECORD_BYTES) == value[HEADER.size :]
            assert is_right
            tier.finished(transfer)
        assert not is_left_alone(tier) and not [each for each in caplog.records if each.levelno >= logging.WARNING]

    fuzz(
        num_examples,
        st.tuples(
            st.just(MAGIC) | st.binary(min_size=8, max_size=8),
            st.just(RECORD_BYTES) | unsigned,
            st.none() | st.integers(0, (1 << 32) - 1),
            st.integers(1, 2),
            st.none() | edits,
        ),
        check,
    )
    tier.close()
