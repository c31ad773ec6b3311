"""Servers on several GPUs behind vllm-router: the same requests by one of them, and by one on each GPU.

replicas    twice the requests of mixed, as texts over HTTP, through the script of deploy/

Each has as many requests for each replica as `mixed` has where there are two. The router's policy is the script's own.
"""

import os
import random
import signal
import subprocess
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Final

import httpx
import torch

from bench.harness import Settings, WrongNumbers
from bench.suites.serve import Context
from bench.suites.serve.generate import stages
from bench.suites.serve.models import tokenizer_file
from bench.suites.serve.over_http import AskAll, Streamed, clients
from bench.suites.serve.quantised import times
from bench.suites.serve.systems import EngineLimits
from bench.workloads import Ask
from vmmkv.server.tokenizer import Tokenizer

SCRIPT: Final = Path(__file__).parents[3] / "deploy" / "vllm-router.sh"
_START_S: Final = 180.0
_STOP_S: Final = 60.0
_LIMIT_S: Final = 600.0
_LEAST_ALIKE: Final = 0.5
"""Of the answers, those that begin as they do by one replica: batches differ, and with them roundings."""
_WARM_REQUESTS: Final = 32
"""Before those that are timed; their answers are compared."""
_BEGINNING: Final = 8
"""Characters of an answer that are compared."""


def run(context: Context, part: str) -> None:
    """By one replica, and by one on each GPU."""
    settings, recorder, file = context.settings, context.recorder, tokenizer_file(context.settings.tokenizer)
    context.close()  # each replica takes all memory
    bare, context.model = context.model, context.model.with_tokenizer(file)
    stage = times(context, stages(context.model, settings, "mixed")[0])
    name, first = context.name(part, stage.workload.text), list[Streamed]()
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if settings.on_gpu else ["cpu", "cpu"]
    try:
        with context.model.directory() as directory, clients(8 if settings.on_gpu else 1) as ask_all:
            for count in dict.fromkeys((1, len(devices))):
                system = f"vmmkv, replicas: {count}"
                recorder.note(f"{name}, {system}")
                with recorder.guarded(name, system), _served(directory, devices[:count], settings) as url:
                    few = _asked(directory, url, ask_all, stage.workload.asks[:_WARM_REQUESTS], 0)
                    first = few if count == 1 else first
                    alike = [a.text[:_BEGINNING] == b.text[:_BEGINNING] for a, b in zip(first, few, strict=True)]
                    if (share := sum(alike) / len(alike)) < _LEAST_ALIKE:
                        raise WrongNumbers(f"only {100 * share:.3g} % of the answers begin as by one replica")
                    recorder.figure(name, system, "answers that begin as by one", "%", 100 * share, len(alike))
                    asks, numbers = stage.workload.asks, range(1, 1 + settings.repeat)
                    served = [_asked(directory, url, ask_all, asks, number) for number in numbers]
                    runs_s = [max(each.ended_s for each in run) - min(each.begun_s for each in run) for run in served]
                    recorder.samples(name, system, "throughput", "tok/s", [stage.num_out / each for each in runs_s])
                    recorder.samples(name, system, "total", "s", runs_s)
                    firsts_s = [each.first_s - each.begun_s for run in served for each in run]
                    recorder.samples(name, system, "first token", "ms", [1e3 * each for each in firsts_s])
    finally:
        context.model = bare


def _asked(directory: Path, url: str, ask_all: AskAll, asks: Sequence[Ask], number: int) -> list[Streamed]:
    """All requests at once; of the same number the same prompts. Raises: WrongNumbers for one that failed or is too short."""
    tokenizer, draws = Tokenizer.load(directory), random.Random(number)
    bodies: list[dict[str, Any]] = []
    for ask in asks:
        detokenizer = tokenizer.detokenizer(())
        text = detokenizer.feed([draws.randrange(1000, 40_000) for _ in ask.prompt]) + detokenizer.finish([])
        bodies.append({"model": directory.name, "prompt": text, "max_tokens": ask.num_out, "temperature": 0})
        bodies[-1] |= {"ignore_eos": True, "stream": True, "stream_options": {"include_usage": True}}
    served = ask_all(f"{url}/v1/completions", bodies, _LIMIT_S)
    for stream, ask in zip(served, asks, strict=True):
        if stream.completion_tokens != ask.num_out:
            raise WrongNumbers(f"{stream.completion_tokens} of {ask.num_out} tokens: {stream.error}")
    return served


@contextmanager
def _served(directory: Path, devices: Sequence[str], settings: Settings) -> Iterator[str]:
    """The URL of a router before a replica on each device. Raises: WrongNumbers, with the end of what they say."""
    limits = EngineLimits.of(settings)
    options = ["--load-format", "dummy", "--seed", str(settings.seed), "--max-num-seqs", str(limits.max_num_seqs)]
    if limits.budget_bytes is not None:
        options += ["--kv-budget", f"{limits.budget_bytes >> 20}MiB"]
    port = random.randrange(10_000, 30_000)  # with some hundred behind it, below those that the kernel gives out
    url, command = f"http://127.0.0.1:{port}", [str(SCRIPT), str(directory), " ".join(devices), *options]
    with TemporaryFile() as log:
        router = subprocess.Popen(command, stdout=log, stderr=log, env=os.environ | {"PORT": str(port)}, start_new_session=True)
        try:
            until_s = time.monotonic() + _START_S
            while not _answers(f"{url}/v1/models"):
                if router.poll() is not None or time.monotonic() > until_s:
                    raise WrongNumbers("the router does not start")
                time.sleep(0.2)
            yield url
        except BaseException as error:
            error.add_note(os.pread(log.fileno(), 1 << 20, 0).decode(errors="replace")[-4096:])
            raise
        finally:
            router.terminate()
            with suppress(subprocess.TimeoutExpired):
                router.wait(_STOP_S)
            with suppress(ProcessLookupError):
                os.killpg(router.pid, signal.SIGKILL)
            router.wait()


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False
