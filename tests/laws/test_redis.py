"""RedisTier: the laws of stores, and what Redis makes of values, limits, evictions, passwords and time."""

import contextlib
import logging
import signal
import socket
import threading

import pytest
import redis

from tests.laws.store_laws import StoreLaws, clock, is_left_alone, value_of, works
from tests.laws.test_tiers import NUM_RECORDS, found, key_of, load, store
from tests.stores import redis_server, until
from vmmkv.tiers import RedisTier, Transfer, open_store
from vmmkv.tiers.record import RECORD_BYTES

__all__ = ["clock"]

PASSWORD = "pa55 w/rd"

TYPES = {
    "list": lambda client, name: client.rpush(name, b"x"),
    "set": lambda client, name: client.sadd(name, b"x"),
    "hash": lambda client, name: client.hset(name, b"x", b"y"),
    "stream": lambda client, name: client.xadd(name, {b"x": b"y"}),
}


class TestRedis(StoreLaws):
    kind, scheme = RedisTier, "redis"
    start = staticmethod(redis_server)

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
        ids=[
            "a byte",
            "the magic",
            "the length",
            "shorter",
            "longer",
            "a part of the header",
            "empty",
            "no header",
            "a pickle",
        ],
    )
    def test_a_value_that_is_not_the_record_is_a_miss_and_is_removed(self, make, server, change):
        tier, client = make(server.url), server.client()
        assert store(tier, 1)
        client.set(value_of(tier, 1), change(client.get(value_of(tier, 1))))
        assert not load(tier, 1)
        assert tier.stats().errors == 1 and not client.exists(value_of(tier, 1))
        assert found(tier, 1) == [False]
        assert store(tier, 1) and load(tier, 1)

    @pytest.mark.parametrize("put", TYPES.values(), ids=TYPES)
    def test_a_key_of_another_type_is_one_miss_is_removed_and_pauses_nothing(self, make, server, put):
        tier, client = make(server.url), server.client()
        put(client, value_of(tier, 1))
        assert found(tier, 1, 2) == [True, False] and not load(tier, 1)
        assert tier.stats().errors == 1 and not client.exists(value_of(tier, 1)) and not is_left_alone(tier)
        assert store(tier, 1) and load(tier, 1)

    def test_a_wrong_record_that_the_store_does_not_remove_pauses_nothing(self, make, server):
        tier, client = make(server.url), server.client()
        client.set(value_of(tier, 1), b"wrong")
        client.acl_setuser("default", enabled=True, commands=["-unlink"])  # else no new connection is let in
        assert found(tier, 1) == [True] and not load(tier, 1)
        assert not is_left_alone(tier) and store(tier, 2) and load(tier, 2)

    def test_a_record_under_the_name_of_another_is_a_miss(self, make, server):
        """As if names of two namespaces met."""
        tier, client = make(server.url), server.client()
        assert store(tier, 1)
        client.set(value_of(tier, 2), client.get(value_of(tier, 1)))
        assert found(tier, 2) == [True] and not load(tier, 2) and load(tier, 1)

    def test_a_store_that_hangs_blocks_no_call_and_comes_back(self, make, server, clock, monkeypatch):
        tier, callers = make(server.url, timeout_s=2.0), set()
        for name in ("ask", "get", "put"):
            call = getattr(tier, name)
            monkeypatch.setattr(
                tier, name, lambda *given, call=call: (callers.add(threading.current_thread()), call(*given))[1]
            )
        until(lambda: works(tier, clock))
        found(tier, *range(2, 8))
        server.send(signal.SIGSTOP)
        callers.clear()
        transfers = [each for number in range(2, 8) for each in (tier.load(key_of(20)), tier.store(key_of(number)))]
        until(lambda: callers or is_left_alone(tier))
        clock.pass_for(tier.timeout_s + 1)
        until(lambda: is_left_alone(tier))
        assert callers and threading.current_thread() not in callers
        for transfer in transfers:
            if isinstance(transfer, Transfer):
                tier.drop(transfer)
        server.send(signal.SIGCONT)
        until(lambda: works(tier, clock))

    @pytest.mark.parametrize("asks", [True, False])
    def test_a_store_that_answers_byte_by_byte_is_late(self, make, clock, asks):
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
        "options",
        [("--proto-max-bulk-len", "1mb"), ("--maxmemory", "8mb"), ("--maxmemory", "1")],
        ids=["large", "full", "none"],
    )
    def test_what_the_store_does_not_take_is_refused_and_counted(self, make, options):
        with redis_server(*options) as server:
            tier = make(server.url)
            taken = [store(tier, number) and load(tier, number) for number in range(NUM_RECORDS)]
            stats = tier.stats()
            assert not all(taken) and stats.refused_records == taken.count(False) and not is_left_alone(tier)
            assert stats.held_bytes == taken.count(True) * RECORD_BYTES
            assert [load(tier, number) for number in range(NUM_RECORDS)] == taken
            tier.close()

    def test_a_full_store_evicts_as_it_is_told(self, make):
        with redis_server("--maxmemory", "24mb", "--maxmemory-policy", "allkeys-lru") as server:
            tier = make(server.url)
            assert all(store(tier, number) for number in range(5 * NUM_RECORDS))
            kept = [load(tier, number) for number in range(5 * NUM_RECORDS)]
            assert kept[-1] and 0 < sum(kept) < 12 and tier.stats().refused_records == 0
            tier.close()

    def test_a_question_is_a_use_of_a_record_to_a_store_that_evicts(self, make):
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
    def test_the_log_tells_a_store_that_refuses_from_one_that_does_not_answer(self, make, caplog, login, database, said):
        with redis_server("--requirepass", "right") as server:
            make(f"redis://{login}127.0.0.1:{server.port}/{database}")
            until(lambda: "asked again" in caplog.text)
        assert "refuses this client" in caplog.text and said in caplog.text
        assert "check its URL, redis://user:password@host:6379/DATABASE" in caplog.text
        assert "does not answer" not in caplog.text and "secret" not in caplog.text

    def test_a_password_works_and_is_never_told(self, make, caplog, monkeypatch):
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
