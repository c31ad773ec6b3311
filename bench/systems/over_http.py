"""`vmmkv serve`, alone or several behind a router, in processes of their own, and clients in others: what a user has.

Times of clients are of CLOCK_MONOTONIC, which all processes of a machine share. Bytes are put aside as they come, and parsed
when all are there: parsing is not the server's time.
"""

import asyncio
import json
import multiprocessing
import random
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from bench.harness import Settings, WrongNumbers, started
from bench.systems.engine import of_users
from bench.workloads import Ask

_ROUTER: Final = Path(__file__).parents[2] / "deploy" / "vllm-router.sh"
"""A script: a router before replicas. The router's policy is the script's own."""
_ANNOUNCED: Final = re.compile(r"at (http://\S+)/v1")


# the server


@contextmanager
def vmmkv_serve(model: Path, settings: Settings) -> Iterator[httpx.Client]:
    """A client of a server of the directory `model` on a port of its own. Raises: WrongNumbers, see `started`."""
    command = [sys.executable, "-m", "vmmkv", "serve", "--model", str(model), "--device", str(settings.device), "--port", "0"]
    admin_key = secrets.token_hex(16)
    with started([*command, *engine_options(settings)], _ANNOUNCED.search, VMMKV_ADMIN_KEY=admin_key) as announced:
        headers = {"Authorization": f"Bearer {admin_key}"}
        # A proxy does not know this machine's ports.
        with httpx.Client(base_url=announced[1], headers=headers, timeout=60.0, trust_env=False) as client:
            yield client


@contextmanager
def routed(directory: Path, devices: Sequence[str], settings: Settings) -> Iterator[str]:
    """The URL of a router before a replica on each device. Raises: WrongNumbers, see `started`."""
    port = random.randrange(10_000, 30_000)  # with some hundred behind it, below those that the kernel gives out
    url, command = f"http://127.0.0.1:{port}", [str(_ROUTER), str(directory), " ".join(devices), *engine_options(settings)]
    with started(command, lambda said: _answers(f"{url}/v1/models"), PORT=str(port)):
        yield url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False


def engine_options(settings: Settings) -> list[str]:
    """Those of `vmmkv serve` by which its engine is the one in this process."""
    limits = of_users(settings)
    options = ["--load-format", "dummy", "--seed", str(settings.seed), "--max-num-seqs", str(limits["max_num_seqs"])]
    return options + (["--kv-budget", str(limits["kv_budget_bytes"])] if limits["kv_budget_bytes"] else [])


# the clients


class Streamed(NamedTuple):
    """What became of one request. A failed one has `error` alone."""

    begun_s: float = 0.0
    first_s: float = 0.0
    """When the first text was there."""
    ended_s: float = 0.0
    text: str = ""
    prompt_tokens: int = 0
    cached_tokens: int = 0
    """Of the prompt's, those that the prefix cache had."""
    completion_tokens: int = 0
    error: str = ""


Times = tuple[float, Sequence[float]]
"""Seconds of a run, and to each first token."""


def times_of(run: Sequence[Streamed]) -> Times:
    """From the first request until the last answer."""
    seconds = max(each.ended_s for each in run) - min(each.begun_s for each in run)
    return seconds, [each.first_s - each.begun_s for each in run]


Bodies = Sequence[dict[str, Any]]
AskAll = Callable[[str, Bodies, float], list[Streamed]]
"""All requests to a URL at once. Raises: WrongNumbers if not all have ended after so many seconds, or have all their tokens."""


def body_of(model: str, prompt: str | list[int], ask: Ask) -> dict[str, Any]:
    """A request for a stream, greedy."""
    body = {"model": model, "prompt": prompt, "max_tokens": ask.num_out, "temperature": 0, "ignore_eos": True}
    return {**body, "stream": True, "stream_options": {"include_usage": True}}


_CONNECTIONS: Final = 80
"""Of each of eight client processes on a GPU. vllm-router's socket queues 128: of 1,024 at once it reset one, of 640 none."""
_together: Barrier
"""Of a client process: all send when all are ready to."""


@contextmanager
def clients(settings: Settings) -> Iterator[AskAll]:
    """Processes that ask together: one cannot read as many events a second as a GPU's engine makes tokens."""
    count = 8 if settings.on_gpu else 1
    context = multiprocessing.get_context("spawn")  # a copy of this process would have its CUDA context
    pool = context.Pool(count, _begin, (context.Barrier(count),))

    def ask_all(url: str, bodies: Bodies, limit_s: float) -> list[Streamed]:
        """Each process sends every `count`-th request."""
        parts = [(url, bodies[number::count]) for number in range(count)]
        try:
            told = pool.starmap_async(_ask, parts, chunksize=1).get(limit_s)
        except multiprocessing.TimeoutError:
            raise WrongNumbers("the streams have not ended in their time") from None
        streamed = [Streamed()] * len(bodies)
        for number, of_part in enumerate(told):
            streamed[number::count] = of_part
        for stream, body in zip(streamed, bodies, strict=True):
            if stream.completion_tokens != body["max_tokens"]:
                raise WrongNumbers(f"{stream.completion_tokens} of {body['max_tokens']} tokens: {stream.error}")
        return streamed

    try:
        yield ask_all
    finally:
        pool.terminate()
        pool.join()


def _begin(together: Barrier) -> None:
    global _together
    _together = together


def _ask(url: str, bodies: Bodies) -> list[Streamed]:
    return asyncio.run(_stream_all(url, bodies))


async def _stream_all(url: str, bodies: Bodies) -> list[Streamed]:
    # A read has no limit: a request may wait for its turn.
    limits = httpx.Limits(max_connections=_CONNECTIONS, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        requests = [client.build_request("POST", url, json=body) for body in bodies]
        _together.wait()
        return await asyncio.gather(*(_stream(client, request) for request in requests))


async def _stream(client: httpx.AsyncClient, request: httpx.Request) -> Streamed:
    begun_s = first_s = time.monotonic()
    parts: list[bytes] = []
    try:
        response = await client.send(request, stream=True)
        async for part in response.aiter_raw():
            if not parts:
                first_s = time.monotonic()
            parts.append(part)
    except httpx.HTTPError as error:
        return Streamed(error=f"{type(error).__name__}: {error}")
    ended_s = time.monotonic()
    return parse(b"".join(parts), response.status_code)._replace(begun_s=begun_s, first_s=first_s, ended_s=ended_s)


def parse(data: bytes, status: int) -> Streamed:
    """A stream of /v1/completions: its text, and the usage at its end."""
    if status != 200:
        return Streamed(error=f"status {status}: {data.decode(errors='replace')[:500]}")
    lines = [line.removeprefix("data: ") for line in data.decode().split("\n\n") if line]
    text, usage = "", None
    for line in lines[:-1]:
        said = json.loads(line)
        if "error" in said:
            return Streamed(error=str(said["error"]))
        usage = said.get("usage") or usage
        text += "".join(choice["text"] for choice in said["choices"])
    if usage is None or lines[-1] != "[DONE]":
        return Streamed(error="the stream has no end")
    cached_tokens = usage["prompt_tokens_details"]["cached_tokens"]
    return Streamed(0.0, 0.0, 0.0, text, usage["prompt_tokens"], cached_tokens, usage["completion_tokens"])
