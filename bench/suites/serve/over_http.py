"""The same requests by `vmmkv serve` over HTTP, all of them streams, and by the engine in this process: what HTTP costs.

The server runs in processes of its own, and clients in others: what is measured is what a user has. The engine in this process
makes texts too. It runs first, and its rows are written before the server starts.
"""

import itertools
import os
import re
import secrets
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryFile
from typing import Final

import httpx

from bench.harness import Settings, WrongNumbers
from bench.suites.serve import Context
from bench.suites.serve.client import Ask, Streamed, clients
from bench.suites.serve.generate import Measured, Stage, computed_alone, stages, timed_runs
from bench.suites.serve.models import digest_of, tokenizer_file
from bench.suites.serve.systems import EngineLimits, ServedRun, UserEngine
from vmmkv.config import KNOWN_VARIABLES, PREFIX
from vmmkv.server.console import die_with_parent
from vmmkv.server.tokenizer import Tokenizer
from vmmkv.units import MIB

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
_START_S: Final = 300.0
_STOP_S: Final = 60.0
_FORGET_S: Final = 60.0
_SAID_CHARACTERS: Final = 4096
"""Of the end of what the server has said: what goes with a failure."""
_ANNOUNCED: Final = re.compile(r"at (http://\S+)/v1")


def run(context: Context, part: str) -> None:
    """Many requests of many lengths, over HTTP and without."""
    recorder, settings = context.recorder, context.settings
    file = tokenizer_file(settings.tokenizer)
    name = context.name(part, f"{stages(context.model, settings, 'mixed')[0].workload.text}, tokenizer {digest_of(file)}")
    context.close()  # each engine takes all memory
    bare, context.model = context.model, context.model.with_tokenizer(file)
    try:
        with recorder.guarded(name, SYSTEM), context.model.directory() as directory:
            stage = stages(context.model, settings, "mixed")[0]
            alone = _without_http(context, stage, name)
            limit_s = max(_LEAST_LIMIT_S, _LATEST * max(run.seconds for run in alone.runs))
            recorder.note("vmmkv serve starts")
            with clients(_CLIENTS[settings.device.type]) as ask_all, vmmkv_serve(directory, settings) as server:
                served = _over_http(context, server, directory.name, ask_all, stage, limit_s)
            share = _check_texts(
                Tokenizer.load(directory), stage, alone.runs[0], alone.same, served, strict=not settings.on_gpu
            )
            _add_rows(context, name, stage, served, share)
    finally:
        context.model = bare
        context.close()


def _without_http(context: Context, stage: Stage, name: str) -> Measured:
    """The engine in this process, and its rows."""
    engine = UserEngine(context.model, context.settings)
    try:
        (measured,) = timed_runs(context, engine, [stage], computed_alone(context, engine, [stage]))
    finally:
        engine.close()
        context.close()
    for run in measured.runs:
        _check_cached(stage, run.cached_tokens)
    timed = [(run.seconds, [each.first_s for each in run.served]) for run in measured.runs[1:]]
    _add_times(context, name, stage, UserEngine.name, timed)
    count = len(stage.workload.asks)
    context.recorder.figure(name, UserEngine.name, "same answers in all runs", "%", 100 * measured.same, count)
    return measured


def _over_http(
    context: Context, server: httpx.Client, model: str, ask_all: Ask, stage: Stage, limit_s: float
) -> list[list[Streamed]]:
    """A run that is not timed, and those that are. Raises: WrongNumbers if a request has failed, or has other counts."""
    common = {"model": model, "temperature": 0, "ignore_eos": True, "stream": True}
    bodies = [
        {**common, "prompt": ask.prompt.tolist(), "max_tokens": ask.num_out, "stream_options": {"include_usage": True}}
        for ask in stage.workload.asks
    ]
    runs = []
    for number in range(1 + context.settings.repeat):
        context.recorder.note(f"http: run {number} of {context.settings.repeat}")
        server.post("/kv/reset", json={}).raise_for_status()
        runs.append(ask_all(str(server.base_url.join("/v1/completions")), bodies, limit_s))
        for index, (stream, ask) in enumerate(zip(runs[-1], stage.workload.asks, strict=True)):
            if "error" in stream:
                raise WrongNumbers(f"request {index} failed: {stream['error']}")
            counts = (stream["prompt_tokens"], stream["completion_tokens"], stream["finish_reason"])
            if counts != (len(ask.prompt), ask.num_out, "length"):
                raise WrongNumbers(f"request {index} of {len(ask.prompt)} tokens in, {ask.num_out} out, has {counts} over HTTP")
        _check_cached(stage, sum(stream["cached_tokens"] for stream in runs[-1]))
    return runs


def _check_cached(stage: Stage, cached_tokens: int) -> None:
    """A run begins with an empty prefix cache, which finds no more than prompts have in common by chance."""
    ordered = sorted(ask.prompt.tolist() for ask in stage.workload.asks)  # prompts with most in common adjoin
    commons = [
        sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))
        for one, other in itertools.pairwise(ordered)
    ]
    most = sum(map(max, [0, *commons], [*commons, 0]))
    if cached_tokens > most:
        raise WrongNumbers(f"{cached_tokens:,} tokens of prompts were in the emptied prefix cache; they have {most} in common")


def _check_texts(
    tokenizer: Tokenizer, stage: Stage, wanted: ServedRun, same: float, served: Sequence[Sequence[Streamed]], *, strict: bool
) -> float:
    """The share of texts that are those of the tokens of the engine in this process; on a CPU (`strict`) all must be.

    Raises: WrongNumbers if fewer are, or on a GPU if too few begin as they do.
    """
    texts, beginnings = [], []
    for ask, each in zip(stage.workload.asks, wanted.served, strict=True):
        detokenizer = tokenizer.detokenizer((), ask.prompt.tolist())
        texts.append(detokenizer.feed(each.tokens[:-1]) + detokenizer.finish(each.tokens[-1:]))
        beginnings.append(tokenizer.detokenizer((), ask.prompt.tolist()).feed(each.tokens[:_BEGINNING]))
    given = [[stream["text"] for stream in run] for run in served]
    count = len(texts) * len(given)
    share = sum(text == whole for run in given for text, whole in zip(run, texts, strict=True)) / count
    alike = sum(text.startswith(begin) for run in given for text, begin in zip(run, beginnings, strict=True)) / count
    if strict and share < 1:
        raise WrongNumbers(f"{100 * (1 - share):.3g} % of the texts over HTTP are not those of the engine's own tokens")
    if alike < _LEAST_ALIKE * same:
        raise WrongNumbers(
            f"only {100 * alike:.3g} % of the texts over HTTP begin as those of the engine's own tokens, of which "
            f"{100 * same:.3g} % are the same in all runs without HTTP"
        )
    return share


def _add_rows(context: Context, name: str, stage: Stage, served: list[list[Streamed]], share: float) -> None:
    timed = [
        (
            max(each["ended_s"] for each in run) - min(each["begun_s"] for each in run),
            [each["first_s"] - each["begun_s"] for each in run],
        )
        for run in served[1:]
    ]
    _add_times(context, name, stage, SYSTEM, timed)
    chunks, count = sum(each["chunks"] for run in served[1:] for each in run), len(stage.workload.asks)
    context.recorder.figure(name, SYSTEM, "tokens a chunk", "tokens", stage.num_out * len(timed) / chunks, count)
    context.recorder.figure(name, SYSTEM, f"same answers as {UserEngine.name}", "%", 100 * share, count)


def _add_times(context: Context, name: str, stage: Stage, system: str, timed: Sequence[tuple[float, Sequence[float]]]) -> None:
    """Of each timed run the seconds of all of it, and to each first token."""
    add, seconds = context.recorder.samples, [each for each, _ in timed]
    add(name, system, "throughput", "tok/s", [stage.num_out / each for each in seconds], stage.num_out / stage.bound_s)
    add(name, system, "total", "s", seconds, stage.bound_s)
    add(name, system, "first token", "ms", [1e3 * each for _, firsts_s in timed for each in firsts_s])


@contextmanager
def vmmkv_serve(model: Path, settings: Settings) -> Iterator[httpx.Client]:
    """A client of a server of the directory `model` on a port of its own, with the options of the engine in this process.

    Raises: WrongNumbers, with the server's log, if it does not start. A failure in the block gets the log's end as a note.
    """
    limits, admin_key = EngineLimits.of(settings), secrets.token_hex(16)
    options = f"--load-format dummy --device {settings.device} --seed {settings.seed} --port 0".split()
    options += ["--max-num-seqs", str(limits.max_num_seqs)]
    if limits.budget_bytes is not None:
        options += ["--kv-budget", f"{limits.budget_bytes // MIB}MiB"]
    if limits.max_num_batched_tokens is not None:
        options += ["--max-num-batched-tokens", str(limits.max_num_batched_tokens)]
    # Without variables that set options of `vmmkv serve`: the engine in this process reads none of them.
    environment = {name: value for name, value in os.environ.items() if not name.startswith(PREFIX) or name in KNOWN_VARIABLES}
    with TemporaryFile() as log:
        process = subprocess.Popen(
            [sys.executable, "-m", "vmmkv", "serve", "--model", str(model), *options],
            stdout=log,
            stderr=subprocess.STDOUT,
            env={**environment, "VMMKV_ADMIN_KEY": admin_key},
            preexec_fn=die_with_parent(),
        )

        def said() -> str:
            return os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")

        try:
            deadline_s = time.monotonic() + _START_S
            while (announced := _ANNOUNCED.search(said())) is None:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise WrongNumbers(f"vmmkv serve does not start:\n{said()}")
                time.sleep(0.1)
            headers = {"Authorization": f"Bearer {admin_key}"}
            # A proxy does not know this machine's ports.
            with httpx.Client(base_url=announced[1], headers=headers, timeout=_FORGET_S, trust_env=False) as client:
                yield client
        except BaseException as error:
            error.add_note(f"what vmmkv serve said last:\n{said()[-_SAID_CHARACTERS:] or '(nothing)'}")
            raise
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
