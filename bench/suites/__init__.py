"""The suites: a file or folder here and a line in SUITES each.

A suite answers one question, and imports no other. It has `run(recorder)`, and may have

- `FIGURES` and `QUESTIONS`: what `bench.report` draws of its rows, and answers by them
- `PARTS`: the names that `--parts` chooses from
- `cases_of(settings)`: by part, the names that `--cases` chooses from
- `check(settings)`, which raises ValueError for settings that cannot be run
- `absent(settings)`: what is left out because something that it needs is missing, and why
"""

from importlib import import_module
from typing import Any, Final, NamedTuple


class Suite(NamedTuple):
    """What a suite measures, and whether it is part of `all`."""

    text: str
    in_all: bool = True


SUITES: Final = {
    "driver_calls": Suite("each call of the driver: alone, beside a busy Python thread, beside a kernel"),
    "append": Suite("a decode loop that grows: in the foreground, mapped ahead in slack, on adopted slots"),
    "resize": Suite("what it costs to give memory back, and to take it again, while sequences decode on"),
    "memory_efficiency": Suite("memory held beyond the rows, and how many sequences fit, by each way to lay out a cache"),
    "kernels": Suite("attention over each kind of memory, by our kernels, torch's SDPA and FlashAttention-3"),
    "products": Suite("the matrix products of a layer by rows, by cuBLAS and for few rows by our kernel"),
    "prefix": Suite("requests that share a prefix, over slots, blocks, unshared; attaching; the host's work by size"),
    "serve": Suite("the engine under load: workloads, rates, HTTP, grammars, decode steps, and where their time goes"),
    "collectives": Suite("sums, gathers and broadcasts over GPUs, by size and by way; needs two GPUs", in_all=False),
    "tiers": Suite("KV that leaves the device: bandwidth, first tokens of known prompts, conversations that do not fit"),
    "engines": Suite("vLLM with vmmkv's tiers or elastic memory, against vLLM alone; needs vLLM and a GPU", in_all=False),
    "transformers": Suite("a VmmCache in transformers, against DynamicCache and StaticCache: time, memory, what fits"),
    "quality": Suite("what quantised K and V cost a real model: perplexity, and the error of attention", in_all=False),
    "streaming": Suite("perplexity of a real model along a text of 4 times its trained length", in_all=False),
}
"""By the name of its module. Those that need several GPUs, or a model and minutes, are not in `all`."""


def load(name: str) -> Any:
    """The suite's module."""
    return import_module(f"bench.suites.{name}")
