"""Bytes that tiers read, changed at random, with their checksums made right: what is read is what was written, or a miss."""

import ctypes
import logging
import struct
import tracemalloc

from hypothesis import strategies as st

from tests.laws.faulty_tier import FaultyStore, index_entry
from tests.laws.test_stores import is_left_alone
from tests.laws.test_tiers import CPU, found, key_of, load, payload, store
from tests.unit.test_fuzz_files import MOST_BYTES, changed, edits, fuzz, lengths, unsigned
from vmmkv import DiskTier
from vmmkv.tiers.record import RECORD_BYTES, checksum_of

HEADER = struct.Struct("<8sQI")
MAGIC = b"vmmkv 1\0"

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
