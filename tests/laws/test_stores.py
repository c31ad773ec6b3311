"""Stores that engines share: what they find of each other, and that a store which fails is a miss and is left alone."""

import contextlib
import itertools
import logging
import signal
import socket
import threading
from importlib.metadata import EntryPoint

import pytest
import redis

from tests.laws.faulty_tier import FaultyStore
from tests.laws.test_tiers import CPU, NUM_RECORDS, found, key_of, load, store
from tests.stores import free_port, mooncake_store, redis_server, until
from vmmkv import TierUnavailable
from vmmkv.tiers import MooncakeTier, RedisTier, Transfer, open_store, shared
from vmmkv.tiers.record import RECORD_BYTES

PASSWORD = "pa55 w/rd"
MOONCAKE = pytest.param(mooncake_store, MooncakeTier, marks=pytest.mark.nightly, id="mooncake")
both = pytest.mark.parametrize(("start", "kind"), [pytest.param(redis_server, RedisTier, id="redis"), MOONCAKE])


class Clock:
    """What stores take to be the time: it stands still until it is told to go on."""

    now_s = 0.0

    def monotonic(self) -> float:
        return self.now_s

    def pass_for(self, seconds: float) -> None:
        self.now_s += seconds


@pytest.fixture(autouse=True)
def clock(monkeypatch):
    clock = Clock()
    monkeypatch.setattr(shared, "time", clock)
    return clock


@pytest.fixture
def server():
    with redis_server() as server:
        yield server


@pytest.fixture
def make():
    """Open tiers, which are closed at the end."""
    tiers = []

    def make(url, kind=RedisTier, timeout_s=60.0):
        tiers.append(kind(url, timeout_s=timeout_s))
        tiers[-1].open(CPU)
        return tiers[-1]

    yield make
    for tier in tiers:
        tier.close()


def is_left_alone(tier) -> bool:
    try:
        tier.lookup([key_of(0)])
    except TierUnavailable:
        return True
    return False


def works(tier, clock) -> bool:
    """Does it, when it has been left alone for so long that it is tried again?"""
    clock.pass_for(shared._LONGEST_PAUSE_S)
    try:
        return (store(tier, 20) or found(tier, 20) == [True]) and load(tier, 20)
    except TierUnavailable:
        return False


def value_of(tier, number: int) -> str:
    return f"vmmkv:{key_of(number).hex()}"


@both
def test_a_tier_finds_what_another_stored_and_not_for_ever_what_is_gone(make, start, kind, clock):
    with start() as server:
        one, other = make(server.url, kind), make(server.url, kind)
        assert found(other, 1) == [False]
        assert store(one, 1) and found(other, 1) == [False]
        clock.pass_for(shared._LACKED_S)
        assert found(other, 1) == [True]
        assert load(other, 1) and not store(other, 1)
        server.empty()
        assert found(other, 1) == [True]
        clock.pass_for(shared._KNOWN_S)
        assert found(other, 1) == [False]
        assert store(other, 1) and load(one, 1)
        one.close(), other.close()


@both
def test_a_store_that_is_killed_in_the_middle_is_left_alone_and_comes_back(make, start, kind, clock, caplog, monkeypatch):
    with start() as server:
        tier = make(server.url, kind)
        num_buffers = len(tier._buffers)
        assert store(tier, 1) and found(tier, *range(2, 14))[0] is False
        lent = [tier.store(key_of(number)) for number in range(2, 14)] + [tier.load(key_of(1)) for _ in range(8)]
        server.kill() if kind is RedisTier else server.kill_master()
        for transfer in lent:
            (tier.finished if transfer.is_store else tier.drop)(transfer)
        tier.flush()
        until(lambda: all(transfer.is_store or transfer.ended for transfer in lent))  # one may have been answered before
        until(lambda: len(tier._buffers) == num_buffers and not tier._storing)
        until(lambda: is_left_alone(tier))
        with monkeypatch.context() as patch:
            patch.setattr(tier, "ask", lambda _: pytest.fail("it is asked"))
            assert all(is_left_alone(tier) and tier.load(key_of(1)).missed for _ in range(1000))
        server.start() if kind is RedisTier else server.start_master()
        until(lambda: works(tier, clock))
        said = [record.getMessage() for record in caplog.records]
        assert "does not answer" in said[0] and "answers again" in said[-1]
        tier.close()


@pytest.mark.parametrize(
    "change",
    [
        lambda value: value[:30] + bytes([value[30] ^ 1]) + value[31:],
        lambda value: bytes([value[0] ^ 1]) + value[1:],
        lambda value: value[:8] + bytes(8) + value[16:],
        lambda value: value[:-1],
        lambda value: value + b"\0",
        lambda value: value[:7],
        lambda value: b"",
        lambda value: value[20:],
        lambda value: b"\x80\x04" + value[2:],
    ],
    ids=["a byte", "the magic", "the length", "shorter", "longer", "a part of the header", "empty", "no header", "a pickle"],
)
def test_a_value_that_is_not_the_record_is_a_miss_and_is_removed(make, server, change):
    tier, client = make(server.url), server.client()
    assert store(tier, 1)
    client.set(value_of(tier, 1), change(client.get(value_of(tier, 1))))
    assert not load(tier, 1)
    assert tier.stats().errors == 1 and not client.exists(value_of(tier, 1))
    assert found(tier, 1) == [False]
    assert store(tier, 1) and load(tier, 1)


TYPES = {
    "list": lambda client, name: client.rpush(name, b"x"),
    "set": lambda client, name: client.sadd(name, b"x"),
    "hash": lambda client, name: client.hset(name, b"x", b"y"),
    "stream": lambda client, name: client.xadd(name, {b"x": b"y"}),
}


@pytest.mark.parametrize("put", TYPES.values(), ids=TYPES)
def test_a_key_of_another_type_is_one_miss_is_removed_and_pauses_nothing(make, server, put):
    tier, client = make(server.url), server.client()
    put(client, value_of(tier, 1))
    assert found(tier, 1, 2) == [True, False] and not load(tier, 1)
    assert tier.stats().errors == 1 and not client.exists(value_of(tier, 1)) and not is_left_alone(tier)
    assert store(tier, 1) and load(tier, 1)


def test_a_wrong_record_that_the_store_does_not_remove_pauses_nothing(make, server):
    tier, client = make(server.url), server.client()
    client.set(value_of(tier, 1), b"wrong")
    client.acl_setuser("default", enabled=True, commands=["-unlink"])  # else no new connection is let in
    assert found(tier, 1) == [True] and not load(tier, 1)
    assert not is_left_alone(tier) and store(tier, 2) and load(tier, 2)


@both
def test_a_value_that_is_too_long_is_not_read_and_is_removed(make, start, kind, monkeypatch):
    with start() as server:
        tier, got = make(server.url, kind), []
        get = tier.get
        monkeypatch.setattr(tier, "get", lambda name: got.append(get(name)) or got[-1])
        server.put(value_of(tier, 1), bytes(80 * RECORD_BYTES // 2))
        assert found(tier, 1) == [True] and not load(tier, 1)
        assert len(got[0]) != tier.value_bytes and len(got[0]) < 2 * tier.value_bytes
        assert tier.stats().errors == 1 and not is_left_alone(tier)
        until(lambda: not server.has(value_of(tier, 1)))
        assert store(tier, 1) and load(tier, 1)
        tier.close()


def test_a_record_under_the_name_of_another_is_a_miss(make, server):
    """As if names of two namespaces met."""
    tier, client = make(server.url), server.client()
    assert store(tier, 1)
    client.set(value_of(tier, 2), client.get(value_of(tier, 1)))
    assert found(tier, 2) == [True] and not load(tier, 2) and load(tier, 1)


def test_what_was_not_asked_before_a_close_is_asked_when_the_tier_is_open_again():
    tier, asked, ends = FaultyStore(NUM_RECORDS), [], threading.Event()
    ask = tier.ask
    tier.ask = lambda names: (asked.append(names), ends.wait(60), ask(names))[2]
    tier.open(CPU)
    until(lambda: asked)
    assert tier.lookup([key_of(1)]) is None  # behind the first question
    closing = threading.Thread(target=tier.close)
    closing.start()
    until(lambda: tier._asker is None)
    ends.set()
    closing.join()
    tier.open(CPU)
    assert found(tier, 1) == [False]
    tier.close()


def test_what_an_interrupted_close_has_cancelled_is_asked_when_the_tier_is_open_again(monkeypatch):
    tier, ends = FaultyStore(NUM_RECORDS), threading.Event()
    ask = tier.ask
    monkeypatch.setattr(tier, "ask", lambda names: ends.wait(60) and ask(names))
    tier.open(CPU)
    assert tier.lookup([key_of(1)]) is None  # behind the first question

    def shutdown(**options):
        ends.set()
        end(**options)
        raise KeyboardInterrupt

    end = tier._asker.shutdown
    monkeypatch.setattr(tier._asker, "shutdown", shutdown)
    with pytest.raises(KeyboardInterrupt):
        tier.close()
    tier.close()
    tier.open(CPU)
    assert found(tier, 1) == [False]
    tier.close()


def test_a_store_that_answers_a_tier_opened_again_is_left_alone_when_it_fails():
    tier = FaultyStore(NUM_RECORDS)
    tier.fault = "gone"
    tier.open(CPU)
    until(lambda: is_left_alone(tier))
    tier.close()
    tier.fault = None
    tier.open(CPU)
    until(lambda: not is_left_alone(tier))
    assert found(tier, 0) == [False]
    tier.fault = "gone"
    tier.lookup([key_of(1)])
    until(lambda: is_left_alone(tier))
    tier.close()


def test_what_a_store_had_is_not_believed_after_an_outage(clock):
    """It may come back empty."""
    tier = FaultyStore(NUM_RECORDS)
    tier.open(CPU)
    assert store(tier, 1) and found(tier, 1, 2) == [True, False]
    tier.fault = "gone"
    tier.lookup([key_of(3)])
    until(lambda: is_left_alone(tier))
    tier.values.clear()
    tier.fault = None
    clock.pass_for(shared._FIRST_PAUSE_S)
    until(lambda: not is_left_alone(tier))
    assert shared._FIRST_PAUSE_S < shared._KNOWN_S and found(tier, 1) == [False]
    assert tier.stats().held_bytes == 0 and store(tier, 1) and load(tier, 1)
    tier.close()


def test_a_store_that_stays_away_is_asked_half_as_often_each_time(clock):
    tier, asked = FaultyStore(NUM_RECORDS), []
    tier.fault = "gone"
    answer = tier._answer
    tier._answer = lambda: (asked.append(clock.now_s), answer())
    tier.open(CPU)
    until(lambda: is_left_alone(tier) and len(asked) == 1)
    for _ in range(63):
        clock.pass_for(shared._FIRST_PAUSE_S / 2)
        is_left_alone(tier)  # asks, if it is time to
        until(lambda: not tier._probing)
    pauses = [(later - earlier) / shared._FIRST_PAUSE_S for earlier, later in itertools.pairwise(asked)]
    assert pauses == [1, 2, 4, 8, 16]
    tier.close()


def test_an_answer_to_an_old_call_does_not_end_a_stores_pause(clock):
    tier, begun, ends = FaultyStore(NUM_RECORDS), threading.Event(), threading.Event()
    tier.open(CPU)
    assert store(tier, 1)
    tier.get = lambda name: (begun.set(), ends.wait(60), FaultyStore.get(tier, name))[-1]
    loading = tier.load(key_of(1))
    assert begun.wait(60)
    tier.fault = "gone"
    tier.lookup([key_of(2)])
    until(lambda: is_left_alone(tier))
    tier.fault = None
    ends.set()
    until(lambda: loading.ended)
    assert not loading.missed and is_left_alone(tier)
    tier.finished(loading)
    clock.pass_for(shared._FIRST_PAUSE_S)
    until(lambda: not is_left_alone(tier))
    tier.close()


def test_a_store_that_hangs_blocks_no_call_and_comes_back(make, server, clock, monkeypatch):
    tier, callers = make(server.url, timeout_s=2.0), set()
    for name in ("ask", "get", "put"):
        call = getattr(tier, name)
        monkeypatch.setattr(tier, name, lambda *given, call=call: (callers.add(threading.current_thread()), call(*given))[1])
    until(lambda: works(tier, clock))
    found(tier, *range(2, 8))
    server.send(signal.SIGSTOP)
    transfers = [each for number in range(2, 8) for each in (tier.load(key_of(20)), tier.store(key_of(number)))]
    until(lambda: tier._calls or is_left_alone(tier))
    clock.pass_for(tier.timeout_s + 1)
    until(lambda: is_left_alone(tier))
    assert callers and threading.current_thread() not in callers
    for transfer in transfers:
        if isinstance(transfer, Transfer):
            tier.drop(transfer)
    server.send(signal.SIGCONT)
    until(lambda: works(tier, clock))


@pytest.mark.parametrize("asks", [True, False])
def test_a_store_that_answers_byte_by_byte_is_late(make, clock, asks):
    """It is left alone when it is asked again; and closing waits for its time alone."""
    dripping, ended = threading.Event(), threading.Event()
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def drip():
            client, _ = listener.accept()
            with client, contextlib.suppress(OSError):
                client.recv(1000)
                dripping.set()
                while not ended.wait(0.05):
                    client.send(b"+")

        threading.Thread(target=drip, daemon=True).start()
        tier = make(f"redis://127.0.0.1:{listener.getsockname()[1]}", timeout_s=0.5)
        try:
            assert dripping.wait(60) and not is_left_alone(tier)
            if asks:
                clock.pass_for(1)
                assert is_left_alone(tier)
            tier.close()  # else it goes on for ever
        finally:
            ended.set()


@pytest.mark.parametrize(
    "options", [("--proto-max-bulk-len", "1mb"), ("--maxmemory", "8mb"), ("--maxmemory", "1")], ids=["large", "full", "none"]
)
def test_what_the_store_does_not_take_is_refused_and_counted(make, options):
    with redis_server(*options) as server:
        tier = make(server.url)
        taken = [store(tier, number) and load(tier, number) for number in range(NUM_RECORDS)]
        stats = tier.stats()
        assert not all(taken) and stats.refused_records == taken.count(False) and not is_left_alone(tier)
        assert stats.held_bytes == taken.count(True) * RECORD_BYTES
        assert [load(tier, number) for number in range(NUM_RECORDS)] == taken
        tier.close()


def test_a_full_store_evicts_as_it_is_told(make):
    with redis_server("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server:
        tier = make(server.url)
        assert all(store(tier, number) for number in range(5 * NUM_RECORDS))
        kept = [load(tier, number) for number in range(5 * NUM_RECORDS)]
        assert kept[-1] and 0 < sum(kept) < 12 and tier.stats().refused_records == 0
        tier.close()


def test_a_question_is_a_use_of_a_record_to_a_store_that_evicts(make):
    with redis_server("--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lfu") as server:
        one, other = make(server.url), make(server.url)
        assert store(one, 1)
        with redis.Redis.from_url(server.url) as client:
            uses = client.object("freq", value_of(one, 1))
            assert found(other, 1) == [True]
            assert client.object("freq", value_of(one, 1)) > uses  # the first use counts for certain, later ones by chance
        one.close(), other.close()


@pytest.mark.parametrize(
    ("login", "database", "said"),
    [("", "0", "authenticate"), (":secret@", "0", "invalid username-password"), (":right@", "99", "index is out of range")],
    ids=["no password", "another password", "no such database"],
)
def test_the_log_tells_a_store_that_refuses_from_one_that_does_not_answer(make, caplog, login, database, said):
    with redis_server("--requirepass", "right") as server:
        make(f"redis://{login}127.0.0.1:{server.port}/{database}")
        until(lambda: "asked again" in caplog.text)
    assert "refuses this client" in caplog.text and said in caplog.text
    assert "check its URL, redis://user:password@host:6379/DATABASE" in caplog.text
    assert "does not answer" not in caplog.text and "secret" not in caplog.text


def test_a_password_works_and_is_never_told(make, caplog, monkeypatch):
    caplog.set_level(logging.DEBUG)
    with redis_server("--requirepass", PASSWORD) as server:
        host = server.url.removeprefix("redis://")
        right = make(f"redis://:{PASSWORD.replace(' ', '%20').replace('/', '%2F')}@{host}")
        assert store(right, 1) and load(right, 1)
        wrong = make(f"redis://:{PASSWORD[:4]}wrong@{host}")
        assert not is_left_alone(wrong)
        until(lambda: is_left_alone(wrong))
        with pytest.raises(ValueError, match="write redis://") as refused:
            RedisTier(f"redis://:{PASSWORD}@{host}")
        with pytest.raises(ValueError, match=r"no store has the scheme 'redi'; there are .* did you mean redis") as unknown:
            open_store(f"redi://:{PASSWORD}@{host}")
        told = [repr(right), repr(wrong), str(refused.value), str(unknown.value), str(right.stats()), caplog.text]
        assert not any(PASSWORD[:4] in text for text in told) and refused.value.__suppress_context__
        right.close(), wrong.close()


@pytest.mark.parametrize(("kind", "url"), [(RedisTier, "redis://127.0.0.1:{}"), (MooncakeTier, "mooncake://127.0.0.1:{}")])
def test_an_engine_starts_without_its_store_and_says_so(make, kind, url, caplog):
    if kind is MooncakeTier:
        pytest.importorskip("mooncake.store", exc_type=ImportError)
    tier = make(url.format(free_port()), kind)
    until(lambda: is_left_alone(tier))
    assert tier.stats().errors and not tier.stats().held_bytes and "does not answer" in caplog.text


def test_tiers_of_packages_are_found_by_the_scheme_of_a_url(monkeypatch):
    entries = [
        EntryPoint("shelf", "tests.laws.test_stores:Shelf", shared.ENTRY_POINTS),
        EntryPoint("gone", "no_such_package:Tier", shared.ENTRY_POINTS),
    ]
    monkeypatch.setattr(shared, "entry_points", lambda group: entries)
    assert open_store("shelf://anywhere").url == "shelf://anywhere"
    with pytest.raises(TierUnavailable, match=r"no_such_package:Tier, the tier for gone://, .*No module named"):
        open_store("gone://")
    for url in ("cups://", "shelf", "/tmp"):
        with pytest.raises(ValueError, match="there are gone://, shelf://"):
            open_store(url)


class Shelf:
    """The tier of a third party."""

    def __init__(self, url: str) -> None:
        self.url = url


@pytest.mark.parametrize("scheme", ["redis", "mooncake"])
def test_a_client_that_is_missing_is_named_with_its_extra(monkeypatch, scheme):
    monkeypatch.setattr(shared.importlib, "import_module", lambda name: (_ for _ in ()).throw(ImportError(f"no {name}")))
    with pytest.raises(TierUnavailable, match=rf"in a checkout: pip install '\.\[{scheme}\]'"):
        open_store(f"{scheme}://localhost:1")
