"""`vmmkv serve --tensor-parallel-size` as a user runs it: the same answers, and an end with an error when a rank fails."""

import contextlib
import os
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import openai
import pytest

from tests.end_to_end.small import ServerProcess, small_server, until
from vmmkv import MIB

TWO_RANKS = ("--tensor-parallel-size", "2")


def answer(server: ServerProcess) -> str:
    client = server.openai()
    return client.completions.create(model="small", prompt="abc", max_tokens=12, temperature=0).choices[0].text


def ranks(server: ServerProcess) -> list[int]:
    """The processes of the other ranks."""
    _, engine = server.pids()
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


@contextlib.contextmanager
def failing_requests(server: ServerProcess, count: int) -> Iterator[None]:
    """Requests that are in flight in the block, and one that comes behind it: each gets an error that says why."""
    begun = threading.Semaphore(0)

    def ask() -> None:
        for _ in server.openai().completions.create(
            model="small", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
        ):
            begun.release()

    with ThreadPoolExecutor(count + 1) as clients:
        asked = [clients.submit(ask) for _ in range(count)]
        for _ in asked:
            assert begun.acquire(timeout=60)
        yield
        asked.append(clients.submit(ask))
        errors = [each.exception(90) for each in asked]
    assert all(isinstance(error, openai.APIError) and "another rank is lost" in str(error) for error in errors), errors


@pytest.mark.nightly
def test_two_ranks_answer_as_one_does(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with small_server(tmp_path / "one" / "small") as server:
        expected = answer(server)
    with small_server(tmp_path / "small", *TWO_RANKS) as server:
        assert answer(server) == expected


@pytest.mark.nightly
@pytest.mark.parametrize(
    ("fail", "reason"),
    [
        pytest.param(lambda rank: os.kill(rank, signal.SIGKILL), "rank 1 has ended with exit code -9", id="killed"),
        pytest.param(lambda rank: os.kill(rank, signal.SIGSTOP), "a rank failed, or was late: ", id="stopped"),
        pytest.param(
            lambda rank: resource.prlimit(rank, resource.RLIMIT_FSIZE, (4 * MIB, 4 * MIB)),
            "rank 1: DriverError: create",
            id="without memory",
        ),
    ],
)
def test_a_rank_that_fails_ends_the_server_and_all_requests(fail: Callable[[int], object], reason: str, tmp_path: Path) -> None:
    """One that is stopped, once the others have waited for a minute."""
    with small_server(tmp_path / "small", *TWO_RANKS) as server:
        (rank,) = ranks(server)
        with failing_requests(server, 3):
            fail(rank)
        assert server.process.wait(60) == 1
        assert not Path(f"/proc/{rank}").exists()
        assert reason in server.log.read_text()


@pytest.mark.nightly
@pytest.mark.parametrize("was_asked", [False, True])
def test_a_rank_that_is_killed_while_the_server_is_idle_ends_it(tmp_path: Path, was_asked: bool) -> None:
    with small_server(tmp_path / "small", *TWO_RANKS) as server:
        (rank,) = ranks(server)
        if was_asked:
            assert httpx.get(f"{server.url}/kv").is_success
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(60) == 1


@pytest.mark.nightly
def test_an_engine_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    with small_server(tmp_path / "small", *TWO_RANKS) as server:
        (rank,) = ranks(server)
        os.kill(server.pids()[1], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{rank}").exists())
        assert server.process.wait(60) == 1
