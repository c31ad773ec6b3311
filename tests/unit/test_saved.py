"""Sequences in files: what comes back, what is refused, and what a save that ends early leaves.

That bytes are right under any order of calls and failures is proved in tests/laws.
"""

import json
import os
import shutil
import struct
import threading
import zlib

import pytest
import torch

from tests.unit.support import LAYOUT, PROMPT, WINDOWED, assert_reads, write
from vmmkv import Closed, KVCache, KVLayout, KVType, SequenceTooLong
from vmmkv.units import PAGE_BYTES

INT8 = KVLayout.uniform(layers=4, kv_heads=8, head_dim=2048, dtype=KVType("int8"))


@pytest.fixture
def cache(pool):
    with KVCache(LAYOUT, pool, slots=4, max_tokens=512) as cache:
        yield cache
        cache.check()


@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED, INT8], ids=["one group", "windowed", "int8"])
def test_a_saved_sequence_is_restored_and_goes_on(pool, tmp_path, layout):
    tokens = [token % 50 for token in range(90)]
    with KVCache(layout, pool, slots=2, max_tokens=256) as cache:
        sequence = cache.open()
        write(sequence, tokens)
        for index, group in enumerate(layout.groups):
            if group.window is not None:
                sequence.advance_start(index)
        sequence.save(tmp_path / "one", fingerprint="model")
        assert [path.name for path in tmp_path.iterdir()] == ["one"]
    with KVCache(layout, pool, slots=2, max_tokens=128) as cache:
        again = cache.restore(tmp_path / "one", fingerprint="model", tenant="red")
        assert_reads(again, tokens)
        assert (again.tenant, again.max_tokens) == ("red", 128)
        write(again, [*tokens, 1, 2, 3])
        assert_reads(again, [*tokens, 1, 2, 3])
        cache.check()


def test_what_another_save_left_behind_hinders_none(cache, tmp_path):
    """A container's processes all have the same number; and a save that fails takes only its own file with it."""
    (tmp_path / f"one.{os.getpid()}.new").write_bytes(b"another program's")
    sequence = cache.open()
    write(sequence, PROMPT)
    sequence.save(tmp_path / "one")
    assert_reads(cache.restore(tmp_path / "one"), PROMPT)
    assert len([*tmp_path.iterdir()]) == 2


def test_what_a_killed_save_left_behind_is_removed_by_the_next_one_there(cache, tmp_path, monkeypatch):
    sequence = cache.open()
    write(sequence, PROMPT)
    foreign = {"mine.backup00.new", "pipe.abcdefgh.new", "empty.abcdefgh.new", "chat.20261129.new"}
    (tmp_path / "mine.backup00.new").write_bytes(b"something else")
    os.mkfifo(tmp_path / "pipe.abcdefgh.new")
    (tmp_path / "empty.abcdefgh.new").touch()
    sequence.save(tmp_path / "chat.20261129.new")  # whole, whatever its name

    def left():
        return {path.name for path in tmp_path.iterdir()} - foreign

    crc32, found = zlib.crc32, []

    def crc32_beside_a_save(data):
        monkeypatch.undo()
        (under_way,) = left()
        shutil.copy(tmp_path / under_way, tmp_path / "one.killed00.new")  # as a process that is killed here leaves it
        sequence.save(tmp_path / "two")
        found.append(left() == {under_way, "two"})
        return crc32(data)

    monkeypatch.setattr(zlib, "crc32", crc32_beside_a_save)
    sequence.save(tmp_path / "one")
    assert found == [True] and left() == {"one", "two"}
    assert foreign < {path.name for path in tmp_path.iterdir()}
    assert_reads(cache.restore(tmp_path / "chat.20261129.new"), PROMPT)


def test_a_save_that_fails_names_the_path_that_it_was_given(cache, tmp_path):
    sequence = cache.open()
    write(sequence, PROMPT)
    (tmp_path / "folder").mkdir()
    for name, error in (("no/one", FileNotFoundError), ("folder", IsADirectoryError), ("n" * 250, OSError)):
        with pytest.raises(error) as raised:
            sequence.save(tmp_path / name)
        assert raised.value.filename == str(tmp_path / name) and str(raised.value).endswith(f": '{tmp_path / name}'")
        assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_sequence_that_ends_while_it_is_saved_is_not_read_and_leaves_no_file(cache, tmp_path, monkeypatch):
    monkeypatch.setattr("vmmkv.saved.CHUNK_BYTES", PAGE_BYTES)
    sequence, crc32, ends = cache.open(), zlib.crc32, []
    write(sequence, PROMPT)

    def crc32_while_it_ends(data):
        ends.pop()()
        return crc32(data)

    monkeypatch.setattr(zlib, "crc32", crc32_while_it_ends)
    for end, error in ((lambda: sequence.truncate(50), ValueError), (sequence.close, Closed)):
        ends[:] = [end, list, list]  # after the header and the first chunk
        with pytest.raises(error):
            sequence.save(tmp_path / "one")
        assert not ends and not [*tmp_path.iterdir()]


def test_the_steps_of_others_do_not_wait_for_a_file_that_is_restored(cache, pool, tmp_path, monkeypatch):
    sequence, crc32, sums = cache.open(), zlib.crc32, []
    write(sequence, PROMPT)
    sequence.save(tmp_path / "one")

    def crc32_beside_a_step(data):
        other = threading.Thread(target=pool.stats, daemon=True)
        other.start()
        other.join(60)
        assert not other.is_alive(), "the lock is held"
        sums.append(crc32(data))
        if len(sums) == 4:
            cache.close()
        return sums[-1]

    monkeypatch.setattr(zlib, "crc32", crc32_beside_a_step)
    assert_reads(cache.restore(tmp_path / "one"), PROMPT)
    with pytest.raises(Closed):
        cache.restore(tmp_path / "one")
    assert len(sums) == 4 and pool.stats().held_bytes == 0


def test_what_cannot_be_restored_is_refused_and_leaves_nothing(cache, pool, tmp_path):
    sequence = cache.open()
    with pytest.raises(ValueError, match="nothing to save"):
        sequence.save(tmp_path / "none")
    write(sequence, PROMPT)
    sequence.save(tmp_path / "one")
    sequence.close()
    cache.drain()
    whole = (tmp_path / "one").read_bytes()
    changed = bytearray(whole)
    changed[len(changed) // 2] ^= 1
    for name, content in (("short", whole[:-100]), ("changed", changed), ("other", b"something else"), ("cut", whole[:30])):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(ValueError, match=f"{name} (is damaged|holds no sequence)"):
            cache.restore(tmp_path / name)
    with pytest.raises(ValueError, match="another fingerprint than 'model'"):
        cache.restore(tmp_path / "one", fingerprint="model")
    with pytest.raises(SequenceTooLong, match="100 tokens, for a sequence of max_tokens=50"):
        cache.restore(tmp_path / "one", max_tokens=50)
    assert cache.stats().num_sequences == 0
    cache.drain()
    assert pool.stats().held_bytes == 0


@pytest.mark.parametrize("windows", [[1, None], [2, 1], [60, 100]])
def test_a_sequence_whose_windows_keep_least_is_restored(pool, tmp_path, windows):
    layout = KVLayout.uniform(layers=2, kv_heads=1, head_dim=64, dtype=torch.float32, windows=windows)
    cache = KVCache(layout, pool, slots=2, max_tokens=512)
    sequence = cache.open()
    sequence.grow(100)
    for layer in range(2):
        sequence.k(layer)[:] = torch.arange(len(sequence.k(layer)))[:, None, None]
    sequence.advance(100)
    for index, window in enumerate(windows):
        if window is not None:
            sequence.advance_start(index)
    sequence.save(tmp_path / "one")
    restored = cache.restore(tmp_path / "one")
    for layer in range(2):
        start = sequence.start(layer)
        assert restored.start(layer) == start == layout.start_for(layout.groups[layer], 100)
        assert torch.equal(restored.k(layer)[: 100 - start], sequence.k(layer)[: 100 - start])


HEADERS = {
    "no tokens": {"num_tokens": 0},
    "fewer than none": {"num_tokens": -1},
    "tokens that are no number": {"num_tokens": "100"},
    "tokens that are a truth": {"num_tokens": True},
    "tokens that the file has not": {"num_tokens": 200},
    "more tokens than there are": {"num_tokens": 2**40},
    "a start before the slot": {"starts": [-1]},
    "a start behind the end": {"starts": [2**31]},
    "a start of a group without a window": {"starts": [1]},
    "a start that is no whole number": {"starts": [0.5]},
    "no starts": {"starts": None},
    "starts of two groups": {"starts": [0, 0]},
    "positions of no row": {"positions": [0]},
    "positions of more rows": {"positions": [*range(102)]},
    "positions before the first": {"positions": [-5, 3]},
    "positions that fall": {"positions": [5, 4]},
    "positions that repeat": {"positions": [5, 5]},
    "positions past all": {"positions": [2**63]},
    "positions that are no list": {"positions": "abc"},
    "no positions": {"positions": None},
    "another identity": {"identity": 1},
}


@pytest.mark.parametrize(
    "text",
    [b"", b"[]", b"[" * 10_000, b'"\xff"', b"{}", b"1" * 5_000, *HEADERS.values()],
    ids=["nothing", "a list", "deep", "no text", "no field", "a long number", *HEADERS],
)
def test_a_header_that_is_not_that_of_a_sequence_is_refused_and_leaves_nothing(cache, pool, tmp_path, text):
    sequence = cache.open()
    write(sequence, PROMPT)
    sequence.save(tmp_path / "one")
    sequence.close()
    cache.drain()
    whole = (tmp_path / "one").read_bytes()
    (size,) = struct.unpack_from("<I", whole, 16)
    if isinstance(text, dict):
        text = json.dumps(json.loads(whole[20 : 20 + size]) | text).encode()
    header = struct.pack("<I", len(text)) + text + struct.pack("<I", zlib.crc32(text))
    (tmp_path / "one").write_bytes(whole[:16] + header + whole[24 + size :])
    with pytest.raises(ValueError, match=r"one (is damaged|was saved from a cache of another layout)") as refused:
        cache.restore(tmp_path / "one")
    assert type(refused.value) is ValueError
    assert cache.stats().num_sequences == 0 and pool.stats().held_bytes == 0


def test_a_header_that_says_it_is_longer_than_any_is_not_read(cache, tmp_path):
    (tmp_path / "one").write_bytes(b"vmmkv sequence 1" + struct.pack("<I", 2**32 - 1))
    with pytest.raises(
        ValueError, match=r"is damaged, or its sequence is longer than this cache's slots, which have 512 tokens"
    ):
        cache.restore(tmp_path / "one")


def test_a_start_that_a_window_has_not_passed_is_damage(pool, tmp_path):
    with KVCache(WINDOWED, pool, slots=2, max_tokens=256) as cache:
        sequence = cache.open()
        write(sequence, PROMPT)
        sequence.save(tmp_path / "one")
        whole = (tmp_path / "one").read_bytes()
        (size,) = struct.unpack_from("<I", whole, 16)
        fields = json.loads(whole[20 : 20 + size])
        (windowed,) = (index for index, group in enumerate(WINDOWED.groups) if group.window is not None)
        needed = WINDOWED.start_for(WINDOWED.groups[windowed], len(PROMPT))
        for start, said in ((needed, "bytes, and its header says"), (needed + 1, "rows that it needs begin at")):
            fields["starts"][windowed] = start
            text = json.dumps(fields).encode()
            header = struct.pack("<I", len(text)) + text + struct.pack("<I", zlib.crc32(text))
            (tmp_path / "one").write_bytes(whole[:16] + header + whole[24 + size :])
            with pytest.raises(ValueError, match=said):
                cache.restore(tmp_path / "one")


def test_rows_of_a_compacted_sequence_come_back_at_their_positions(cache, tmp_path):
    sequence = cache.open()
    write(sequence, PROMPT)
    sequence.compact([0, 1, 50])
    sequence.advance()
    sequence.save(tmp_path / "one")
    again = cache.restore(tmp_path / "one")
    assert again.positions().tolist() == [0, 1, 50, 100] and again.position == sequence.position == 101
    assert torch.equal(again.k(0)[:4], sequence.k(0)[:4])
