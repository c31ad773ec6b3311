"""Keys and values of a VmmCache outside of it: as tensors that torch copies, and in a file."""

import contextlib
import copy
import io
import itertools
import json
import pickle
import struct
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from hypothesis import strategies as st

from tests.adapters.models import MODELS as KINDS
from tests.adapters.models import forward, gemma3, generated, ids_of, llama, prompts, states_of, wide_llama
from tests.unit.test_fuzz_files import MOST_BYTES, changed, edits, fuzz, lengths, near, values
from vmmkv import MIB, DriverError, Pool, RowsUnmapped, SequenceTooLong, ViewNotCloned, saved
from vmmkv.adapters.transformers import VmmCache
from vmmkv.testing.fake_driver import FakeDriver

ROOT = Path(__file__).parents[2]
MAGIC = b"vmmkv batches 1\n"


def ids(*rows: int, num_tokens: int) -> torch.Tensor:
    """A prompt for each row: rows of one number are equal."""
    return torch.stack([torch.arange(num_tokens) * (3 + row) % 97 + 1 for row in rows])


@pytest.mark.parametrize("make", [llama, lambda: gemma3(16)], ids=["full", "windows"])
def test_views_of_one_sequence_are_copied_as_they_are_and_stay_views(pool: Pool, make: Callable[[], Any]) -> None:
    model, prompt = make(), ids(0, num_tokens=45)
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as alone:
        for chunk in prompt.split(20, dim=1):
            logits, of_alone = (forward(model, each, chunk) for each in (cache, alone))
        for layer in range(len(cache.layers)):
            of_pass = cache.batch.seen(layer)  # what a pass reads, over the whole arena
            for view, seen in zip(cache.states(layer), of_pass, strict=True):
                assert (view.shape, view.data_ptr(), view.stride()[1:]) == (seen.shape, seen.data_ptr(), seen.stride()[1:])
                for copied in (copy.deepcopy(view), pickle.loads(pickle.dumps(view))):
                    assert torch.equal(copied, seen)
        with pytest.warns(UserWarning, match="does not reach the cache"):
            cache.layers[0].keys.share_memory_()
        logits, of_alone = (forward(model, each, prompt[:, :1]) for each in (cache, alone))
        assert torch.equal(logits, of_alone)


def test_views_of_several_sequences_are_refused_and_copies_are_not(pool: Pool) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids(0, 1, num_tokens=20))
        for view in cache.states(0):
            with pytest.raises(ViewNotCloned, match=r"cache\.layers\[layer\]\.keys\.clone\(\) of a VmmCache"):
                copy.deepcopy(view)
        assert torch.equal(copy.deepcopy(cache.layers[0].keys.clone()), cache.states(0)[0])
        cache.reset()
        forward(model, cache, ids(0, 0, num_tokens=20))  # kept once
        keys, _ = cache.states(0)
        assert torch.equal(copy.deepcopy(keys), keys) and torch.equal(keys[0], keys[1])


@pytest.mark.parametrize("way", [pickle.dumps, copy.copy, lambda cache: torch.save(cache, io.BytesIO())])
def test_a_cache_that_is_pickled_says_how_it_is_saved(pool: Pool, way: Callable[[Any], Any]) -> None:
    model = llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids(0, 1, num_tokens=20))
        with pytest.raises(TypeError, match=r"a VmmCache can be neither .*; cache\.save\(path\) writes it to a file"):
            way(cache)


# in a file

MODELS = pytest.mark.parametrize("make", [wide_llama, lambda: gemma3(16)], ids=["full", "hybrid"])

CONTINUE = """
import json, sys, torch
from tests.adapters.models import MODELS, generated
from vmmkv import MIB, Pool
from vmmkv.adapters.transformers import VmmCache
model = MODELS[sys.argv[1]]()
inputs = {name: torch.tensor(rows) for name, rows in json.loads(sys.argv[3]).items()}
with Pool("cpu", 64 * MIB) as pool, VmmCache(model.config, pool) as cache:
    cache.restore(sys.argv[2])
    length = cache.get_seq_length()
    tokens = generated(model, cache, inputs)
    cache.check()
    print(json.dumps([length, tokens]))
"""


@pytest.mark.parametrize("name", ["grouped", pytest.param("sliding and full, head size 256", marks=pytest.mark.nightly)])
def test_another_process_generates_on_from_a_file(pool: Pool, tmp_path: Path, name: str) -> None:
    model, inputs, path = KINDS[name](), prompts(40, 23), tmp_path / "batch"
    with VmmCache(model.config, pool) as cache:
        tokens = torch.tensor(generated(model, cache, inputs, max_new_tokens=5))
        cache.save(path)
        mask = torch.nn.functional.pad(inputs["attention_mask"], (0, tokens.shape[1] - 40), value=1)
        going_on = {"input_ids": tokens, "attention_mask": mask}
        length = cache.get_seq_length()
        ours = generated(model, cache, going_on)
    given = json.dumps({key: rows.tolist() for key, rows in going_on.items()})
    child = subprocess.run(
        [sys.executable, "-c", CONTINUE, name, path, given], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert child.returncode == 0, child.stderr
    assert json.loads(child.stdout) == [length, ours]


@MODELS
def test_a_restored_batch_is_as_it_was(pool: Pool, tmp_path: Path, make: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(saved, "CHUNK_BYTES", 3 * MIB)
    model, path = make(), tmp_path / "batch"
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        forward(model, cache, ids_of(0, 0, 1, 1, num_tokens=600), logits_to_keep=1)
        cache.save(path)
        other.restore(path)
        assert sum(len(rows.sequences) for rows in other.batch.groups) == 2 * len(other.batch.groups)  # equal prompts, once
        other.reset()
        forward(model, cache, ids_of(0, 1, 2, 3, num_tokens=20))  # each row goes its own way
        cache.reorder_cache(torch.tensor([3, 3, 0, 1]))
        cache.save(path)
        other.restore(path)
        assert (other.get_seq_length(), other.batch_size) == (620, 4)
        assert all(map(torch.equal, states_of(other), states_of(cache)))
        for seed in range(2):
            ids = ids_of(4, 5, 6, 7, num_tokens=20, seed=seed)
            assert torch.equal(forward(model, other, ids), forward(model, cache, ids))
        other.crop(-25)
        cache.crop(-25) if make is wide_llama else None
        other.check()
    assert pool.used_bytes == 0


def test_rows_that_were_dropped_stay_so_in_a_file(pool: Pool, tmp_path: Path) -> None:
    model = wide_llama()
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool) as other:
        forward(model, cache, ids_of(0, 1, num_tokens=50))
        cache.compact(range(0, 50, 2))
        cache.save(tmp_path / "batch")
        other.restore(tmp_path / "batch")
        assert (other.get_seq_length(), other.states(0)[0].shape[2]) == (50, 25)
        with pytest.raises(ValueError, match="go back before 50 tokens"):
            other.crop(-1)
        ids = ids_of(0, 1, num_tokens=2)
        assert torch.equal(forward(model, other, ids), forward(model, cache, ids))


def test_what_cannot_be_saved_or_restored_is_refused_and_leaves_nothing(pool: Pool, tmp_path: Path) -> None:
    model, path = wide_llama(), tmp_path / "batch"
    with VmmCache(model.config, pool) as cache, VmmCache(model.config, pool, max_tokens=20) as short:
        with pytest.raises(ValueError, match="no tokens yet"):
            cache.save(path)
        forward(model, cache, ids_of(0, 1, num_tokens=50))
        cache.save(path, fingerprint="a")
        used_bytes = pool.used_bytes
        with pytest.raises(ValueError, match=r"has 50 tokens; reset\(\) it first"):
            cache.restore(path)
        with pytest.raises(SequenceTooLong, match="50 tokens of each sequence"):
            short.restore(path, fingerprint="a")
        with pytest.raises(ValueError, match="another fingerprint"):
            short.restore(path)
        with pytest.raises(FileNotFoundError):
            short.restore(tmp_path / "another")
        for config in (llama().config, gemma3(16).config):
            with VmmCache(config, pool) as other, pytest.raises(ValueError, match="of another model"):
                other.restore(path, fingerprint="a")
        assert short.get_seq_length() == 0 and pool.used_bytes == used_bytes
        cache.reset()
        cache.restore(path, fingerprint="a")
        assert cache.get_seq_length() == 50


@contextlib.contextmanager
def saved_and_empty(pool: Pool, path: Path) -> Iterator[VmmCache]:
    """A cache that has saved 50 tokens of two sequences, and has none of them any more."""
    model = wide_llama()
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 1, num_tokens=50))
        cache.save(path)
        cache.reset()
        yield cache


@pytest.mark.parametrize(
    "change",
    [
        {"num_tokens": 51},
        {"num_tokens": -1},
        {"num_tokens": True},
        {"compacted_tokens": 51},
        {"parents": [0, 2]},
        {"parents": []},
        {"parents": 3},
        {"common": [[0, 0]]},
        {"common": [[0, 51], [51, 0]]},
        {"common": [[0, 1], [2, 0]]},
        {"common": [["0", 0], [0, 0]]},
        {"windows": []},
        {"windows": [None]},
        {"windows": [{"layers": [0], "window": None}]},
        {"windows": {}},
        {"num_dropped": 1},
        {"num_dropped": -1},
        {"num_dropped": None},
        {"k": [0, 32, "torch.float32"]},
        {"k": [2, 32, "torch.load"]},
        {"v": [2, 32]},
        {"v": 7},
    ],
    ids=str,
)
def test_a_crafted_header_is_damage(pool: Pool, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "batch"
    with saved_and_empty(pool, path) as cache:
        content = path.read_bytes()
        begin = len(MAGIC) + 4
        end = begin + struct.unpack("<I", content[begin - 4 : begin])[0]
        fields = json.loads(content[begin:end])
        of_window = change.keys() <= fields["windows"][0].keys()
        (fields["windows"][0] if of_window else fields).update(change)
        text = json.dumps(fields).encode()
        size, checksum = struct.pack("<I", len(text)), struct.pack("<I", zlib.crc32(text))
        path.write_bytes(MAGIC + size + text + checksum + content[end + 4 :])
        with pytest.raises(ValueError, match=r"is damaged|another layout"):
            cache.restore(path)
        assert cache.get_seq_length() == 0 and pool.used_bytes == 0
        path.write_bytes(content)
        cache.restore(path)
        assert cache.get_seq_length() == 50


@pytest.mark.parametrize("cut", [0, 10, 40, 400, -1, -5000])
def test_a_file_cut_or_changed_anywhere_is_damage(pool: Pool, tmp_path: Path, cut: int) -> None:
    path = tmp_path / "batch"
    with saved_and_empty(pool, path) as cache:
        content = path.read_bytes()
        changed = bytearray(content)
        changed[cut] ^= 1
        for bad in (content[:cut], bytes(changed), content + b"!"):
            path.write_bytes(bad)
            with pytest.raises(ValueError, match=r"is damaged|holds no|is longer"):
                cache.restore(path)
            assert cache.get_seq_length() == 0 and pool.used_bytes == 0


@MODELS
def test_at_whichever_driver_call_a_restore_fails_the_cache_is_empty(pool: Pool, tmp_path: Path, make: Any) -> None:
    model, driver, path = make(), cast(FakeDriver, pool.driver), tmp_path / "batch"
    with VmmCache(model.config, pool) as cache:
        forward(model, cache, ids_of(0, 0, 1, num_tokens=40))
        before = [each.clone() for each in states_of(cache)]
        cache.save(path)
        for number in itertools.count():
            cache.reset()
            failing = driver.num_calls + number
            driver.fail_at = {failing}
            try:
                cache.restore(path)
            except DriverError:
                driver.fail_at = set()
                assert (cache.get_seq_length(), pool.used_bytes) == (0, 0), f"call {number} failed"
                cache.check()
                cache.restore(path)
            driver.fail_at = set()
            assert all(map(torch.equal, states_of(cache), before))
            if driver.num_calls <= failing:
                break
        assert number > 5
        cache.check()


wholes = st.integers(0, 4) | near
kinds = st.tuples(
    st.sampled_from([1, 2, 4]) | near, st.sampled_from([16, 32]) | near, st.sampled_from(["torch.float32", "torch.int8"])
)


@st.composite
def headers_of_batches(draw: st.DrawFn) -> dict[str, Any]:
    """Fields of a header that take the place of the right ones; those of `windows` in the first window alone."""
    names = ["model", "num_tokens", "compacted_tokens", "parents", "common", "windows", "x"]
    fields = draw(st.dictionaries(st.sampled_from(names), values, max_size=1))
    for name, likely in {
        "num_tokens": wholes,
        "compacted_tokens": wholes,
        "parents": st.lists(wholes, max_size=4),
        "common": st.integers(0, 4).flatmap(lambda size: st.lists(st.lists(wholes, min_size=size, max_size=size), max_size=4)),
        "windows": st.fixed_dictionaries(
            {}, optional={"num_dropped": wholes, "k": kinds.map(list), "v": values, "layers": values}
        ),
    }.items():
        if draw(st.integers(0, 3)) == 0:
            fields[name] = draw(likely)
    return fields


@lengths
@pytest.mark.parametrize("make", [llama, lambda: gemma3(16)], ids=["full", "windows"])
def test_a_saved_batch_is_restored_as_it_was_or_refused(pool: Pool, tmp_path: Path, make: Any, num_examples: int) -> None:
    """One that is read can be used, whatever its header says of it."""
    model, path = make(), tmp_path / "batch"
    with VmmCache(model.config, pool, max_tokens=512) as cache:
        forward(model, cache, ids_of(0, 0, 1, num_tokens=45))
        cache.save(path)
        before = [each.clone() for each in states_of(cache)]
        cache.reset()
        whole = path.read_bytes()
        begin = len(MAGIC) + 4
        end = begin + struct.unpack("<I", whole[begin - 4 : begin])[0]
        right, rows = json.loads(whole[begin:end]), whole[end + 4 :]

        def check(change: Any) -> None:
            fields, size_bytes, edit_text, edit_all = change
            if isinstance(of_window := fields.get("windows"), dict):
                fields = fields | {"windows": [right["windows"][0] | of_window, *right["windows"][1:]]}
            text = json.dumps(right | fields).encode()
            if edit_text is not None:
                text = changed(text, edit_text)
            size = struct.pack("<I", len(text) if size_bytes is None else size_bytes)
            content = MAGIC + size + text + struct.pack("<I", zlib.crc32(text)) + rows
            if edit_all is not None:
                content = changed(content, edit_all)
            path.write_bytes(content)
            tracemalloc.reset_peak()
            try:
                cache.restore(path)
            except (ValueError, SequenceTooLong) as error:
                assert type(error) in (ValueError, SequenceTooLong) and str(path) in str(error)
                assert len(str(error)) < 500 + len(str(path))
            else:
                if content == whole:
                    assert all(map(torch.equal, states_of(cache), before))
                cache.check()
                size = cache.batch_size
                forward(model, cache, ids_of(*range(size), num_tokens=2))
                cache.reorder_cache(torch.arange(size).flip(0))
                forward(model, cache, ids_of(*range(size), num_tokens=1))
                with contextlib.suppress(ValueError, RowsUnmapped):  # what was compacted, or what a window has passed
                    cache.crop(-2)
                cache.check()
            assert tracemalloc.get_traced_memory()[1] - tracemalloc.get_traced_memory()[0] < MOST_BYTES
            cache.reset()
            cache.check()
            assert pool.used_bytes == 0

        sizes = st.none() | st.none() | st.integers(0, (1 << 32) - 1)
        often_none = st.none() | st.none() | st.none() | edits
        fuzz(num_examples, st.tuples(st.just({}) | headers_of_batches(), sizes, often_none, often_none), check)
