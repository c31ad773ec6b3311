"""What others can write to a holder's log, or send to a holder and its engines: any of it is taken, or refused as damage.

The log is shared memory, and each process that a holder welcomes can write to it. Whatever stands there with right checksums,
the next engine starts, warm or cold, and its books are right.
"""

import contextlib
import json
import os
import socket
import struct
import threading
import zlib

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from tests.unit.holder_engines import BUDGET_BYTES, LONG, PROMPT, Engine, holder, opened, path
from tests.unit.support import LAYOUT, WINDOWED
from vmmkv import HolderUnavailable
from vmmkv.driver.host import HostDriver
from vmmkv.errors import HolderGone, LogDamaged
from vmmkv.holder import HolderClient, Sealed, SealedLog, messages, process
from vmmkv.testing.fake_driver import FakeDriver
from vmmkv.units import MIB, PAGE_BYTES

__all__ = ["holder", "opened", "path"]

CPU = torch.device("cpu")
RED = [5] * 40
RECORD, SEAL = struct.Struct("<IIc"), struct.Struct("<QQQQIIII")
PROMPTS = [(PROMPT, None), (LONG, None), (RED, ("red", 1))]
CHANGED = {
    "serial": st.sampled_from([0, 10**6, 2**63, 2**64 - 1]) | st.integers(1, 12),
    "parent": st.none() | st.integers(0, 2000),
    "end_token": st.sampled_from([0, 2**63, 2**64 - 1]) | st.integers(0, 400),
    "first_token": st.sampled_from([2**63, 2**64 - 1]) | st.integers(0, 400),
    "group": st.sampled_from([2**32 - 1]) | st.integers(0, 3),
    "page": st.sampled_from([2**31, 2**32 - 1]) | st.integers(0, 40),
    "num_pages": st.sampled_from([0, 2**32 - 1]) | st.sampled_from([1, 2, 3, 4, 16]),
    "namespace": st.sampled_from([b"(", b"\xff", b"", b"1.0", b"[]", b"True", b"(1 , 2)", b"'red'", b"-" * 5000 + b"1"]),
    "tokens": st.binary(max_size=64) | st.sampled_from([bytes(4 * 16), b"\xff" * 64, bytes(3)]),
}


@contextlib.contextmanager
def held(path, driver=None):
    """A holder in a thread; the lines that it reports."""
    told = []
    holder = process.Holder(path, BUDGET_BYTES, driver or HostDriver(), told.append)
    thread = threading.Thread(target=holder.run)
    thread.start()
    try:
        yield told
    finally:
        holder.stop()
        thread.join(60)
        holder.close()


@contextlib.contextmanager
def left_fd(path):
    """The descriptor of a holder's log, for a process that neither owns nor borrows."""
    with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as connection:
        connection.connect(str(path))
        _, (fd,), *_ = socket.recv_fds(connection, 1 << 16, 1)
        connection.send(b'{"do": "count"}')
        connection.recv(1 << 16)  # it hears an owner to its end first, and then frees what the log does not name
        try:
            yield fd
        finally:
            os.close(fd)


@contextlib.contextmanager
def left_log(path):
    """That log."""
    with left_fd(path) as fd, contextlib.closing(SealedLog(fd)) as log:
        yield log


def served(path, layout=LAYOUT, prompts=PROMPTS):
    """An engine's tokens attached of each prompt. Its rows and books are right, and it leaves nothing in its driver."""
    driver, found = FakeDriver(over=HostDriver()), []
    with contextlib.closing(Engine(path, driver=driver, layout=layout)) as engine:
        engine.cache.check()
        for tokens, namespace in prompts:
            num_tokens, wrong = engine.serve([*tokens, 1], namespace)
            assert not wrong
            found.append(num_tokens)
            engine.cache.check()
    assert (driver.live_handles, driver.live_mappings) == (0, 0)
    return found


class LogBytes:
    """The active half of a log, by the format that vmmkv/holder/log.py describes and without its checks."""

    HEADER_BYTES = 4096

    def __init__(self, fd):
        self.fd = fd
        self.half = struct.unpack("<Q", os.pread(fd, 8, 8))[0] % 2
        self.start = self.HEADER_BYTES + self.half * (os.fstat(fd).st_size - self.HEADER_BYTES) // 2

    def used_bytes(self):
        return struct.unpack("<Q", os.pread(self.fd, 8, 8 * (2 + self.half)))[0]

    def records(self):
        """Kind and body of each record."""
        place, found = 0, []
        while place < self.used_bytes():
            size_bytes, _, kind = RECORD.unpack(os.pread(self.fd, RECORD.size, self.start + place))
            found.append((kind, os.pread(self.fd, size_bytes, self.start + place + RECORD.size)))
            place += RECORD.size + size_bytes
        return found

    def append(self, kind, body):
        used_bytes = self.used_bytes()
        os.pwrite(self.fd, RECORD.pack(len(body), zlib.crc32(kind + body), kind) + body, self.start + used_bytes)
        self.use(used_bytes + RECORD.size + len(body))

    def use(self, used_bytes):
        os.pwrite(self.fd, struct.pack("<Q", used_bytes), 8 * (2 + self.half))

    def write(self, written):
        """Write records in place of all that is there."""
        self.use(0)
        for kind, body in written:
            self.append(kind, body)


def changed_seal(body, what, value):
    """The bytes of a seal with another value in one of its fields, whatever they are."""
    serial, parent, end, first, group, page, num_pages, name_bytes = SEAL.unpack_from(body)
    name, tokens = body[SEAL.size :][:name_bytes], body[SEAL.size :][name_bytes:]
    seal = Sealed(serial, parent - 1 if parent else None, end, first, group, page, num_pages, name, tokens)
    serial, parent, *numbers, name, tokens = seal._replace(**{what: value})
    return SEAL.pack(serial, 0 if parent is None else parent + 1, *numbers, len(name)) + name + tokens


@pytest.mark.parametrize(
    "changed",
    [
        {"namespace": b"("},
        {"namespace": b"\xff"},
        {"namespace": b"1.0"},
        {"namespace": b""},
        {"group": 9},
        {"num_pages": 3},
        {"num_pages": 4, "page": 2},
        {"page": 2**31},
        {"page": 1},
        {"serial": 10**6},
        {"end_token": 15},
        {"first_token": 16},
        {"tokens": bytes(3)},
        {"tokens": b"\xff" * 64},
        {"parent": 7},
    ],
    ids=str,
)
def test_an_engine_starts_cold_from_a_log_with_a_seal_that_no_engine_writes(path, caplog, changed):
    with held(path):
        assert served(path, prompts=[([2] * 60, None)]) == [0]
        with left_log(path) as log:
            serial = max(log.read().live)
            log.drop(serial)
            right = Sealed(serial, None, 16, 0, 0, 0, 1, b"None", np.full(16, 3, np.int32).tobytes())
            log.seal(right._replace(**changed))
        caplog.clear()
        assert served(path, prompts=[([2] * 60, None)]) == [0], "cold"
        assert caplog.text.count("starting cold") == 1 and "damaged" in caplog.text
        assert served(path, prompts=[([2] * 60, None)]) == [60 // 16 * 16], "and the next one is warm"


def test_a_handle_is_sealed_once_until_it_is_dropped(path, caplog):
    with held(path):
        assert served(path, prompts=[([2] * 60, None)]) == [0]
        with left_log(path) as log:
            contents = log.read()
            log.seal(next(seal for seal in contents.seals.values() if seal.parent is None))
        assert served(path, prompts=[([2] * 60, None)]) == [0]
        assert "damaged" in caplog.text


def test_an_extent_stands_at_a_multiple_of_its_size(path, caplog):
    with held(path):
        assert served(path, prompts=[([2] * 100, None)]) == [0]
        with left_log(path) as log:
            contents = log.read()
            seal = next(seal for seal in contents.seals.values() if seal.num_pages == 4)
            for serial in contents.live:
                log.drop(serial)
            log.seal(seal._replace(page=2, end_token=96, tokens=np.full(96, 2, np.int32).tobytes()))
        assert served(path, prompts=[([2] * 100, None)]) == [0]
        assert "damaged" in caplog.text


def test_a_seal_goes_on_from_one_that_ends_before_it(path, caplog):
    with held(path):
        assert served(path, prompts=[([2] * 100, None)]) == [0]
        with left_log(path) as log:
            seals = log.read().seals
            (last, seal) = max(seals.items(), key=lambda each: each[1].end_token)
            log.drop(seal.serial)
            log.seal(Sealed(seal.serial, last, 16, 0, 0, 0, 1, b"", b""))
        assert served(path, prompts=[([2] * 100, None)]) == [0]
        assert "damaged" in caplog.text


def test_two_handles_that_are_sealed_for_the_same_rows_are_damage(path, caplog):
    with held(path):
        served(path)
        with left_log(path) as log:
            contents = log.read()
            single = [seal for seal in map(contents.seals.get, contents.live.values()) if seal.num_pages == 1]
            first, second = single[0].serial, single[-1].serial
            log.drop(second)
            log.seal(single[0]._replace(serial=second))
        served(path)
        assert f"handles {first} and {second} are sealed for the same rows" in caplog.text


def test_an_extent_that_is_sealed_with_fewer_rows_than_it_has_is_held_once(path):
    with held(path):
        served(path, WINDOWED)
        with left_fd(path) as fd:
            log = LogBytes(fd)
            log.write(edited(log.records(), 18, "first_token", 1))  # a page that a later prompt is attached to
        served(path, WINDOWED)


def test_a_borrower_takes_nothing_from_a_damaged_log_and_says_so_once(path, caplog):
    with held(path), contextlib.closing(Engine(path)) as owner:
        owner.serve(PROMPT)
        with contextlib.closing(Engine(path, borrows=True)) as borrower:
            owner.pool.holder.log.seal(Sealed(10**6, None, 16, 0, 9, 0, 1, b"None", bytes(64)))
            for _ in range(3):
                assert borrower.serve([*PROMPT, 1])[1] == 0
            borrower.cache.check()
    assert caplog.text.count("damaged") == 1


def test_a_borrower_computes_what_a_handle_of_another_size_was_to_hold(path, caplog):
    with held(path), contextlib.closing(Engine(path)) as owner:
        owner.serve([4] * 60)
        log = owner.pool.holder.log
        serial = max(log.read().live)
        log.drop(serial)
        log.seal(Sealed(serial, None, 64, 0, 0, 0, 4, b"None", np.full(64, 3, np.int32).tobytes()))
        with contextlib.closing(Engine(path, borrows=True)) as borrower:
            assert borrower.serve([3] * 80) == (0, 0)
            borrower.cache.check()
    assert "has 2097152 bytes, and its seal 8388608" in caplog.text


EDITS = st.one_of(
    *(st.tuples(st.just(name), values) for name, values in CHANGED.items()),
    st.tuples(st.just("kind"), st.sampled_from([b"i", b"s", b"d", b"x"])),
    st.tuples(st.just("cut"), st.integers(0, 100)),
    st.tuples(st.just("drop"), st.integers(0, 12)),
    st.tuples(st.sampled_from(["twice", "gone"]), st.none()),
)


def edited(written, number, what, value):
    """Records of which one is changed, doubled or taken away, or with a drop behind it."""
    kind, body = written[number]
    if what in CHANGED and kind == b"s" and len(body) >= SEAL.size:
        body = changed_seal(body, what, value)
    if what == "kind":
        kind = value
    elif what == "cut":
        body = body[:value]
    now = [(kind, body)] * {"twice": 2, "gone": 0}.get(what, 1)
    if what == "drop":
        now.append((b"d", value.to_bytes(8, "little")))
    return [*written[:number], *now, *written[number + 1 :]]


@pytest.mark.nightly
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("layout", [LAYOUT, WINDOWED], ids=["whole", "windowed"])
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
@given(edits=st.lists(st.tuples(st.integers(0, 30), EDITS), min_size=1, max_size=3))
def test_whatever_stands_in_a_log_with_right_checksums_the_next_engine_starts(tmp_path_factory, layout, edits):
    path = tmp_path_factory.mktemp("holder") / "kv.sock"
    with held(path):
        served(path, layout)
        with left_fd(path) as fd:
            log = LogBytes(fd)
            written = log.records()
            for number, (what, value) in edits:
                written = edited(written, number % len(written), what, value) if written else []
            log.write(written)
        driver = FakeDriver(over=HostDriver())
        with contextlib.closing(Engine(path, driver=driver, layout=layout)) as engine:
            engine.cache.check()
            for tokens, namespace in PROMPTS:
                engine.serve([*tokens, 1], namespace)  # tokens that were changed have the rows of others
                engine.cache.check()
            engine.give_up()
            engine.cache.check()
            for tokens, namespace in PROMPTS:
                assert engine.serve(tokens, namespace)[1] == 0
        assert (driver.live_handles, driver.live_mappings) == (0, 0)


@pytest.mark.nightly
@settings(max_examples=2000, deadline=None)
@given(st.binary(max_size=300), st.dictionaries(st.sampled_from([8, 16, 24, 32, 40]), st.integers(0, 2**64 - 1)))
def test_bytes_that_are_no_log_are_damage_and_can_be_written_over(body, words):
    fd = SealedLog.create(MIB)
    with contextlib.closing(SealedLog(fd)) as log:
        log.seal(Sealed(1, None, 16, 0, 0, 0, 1, b"None", bytes(64)))
        LogBytes(fd).append(b"s", body)
        for at, value in words.items():
            os.pwrite(fd, struct.pack("<Q", value), at)
        with contextlib.suppress(LogDamaged):
            log.read()
        log.seal(Sealed(2, None, 16, 0, 0, 0, 1, b"None", bytes(64)))
        log.drop(1)
        log.rewrite(b"model", [Sealed(3, None, 16, 0, 0, 0, 1, b"None", bytes(64))])
        assert list(log.read().live) == [3]
    os.close(fd)


# messages

FIELDS = {
    "version": messages.VERSION,
    "device": "host memory",
    "budget_bytes": BUDGET_BYTES,
    "serials": [1],
    "sizes_bytes": [PAGE_BYTES],
    "held_bytes": 0,
}
NO_FIELDS = [None, True, -1, 1.0, 10**20, "1", [], {}, [True], [-1], ["1"], [1, 1], [1] * 2000]


class OddHolder:
    """A holder that answers with what it is told."""

    def __init__(self, path):
        self.path = path
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen()
        self.log_fd = SealedLog.create(MIB)
        self.answers = []
        self.thread = threading.Thread(target=self._run)
        self.thread.start()

    def _run(self):
        connection, _ = self.listener.accept()
        with contextlib.closing(connection), contextlib.suppress(OSError):
            for packet, num_fds in self.answers:
                socket.send_fds(connection, [packet], [self.log_fd] * num_fds)
                if not connection.recv(1 << 16):
                    return

    def close(self):
        self.thread.join(60)
        self.listener.close()
        self.path.unlink()
        os.close(self.log_fd)


def asked(path, answers, ask):
    """Ask a holder that gives these answers, each with descriptors; those that are left open are counted."""
    with contextlib.closing(OddHolder(path)) as holder:
        holder.answers += answers
        before = len(os.listdir("/proc/self/fd"))
        try:
            with contextlib.closing(HolderClient(path, CPU)) as asking:
                ask(asking)
        finally:
            holder.thread.join(60)
            assert len(os.listdir("/proc/self/fd")) <= before  # fewer if others were collected


def packet(**fields):
    return json.dumps(fields).encode()


WELCOME = packet(**{name: FIELDS[name] for name in ("version", "device", "budget_bytes")}), 1
JOINED = b"{}", 0
ASKS = {
    "create": (("serials",), 1, lambda asking: asking.create(PAGE_BYTES)),
    "open": (("serials", "sizes_bytes"), 1, lambda asking: [os.close(fd) for _, fd in asking.open({1: PAGE_BYTES})]),
    "handles": (("serials", "sizes_bytes"), 0, lambda asking: asking.handles()),
    "held_bytes": (("held_bytes",), 0, lambda asking: asking.held_bytes()),
}


@pytest.mark.parametrize("name", ["version", "device", "budget_bytes"])
def test_a_welcome_that_is_none_is_refused(path, name):
    for value in [value for value in NO_FIELDS if not (name == "device" and value == "1")]:
        fields = {each: FIELDS[each] for each in ("version", "device", "budget_bytes")} | {name: value}
        with pytest.raises(HolderUnavailable):
            asked(path, [(packet(**fields), 1)], lambda asking: None)
    for odd in ((WELCOME[0], 0), (WELCOME[0], 2), (b"[" * 60_000, 1), (b"7", 1), (b"\xff", 0), (packet(error=7), 0)):
        with pytest.raises(HolderUnavailable):
            asked(path, [odd], lambda asking: None)


@pytest.mark.parametrize("call", ASKS)
def test_an_answer_that_is_none_ends_the_connection_and_leaves_no_descriptor(path, call):
    names, num_fds, ask = ASKS[call]
    odd = [(b"7", num_fds), (b"[" * 60_000, num_fds), (b"{}", num_fds), (packet(error=7, code="x"), num_fds)]
    for name in names:
        odd += [(packet(**{each: FIELDS[each] for each in names} | {name: value}), num_fds) for value in NO_FIELDS]
    right = packet(**{each: FIELDS[each] for each in names})
    odd += [(right, number) for number in (0, 2) if num_fds and number != num_fds]
    for answer in odd:
        if call == "handles" and answer[0] == packet(serials=[], sizes_bytes=[]):
            continue
        with pytest.raises(HolderGone):
            asked(path, [WELCOME, JOINED, answer], ask)


ODD_VALUES = (
    st.sampled_from([*NO_FIELDS, 2**62, [2**62], "own", "borrow"]) | st.integers() | st.lists(st.integers(), max_size=3)
)


@pytest.mark.nightly
@settings(max_examples=1000, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.lists(
        st.dictionaries(
            st.sampled_from(["do", "serials", "size_bytes", "after", "more"]),
            ODD_VALUES | st.sampled_from(["own", "borrow", "create", "open", "release", "list", "count"]),
        )
        | st.binary(max_size=50),
        max_size=6,
    )
)
def test_whatever_is_asked_a_holder_serves_the_next_engine_and_its_books_are_right(tmp_path_factory, messages):
    path = tmp_path_factory.mktemp("holder") / "kv.sock"
    with held(path):
        with contextlib.closing(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)) as odd, contextlib.suppress(OSError):
            odd.connect(str(path))
            odd.recv(1 << 16)
            for message in messages:
                odd.send(message if isinstance(message, bytes) else json.dumps(message).encode())
                odd.settimeout(0.01)
                with contextlib.suppress(TimeoutError):
                    odd.recv(1 << 16)
        with contextlib.closing(HolderClient(path, CPU)) as next_one:
            assert (next_one.held_bytes(), next_one.handles(), next_one.log.num_borrowers) == (0, {}, 0)
