"""The engine under load: what its workloads take, beside other systems, over HTTP, by grammars, and where a step's time goes.

context      what the parts of one shape share
models       configurations, loaded weights, bounds, tokenizers
systems      what serves a workload, and the checks before timing
peers        the systems of others: transformers and vLLM over the engine's weights
generate     mixed, single, first, long, shared, sampled, full: the engine as a user has it
compared     closed, rates: systems over the same weights with the same limits
quantised    quantised: mixed over each type of the KV cache, in the same memory
policies     policies: long prompts by requests that keep some of their rows, and by requests that keep all
outside      outside: transformers beside the engine, and vLLM under the workloads of generate
over_http    http: the same requests by `vmmkv serve` over HTTP, asked by client processes
replicas     replicas: by a server, and by one on each GPU, behind vllm-router
grammar      answers by a grammar: masks, and jump-forward (schemas)
steps        step, breakdown: decode steps against the byte limit, and steps by kind of kernel
"""

import itertools
import shutil
from collections import defaultdict
from contextlib import closing
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Final

import torch

from bench.baselines import backend
from bench.harness import Recorder, Settings
from bench.suites.serve.context import GENERATED, Context, lacks_vllm
from bench.suites.serve.models import model_of, tokenizer_file, vocabulary_of
from vmmkv.layout import KV_KINDS

PARTS: Final = {
    **dict.fromkeys(GENERATED, "generate"),
    **dict.fromkeys(("closed", "rates"), "compared"),
    "quantised": "quantised",
    "policies": "policies",
    "outside": "outside",
    "http": "over_http",
    "replicas": "replicas",
    "grammar": "grammar",
    **dict.fromkeys(("step", "breakdown"), "steps"),
}
"""The module whose `run` measures each. The profiler slows what comes later: its part is the last."""

_MINUTES: Final = ("long", "full", "quantised", "policies", "outside", "replicas")
"""Parts that take minutes: by default the first shape has them, and a CPU none."""

_NEEDED: Final = {
    "http": ("fastapi", "httpx", "msgspec", "structlog", "tokenizers", "uvicorn", "zmq"),
    "replicas": ("fastapi", "httpx", "msgspec", "structlog", "tokenizers", "uvicorn", "zmq"),
    "grammar": ("tokenizers", "xgrammar"),
}
"""Modules that parts need, beside what all parts need."""
_BY_DEFAULT: Final = ("llama-3.1-8b", "qwen3-0.6b")
"""Shapes that are measured on a GPU if none is named."""


def check(settings: Settings) -> None:
    """Raises: ValueError for a part or a case that was asked for and lacks something."""
    for part in _NEEDED:
        asked = part in settings.parts or (settings.tokenizer is not None and not settings.parts)
        if asked and (why := _lacking(part, settings)):
            raise ValueError(f"serve's part {part} cannot run: {why}")
    if settings.tensor_parallel_sizes and not set(settings.parts) & set(GENERATED):
        raise ValueError(f"--tensor-parallel-size is of serve's parts {', '.join(GENERATED)}: name some by --parts")
    of_vllm = [case for case in settings.cases if case in GENERATED]
    if of_vllm and settings.wants("outside") and (why := lacks_vllm(settings)):
        raise ValueError(f"serve's part outside cannot run {', '.join(of_vllm)}: {why}")


def cases_of(settings: Settings) -> dict[str, list[str]]:
    """By part, those of what compares systems, types and policies."""
    from bench.suites.serve.compared import workloads_of
    from bench.suites.serve.policies import Sizes

    model = model_of(settings.shape.name, tiny=settings.small)
    cases = {part: list(workloads_of(model, settings, part)) for part in ("closed", "rates", "outside")}
    cases["outside"] += GENERATED  # by vLLM
    cases |= {"quantised": ["auto", *KV_KINDS], "policies": list(Sizes.of(settings, model).policies)}
    return {part: names for part, names in cases.items() if settings.wants(part)}


def absent(settings: Settings) -> dict[str, str]:
    """Parts and systems that are left out because something that they need is missing, and why."""
    compares = settings.wants("closed") or settings.wants("rates")
    systems = backend.absent(settings.device, settings.fa3) if compares else {}
    if settings.wants("outside") and (why := lacks_vllm(settings)):
        systems["vLLM"] = why
    return systems | {part: why for part in _NEEDED if settings.wants(part) and (why := _lacking(part, settings))}


def run(recorder: Recorder) -> None:
    """Every part for every shape. What fails has a row `failed`, and the next part a new engine."""
    settings = recorder.settings
    shapes = [shape for shape in settings.shapes if shape.name in _BY_DEFAULT] or [settings.shape]
    left_out = absent(settings)
    all_sizes = sorted(settings.tensor_parallel_sizes) or [1]
    steps = [
        (shape, size, part)
        for last in (False, True)
        for shape in shapes
        for size in all_sizes
        for part in PARTS
        if part in GENERATED or size == all_sizes[0]
        if settings.wants(part) and part not in left_out and (part == "breakdown") == last
        if settings.parts or part not in _MINUTES or (shape is shapes[0] and not settings.small)
    ]
    alone: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    tracked = recorder.track(steps, lambda step: f"{step[0].name} {step[2]}, ranks: {step[1]}")
    for (shape, size), of_engine in itertools.groupby(tracked, lambda step: step[:2]):
        with closing(Context(recorder, shape, size, alone[shape.name])) as context:
            for *_, part in of_engine:
                num_failed = len(recorder.failed)
                with recorder.guarded(context.name(part, "all")):
                    import_module(f"{__name__}.{PARTS[part]}").run(context, part)
                if len(recorder.failed) > num_failed:  # an engine that has failed is not trusted with the next part
                    context.close()


def _lacking(part: str, settings: Settings) -> str | None:
    """Why a part cannot run, and what would help; None if it can. Nothing is imported, and nothing fetched."""
    if missing := [name for name in _NEEDED[part] if find_spec(name) is None]:
        return f"{', '.join(missing)} cannot be imported; the extras server and bench of vmmkv bring them"
    if part == "replicas" and shutil.which("vllm-router") is None:
        return "there is no program vllm-router; `pip install vllm-router` brings it"
    if part == "replicas" and settings.on_gpu and torch.cuda.device_count() < 2:
        return "there is one GPU"
    try:
        vocabulary_of(tokenizer_file(settings.tokenizer))
    except ValueError as error:
        return str(error)
    return None
