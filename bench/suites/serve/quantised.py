"""The engine over quantised K and V, in memory for K and V that is the same for each type.

quantised   the requests of mixed, for which the memory of exact K and V is nearly enough; and twice as many at once

Bounds are those of K and V in bfloat16.
"""

from contextlib import closing
from dataclasses import replace
from typing import Final

from bench.suites.serve.context import Context
from bench.suites.serve.generate import Stage, computed_alone, measure, stages
from bench.suites.serve.models import requests_s
from bench.suites.serve.systems import UserEngine, of_users
from vmmkv.layout import KV_KINDS
from vmmkv.units import GIB

_BUDGET_BYTES: Final = 24 * GIB
"""On a GPU: 233 of the requests of mixed at full length, in Llama-3.1-8B's bfloat16."""
TIMES: Final = 2
"""So many more requests at once than mixed has."""


def run(context: Context, part: str) -> None:
    """Both workloads by an engine of each type; `--cases` chooses types."""
    settings, limits = context.settings, of_users(context.settings)
    limits = {"kv_budget_bytes": limits["kv_budget_bytes"] or _BUDGET_BYTES, "max_num_seqs": TIMES * limits["max_num_seqs"]}
    (few,) = stages(context.model, settings, "mixed")
    lengths = [len(ask.prompt) + ask.num_out for ask in few.workload.asks]
    context.close()
    for kv_cache_dtype in filter(settings.wants_case, ("auto", *KV_KINDS)):
        with closing(UserEngine(context.model, settings, kv_cache_dtype=kv_cache_dtype, **limits)) as engine:
            for stage in (few, times(context, few, TIMES)):
                name = context.name(part, stage.workload.text)
                stage = replace(stage, workload=replace(stage.workload, name=part))
                measure(context, engine, [stage], computed_alone(context, engine, [stage]))
                fitting = engine.num_kv_tokens * len(lengths) / sum(lengths)
                context.recorder.figure(name, engine.name, "sequences that fit", "", fitting)


def times(context: Context, few: Stage, count: int) -> Stage:
    """The requests of a stage `count` times, with other tokens each time."""
    settings = context.settings
    more = [stages(context.model, replace(settings, seed=settings.seed + number), "mixed")[0] for number in range(count)]
    asks = tuple(ask for stage in more for ask in stage.workload.asks)
    text = f"{count} x {few.workload.text}"
    bound_s = requests_s(context.model, [len(ask.prompt) for ask in asks], [ask.num_out for ask in asks])
    return replace(few, workload=replace(few.workload, text=text, asks=asks), bound_s=bound_s)
