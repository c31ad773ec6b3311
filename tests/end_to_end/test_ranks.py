"""`vmmkv serve --tensor-parallel-size` as a user runs it: the same answers, and an end with an error when a rank is killed."""

import os
import signal
import threading
from pathlib import Path

import openai
import pytest

from tests.end_to_end.small import ServerProcess, small_server, until


def answer(server: ServerProcess) -> str:
    client = server.openai()
    return client.completions.create(model="small", prompt="abc", max_tokens=12, temperature=0).choices[0].text


def ranks(server: ServerProcess) -> list[int]:
    """The processes of the other ranks."""
    _, engine = server.pids()
    return [int(pid) for pid in Path(f"/proc/{engine}/task/{engine}/children").read_text().split()]


@pytest.mark.nightly
def test_two_ranks_answer_as_one_does_and_one_that_is_killed_ends_the_server(tmp_path: Path) -> None:
    (tmp_path / "one").mkdir()
    with small_server(tmp_path / "one" / "small") as server:
        expected = answer(server)
    with small_server(tmp_path / "small", "--tensor-parallel-size", "2", "--max-tokens", "1024") as server:
        assert answer(server) == expected
        begun, errors = threading.Event(), []

        def ask() -> None:
            try:
                for _ in server.openai().completions.create(
                    model="small", prompt="a", max_tokens=1000, stream=True, extra_body={"ignore_eos": True}
                ):
                    begun.set()
            except (openai.APIError, openai.APIConnectionError) as error:
                errors.append(error)

        asking = threading.Thread(target=ask)
        asking.start()
        assert begun.wait(60)
        (rank,) = ranks(server)
        os.kill(rank, signal.SIGKILL)
        asking.join(60)
        assert len(errors) == 1, "the request in flight is answered with an error"
        assert server.process.wait(60) == 1
        assert "rank 1 has ended with exit code -9" in server.log.read_text()


@pytest.mark.nightly
def test_a_rank_that_is_killed_while_the_server_is_idle_ends_it(tmp_path: Path) -> None:
    with small_server(tmp_path / "small", "--tensor-parallel-size", "2") as server:
        (rank,) = ranks(server)
        os.kill(rank, signal.SIGKILL)
        assert server.process.wait(60) == 1


@pytest.mark.nightly
def test_an_engine_that_is_killed_leaves_no_rank(tmp_path: Path) -> None:
    with small_server(tmp_path / "small", "--tensor-parallel-size", "2") as server:
        (rank,) = ranks(server)
        os.kill(server.pids()[1], signal.SIGKILL)
        until(lambda: not Path(f"/proc/{rank}").exists())
        assert server.process.wait(60) == 1
