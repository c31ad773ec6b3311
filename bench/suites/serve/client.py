"""Client processes that ask a server for many streams at once, and say when what came.

Times are of CLOCK_MONOTONIC, which all processes of a machine share. Bytes are put aside as they come, and parsed when all are
there: parsing is not the server's time.
"""

import asyncio
import json
import multiprocessing
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.synchronize import Barrier
from typing import Any, TypedDict

import httpx

from bench.harness import WrongNumbers

Bodies = Sequence[dict[str, Any]]

_together: Barrier
"""Of a client process: all send when all are ready to."""


class Streamed(TypedDict, total=False):
    """What became of one request. A failed one has `error` alone."""

    begun_s: float
    first_s: float
    """When the first text was there."""
    ended_s: float
    text: str
    finish_reason: str | None
    prompt_tokens: int
    cached_tokens: int
    """Of the prompt's, those that the prefix cache had."""
    completion_tokens: int
    chunks: int
    """That had text, or could have had."""
    error: str


Ask = Callable[[str, Bodies, float], list[Streamed]]
"""All requests to a URL at once. Raises: WrongNumbers if not all have ended after so many seconds."""


@contextmanager
def clients(count: int) -> Iterator[Ask]:
    """Processes that ask together: one cannot read as many events a second as a GPU's engine makes tokens."""
    context = multiprocessing.get_context("spawn")  # a copy of this process would have its CUDA context
    pool = context.Pool(count, _begin, (context.Barrier(count),))

    def ask(url: str, bodies: Bodies, limit_s: float) -> list[Streamed]:
        """Each process sends every `count`-th request."""
        parts = [(url, bodies[number::count]) for number in range(count)]
        try:
            told = pool.starmap_async(_ask, parts, chunksize=1).get(limit_s)
        except multiprocessing.TimeoutError:
            raise WrongNumbers("the streams have not ended in their time") from None
        streamed: list[Streamed] = [{}] * len(bodies)
        for number, of_part in enumerate(told):
            streamed[number::count] = of_part
        return streamed

    try:
        yield ask
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
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        requests = [client.build_request("POST", url, json=body) for body in bodies]
        _together.wait()
        return await asyncio.gather(*(_streamed(client, request) for request in requests))


async def _streamed(client: httpx.AsyncClient, request: httpx.Request) -> Streamed:
    begun_s = first_s = time.monotonic()
    parts: list[bytes] = []
    try:
        response = await client.send(request, stream=True)
        try:
            async for part in response.aiter_raw():
                if not parts:
                    first_s = time.monotonic()
                parts.append(part)
        finally:
            await response.aclose()
        return parse(b"".join(parts), response.status_code, begun_s, first_s, time.monotonic())
    except httpx.HTTPError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def parse(data: bytes, status: int, begun_s: float, first_s: float, ended_s: float) -> Streamed:
    """A stream of /v1/completions: its text, and the usage at its end."""
    if status != 200:
        return {"error": f"status {status}: {data.decode(errors='replace')[:500]}"}
    text: list[str] = []
    reason: str | None = None
    usage: dict[str, Any] | None = None
    lines = [line for line in data.decode().split("\n\n") if line]
    for line in lines[:-1]:
        said = json.loads(line.removeprefix("data: "))
        if "error" in said:
            return {"error": f"error: {said['error']}"}
        usage = said.get("usage") or usage
        for choice in said["choices"]:
            text.append(choice["text"])
            reason = choice["finish_reason"] or reason
    if not lines or lines[-1] != "data: [DONE]" or usage is None:
        return {"error": "the stream has no end"}
    return {
        "begun_s": begun_s,
        "first_s": first_s,
        "ended_s": ended_s,
        "text": "".join(text),
        "finish_reason": reason,
        "prompt_tokens": usage["prompt_tokens"],
        "cached_tokens": usage["prompt_tokens_details"]["cached_tokens"],
        "completion_tokens": usage["completion_tokens"],
        "chunks": len(text),
    }
