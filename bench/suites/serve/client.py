"""A process that asks a server for many streams at once, as a client does, and says when what came.

    in    {"url": ..., "bodies": [...]}     what is asked, a line a run
    out   ready                             all of it is ready to be sent
    in    go
    out   [{"begun_s": ..., ...}, ...]      of each body, in order

Times are of CLOCK_MONOTONIC, which all processes of a machine share. Bytes are put aside as they come, and parsed when all are
there: parsing is not the server's time. Run by its path, without torch: several of these start in no time.
"""

import asyncio
import json
import sys
import time
from typing import Any, TypedDict

import httpx


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


async def _serve() -> None:
    # A read has no limit: a request may wait for its turn.
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(timeout=None, limits=limits, trust_env=False) as client:
        for line in sys.stdin:
            asked = json.loads(line)
            requests = [client.build_request("POST", asked["url"], json=body) for body in asked["bodies"]]
            print("ready", flush=True)
            if sys.stdin.readline() != "go\n":
                return
            print(json.dumps(await asyncio.gather(*(_streamed(client, request) for request in requests))), flush=True)


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
        ended_s = time.monotonic()
        return parse(b"".join(parts), response.status_code, begun_s, first_s, ended_s)
    except httpx.HTTPError as error:
        return {"error": f"{type(error).__name__}: {error}"}


def parse(data: bytes, status: int, begun_s: float, first_s: float, ended_s: float) -> Streamed:
    """A stream of /v1/completions: its text, and the usage at its end."""
    if status != 200:
        return {"error": f"status {status}: {data.decode(errors='replace')[:500]}"}
    text: list[str] = []
    reason: str | None = None
    usage: dict[str, Any] | None = None
    chunks = 0
    lines = [line for line in data.decode().split("\n\n") if line]
    for line in lines[:-1]:
        said = json.loads(line.removeprefix("data: "))
        if "error" in said:
            return {"error": f"error: {said['error']}"}
        usage = said.get("usage") or usage
        for choice in said["choices"]:
            chunks += 1
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
        "chunks": chunks,
    }


if __name__ == "__main__":
    asyncio.run(_serve())
