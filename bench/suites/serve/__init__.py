"""The engine under load: what its workloads take, beside other systems, over HTTP, by grammars, and where a step's time goes.

users       mixed, single, first, long, shared, sampled, full: systems as their users open them; quantised, http, replicas
compared    closed, rates, outside, policies: systems over the same weights with the same limits
grammar     answers by a grammar: masks, and jump-forward
steps       step, breakdown: decode steps against the byte limit, and steps by kind of kernel

Systems are those of `bench.systems`. `outside` has transformers beside the engine, and vLLM serve the parts of users.
To add a part, write its `run(context, part)`, and its line in PARTS.
"""

import itertools
import shutil
from collections import defaultdict
from collections.abc import Callable, Mapping
from contextlib import closing
from importlib.util import find_spec
from typing import Any, Final, NamedTuple

import torch

from bench import systems
from bench.baselines import COMMON_PREFILL
from bench.figures import PAGED, Drawing, Question
from bench.harness import Recorder, Settings, Shape
from bench.suites.serve import compared, grammar, steps, users
from bench.suites.serve.users import GENERATED
from bench.systems import VLLM, Context, Users, lacks_vllm, vmmkv
from bench.systems.models import model_of, tokenizer_file, vocabulary_of
from vmmkv.layout import KV_KINDS

PARTS: Final[Mapping[str, Callable[[Context, str], None]]] = {
    **dict.fromkeys(GENERATED, users.run),
    **dict.fromkeys(compared.SYSTEMS_OF, compared.run),
    "policies": compared.run_policies,
    "quantised": users.run_quantised,
    "http": users.run_http,
    "replicas": users.run_replicas,
    "grammar": grammar.run,
    **dict.fromkeys(("step", "breakdown"), steps.run),
}
"""By part, what measures it. The profiler slows what comes later: its part is the last."""

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
    model = model_of(settings.shape.name, tiny=settings.small)
    cases = {part: list(compared.workloads_of(model, settings, part)) for part in compared.SYSTEMS_OF}
    cases["outside"] += GENERATED  # by vLLM
    cases |= {"quantised": ["auto", *KV_KINDS], "policies": list(compared.PolicySizes.of(settings, model).policies)}
    return {part: names for part, names in cases.items() if settings.wants(part)}


def absent(settings: Settings) -> dict[str, str]:
    """Parts and systems that are left out because something that they need is missing, and why."""
    compares = [name for part, names in compared.SYSTEMS_OF.items() if settings.wants(part) for name in names]
    lacking = systems.absent(settings, compares)
    if settings.wants("outside") and (why := lacks_vllm(settings)):
        lacking["vLLM"] = why
    return lacking | {part: why for part in _NEEDED if settings.wants(part) and (why := _lacking(part, settings))}


class _Step(NamedTuple):
    """A part of one shape, and the system that users open there."""

    shape: Shape
    users: Users
    part: str


def run(recorder: Recorder) -> None:
    """Every part for every shape. What fails has a row `failed`, and the next part a new engine."""
    alone: defaultdict[str, dict[str, Any]] = defaultdict(dict)
    tracked = recorder.track(_plan(recorder.settings), lambda step: f"{step.shape.name} {step.part}, {step.users.name}")
    for (shape, opened), of_engine in itertools.groupby(tracked, lambda step: (step.shape, step.users)):
        with closing(Context(recorder, shape, opened, alone[shape.name])) as context:
            for step in of_engine:
                num_failed = len(recorder.failed)
                with recorder.guarded(context.name(step.part, "all")):
                    PARTS[step.part](context, step.part)
                # An engine that has failed is not trusted with the next part. A process opens vLLM once.
                if len(recorder.failed) > num_failed and opened is not VLLM:
                    context.close()


def _plan(settings: Settings) -> list[_Step]:
    """All steps: by shape the parts that are wanted by vmmkv, then those that vLLM serves; breakdown behind all."""
    shapes = [shape for shape in settings.shapes if shape.name in _BY_DEFAULT] or [settings.shape]
    ours = [vmmkv(size) for size in sorted(settings.tensor_parallel_sizes) or [1]]
    left_out = absent(settings)

    def wants(shape: Shape, part: str) -> bool:
        is_chosen = settings.parts or part not in _MINUTES or (shape is shapes[0] and not settings.small)
        return settings.wants(part) and part not in left_out and bool(is_chosen)

    plan = []
    for shape in shapes:
        parts = [part for part in PARTS if wants(shape, part) and part != "breakdown"]
        plan += [_Step(shape, one, part) for one in ours for part in parts if part in GENERATED or one is ours[0]]
        if wants(shape, "outside") and "vLLM" not in left_out:
            plan += [_Step(shape, VLLM, part) for part in users.parts_of_vllm(settings)]
    return plan + [_Step(shape, ours[0], "breakdown") for shape in shapes if wants(shape, "breakdown")]


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


# what the report says of the rows

QUESTIONS: Final = (
    *(
        Question(text, "throughput", other, part=part)
        for other in (PAGED, "static 4096", "transformers *")
        for part, text in (("closed", "Serving, all requests at once"), ("rates", "Serving, at rates"), ("outside", "Serving"))
    ),
    *(
        Question(text, metric, "vLLM")
        for metric, text in (
            ("throughput", "As users open them"),
            ("first token", "As users open them, a long prompt's first token"),
            ("first tokens", "As users open them, first tokens"),
        )
    ),
    Question("Over two GPUs", "throughput", "vmmkv", ours="vmmkv, TP 2"),
    Question("Over two GPUs, a long prompt's first token", "first token", "vmmkv", ours="vmmkv, TP 2"),
    Question("Goodput at rates", "goodput", PAGED, part="rates"),
    Question("First tokens at rates", "first token", PAGED, part="rates"),
    Question("What HTTP costs", "throughput", "vmmkv", ours="vmmkv serve"),
    *(
        Question(text, metric, "vmmkv, all rows", f"vmmkv, {policy}-2048", "policies")
        for metric, text in (("throughput", "Keeping 2,048 rows"), ("KV memory at peak", "Keeping 2,048 rows, memory"))
        for policy in ("snapkv", "h2o", "streaming_llm")
    ),
    Question("Blocks of 16, by the same kernels", "throughput", "paged 16", COMMON_PREFILL, "closed"),
)
_OF_USERS: Final = r"(?P<by>[^:]+?) (?P<group>mixed|single|long|shared cold|shared warm|shared again|sampled|full):"
_RATES: Final = r"(?P<by>.+ rates: .+), (?P<x>[\d.]+) requests/s, Poisson"
_LATENCIES: Final = ("first token", "time per output token")
FIGURES: Final = (
    *(
        Drawing(f"{part}-{slug}", f"{what}: {', '.join(metrics)}", metrics, rf"(?P<by>.+?) {part}: (?P<group>[^:]+)")
        for part, what in (
            ("closed", "All requests at once"),
            ("outside", "Beside transformers"),
            ("http", "Over HTTP and without"),
            ("grammar", "Answers by a grammar"),
        )
        for slug, metrics in (("throughput", ("throughput",)), ("latency", _LATENCIES))
    ),
    Drawing("users-throughput", "As users open them: throughput", ("throughput",), _OF_USERS),
    Drawing("users-latency", "As users open them: first tokens", ("first tokens",), _OF_USERS),
    *(
        Drawing(f"policies-{slug}", f"Keeping some of the rows: {metric}", (metric,), r"(?P<group>.+) policies: ")
        for slug, metric in (("throughput", "throughput"), ("memory", "KV memory at peak"), ("fit", "sequences that fit"))
    ),
    Drawing("rates", "goodput and latency", ("goodput", *_LATENCIES), _RATES, "requests/s offered"),
)
