"""The model, token by token: prompts in chunks, then decode steps over each system's cache, eager and compiled.

The first system decodes greedily; the others are given its tokens, so that each of their steps can be held against its own: the
logits, the likeliest tokens, and behind each way the rows of the first and of the last layer. Prompts are computed with SDPA.
On a GPU steps are taken back, and once more with vmmkv's attention, over the caches that can be cropped. A system's compiled
steps come behind these: where they fail, what does not compile has been measured.

    B sequences, K kv heads, T tokens, D head dim, V vocabulary
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, Final, NamedTuple

import torch

from bench.hf.agreement import Expected, Judge
from bench.hf.caches import ATTENDING, DYNAMIC, STATIC, SYSTEMS, VMMKV, memory_of
from bench.hf.context import Context
from bench.hf.meter import Meter, meter_of, release
from bench.serve import roofline
from bench.serve.models import ITEM_BYTES
from bench.timing import WrongNumbers, now_us
from vmmkv.units import GIB

STEP: Final = "time per token"
RATE: Final = "throughput"
PREFILL: Final = "prefill"
HELD: Final = "peak memory beyond the weights"
SAME: Final = "same tokens"
OFF: Final = "logits off by"

COMPILED: Final = ", compiled"
"""Behind a system's name: its decode steps are compiled. Prompts never are."""

Call = Callable[..., Any]


class Way(NamedTuple):
    """One way to take steps. `again`: those of the way before are taken back first."""

    name: str
    call: Call
    again: bool = False


def num_steps(context: Context) -> int:
    """Each system at each context."""
    return len(SYSTEMS) * len(context.sizes.contexts)


def workload_of(name: str, batch: int, num_tokens: int) -> str:
    """A row's workload."""
    return f"{name} decode: {num_tokens} tokens, batch {batch}"


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Rows of all systems at all contexts. Where the first system fails, there is nothing to hold the others against."""
    model, sizes = context.random_model(), context.sizes
    generator = torch.Generator().manual_seed(context.settings.seed)
    _warm(context, model)
    for num_tokens in sizes.contexts:
        workload = workload_of(context.decoder.name, sizes.batch, num_tokens)
        ids_BT = torch.randint(context.decoder.vocabulary, (sizes.batch, num_tokens), generator=generator)
        with context.guarded(f"{workload}, {DYNAMIC}"):
            expected = Expected()
            for system in SYSTEMS:
                begin(f"{workload}, {system}")
                with context.guarded(f"{workload}, {system}") if system != DYNAMIC else nullcontext():
                    _measure(context, workload, system, model, ids_BT.to(context.device), expected)
        if num_tokens in sizes.compiled:
            torch.compiler.reset()  # else a StaticCache of another length is compiled for any length
    del model
    release(context.device)


def _measure(context: Context, workload: str, system: str, model: Any, prompt_BT: torch.Tensor, expected: Expected) -> None:
    sizes, device = context.sizes, context.device
    batch, num_tokens = prompt_BT.shape
    ways, per_way = _ways(context, model, system, num_tokens), sizes.warm_steps + sizes.steps
    total = num_tokens + sum(per_way for way in ways if not way.again)
    token_bytes = batch * context.decoder.row_bytes // ITEM_BYTES * model.dtype.itemsize
    judge = Judge(expected, model.dtype, first=system == DYNAMIC)
    # A budget that nothing here should come near: what is taken is measured elsewhere, and not forced.
    with memory_of(system, model.config, device, total * token_bytes + GIB) as memory:
        cache = memory.open(batch, total)
        with _metered(context) as meter:
            prefill_us = _timed_us(device, lambda: judge.take(_prefill(model, prompt_BT, cache, sizes.chunk_tokens)))
            judge.judge(system)
            step_us = {system: _steps_us(context, judge, ways[0], model, cache)}
            held_bytes = None if meter is None else meter.peak_bytes + memory.own_bytes
        written = num_tokens + per_way
        needed_bytes = written * token_bytes
        judge.judge_rows(cache, written)
        for way in ways[1:]:
            with context.guarded(f"{workload}, {way.name}") if way.name != system else nullcontext():
                if way.again:
                    cache.crop(-per_way)
                    judge.go_back(per_way)
                    written -= per_way
                took_us = _steps_us(context, judge, way, model, cache)
                written += per_way
                judge.judge_rows(cache, written)
                step_us.setdefault(way.name, []).extend(took_us)
            if way.name not in step_us:
                break  # nobody knows what the cache has now
    context.add_figure(workload, system, PREFILL, "tok/s", batch * num_tokens / prefill_us * 1e6)
    if held_bytes is not None:
        context.add_figure(workload, system, HELD, "GiB", held_bytes / GIB, needed_bytes / GIB)
    bound_s = roofline.decode_s(context.decoder, batch, batch * total) if context.settings.on_gpu else None
    for name, samples in step_us.items():
        bounds = (None, None) if bound_s is None else (bound_s * 1e3, batch / bound_s)
        context.add(workload, name, STEP, "ms", [each / 1e3 for each in samples], bounds[0])
        context.add(workload, name, RATE, "tok/s", [batch / each * 1e6 for each in samples], bounds[1])
        if name != DYNAMIC:
            context.add_figure(workload, name, SAME, "%", 100 * judge.share_same(name))
            context.add(workload, name, OFF, "%", [100 * each for each in judge.off[name]])


def _steps_us(context: Context, judge: Judge, way: Way, model: Any, cache: Any) -> list[float]:
    """How long steps take, behind what the cache has; those that warm up are not among them. Raises: WrongNumbers."""
    took_us: list[float] = []
    with _attention_of(model, way.name):
        for _ in range(context.sizes.warm_steps + context.sizes.steps):
            ids_B1 = judge.next_ids()
            took_us.append(_timed_us(context.device, lambda: judge.take(_logits(way.call, ids_B1, cache))))  # noqa: B023
            judge.judge(way.name)
    return took_us[context.sizes.warm_steps :]


@contextmanager
def _attention_of(model: Any, name: str) -> Iterator[None]:
    """The model attends as the name says. Raises: WrongNumbers if vmmkv's kernels declined a layer, which others then did."""
    from vmmkv.adapters.transformers import attention

    if ATTENDING not in name:
        yield
        return
    declined = attention.declined.copy()
    model.set_attn_implementation(attention.NAME)
    try:
        yield
    finally:
        model.set_attn_implementation("sdpa")
    if others := attention.declined - declined:
        raise WrongNumbers(f"{name}: {others.total()} layers attended by sdpa: {', '.join(others)}")


def _warm(context: Context, model: Any) -> None:
    """Who is first would load kernels and open libraries for all: two chunks and a step, of which nothing is kept."""
    chunk_tokens = context.sizes.chunk_tokens
    ids_BT = torch.zeros(context.sizes.batch, 2 * chunk_tokens + 1, dtype=torch.int64, device=context.device)
    with memory_of(DYNAMIC, model.config, context.device, 0) as memory:
        cache = memory.open(*ids_BT.shape)
        _prefill(model, ids_BT, cache, chunk_tokens)
    _wait(context.device)


def _ways(context: Context, model: Any, system: str, num_tokens: int) -> list[Way]:
    """One way after the other, behind one prompt.

    transformers' own `generate` compiles the steps of a StaticCache on a GPU, in the way taken here, and of no other. A model
    over a VmmCache is one graph of torch.compile with vmmkv's attention; memory is mapped while it runs, so there is no CUDA
    graph. The first system takes as many steps, all of them eager.
    """
    eager, on_gpu = [Way(system, model)], context.settings.on_gpu
    attending = [Way(system + ATTENDING, model, again=True)] if on_gpu and system != STATIC else []
    if num_tokens not in context.sizes.compiled:
        return eager + attending
    if system == STATIC:
        return [*eager, Way(system + COMPILED, model.get_compiled_call(None))]
    if system == VMMKV:
        compiled = torch.compile(model.__call__, fullgraph=True, dynamic=True)
        return [*eager, *attending, Way(system + ATTENDING + COMPILED, compiled)]
    return [*eager, *eager, *attending]


def _prefill(model: Any, prompt_BT: torch.Tensor, cache: Any, chunk_tokens: int) -> torch.Tensor:
    """The logits behind the last token, [B, V]. In chunks, each of which sees those before it in the cache."""
    *chunks, last_BT = torch.split(prompt_BT, chunk_tokens, dim=1)
    for chunk_BT in chunks:
        _logits(model, chunk_BT, cache)
    return _logits(model, last_BT, cache)


def _logits(call: Call, ids_BT: torch.Tensor, cache: Any) -> torch.Tensor:
    """Behind the last of these tokens, [B, V]. Without a mask, since nothing is padded."""
    logits_B1V: torch.Tensor = call(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits_B1V[:, -1]


def _timed_us(device: torch.device, run: Callable[[], None]) -> float:
    """Until the device is done with it."""
    _wait(device)
    began_us = now_us()
    run()
    _wait(device)
    return now_us() - began_us


def _wait(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _metered(context: Context) -> AbstractContextManager[Meter | None]:
    """On a GPU, whose allocator counts anyway. On a CPU counting would take longer than what is timed."""
    return meter_of(context.device) if context.settings.on_gpu else nullcontext()
