"""One engine maps what another one on the host has sealed: whose rows they are, and what each of the two may do meanwhile."""

import contextlib
import json
import os
import random
import re
import socket
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from tests.unit import holder_engines as engines
from tests.unit.holder_engines import BUDGET_BYTES, LONG, PROMPT, Engine, Process, holder, opened, path, start, wrong_rows
from tests.unit.support import STRADDLING, WINDOWED
from vmmkv import HolderUnavailable, KVCache, Pool, PrefixCache
from vmmkv.holder import HolderClient, Sealed, SealedLog
from vmmkv.holder.borrowed import BorrowedPrefixes
from vmmkv.holder.client import check_reach
from vmmkv.holder.source import LenderSource
from vmmkv.units import MIB, PAGE_BYTES

__all__ = ["holder", "opened", "path"]


@pytest.fixture
def owner(path: Path, holder: Process) -> Process:
    """An engine that has computed the prompt."""
    engine = start(path)
    assert engine.ask("serve", PROMPT) == (0, 0)
    return engine


@pytest.fixture
def borrower(owner: Process, opened: Callable[..., Engine]) -> Engine:
    return opened(borrows=True)


def handles(pid: int) -> list[tuple[int, int, int]]:
    """The memory of a process's handles that came from or went to another one: file, first byte, and last byte."""
    found = []
    for each in Path(f"/proc/{pid}/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):
            for lock in re.findall(
                r"OFDLCK .* (\d+) (\d+)$", Path(f"/proc/{pid}/fdinfo/{each.name}").read_text(), re.MULTILINE
            ):
                found.append((each.stat().st_ino, *map(int, lock)))
    return found


def held_pages(engine: Process) -> int:
    """Pages of the owner, of which the holder knows as many."""
    created, held = engine.ask("held")
    assert created == held
    return int(held)


def total_pages(holder: Process) -> int:
    """Pages of all that the holder has: also of what the owner has given up."""
    return sum(last + 1 - first for _, first, last in handles(holder.pid)) // PAGE_BYTES


def hold_rows(engine: Engine, tokens: list[int], num_tokens: int) -> Any:
    """A sequence over borrowed rows, which are right."""
    engine.prefix.borrow(tokens)
    attached = engine.prefix.attach(tokens)
    assert attached.num_tokens == num_tokens
    assert not wrong_rows(attached.sequence, None, tokens, num_tokens)
    return attached.sequence


def test_borrowed_rows_are_the_owners_memory_and_no_byte_is_copied(holder, owner, borrower):
    borrowed = borrower.prefix.borrow([*PROMPT, 1])
    assert (borrowed.known_tokens, borrowed.num_tokens, borrowed.loaded_bytes) == (0, 96, {"lender": 6 * PAGE_BYTES})
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    calls = borrower.pool.driver.calls
    assert (calls["create"], calls["copy"], calls["import_fd"], calls["map"]) == (1, 0, 3, 4), "the null page is its own"
    mine, of_holder, of_owner = (set(handles(pid)) for pid in (os.getpid(), holder.pid, owner.pid))
    assert len(mine & of_holder & of_owner) == 3
    assert borrower.prefix.borrow([*PROMPT, 1]) is None, "once"
    sequence.close()


def test_what_is_borrowed_again_before_it_has_left_stays_lent(holder, owner, borrower):
    hold_rows(borrower, [*PROMPT, 1], 96).close()
    borrower.prefix.evict()
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    borrower.settle()
    owner.ask("give_up")
    assert borrower.pool.borrowed_bytes == 6 * PAGE_BYTES
    assert total_pages(holder) == held_pages(owner) + 6
    sequence.close()
    borrower.prefix.evict()
    borrower.settle()
    assert not borrower.pool.borrowed_bytes
    engines.until(lambda: total_pages(holder) == held_pages(owner))


@pytest.mark.parametrize("layout", [STRADDLING, WINDOWED])
@pytest.mark.parametrize("num_tokens", [100, 130, 331])
def test_rows_of_all_layouts_and_lengths_are_right(path, opened, layout, num_tokens):
    owner = start(path, layout=layout)
    owner.ask("serve", LONG[:num_tokens])
    attached, wrong = opened(layout=layout, borrows=True).serve([*LONG[:num_tokens], 1])
    assert attached >= num_tokens - 48 and not wrong


def test_more_is_borrowed_behind_what_is_known(owner, borrower):
    assert borrower.serve([*PROMPT[:70], 9, 9]) == (64, 0)
    owner.ask("serve", [*PROMPT, *range(40)])
    borrowed = borrower.prefix.borrow([*PROMPT, *range(40), 5])
    assert (borrowed.known_tokens, borrowed.num_tokens) == (70, 128), "rows that were computed here are not borrowed"
    assert borrower.serve([*PROMPT, *range(40), 5]) == (128, 0)


def test_room_for_what_is_borrowed_is_not_made_by_evicting_what_it_goes_on_from(owner, opened):
    borrower = opened(pages=7, borrows=True)
    assert borrower.serve(PROMPT[:65]) == (64, 0)
    borrower.serve([5] * 48, "own")  # used last, and the pool is full
    assert borrower.serve([*PROMPT, 1]) == (96, 0)


def test_namespaces_are_kept_apart(owner, borrower):
    owner.ask("serve", PROMPT, ("red", 1))
    assert borrower.serve(PROMPT, "blue") == (0, 0)
    assert borrower.serve([*PROMPT, 1], ("red", 1)) == (96, 0)


def test_another_model_or_layout_borrows_nothing_and_says_so_once(opened, owner, caplog):
    for options in ({"fingerprint": "another"}, {"layout": WINDOWED}):
        caplog.clear()
        engine = opened(borrows=True, **options)
        assert engine.prefix.borrow(PROMPT) is engine.prefix.borrow([*PROMPT, 1]) is None
        assert engine.serve([*PROMPT, 1]) == (0, 0)
        assert caplog.text.count("starting cold") == 1 and "another layout, dtype, model or fingerprint" in caplog.text


def test_a_borrower_is_at_hand_before_the_owner(path, opened):
    borrower = opened(borrows=True)
    assert borrower.prefix.borrow(PROMPT) is None
    owner = start(path)
    owner.ask("serve", PROMPT)
    assert borrower.serve([*PROMPT, 1]) == (96, 0)


def test_what_an_owner_evicts_is_not_written_while_it_is_borrowed(holder, owner, borrower):
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    owner.ask("give_up")
    for seed in range(4):
        owner.ask("serve", [seed] * 200, "red")
    assert owner.ask("check") is None
    assert not wrong_rows(sequence, None, PROMPT, 96)
    assert total_pages(holder) == held_pages(owner) + 6 <= BUDGET_BYTES // PAGE_BYTES, "what was given up counts there"
    sequence.close()
    borrower.prefix.evict()
    borrower.settle()
    engines.until(lambda: total_pages(holder) == held_pages(owner))


def test_rows_that_windows_have_passed_are_not_borrowed(path, opened):
    start(path, layout=WINDOWED).ask("serve", LONG)
    borrower = opened(layout=WINDOWED, borrows=True)
    borrowed = borrower.prefix.borrow([*LONG, 1])
    assert (borrowed.num_tokens, borrowed.loaded_bytes) == (320, {"lender": (10 + 2) * PAGE_BYTES})
    borrowed = borrower.prefix.borrow([*LONG[:200], 1])
    assert (borrowed.num_tokens, borrowed.loaded_bytes) == (192, {"lender": 4 * PAGE_BYTES}), "windows alone"
    assert borrower.serve([*LONG[:200], 1]) == (192, 0) and borrower.serve([*LONG, 1]) == (320, 0)


def test_a_page_that_a_window_passed_in_part_is_borrowed_whole(path, opened):
    start(path, layout=WINDOWED).ask("serve", PROMPT[:70])
    borrower = opened(layout=WINDOWED, borrows=True)
    source, sequence = (borrower.prefix.attach(PROMPT).sequence for _ in range(2))
    engines.write(source, None, PROMPT, 0)
    engines.write(sequence, None, [*PROMPT[:5], *PROMPT[6:], 5], 0)
    source.advance_start(1)  # to row 61 of those from 32 to 64
    borrower.cache.copy_rows([(source, sequence)], 5, len(PROMPT))  # a beam, which has none of the rows before
    source.close()
    borrower.prefix.insert(sequence, PROMPT)
    assert borrower.prefix.match([*PROMPT[:75], 1]) == 0
    hold_rows(borrower, [*PROMPT[:75], 1], 75).close()
    sequence.close()


def test_a_full_last_page_is_borrowed_once(holder, owner, borrower):
    sequence = hold_rows(borrower, PROMPT[:96], 95)
    assert borrower.prefix.borrow(PROMPT[:96]) is None
    borrower.cache.check()
    owner.ask("give_up")
    assert total_pages(holder) == held_pages(owner) + 6
    sequence.close()


def test_a_slot_that_goes_on_otherwise_gets_pages_of_its_own_for_borrowed_rows(owner, borrower):
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    other = [*PROMPT[:84], *range(90)]
    assert owner.ask("serve", other) == (84, 0), "the parked slot is taken over, in the midst of its last sealed page"
    assert owner.ask("check") is None
    assert not wrong_rows(sequence, None, PROMPT, 96)
    assert owner.ask("serve", [*other, 1]) == (174, 0)
    sequence.close()


def test_without_borrowers_an_owner_uses_its_memory_again(holder, owner):
    before = set(handles(holder.pid))
    owner.ask("give_up")
    owner.ask("serve", [5] * 100)
    assert set(handles(holder.pid)) == before


def test_a_borrower_goes_on_when_the_owner_is_killed_and_with_the_next_one(path, owner, borrower):
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    owner.kill()
    assert not wrong_rows(sequence, None, PROMPT, 96)
    engines.write(sequence, None, [*PROMPT, 1, 2, 3], 96)
    following = start(path)
    assert following.ask("serve", [*PROMPT, 4]) == (96, 0)
    following.ask("serve", LONG)
    assert borrower.serve([*LONG, 1]) == (320, 0)
    assert not wrong_rows(sequence, None, PROMPT, 96)
    sequence.close()


def test_an_owner_gets_its_memory_back_when_a_borrower_is_killed(path, holder, owner):
    borrower = start(path, borrows=True)
    assert borrower.ask("serve", [*PROMPT, 1]) == (96, 0)
    owner.ask("give_up")
    assert total_pages(holder) == held_pages(owner) + 6
    borrower.kill()
    engines.until(lambda: total_pages(holder) == held_pages(owner))


def test_an_owner_that_is_killed_leaves_to_borrowers_what_they_have(path, holder, owner, borrower):
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    owner.ask("evict")
    owner.kill()
    following = start(path, fingerprint="another")
    following.ask("serve", LONG)
    assert not wrong_rows(sequence, None, PROMPT, 96)
    sequence.close()


def test_a_borrower_whose_holder_is_killed_keeps_what_it_has(holder, owner, borrower, caplog):
    sequence = hold_rows(borrower, [*PROMPT, 1], 96)
    holder.kill()
    assert borrower.prefix.borrow(LONG) is None
    assert "further prompts are computed here" in caplog.text
    assert not wrong_rows(sequence, None, PROMPT, 96)
    sequence.close()
    assert borrower.serve([*PROMPT, 1])[1] == 0
    borrower.prefix.evict()


def test_borrowed_memory_counts_in_the_budget_and_is_evicted_like_own(opened, owner):
    borrower = opened(pages=8, borrows=True)
    borrower.serve([5] * 64, "own")
    assert borrower.serve([*PROMPT, 1]) == (96, 0)
    assert borrower.pool.created_bytes == 7 * PAGE_BYTES
    borrower.serve([6] * 120, "own")
    borrower.cache.check()
    assert borrower.prefix.match([*PROMPT, 1]) < 96
    running = borrower.prefix.attach([7] * 100).sequence
    running.grow(100)
    refused = borrower.prefix.borrow([*PROMPT, 1])
    assert refused.num_tokens == 96 and not refused.loaded_bytes, "there is no room for it beside what runs"


def test_what_was_dropped_between_borrowing_and_attaching_is_computed(owner, borrower):
    assert borrower.prefix.borrow([*PROMPT, 1]) is not None
    owner.ask("give_up")
    owner.ask("settle")
    assert borrower.serve([*PROMPT, 1]) == (0, 0)


def test_a_write_to_borrowed_rows_faults(path, owner):
    process = Process(write_borrowed, path)
    process.process.join(60)
    assert process.process.exitcode == -11


def write_borrowed(path: Path, pipe: Any) -> None:
    engine = Engine(path, borrows=True)
    engine.prefix.borrow([*PROMPT, 1])
    engine.prefix.attach([*PROMPT, 1]).sequence.k(0)[:1] = 1.0


def test_a_pool_lends_or_borrows_and_memory_is_of_a_device_within_reach(path, holder):
    with pytest.raises(ValueError, match="lends or borrows"):
        Pool("cpu", PAGE_BYTES, holder=path, lender=path)
    with pytest.raises(HolderUnavailable, match="CUDA_VISIBLE_DEVICES, or take the same device for both"):
        check_reach(torch.device("cpu"), "GPU 1234")
    with (
        Pool("cpu", BUDGET_BYTES, lender=path) as pool,
        KVCache(STRADDLING, pool, slots=2, max_tokens=64) as cache,
        pytest.raises(ValueError, match="a lender it names the model"),
    ):
        PrefixCache(cache)


@pytest.mark.parametrize(("first", "then"), [("own", "borrow"), ("borrow", "borrow"), ("borrow", "own")])
def test_an_engine_joins_once_as_one_or_the_other(path, holder, first, then):
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.connect(str(path))
        assert connection.recv(1 << 16), "it is welcome"
        connection.send(json.dumps({"do": first}).encode())
        assert "error" not in json.loads(connection.recv(1 << 16))
        connection.send(json.dumps({"do": then}).encode())
        assert not connection.recv(1 << 16), "it is sent away"
    with contextlib.closing(HolderClient(path, torch.device("cpu"))) as next_one:
        assert next_one.log.num_borrowers == 0


def test_the_socket_is_closed_to_others(path, holder):
    assert path.stat().st_mode & 0o777 == 0o600


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("windowed", [False, True])
def test_engines_killed_under_load_leave_each_other_right_rows(path, holder, num_kills, windowed):
    draw, busy = random.Random(num_kills), {}
    for number in range(num_kills + 1):
        for borrows in (False, True):
            if borrows not in busy:
                busy[borrows] = Process(engines.busy_engine, path, number, 60.0, windowed, "cpu", borrows)
                busy[borrows].get()
                assert busy[borrows].get() == "sealed"
        time.sleep(draw.uniform(0.1, 0.6))
        for process in busy.values():
            assert not process.pipe.poll(), process.pipe.recv()
        busy.pop(bool(draw.getrandbits(1))).kill()
    for process in busy.values():
        process.kill()
    with contextlib.closing(HolderClient(path, torch.device("cpu"))) as last:
        engines.until(lambda: last.held_bytes() == total_pages(holder) * PAGE_BYTES)


def test_a_log_is_followed_through_drops_and_rewrites(monkeypatch):
    monkeypatch.setattr("vmmkv.holder.borrowed.check_seal", lambda seal, layout: None)  # these are of no layout
    fd = SealedLog.create(MIB)
    writer, reader = SealedLog(fd), SealedLog(fd)
    source = LenderSource(cast(Any, None), cast(Any, SimpleNamespace(log=reader, path="a path")))
    borrowed = BorrowedPrefixes(*[cast(Any, None)] * 2, cast(Any, SimpleNamespace(source=source)), b"model")
    writer.rewrite(b"model", ())
    draw, live, dropped = random.Random(0), {}, []
    for serial in range(1, 1500):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            dropped.append(live.pop(gone))
            if not writer.drop(gone):
                writer.rewrite(b"model", live.values())
        tokens = draw.randbytes(4 * draw.randint(1, 300))
        seal = Sealed(serial, None, len(tokens) // 4, 0, 0, serial, 1, b"None", tokens)
        if writer.seal(seal) is not None:
            live[serial] = seal
        if writer.is_due:
            writer.rewrite(b"model", live.values())
        if draw.random() < 0.2:
            assert borrowed.follow()
            for seal in draw.sample(list(live.values()), min(3, len(live))):
                found = borrowed.seals_of(None, seal.tokens + b"more")
                assert seal in found and all(each in live.values() for each in found)
            assert not any(borrowed.seals_of(None, each.tokens) for each in dropped[-20:])
    for serial in (2000, 3000):  # the same half again, and of the same length
        live = {serial: seal._replace(serial=serial)}
        writer.rewrite(b"model", live.values())
        writer.rewrite(b"model", live.values())
        assert borrowed.follow() and borrowed.seals_of(None, seal.tokens) == [*live.values()]
    writer.close()
    reader.close()
    os.close(fd)
