"""A process that holds KV memory: what outlives an engine, what does not, and who gets what. Real processes, real memory."""

import contextlib
import errno
import os
import random
import socket
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch

from tests.unit import holder_engines as engines
from tests.unit.holder_engines import BUDGET_BYTES, PROMPT, Engine, Process, holder, opened, path, start, start_holder
from tests.unit.support import STRADDLING, WINDOWED, Calls
from tests.unit.test_prefix import hooks
from vmmkv import AttachMethod, BudgetError, DriverError, HolderUnavailable, KVCache, OutOfPages, Pool, PrefixCache
from vmmkv.driver.host import SPARE_DESCRIPTORS, HostDriver
from vmmkv.errors import LogDamaged, OutOfDescriptors, OutOfDeviceMemory
from vmmkv.holder import HolderClient, Sealed, SealedLog, process
from vmmkv.holder.sealed import SealedPrefixes
from vmmkv.holder.source import HolderSource, LenderSource
from vmmkv.memory.extents import ExtentSource
from vmmkv.prefix.index import IndexFollower
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES

__all__ = ["holder", "opened", "path"]

CPU = torch.device("cpu")
LONG = [*range(1, 201)]


def num_held(path: Path) -> int:
    """Pages that the holder has while no engine runs."""
    with contextlib.closing(HolderClient(path, CPU)) as client:
        return client.held_bytes() // PAGE_BYTES


@pytest.fixture
def left(path, opened):
    """The next engine after one that is killed, which has computed some prompts in this order."""

    def left(*prompts, **options):
        engine = start(path, **options)
        for tokens, namespace in prompts:
            engine.ask("serve", tokens, namespace)
        engine.kill()
        return opened(**options)

    return left


def test_a_prefix_outlives_an_engine_that_is_killed(path, holder):
    first = start(path)
    assert first.ask("serve", PROMPT) == (0, 0)
    first.kill()
    second = start(path)
    assert second.ask("imports") == 0, "nothing is imported before it is needed"
    assert second.ask("check") is None
    assert second.ask("serve", [*PROMPT, 1]) == (96, 0), "full pages, and every row right"
    assert second.ask("check") is None
    assert second.ask("close") is None


def test_a_prefix_outlives_an_engine_that_ends_in_order(path, holder):
    for attached in (0, 96, 96):
        engine = start(path)
        assert engine.ask("serve", PROMPT) == (attached, 0)
        assert engine.ask("close") is None
        assert num_held(path) == 6, "what no prefix names is freed"


def test_what_was_not_inserted_is_freed_when_its_engine_goes(path, holder):
    engine = start(path)
    engine.ask("serve", PROMPT)
    engine.ask("serve", [3] * 200, None)
    assert engine.ask("evict") > 0
    engine.ask("serve", PROMPT, "red")
    created, held = engine.ask("held")
    assert created == held > 6, "the books of pool and holder agree"
    engine.kill()
    assert num_held(path) == 6


def test_another_model_or_layout_starts_cold_and_says_so(path, holder, caplog):
    engine = start(path)
    engine.ask("serve", PROMPT)
    engine.kill()
    for options in ({"fingerprint": "another"}, {"fingerprint": "another", "layout": WINDOWED}):
        caplog.clear()
        engine = Engine(path, **options)
        assert "starting cold" in caplog.text
        assert "3 extents of another layout, dtype or fingerprint" in caplog.text
        assert engine.prefix.match([*PROMPT, 1]) == 0
        assert engine.pool.holder.held_bytes() == 0
        engine.serve(PROMPT)
        engine.cache.check()
        engine.close()


def test_no_byte_of_a_tenant_reaches_another_one(left):
    engine = left((PROMPT, "red"), (PROMPT, ("blue", 1)), pages=16)
    assert engine.serve([*PROMPT, 1], "red") == (96, 0)
    assert engine.serve([*PROMPT, 1], ("blue", 1)) == (96, 0)
    assert engine.serve([*PROMPT, 1], "blue") == (0, 0)
    engine.prefix.evict()
    with engine.cache.open(tenant="green") as sequence:
        sequence.grow(15 * 16)  # in memory that red and blue had, as well
        assert not any(sequence.view(layer, plane).any() for layer in range(4) for plane in "kv")
        engine.cache.check()


def test_a_namespace_that_is_not_the_same_in_another_process_is_refused(opened):
    engine = opened()
    for namespace in (frozenset({"red"}), User("red"), (User("red"), 1)):
        with pytest.raises(ValueError, match="give a str, bytes, an int, None, or a tuple of these"):
            engine.prefix.attach(PROMPT, namespace=namespace)


class User(NamedTuple):
    name: str


def test_a_smaller_budget_keeps_what_was_sealed_last(path, holder):
    engine = start(path)
    engine.ask("serve", PROMPT, "old")
    engine.ask("serve", PROMPT, "new")
    engine.kill()
    engine = start(path, pages=8)
    assert engine.ask("check") is None
    assert engine.ask("held") == (6, 6), "a prefix is one leaf, and goes whole"
    assert engine.ask("serve", [*PROMPT, 1], "new") == (96, 0)
    assert engine.ask("check") is None


def test_a_holders_socket_listens_when_it_is_there(path, monkeypatch):
    there, listen = [], socket.socket.listen
    monkeypatch.setattr(socket.socket, "listen", lambda listener: (there.append(path.exists()), listen(listener)))
    with contextlib.closing(process.Holder(path, BUDGET_BYTES, HostDriver(), lambda line: None)), connected(path):
        assert there == [False]
        assert {each.name for each in path.parent.iterdir()} == {"kv.sock", "kv.sock.lock"}
    assert not path.exists()


@pytest.mark.parametrize("name", ["kv.sock", "kv.sock~"])
def test_a_file_that_is_no_socket_is_in_the_way_of_a_holder_and_stays(path, name):
    path.with_name(name).write_text("mine")
    with pytest.raises(HolderUnavailable, match=f"{name} is another file"):
        process.Holder(path, BUDGET_BYTES, HostDriver(), lambda line: None)
    assert path.with_name(name).read_text() == "mine"


def test_a_seal_that_fills_a_gap_goes_on_from_what_ends_before_it(opened, monkeypatch):
    engine = opened(layout=WINDOWED)
    engine.serve(PROMPT)
    engine.prefix.free_slots(6)
    index, log = engine.prefix.index, engine.pool.holder.log
    sealed = len(log.read().live)
    pieces = [piece for node in index.tree.nodes() for piece in node.pieces if piece.group == 1]
    with monkeypatch.context() as patch, engine.pool.lock:
        patch.setattr(engine.pool, "import_extents", set)  # the holder has lost them
        assert not index.import_extents([pieces[0].value.extent])
    assert len(log.read().live) == sealed - 1
    attached = engine.prefix.attach(PROMPT, method=AttachMethod.COMPUTE)
    engines.write(attached.sequence, None, PROMPT, 0)
    engine.prefix.insert(attached.sequence, PROMPT)
    engine.prefix.park(attached.sequence, PROMPT)
    engine.cache.check()
    assert len(log.read().live) == sealed


def test_a_second_engine_is_refused_and_told_which_one_it_is(path, holder):
    engine = start(path)
    with pytest.raises(HolderUnavailable, match=f"process {engine.pid} has it"):
        Pool("cpu", 8 * PAGE_BYTES, holder=path)
    assert engine.ask("serve", PROMPT) == (0, 0), "the first one goes on"
    engine.kill()
    Pool("cpu", 8 * PAGE_BYTES, holder=path).close()


def test_a_child_made_by_fork_does_not_keep_the_holder(path, holder):
    read, write = os.pipe()
    pool = Pool("cpu", 8 * PAGE_BYTES, holder=path)
    if (child := os.fork()) == 0:
        os.close(write)
        os.read(read, 1)
        os._exit(0)
    try:
        assert pool.holder.held_bytes() == 0, "the parent keeps it"
        pool.close()
        Pool("cpu", 8 * PAGE_BYTES, holder=path).close()
    finally:
        os.close(write)
        os.waitpid(child, 0)
        os.close(read)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can be another user")
def test_another_user_is_refused_even_if_the_socket_is_opened_to_all(path, holder):
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    for folder in path.parents:
        if stat.S_IMODE(folder.stat().st_mode) == 0o700:  # pytest's; how many there are depends on its processes
            folder.chmod(0o755)
    refused = Process(engines.engine_as, path, 65534)
    assert "Permission denied" in refused.get()
    path.chmod(0o666)
    refused = Process(engines.engine_as, path, 65534)
    assert "is of user 0" in refused.get()
    assert "belongs to user 0" in holder.get()


def test_budgets_are_kept(path, holder):
    with pytest.raises(BudgetError, match=str(BUDGET_BYTES)):
        Pool("cpu", BUDGET_BYTES + PAGE_BYTES, holder=path)
    client = HolderClient(path, CPU)
    client.create(32 * PAGE_BYTES)
    with pytest.raises(OutOfDeviceMemory, match=r"32.0 MiB of its budget of 96.0 MiB are left"):
        client.create(17 * PAGE_BYTES)
    assert client.held_bytes() == 32 * PAGE_BYTES
    client.close()
    assert num_held(path) == 0


def test_a_budget_of_nothing_gives_the_holders_memory_back_too(opened):
    engine = opened()
    engine.serve(PROMPT)
    engine.pool.resize(0)
    assert (engine.pool.holder.held_bytes(), engine.pool.holder.log.read().live) == (0, {})
    engine.pool.resize(BUDGET_BYTES)
    assert engine.serve(PROMPT) == (0, 0)
    assert engine.serve(PROMPT) == (99, 0)


def test_small_extents_are_exchanged_for_a_large_one_while_there_is_a_holder(opened, holder):
    engine = opened(pages=16)
    with engine.cache.open() as sequence:
        for num_tokens in range(16, 256, 16):
            sequence.grow(num_tokens)
    with engine.cache.open(tenant="another") as sequence:
        sequence.grow(256)
        assert [extent.num_pages for extent in engine.pool.extents()] == [16]
    with engine.cache.open() as sequence:
        holder.kill()
        with pytest.raises(OutOfPages, match="1 extent of 1 page needed, 0 can be evicted"):
            sequence.grow(16)
        assert engine.pool.created_bytes == 16 * PAGE_BYTES, "nothing is given up for what cannot come"


def connected(path):
    """A connection to a holder, of which nothing was read."""
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(60)
    connection.connect(str(path))
    return contextlib.closing(connection)


def packets_left(connection):
    """What there is to read of a connection that the other side ends."""
    packets = []
    while True:
        with contextlib.suppress(ConnectionResetError):  # told once, before the packets: it had not read all that was sent
            packets.append(connection.recv(1 << 16))
            if not packets[-1]:
                return packets[:-1]


@pytest.mark.parametrize(
    "packet",
    [
        b"no JSON",
        b"7",
        b"{}",
        b'{"do": "no such thing"}',
        b"[" * 60_000,
        b'{"do": "create", "size_bytes": 2097152}',
        b'{"do": "release", "serials": [1]}',
    ],
)
def test_a_holder_hangs_up_on_a_process_that_sends_what_is_no_request(path, holder, packet):
    with connected(path) as engine:
        engine.recv(1 << 16)
        engine.send(packet)
        assert packets_left(engine) == []
    assert "hung up on process" in holder.get()
    assert num_held(path) == 0


def test_a_process_that_does_not_read_costs_the_holder_one_answer_and_no_time(path):
    told = []
    holder = process.Holder(path, BUDGET_BYTES, HostDriver(), told.append)
    thread = threading.Thread(target=holder.run)
    thread.start()
    try:
        with contextlib.ExitStack() as closing:
            owner = closing.enter_context(contextlib.closing(HolderClient(path, CPU)))
            deaf = [closing.enter_context(connected(path)) for _ in range(20)]
            for number, connection in enumerate(deaf):
                if number % 2:
                    connection.recv(1 << 16)
                connection.setblocking(False)
                with contextlib.suppress(OSError):  # it was hung up on, or the holder is slower
                    for _ in range(2000):
                        connection.send(b'{"do": "count"}')
                connection.settimeout(60)
            os.close(owner.create(PAGE_BYTES)[1])
            assert owner.held_bytes() == PAGE_BYTES
            hung_up = "asked again before it had read the answer"
            engines.until(lambda: sum(hung_up in line for line in told) == 20)  # before they read, as this test does then
            assert [len(packets_left(connection)) for connection in deaf] == [1] * 20
    finally:
        holder.stop()
        thread.join(60)
        holder.close()


def test_the_owners_end_is_heard_before_the_next_one_that_wants_to_own(path):
    told, is_told, goes_on = [], threading.Event(), threading.Event()

    def report(line):
        told.append(line)
        if "has come to borrow" in line:
            is_told.set()
            goes_on.wait(60)

    holder = process.Holder(path, BUDGET_BYTES, HostDriver(), report)
    thread = threading.Thread(target=holder.run)
    thread.start()
    try:
        with connected(path) as next_one, connected(path) as borrower:
            next_one.recv(1 << 16)  # it comes before the owner
            owner = HolderClient(path, CPU)
            serial, fd = owner.create(PAGE_BYTES)
            os.close(fd)
            borrower.recv(1 << 16)
            borrower.send(b'{"do": "borrow"}')
            assert is_told.wait(60), "the holder hears nothing now"
            next_one.send(b'{"do": "own"}')
            owner.release([serial])
            owner.close()
            goes_on.set()
            assert next_one.recv(1 << 16) == b"{}", told
    finally:
        goes_on.set()
        holder.stop()
        thread.join(60)
        holder.close()


def test_an_engine_without_descriptors_leaves_no_handle_behind(path, holder, monkeypatch):
    with contextlib.closing(HolderClient(path, CPU)) as client:
        with monkeypatch.context() as patch:
            receive = socket.recv_fds

            def without(*arguments):
                packet, fds, flags, address = receive(*arguments)
                for fd in fds:
                    os.close(fd)
                return packet, [], flags | (socket.MSG_CTRUNC if fds else 0), address

            patch.setattr(socket, "recv_fds", without)
            with pytest.raises(DriverError, match="as many file descriptors"):
                client.create(PAGE_BYTES)
        assert client.held_bytes() == 0


@pytest.fixture
def few_descriptors(monkeypatch):
    """A function that leaves so many descriptors to this process's handles, from now on."""
    taken = []

    def limit(number):
        highest = max(map(int, os.listdir("/proc/self/fd")))
        taken.append(os.open(os.devnull, os.O_RDONLY))
        while taken[-1] < highest:
            taken.append(os.open(os.devnull, os.O_RDONLY))
        most = taken[-1] + 1 + SPARE_DESCRIPTORS + number
        monkeypatch.setattr("vmmkv.driver.host.most_descriptors", lambda: most)

    yield limit
    for fd in taken:
        os.close(fd)


def test_prefixes_make_room_for_prompts_where_descriptors_are_short(opened, few_descriptors):
    few_descriptors(12)
    engine = opened()
    for number in range(30):
        assert engine.serve([number] * 100, "red" if number % 2 else None) == (0, 0)
        engine.cache.check()
    assert engine.serve([29] * 100, "red") == (99, 0), "the last ones are kept"
    assert engine.pool.created_bytes < engine.pool.budget_bytes
    sequences = []
    with pytest.raises(OutOfPages, match=r"Too many open files .EMFILE.*raise `ulimit -n`"):
        for _ in range(6):
            sequences.append(engine.cache.open(tenant="green"))
            for num_tokens in range(16, 200, 16):
                sequences[-1].grow(num_tokens)
    engine.cache.check()
    for sequence in sequences:
        sequence.close()
    assert engine.serve([1] * 100) == (0, 0)


def test_what_was_left_is_computed_where_descriptors_are_too_few_to_import_it(left, few_descriptors):
    engine = left((LONG, None), (PROMPT, None), ([9] * 100, None))
    few_descriptors(6)
    engine.prepare_all()
    for tokens in (LONG, PROMPT, [9] * 100):
        assert engine.serve([*tokens, 1])[1] == 0
        engine.cache.check()
    few_descriptors(30)
    assert engine.serve([*[9] * 100, 1, 2]) == (101, 0)


def test_a_pool_says_how_many_files_it_may_open_if_extents_may_be_more(path, holder, caplog, monkeypatch):
    monkeypatch.setattr("vmmkv.holder.source.most_descriptors", lambda: 40)
    for num_pages in (24, 25):
        assert not caplog.text
        Pool("cpu", num_pages * PAGE_BYTES, holder=path).close()
    assert "may open 40 files" in caplog.text and "each of up to 25 extents" in caplog.text


@pytest.mark.parametrize("call", ["create", "export_fd"])
def test_a_holder_without_descriptors_is_full(path, call, monkeypatch):
    driver = HostDriver()
    short = OutOfDescriptors("too many open files", call=call, code="EMFILE")
    monkeypatch.setattr(driver, call, lambda *_: raise_(short))
    holder = process.Holder(path, BUDGET_BYTES, driver, lambda line: None)
    thread = threading.Thread(target=holder.run)
    thread.start()
    with contextlib.closing(HolderClient(path, CPU)) as client, pytest.raises(OutOfDeviceMemory, match="too many open files"):
        client.create(PAGE_BYTES)
    holder.stop()
    thread.join(60)
    holder.close()


def test_a_holder_without_descriptors_refuses_a_process_and_goes_on(path, monkeypatch):
    told, accept, failures = [], socket.socket.accept, [OSError(errno.EMFILE, "too many open files")]
    monkeypatch.setattr(socket.socket, "accept", lambda listener: raise_(failures.pop()) if failures else accept(listener))
    holder = process.Holder(path, BUDGET_BYTES, HostDriver(), told.append)
    thread = threading.Thread(target=holder.run)
    thread.start()
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as refused:
        refused.connect(str(path))
        assert refused.recv(100) == b""
    assert num_held(path) == 0
    holder.stop()
    thread.join(60)
    holder.close()
    assert "refused a process: too many open files" in told


def raise_(error):
    raise error


def test_a_holder_that_cannot_free_a_handle_goes_on_and_tries_again(path):
    driver, told = FakeDriver(over=HostDriver()), []
    holder = process.Holder(path, BUDGET_BYTES, driver, told.append)
    thread = threading.Thread(target=holder.run)
    thread.start()

    def client_with(num_handles):
        client = HolderClient(path, CPU)
        for _ in range(num_handles):
            os.close(client.create(PAGE_BYTES)[1])
        return client

    with contextlib.closing(client_with(3)) as client:
        driver.fail_at = {driver.num_calls + 1}
        client.release([1, 2, 3])
        assert client.held_bytes() == PAGE_BYTES
        driver.fail_at = {driver.num_calls}  # when the engine goes
    with contextlib.closing(client_with(2)) as client:
        assert client.held_bytes() == 3 * PAGE_BYTES
    assert num_held(path) == 0, "all is freed when the next engine goes"
    with contextlib.closing(client_with(2)):
        holder.stop()
        thread.join(60)
        driver.fail_at = {driver.num_calls}
        holder.close()
    assert sum("2.0 MiB cannot be freed now: release was told to fail" in line for line in told) == 3
    assert driver.live_handles == 1, "that one goes with the process"
    assert not path.exists()


def test_without_a_holder_a_pool_says_how_to_start_one(path):
    with pytest.raises(HolderUnavailable, match=f"vmmkv hold --socket {path} --budget"):
        Pool("cpu", 8 * PAGE_BYTES, holder=path)


def test_a_prefix_cache_over_a_holder_needs_a_fingerprint_and_is_the_only_one(opened):
    with KVCache(WINDOWED, opened().pool, slots=2, max_tokens=64) as other:
        with pytest.raises(ValueError, match="fingerprint: none"):
            PrefixCache(other)
        with pytest.raises(ValueError, match="the prefixes of one cache"):
            PrefixCache(other, fingerprint="model")


def test_an_engine_whose_holder_is_killed_keeps_what_it_has_and_gets_no_more(left, path, holder, caplog):
    engine = left((PROMPT, None))
    engine.serve([5] * 40, "red")
    holder.kill()
    attached = engine.prefix.attach([*PROMPT, 1])
    assert attached.num_tokens == 0, "what was not imported is computed again"
    engine.cache.check()
    with pytest.raises(OutOfPages, match=f"4 pages needed, 0 can be evicted, and .*{path} .process {holder.pid}. is gone"):
        attached.sequence.grow(100)
    engine.cache.check()
    attached.sequence.close()
    assert engine.serve([5] * 41, "red") == (40, 0), "what it has stays right, and nothing is evicted for what cannot come"
    assert engine.serve([6] * 40) == (0, 0), "what it has makes room"
    assert engine.prefix.match([5] * 41, namespace="red") == 0
    assert caplog.text.count("is gone") == 1
    assert start_holder(path).pid != holder.pid, "a stale socket is in nobody's way"


@pytest.mark.parametrize("call", range(8))
def test_a_growth_that_fails_loses_no_handle(opened, call):
    engine = opened()
    driver = engine.pool.driver
    driver.fail_at = {driver.num_calls + call}
    with pytest.raises(DriverError, match="told to fail"):
        engine.serve([5] * 40)
    engine.cache.check()
    assert engine.serve([5] * 40)[1] == 0


@pytest.mark.parametrize("call", range(4))
def test_an_attach_that_fails_leaves_the_prefix_for_the_next(left, call):
    engine = left((PROMPT, None))
    driver = engine.pool.driver
    driver.fail_at = {driver.num_calls + 3 * call}
    with pytest.raises(DriverError, match="told to fail"):
        engine.serve([*PROMPT, 1])
    engine.cache.check()
    assert engine.serve([*PROMPT, 1]) == (96, 0)


LAYOUTS = {"whole": engines.LAYOUT, "straddling": STRADDLING, "windowed": WINDOWED}


@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_what_was_prepared_is_adopted_with_right_rows_and_without_a_map(left, layout):
    engine = left((PROMPT, None), layout=layout)
    known = engine.prefix.match([*PROMPT, 1])
    assert known > 80
    engine.prepare_all()
    calls = Calls(engine.pool.driver)
    attached = engine.prefix.attach([*PROMPT, 1])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ADOPT, known)
    assert not calls.made().keys() & {"import_fd", "map", "unmap"}
    assert engines.wrong_rows(attached.sequence, None, PROMPT, known) == 0
    engines.write(attached.sequence, None, [*PROMPT, 1], known)
    engine.prefix.park(attached.sequence, [*PROMPT, 1])
    assert engine.serve([*PROMPT, 1, 2]) == (len(PROMPT) + 1, 0)


def test_a_prompt_before_that_is_aliased(left):
    engine = left((PROMPT, None))
    attached = engine.prefix.attach([*PROMPT, 1])
    assert (attached.method, attached.num_tokens) == (AttachMethod.ALIAS, 96)
    assert not engine.cache.parked(), "what a sequence has is not prepared"
    engine.prepare_all()
    assert not engine.cache.parked()


def test_the_last_used_prefixes_are_prepared_while_slots_are_free(left):
    prompts = [([number] * 40, "red") for number in range(5)]
    engine = left(*prompts)
    engine.prepare_all(free_slots=3)
    assert engine.cache.stats().num_parked == 3
    methods = [engine.prefix.attach([*tokens, 9], namespace=name).method for tokens, name in reversed(prompts)]
    assert methods == [AttachMethod.ADOPT] * 3 + [AttachMethod.ALIAS] * 2


def test_the_last_used_prefix_is_evicted_last_though_it_was_prepared_first(left):
    engine = left(*(([number] * 40, None) for number in range(3)))
    engine.prepare_all()
    engine.prefix.free_slots(5)
    assert engine.prefix.attach([2] * 41).method is AttachMethod.ADOPT
    engine.prefix.evict(4)
    assert engine.prefix.match([1] * 41) == 0


@pytest.mark.parametrize("num_pieces", [1, 2])
def test_preparing_goes_on_behind_requests_of_all_kinds(left, num_pieces):
    engine = left((PROMPT, None), (LONG, None))
    for _ in range(num_pieces):
        engine.prefix.prepare(0)
    assert engine.serve([7] * 40) == (0, 0), "it takes the slot that was begun"
    assert engine.serve([*LONG[:50], 3]) == (50, 0)
    engine.prepare_all()
    for tokens in (PROMPT, LONG):
        assert engine.prefix.attach([*tokens[:-1], 300]).method is AttachMethod.ADOPT


def test_what_goes_while_a_prefix_is_prepared_is_not_copied(left):
    """The rows behind the last whole page are in pages of the branches below, and one branch goes."""
    branches = [[*PROMPT, *[branch] * 120] for branch in (251, 252)]  # too long for one to adopt the other
    engine = left(*((tokens, None) for tokens in branches))
    (shared,) = engine.prefix.index.tree.match(None, PROMPT).path
    engine.prefix.index.restored[:] = [shared]
    assert engine.prefix.prepare(0)
    engine.prefix.evict(1)
    assert engine.serve([0] * 101, "other") == (0, 0)  # in the memory of what has gone
    engine.prepare_all()
    assert engine.serve([*PROMPT, 0]) == (len(PROMPT), 0)


def test_what_is_prepared_gives_way_to_what_runs(left):
    engine = left((PROMPT, None), (LONG, None))
    engine.prefix.prepare(0)
    with engine.cache.open(tenant="green") as sequence:
        sequence.grow(31 * 16)
        engine.cache.check()
    engine.prepare_all()
    assert not engine.cache.parked()


def test_preparing_without_the_holder_ends(left, holder):
    engine = left((PROMPT, None), (LONG, None))
    engine.prefix.prepare(0)
    holder.kill()
    engine.prepare_all()
    assert engine.prefix.match([*PROMPT, 1]) == 0


@pytest.mark.parametrize("every", [9, pytest.param(1, marks=pytest.mark.nightly)])
@pytest.mark.parametrize("layout", LAYOUTS.values(), ids=LAYOUTS)
def test_preparing_can_fail_at_every_driver_call(path, holder, layout, every):
    engine = start(path, layout=layout)
    engine.ask("serve", LONG)
    engine.ask("serve", PROMPT)
    engine.kill()
    call, num_calls = 0, 1
    while call < num_calls:
        driver = FakeDriver(over=HostDriver())
        engine = Engine(path, driver=driver, layout=layout)
        before = driver.num_calls
        driver.fail_at = {before + call}
        num_failed = 0
        for _ in range(100):
            try:
                if not engine.prefix.prepare(0):
                    break
            except DriverError:
                num_failed += 1
            engine.cache.check()
        num_calls = driver.num_calls - before
        assert len(engine.cache.parked()) == 2 - num_failed, "of a fence that fails another is taken"
        for tokens in (PROMPT, LONG):
            assert engine.serve([*tokens, 1])[1] == 0
        engine.cache.check()
        engine.close()
        assert (driver.live_handles, driver.live_mappings) == (0, 0)
        call += every


@pytest.mark.parametrize("how", ["it is said", "the launch ends", "it is waited for", "the engine ends"])
def test_rows_are_sealed_once_they_are_known_to_be_written(opened, how):
    engine = opened()
    attached = engine.prefix.attach(PROMPT)
    engines.write(attached.sequence, None, PROMPT, 0)
    base = engine.cache.k(0)[attached.sequence.slot].data_ptr()
    launch = engine.pool.driver.launch([(base, base + 1)])
    engine.prefix.insert(attached.sequence, PROMPT, is_written=how == "it is said")
    if how != "it is said":
        assert not engine.pool.holder.log.read().live, "the launch may still write"
        engine.cache.map_ahead()
        assert not engine.pool.holder.log.read().live
        if how == "the launch ends":
            launch.finish()
            engine.cache.map_ahead()
        elif how == "the engine ends":
            [sealed] = engine.prefix.index.followers
            sealed.give_up()
        else:
            engine.cache.drain()
    assert len(engine.pool.holder.log.read().live) == 3


def test_what_a_tier_gives_back_outlives_the_engine_too(path, opened, host):
    engine = Engine(path, tiers=[host])
    engine.serve(PROMPT, "red")
    assert engine.prefix.flush()
    engine.prefix.evict()
    assert not engine.pool.holder.log.read().live
    fetch = engine.prefix.fetch(PROMPT, namespace="red")
    assert engine.prefix.flush()
    assert fetch.num_tokens == 96
    engine.cache.check()
    assert len(engine.pool.holder.log.read().live) == 3
    engine.close()
    engine = opened()
    assert engine.prefix.match([*PROMPT, 1]) == 0
    assert engine.serve([*PROMPT, 1], "red") == (96, 0)


@pytest.mark.parametrize("is_gone", [False, True])
def test_what_an_earlier_engine_left_is_stored_in_a_tier_once_it_is_used(path, holder, host, opened, is_gone):
    engine = start(path)
    engine.ask("serve", PROMPT)
    engine.kill()
    engine = opened(tiers=[host])
    computed = engine.prefix.attach(PROMPT, method="compute").sequence
    engines.write(computed, None, PROMPT, 0)
    if is_gone:
        holder.kill()
    engine.prefix.insert(computed, PROMPT)
    assert engine.pool.driver.calls["import_fd"] == 4, "those of the sequence: the tree keeps those that it had"
    assert engine.prefix.flush()
    engine.cache.check()
    computed.close()
    engine.prefix.evict()
    fetch = engine.prefix.fetch([*PROMPT, 1])
    assert engine.prefix.flush()
    if is_gone:
        assert fetch is None, "nothing could be stored"
        assert engine.prefix.match([*PROMPT, 1]) == 0
    else:
        assert engine.serve([*PROMPT, 1]) == (96, 0)


def test_a_full_log_seals_no_more_and_is_rewritten_where_a_drop_has_no_room(path, opened, caplog, monkeypatch):
    engine = Engine(path)
    for name in "ab":
        engine.serve(PROMPT, name * 4_000_000)
    assert "is full" in caplog.text
    engine.serve(PROMPT, "small")
    engine.cache.check()
    assert len(engine.pool.holder.log.read().live) == 6
    with monkeypatch.context() as patch:
        patch.setattr(engine.pool.holder.log, "drop", lambda serial: False)
        assert engine.prefix.evict(7) == 12, "the first and the second prefix"
    engine.cache.drain()
    engine.cache.check()
    engine.close()
    engine = opened()
    assert [engine.prefix.match([*PROMPT, 1], namespace=name) for name in ("a" * 4_000_000, "small")] == [0, 96]


def test_a_budget_above_the_machines_memory_is_refused(path):
    with pytest.raises(BudgetError, match=r"a budget of 1048576\.0 TiB is more than this machine.* in all; lower it"):
        process.Holder(path, 2**60, HostDriver(), print)
    assert not path.exists()


def test_the_command_holds_until_sigterm_and_names_the_holder_of_a_socket(path):
    command = [sys.executable, "-m", "vmmkv", "hold", "--socket", str(path), "--budget", "96MiB", "--device", "cpu"]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as first:
        assert first.stderr is not None
        assert f"96.0 MiB of host memory at {path}" in first.stderr.readline()
        second = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        assert second.returncode == 1
        assert f"in use by process {first.pid}" in second.stderr
        engine = start(path)
        assert engine.ask("serve", PROMPT) == (0, 0)
        first.terminate()
        told = first.stderr.read()
        assert first.wait(60) == 0
    assert f"process {engine.pid} has come" in told
    assert "ended" in told
    assert not path.exists()
    assert "OutOfPages" in engine.ask("serve", PROMPT * 2, "red")


@pytest.mark.parametrize(
    ("num_kills", "windowed"),
    [(3, False), pytest.param(20, False, marks=pytest.mark.nightly), pytest.param(20, True, marks=pytest.mark.nightly)],
)
def test_engines_killed_under_load_leave_right_rows_and_books(path, opened, num_kills, windowed):
    draw, warm = random.Random(num_kills), []
    for seed in range(num_kills):
        engine = Process(engines.busy_engine, path, seed, 600, windowed)
        warm.append(engine.get())
        assert engine.get() == "sealed"
        assert not engine.pipe.poll(draw.uniform(0.2, 1.0)), engine.pipe.recv()
        engine.kill()
    assert warm[0] == 0
    assert all(warm[1:]), "each one found what the one before had sealed"
    opened(layout=WINDOWED if windowed else engines.LAYOUT).cache.check()


@pytest.mark.parametrize("num_kills", [1, pytest.param(20, marks=pytest.mark.nightly)])
def test_holders_killed_under_load_leave_an_engine_with_right_rows(path, num_kills):
    for seed in range(num_kills):
        holder = start_holder(path)
        engine = Process(engines.busy_engine, path, seed, 1.0)
        assert (engine.get(), engine.get()) == (0, "sealed")
        time.sleep(random.Random(seed).uniform(0.1, 0.6))
        holder.kill()
        assert engine.get() == "served on", "no row was wrong, and the books are right"
        engine.kill()


# the log


def seal(serial, tokens, parent=None, behind=0):
    """A seal of these tokens, behind so many of its parent's."""
    packed = np.array(tokens, np.int32).tobytes()
    return Sealed(serial, parent, behind + len(tokens), 0, 0, serial, 1, b"None" if parent is None else b"", packed)


def test_a_log_whose_header_is_damaged_can_be_written_anew(log):
    writer, fd = log
    os.pwrite(fd, b"\xff" * 8, 8)
    with pytest.raises(LogDamaged):
        writer.read()
    writer.rewrite(b"model", [seal(1, [5])])
    assert list(writer.read().live) == [1]


@pytest.fixture
def log():
    fd = SealedLog.create(MIB)
    log = SealedLog(fd)
    yield log, fd
    log.close()
    os.close(fd)


def test_a_client_can_neither_cut_nor_lengthen_the_log(log):
    _, fd = log
    for size_bytes in (0, os.fstat(fd).st_size + 1):
        with pytest.raises(PermissionError):
            os.ftruncate(fd, size_bytes)


def test_a_log_says_what_was_sealed_and_not_dropped_whoever_reads_it(log):
    writer, fd = log
    writer.rewrite(b"model", ())
    draw, live, places = random.Random(0), {}, {}
    for serial in range(1, 1500):
        if live and draw.random() < 0.5:
            gone = draw.choice(list(live))
            del live[gone]
            assert writer.drop(gone)
        parent, behind = draw.choice([*places.values(), (None, 0)])
        one = seal(serial, list(draw.randbytes(draw.randint(1, 300))), parent, behind)
        place = writer.seal(one)
        if place is not None:
            places[serial], live[serial] = (place, one.end_token), one
        if place is None or writer.is_due:
            live = {serial: seal(serial, np.frombuffer(one.tokens, np.int32)) for serial, one in live.items()}
            assert all(place is not None for place in writer.rewrite(b"model", live.values()))
            places.clear()
        if serial % 100 == 0:
            reader = SealedLog(fd)
            contents = reader.read()
            reader.close()
            assert {serial: contents.seals[place] for serial, place in contents.live.items()} == live
            assert contents.identity == b"model"


class Words:
    """The words of a log, which is read again after each store to one."""

    def __init__(self, words, fd):
        self.words, self.fd, self.seen = words, fd, []

    def __getitem__(self, index):
        return self.words[index]

    def __setitem__(self, index, value):
        self.words[index] = value
        reader = SealedLog(self.fd)
        self.seen.append(list(reader.read().live))
        reader.close()

    def release(self):
        self.words.release()


def test_a_writer_that_is_killed_at_any_store_leaves_a_log_of_before_or_after(log):
    writer, fd = log
    writer.rewrite(b"model", ())
    writer.words = words = Words(writer.words, fd)
    for serial in (1, 2, 3):
        writer.seal(seal(serial, [serial] * 4))
    writer.drop(2)
    assert words.seen == [[1], [1, 2], [1, 2, 3], [1, 3]]
    words.seen.clear()
    writer.rewrite(b"model", [seal(3, [3] * 4), seal(1, [1] * 4)])
    assert words.seen == [[1, 3]] * 5 + [[3, 1]]


def test_a_record_that_was_not_finished_does_not_count(log):
    writer, fd = log
    writer.seal(seal(1, [1, 2, 3, 4]))
    os.pwrite(fd, b"\xff" * 100, 4096 + writer.used_bytes)  # a writer was killed in the midst of the next one
    assert list(writer.read().live) == [1]
    assert writer.seal(seal(2, [5])) is not None
    assert list(writer.read().live) == [1, 2]


def test_a_log_with_other_bytes_than_were_written_is_refused_as_a_whole(log):
    writer, fd = log
    writer.seal(seal(1, [1, 2, 3, 4]))
    writer.drop(1)
    os.pwrite(fd, b"\xff", 4096 + 30)
    with pytest.raises(LogDamaged, match="another checksum"):
        writer.read()


def test_sources_and_sealed_prefixes_override_the_hooks_that_they_answer() -> None:
    """A hook that is not overridden does nothing, and would not be missed."""
    assert hooks(IndexFollower) - hooks(SealedPrefixes) == {"extended", "finish", "held", "left", "locks"}
    assert hooks(ExtentSource) - hooks(HolderSource) == {"borrowed_bytes", "holder", "lender"}
    assert hooks(ExtentSource) - hooks(LenderSource) == {
        *("borrowed_bytes", "check_budget", "create", "holder", "lender", "text_if_ended"),
    }
