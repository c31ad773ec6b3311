"""The same requests by `vmmkv serve` over HTTP, all of them streams, and by the engine in this process: what HTTP costs.

The server runs in processes of its own, and clients in others: what is measured is what a user has. The engine in this process
makes texts too. It runs first, and its rows are written before the server starts.

Times of clients are of CLOCK_MONOTONIC, which all processes of a machine share. Bytes are put aside as they come, and parsed
when all are there: parsing is not the server's time.
"""

import asyncio
import json
import multiprocessing
import re
import secrets
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from multiprocessing.synchronize import Barrier
from pathlib import Path
from typing import Any, Final, NamedTuple

import httpx

from bench.harness import Settings, WrongNumbers, started
from bench.suites.serve.context import Context
from bench.suites.serve.generate import Measured, Stage, computed_alone, stages, timed_runs
from bench.suites.serve.models import digest_of, tokenizer_file
from bench.suites.serve.systems import UserEngine, of_users
from bench.workloads import Ask
from vmmkv_server.tokenizer import Tokenizer

SYSTEM: Final = "vmmkv serve"
_CLIENTS: Final = {"cpu": 1, "cuda": 8}
"""Client processes."""
_LATEST: Final = 10
_LEAST_LIMIT_S: Final = 120.0
"""Streams that take longer than so many of the runs without HTTP, and than so long, will not end."""
_BEGINNING: Final = 4
"""Tokens of an answer that are looked for at the beginning of its text. Over HTTP requests come one after the other, and so in
other batches, whose rounding on a GPU may part a long answer from the one without HTTP: both are right."""
_LEAST_ALIKE: Final = 0.5
"""Of the share of answers that are the same in all runs without HTTP, what has to begin alike over HTTP."""
_ANNOUNCED: Final = re.compile(r"at (http://\S+)/v1")


def run(context: Context, part: str) -> None:
    """Many requests of many lengths, over HTTP and without."""
    recorder, settings = context.recorder, context.settings
    with context.with_texts() as directory:
        (stage,) = stages(context.model, settings, "mixed")
        name = context.name(part, f"{stage.workload.text}, tokenizer {digest_of(tokenizer_file(settings.tokenizer))}")
        with recorder.guarded(name, SYSTEM):
            with closing(UserEngine(context.model, settings)) as engine:
                (alone,) = timed_runs(context, engine, [stage], computed_alone(context, engine, [stage]))
            context.close()
            timed = [(run.seconds, [each.first_s for each in run.served]) for run in alone.runs[1:]]
            add_rows(context, name, UserEngine.name, timed, stage.num_out, stage.bound_s)
            limit_s = max(_LEAST_LIMIT_S, _LATEST * max(run.seconds for run in alone.runs))
            recorder.note("vmmkv serve starts")
            with clients(_CLIENTS[settings.device.type]) as ask_all, vmmkv_serve(directory, settings) as server:
                served = _over_http(context, server, directory.name, ask_all, stage, limit_s)
            share = _check_texts(Tokenizer.load(directory), stage, alone, served, strict=not settings.on_gpu)
            add_rows(context, name, SYSTEM, map(times_of, served[1:]), stage.num_out, stage.bound_s)
            count = len(stage.workload.asks)
            recorder.figure(name, SYSTEM, f"same answers as {UserEngine.name}", "%", 100 * share, count)


def _over_http(
    context: Context, server: httpx.Client, model: str, ask_all: "AskAll", stage: Stage, limit_s: float
) -> list[list["Streamed"]]:
    """A run that is not timed, and those that are. Raises: WrongNumbers if a request has failed, or has other counts."""
    asks = stage.workload.asks
    bodies = [body_of(model, ask.prompt.tolist(), ask) for ask in asks]
    runs = []
    for number in range(1 + context.settings.repeat):
        context.recorder.note(f"http: run {number} of {context.settings.repeat}")
        server.post("/kv/reset", json={}).raise_for_status()
        runs.append(ask_all(str(server.base_url.join("/v1/completions")), bodies, limit_s))
        if [stream.prompt_tokens for stream in runs[-1]] != [len(ask.prompt) for ask in asks]:
            raise WrongNumbers("prompts have other numbers of tokens over HTTP")
        if (cached := sum(stream.cached_tokens for stream in runs[-1])) > len(asks):  # what they have in common by chance
            raise WrongNumbers(f"{cached:,} tokens of prompts were in the emptied prefix cache")
    return runs


def _check_texts(
    tokenizer: Tokenizer, stage: Stage, alone: Measured, served: Sequence[Sequence["Streamed"]], *, strict: bool
) -> float:
    """The share of texts that are those of the tokens of the engine in this process; on a CPU (`strict`) all must be.

    Raises: WrongNumbers if fewer are, or on a GPU if too few begin as they do.
    """
    texts, beginnings = [], []
    for ask, each in zip(stage.workload.asks, alone.runs[0].served, strict=True):
        detokenizer = tokenizer.detokenizer((), ask.prompt.tolist())
        texts.append(detokenizer.feed(each.tokens[:-1]) + detokenizer.finish(each.tokens[-1:]))
        beginnings.append(tokenizer.detokenizer((), ask.prompt.tolist()).feed(each.tokens[:_BEGINNING]))
    given = [[stream.text for stream in run] for run in served]
    count = len(texts) * len(given)
    share = sum(text == whole for run in given for text, whole in zip(run, texts, strict=True)) / count
    alike = sum(text.startswith(begin) for run in given for text, begin in zip(run, beginnings, strict=True)) / count
    if strict and share < 1:
        raise WrongNumbers(f"{100 * (1 - share):.3g} % of the texts over HTTP are not those of the engine's own tokens")
    if alike < _LEAST_ALIKE * alone.same:
        raise WrongNumbers(
            f"only {100 * alike:.3g} % of the texts over HTTP begin as those of the engine's own tokens, of which "
            f"{100 * alone.same:.3g} % are the same in all runs without HTTP"
        )
    return share


Times = tuple[float, Sequence[float]]
"""Seconds of a run, and to each first token."""


def times_of(run: Sequence["Streamed"]) -> Times:
    """From the first request until the last answer."""
    seconds = max(each.ended_s for each in run) - min(each.begun_s for each in run)
    return seconds, [each.first_s - each.begun_s for each in run]


def add_rows(
    context: Context, name: str, system: str, timed: Iterable[Times], num_out: int, bound_s: float | None = None
) -> None:
    """Rows of runs of `num_out` tokens each."""
    runs_s, firsts_s = zip(*timed, strict=True)
    add = context.recorder.samples
    add(name, system, "throughput", "tok/s", [num_out / each for each in runs_s], bound_s and num_out / bound_s)
    add(name, system, "total", "s", runs_s, bound_s)
    add(name, system, "first token", "ms", [1e3 * each for of_run in firsts_s for each in of_run])


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
def clients(count: int) -> Iterator[AskAll]:
    """Processes that ask together: one cannot read as many events a second as a GPU's engine makes tokens."""
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
