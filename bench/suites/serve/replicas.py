"""Servers on several GPUs behind vllm-router: requests by one of them, and so many for each by one on each GPU.

replicas    twice the requests of mixed for each replica, as texts over HTTP, through the script of deploy/

Each is busy for most of the time, and with its last few requests for little of it. The router's policy is the script's own.
"""

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Final

import httpx
import torch

from bench.harness import Settings, WrongNumbers, started
from bench.suites.serve.context import Context
from bench.suites.serve.generate import stages
from bench.suites.serve.over_http import AskAll, Streamed, add_rows, body_of, clients, engine_options, times_of
from bench.suites.serve.quantised import TIMES, times
from bench.workloads import Ask
from vmmkv_server.tokenizer import Tokenizer

SCRIPT: Final = Path(__file__).parents[3] / "deploy" / "vllm-router.sh"
_LIMIT_S: Final = 600.0
_LEAST_ALIKE: Final = 0.5
"""Of the answers, those that begin as they do by one replica: batches differ, and with them roundings."""
_WARM_REQUESTS: Final = 32
"""Before those that are timed; their answers are compared."""
_BEGINNING: Final = 8
"""Characters of an answer that are compared."""


def run(context: Context, part: str) -> None:
    """By one replica, and by one on each GPU."""
    settings, recorder, first = context.settings, context.recorder, list[Streamed]()
    devices = [f"cuda:{index}" for index in range(torch.cuda.device_count())] if settings.on_gpu else ["cpu", "cpu"]
    with context.with_texts() as directory, clients(8 if settings.on_gpu else 1) as ask_all:
        (mixed,) = stages(context.model, settings, "mixed")
        name = context.name(part, f"{TIMES} x {mixed.workload.text}, for each replica")
        for count in dict.fromkeys((1, len(devices))):
            stage, system = times(context, mixed, TIMES * count), f"vmmkv, replicas: {count}"
            recorder.note(f"{name}, {system}")
            with recorder.guarded(name, system), _served(directory, devices[:count], settings) as url:
                few = _asked(directory, url, ask_all, mixed.workload.asks[:_WARM_REQUESTS], 0)
                first = few if count == 1 else first
                alike = [a.text[:_BEGINNING] == b.text[:_BEGINNING] for a, b in zip(first, few, strict=True)]
                if (share := sum(alike) / len(alike)) < _LEAST_ALIKE:
                    raise WrongNumbers(f"only {100 * share:.3g} % of the answers begin as by one replica")
                recorder.figure(name, system, "answers that begin as by one", "%", 100 * share, len(alike))
                numbers = range(1, 1 + settings.repeat)
                served = [_asked(directory, url, ask_all, stage.workload.asks, number) for number in numbers]
                add_rows(context, name, system, map(times_of, served), stage.num_out)


def _asked(directory: Path, url: str, ask_all: AskAll, asks: Sequence[Ask], number: int) -> list[Streamed]:
    """All requests at once; of the same number the same prompts. Raises: WrongNumbers for one that failed or is too short."""
    tokenizer, draws = Tokenizer.load(directory), random.Random(number)
    bodies = []
    for ask in asks:
        detokenizer = tokenizer.detokenizer(())
        text = detokenizer.feed([draws.randrange(1000, 40_000) for _ in ask.prompt]) + detokenizer.finish([])
        bodies.append(body_of(directory.name, text, ask))
    return ask_all(f"{url}/v1/completions", bodies, _LIMIT_S)


@contextmanager
def _served(directory: Path, devices: Sequence[str], settings: Settings) -> Iterator[str]:
    """The URL of a router before a replica on each device. Raises: WrongNumbers, see `started`."""
    port = random.randrange(10_000, 30_000)  # with some hundred behind it, below those that the kernel gives out
    url, command = f"http://127.0.0.1:{port}", [str(SCRIPT), str(directory), " ".join(devices), *engine_options(settings)]
    with started(command, lambda said: _answers(f"{url}/v1/models"), PORT=str(port)):
        yield url


def _answers(url: str) -> bool:
    try:
        return httpx.get(url, trust_env=False).is_success
    except httpx.HTTPError:
        return False
