"""A VmmCache in transformers, against DynamicCache and StaticCache: time, memory, the longest context, what fits.

    memory     the peak of what a cache takes while a batch's rows come, over what these rows need
    mixed      how many requests of mixed lengths fit into a budget, each with a cache of its own
    decode     the model, token by token: eager and compiled, with SDPA and with vmmkv's attention

The first two have no model: random keys and values are written pass by pass, and read again. On a GPU alone, where torch's
allocator counts what it gives. In `decode` the first system decodes greedily; the others get its tokens, so that the logits of
each of their steps, and their rows, can be held against its own.

B sequences, K kv heads, T tokens, D head dim, V vocabulary
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple, cast

import torch

from bench import workloads
from bench.harness import Recorder, Settings, WrongNumbers, now_us, release_memory, synchronize
from bench.suites.serve.models import ITEM_BYTES, ServedModel, decode_s, model_of
from vmmkv import Pool
from vmmkv.errors import OutOfPages
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes

PARTS: Final = ("memory", "mixed", "decode")
"""In this order: what `decode` compiles leaves memory with torch in which a meter sees nothing."""

DYNAMIC: Final = "transformers DynamicCache"
STATIC: Final = "transformers StaticCache"
VMMKV: Final = "vmmkv VmmCache"
SYSTEMS: Final = (DYNAMIC, STATIC, VMMKV)
"""The first is what the others' results are held against."""
ATTENDING: Final = ", vmmkv attention"
COMPILED: Final = ", compiled"
"""Behind a system's name: attention by vmmkv's kernels, and not by torch's SDPA; compiled decode steps."""

_PUBLISHED_TOKENS: Final = 4096
"""The most that a request of `chat` has where its lengths are those that were published."""


_FILL_TOKENS: Final = 4096
"""That one pass writes for each sequence where no model runs."""
_SINGLE_TOKENS: Final = 64
"""Of these then come one by one."""
_MEMORY_BATCH: Final = 8
_MIXED_PASS_TOKENS: Final = 16
"""Of an answer, written at once."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSizes:
    """In tokens and numbers of things. Of `decode`, but for the last three."""

    batch: int
    contexts: tuple[int, ...]
    """Tokens of each sequence when decoding begins."""
    compiled: tuple[int, ...]
    """Contexts at which compiled steps are measured too: compiling takes a minute."""
    chunk_tokens: int
    """Of a prompt that one pass computes, for each sequence."""
    warm_steps: int
    """Not timed: torch compiles one, compiles the next for any length or records it, and replays the one behind."""
    steps: int
    memory_contexts: tuple[int, ...]
    mixed_budget_bytes: int
    mixed_max_tokens: int
    """Of a request, prompt and answer: what a StaticCache must be sized for, since no answer's length is known."""

    @classmethod
    def of(cls, settings: Settings) -> "CacheSizes":
        """On one H200 `decode` takes some 200 s, the other parts a minute together; on a CPU all is done in seconds."""
        small = settings.small
        return cls(
            batch=settings.sequences or (1 if small else 8),
            contexts=(64, 256) if small else (1024, 8192, 32768),
            compiled=() if small else (32768,),
            chunk_tokens=48 if small else 2048,
            warm_steps=2 if small else 6,
            steps=settings.steps or ((8 if settings.quick else 32) if small else 16),
            memory_contexts=(512,) if small else (1024, 8192, 32768),
            mixed_budget_bytes=64 * MIB if small else 4 * GIB,
            mixed_max_tokens=64 if small else _PUBLISHED_TOKENS,
        )


def absent(settings: Settings) -> dict[str, str]:
    """Parts that are left out on a CPU."""
    left_out = [part for part in PARTS[:-1] if settings.wants(part) and not settings.on_gpu]
    return dict.fromkeys(left_out, "a CPU's allocator does not count what it gives")


def run(recorder: Recorder) -> None:
    """Every part that is wanted."""
    parts = {"memory": _run_memory, "mixed": _run_mixed, "decode": _run_decode}
    wanted = [name for name in PARTS if recorder.settings.wants(name) and name not in absent(recorder.settings)]
    with torch.no_grad():
        for name in recorder.track(wanted):
            parts[name](_Context(recorder))


class _Context:
    """The recorder, sizes, and models of a run."""

    def __init__(self, recorder: Recorder) -> None:
        self.recorder, self.settings, self.device = recorder, recorder.settings, recorder.settings.device
        self.sizes: Final = CacheSizes.of(self.settings)
        self.rows_of: Final = model_of(self.settings.shape.name, tiny=False)
        """Whose rows are kept where no model runs."""
        self.decoder: Final = model_of(self.settings.shape.name, tiny=self.settings.small)

    def rows(self, batch: int, pass_tokens: int) -> "Rows":
        """Random rows of batches."""
        return Rows(self.rows_of, self.device, batch=batch, pass_tokens=pass_tokens, seed=self.settings.seed)


def _config_of(model: ServedModel) -> Any:
    """As transformers has it. Imported here: it takes seconds."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**model.config)


# caches and their memory


class Caches:
    """Opens caches of one system until its `with` block ends.

    A pool's budget is two pages less: for its null page, and for the few numbers by slot that a cache has in torch's memory.
    What torch's allocator may give is limited by a meter.
    """

    def __init__(self, system: str, config: Any, device: torch.device, budget_bytes: int) -> None:
        self._system, self._config, self._stack = system, config, ExitStack()
        self._pool = Pool(device, budget_bytes=max(budget_bytes, 4 * PAGE_BYTES) - 2 * PAGE_BYTES) if system == VMMKV else None
        if self._pool is not None:
            self._stack.callback(self._pool.close)

    def __enter__(self) -> "Caches":
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        """An empty cache for a batch. A StaticCache takes what `max_tokens` need at its first pass."""
        from transformers import DynamicCache, StaticCache

        from vmmkv.adapters.transformers import VmmCache

        if self._pool is not None:
            cache = VmmCache(self._config, self._pool, max_tokens=max_tokens, slots=num_sequences)
            self._stack.callback(cache.close)
            return cache
        if self._system == STATIC:
            return StaticCache(config=self._config, max_cache_len=max_tokens)
        return DynamicCache(config=self._config)

    @property
    def own_bytes(self) -> int:
        """Taken from the device beside torch's allocator, with the null page."""
        return 0 if self._pool is None else self._pool.created_bytes + PAGE_BYTES


class Meter:
    """What torch's allocator gives on a GPU since it was entered: its peak, and no more than a limit."""

    _MOST_UNUSED_BYTES: Final = 96 * MIB
    """That torch may have kept before: the rest of a few segments. What compiled steps leave is gigabytes."""

    def __init__(self, device: torch.device, limit_bytes: int | None = None) -> None:
        self._device, self._limit_bytes = device, limit_bytes
        self._allocated_before = self._reserved_before = 0

    @property
    def peak_bytes(self) -> int:
        """In tensors, at most."""
        return torch.cuda.max_memory_allocated(self._device) - self._allocated_before

    @property
    def taken_bytes(self) -> int:
        """From the device, at most, with what the allocator keeps of memory that was given back, in pieces or not.

        Raises: WrongNumbers if torch had kept memory when counting began: what is put there is not counted.
        """
        unused_bytes = self._reserved_before - self._allocated_before
        if unused_bytes > self._MOST_UNUSED_BYTES:
            raise WrongNumbers(
                f"torch had kept {format_bytes(unused_bytes)} unused when counting began; run these parts in a process of "
                "their own: --parts memory mixed"
            )
        return torch.cuda.max_memory_reserved(self._device) - self._reserved_before

    def __enter__(self) -> "Meter":
        synchronize(self._device)
        release_memory(self._device)
        self._allocated_before = torch.cuda.memory_allocated(self._device)
        self._reserved_before = torch.cuda.memory_reserved(self._device)
        torch.cuda.reset_peak_memory_stats(self._device)
        if self._limit_bytes is not None:
            _, total_bytes = torch.cuda.mem_get_info(self._device)
            share = (self._reserved_before + self._limit_bytes) / total_bytes
            torch.cuda.set_per_process_memory_fraction(min(1.0, share), self._device)
        return self

    def __exit__(self, *error: object) -> None:
        if self._limit_bytes is not None:
            torch.cuda.set_per_process_memory_fraction(1.0, self._device)


class Rows:
    """What passes write where no model runs: of the seed and a pass's number; no two layers have the same.

    All layers see windows of one random tensor, so that nothing is allocated while they are written.
    """

    def __init__(self, model: ServedModel, device: torch.device, *, batch: int, pass_tokens: int, seed: int) -> None:
        self.layers: Final = model.layers
        self.batch: Final = batch
        self.token_bytes: Final = batch * model.row_bytes
        """Of a token of every sequence, in all layers."""
        self._seed = seed % 2**20
        self._generator = torch.Generator(device)
        kv_heads, head_dim = (cast(int, model.config[key]) for key in ("num_key_value_heads", "head_dim"))
        size = (batch, kv_heads, pass_tokens + self.layers, head_dim)
        self._planes: Final = [torch.empty(size, dtype=torch.bfloat16, device=device) for _ in ("k", "v")]

    def draw(self, number: int, num_tokens: int) -> None:
        """The rows of this pass, for `of_layer`."""
        self._generator.manual_seed(self._seed * 2**20 + number)
        for plane in self._planes:
            plane[:, :, : num_tokens + self.layers].normal_(generator=self._generator)

    def of_layer(self, layer: int, num_tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a layer in the pass that was drawn last, [B, K, T, D]."""
        k_BKTD, v_BKTD = (plane[:, :, layer : layer + num_tokens] for plane in self._planes)
        return k_BKTD, v_BKTD

    def write(self, cache: Any, plan: Sequence[int], *, first: int = 0) -> None:
        """Passes of so many tokens each through all layers; the number of the first is `first`."""
        for number, num_tokens in enumerate(plan, first):
            self.draw(number, num_tokens)
            for layer in range(self.layers):
                cache.update(*self.of_layer(layer, num_tokens), layer)

    def check(self, cache: Any, plan: Sequence[int], *, first: int = 0) -> None:
        """Has it every row of these passes? Raises: WrongNumbers naming the first that is another."""
        start = 0
        for number, num_tokens in enumerate(plan, first):
            self.draw(number, num_tokens)
            for layer in range(self.layers):
                kept = cache.layers[layer]
                for given, wanted in zip((kept.keys, kept.values), self.of_layer(layer, num_tokens), strict=True):
                    if not torch.equal(given[:, :, start : start + num_tokens], wanted):
                        raise WrongNumbers(f"layer {layer}, tokens {start} to {start + num_tokens}: not what was written")
            start += num_tokens


def plan_of(num_tokens: int, *, chunk_tokens: int, steps: int) -> list[int]:
    """A prompt in chunks, then `steps` single tokens; `num_tokens` in all, or fewer single ones if it is so short."""
    steps = min(steps, num_tokens)
    chunks, rest = divmod(num_tokens - steps, chunk_tokens)
    return [chunk_tokens] * chunks + [rest] * bool(rest) + [1] * steps


# memory, mixed


def _run_memory(context: _Context) -> None:
    recorder, rows = context.recorder, context.rows(_MEMORY_BATCH, _FILL_TOKENS)
    for num_tokens, system in itertools.product(context.sizes.memory_contexts, SYSTEMS):
        name = f"{context.rows_of.name} memory: {rows.batch} sequences of {num_tokens} + {_SINGLE_TOKENS} tokens"
        plan = plan_of(num_tokens + _SINGLE_TOKENS, chunk_tokens=_FILL_TOKENS, steps=_SINGLE_TOKENS)
        needed_bytes = sum(plan) * rows.token_bytes
        recorder.note(f"{name}, {system}")
        # A budget that nothing here comes near: what is taken is measured, and not forced.
        with (
            recorder.guarded(name, system),
            Caches(system, _config_of(context.rows_of), context.device, 2 * needed_bytes) as caches,
        ):
            cache = caches.open(rows.batch, sum(plan))
            with Meter(context.device) as meter:
                rows.write(cache, plan)
                peak_bytes, taken_bytes = meter.peak_bytes + caches.own_bytes, meter.taken_bytes + caches.own_bytes
            rows.check(cache, plan)
            waste = 100 * (peak_bytes / needed_bytes - 1)
            recorder.figure(name, system, "peak memory", "GiB", peak_bytes / GIB, 1, needed_bytes / GIB)
            recorder.figure(name, system, "peak memory, from the device", "GiB", taken_bytes / GIB, 1, needed_bytes / GIB)
            recorder.figure(name, system, "waste at the peak", "% of the rows' bytes", waste, 1, 0.0)


def _run_mixed(context: _Context) -> None:
    """How many requests each system holds at once, taken in one order until one does not fit."""
    sizes, recorder = context.sizes, context.recorder
    chat = workloads.chat(
        seed=context.settings.seed,
        vocabulary=32_000,
        count=1024,
        max_tokens=sizes.mixed_max_tokens,
        scale=min(1.0, sizes.mixed_max_tokens / _PUBLISHED_TOKENS),
    )
    requests = [(len(ask.prompt), ask.num_out) for ask in chat.asks]
    rows = context.rows(1, sizes.mixed_max_tokens)
    name = f"{context.rows_of.name} mixed: {chat.text}, in {format_bytes(sizes.mixed_budget_bytes)}"
    sums = itertools.accumulate(rows.token_bytes * (prompt + out) for prompt, out in itertools.cycle(requests))
    most = sum(1 for _ in itertools.takewhile(lambda sum_bytes: sum_bytes <= sizes.mixed_budget_bytes, sums))
    for system in SYSTEMS:
        with recorder.guarded(name, system):
            recorder.note(f"{name}, {system}")
            admitted = _admitted(context, system, rows, requests)
            if admitted > most:
                raise WrongNumbers(f"{admitted} sequences were admitted, and the budget has rows for {most}")
            recorder.figure(name, system, "admitted sequences", "sequences", admitted, most, most)


def _admitted(context: _Context, system: str, rows: Rows, requests: list[tuple[int, int]]) -> int:
    """Raises: WrongNumbers if what was written for one of them is something else in the end."""
    sizes = context.sizes
    running: list[tuple[Any, list[int], int]] = []
    with Caches(system, _config_of(context.rows_of), context.device, sizes.mixed_budget_bytes) as caches:
        with Meter(context.device, sizes.mixed_budget_bytes) as meter:
            first = 0
            for prompt, out in itertools.cycle(requests):
                plan = [prompt, *plan_of(out, chunk_tokens=_MIXED_PASS_TOKENS, steps=0)]
                cache = caches.open(1, sizes.mixed_max_tokens)
                try:
                    rows.write(cache, plan, first=first)
                except (OutOfPages, torch.OutOfMemoryError):
                    break
                if meter.taken_bytes + caches.own_bytes > sizes.mixed_budget_bytes:
                    break
                running.append((cache, plan, first))
                first += len(plan)
        for cache, plan, first in running:
            rows.check(cache, plan, first=first)
    return len(running)


# decode


class ErrorBounds(NamedTuple):
    """The most by which something may be off: the length of the difference from the first system's, over that one's length."""

    logits: float
    row: float


BOUNDS: Final = {torch.float32: ErrorBounds(1e-3, 1e-3), torch.bfloat16: ErrorBounds(0.1, 0.5)}
"""By the model's type. What has nothing in common is off by 1.4: a row of another token, or logits behind another prompt.

Adding up in another order changes bfloat16 by 0.4 % at a time, in each layer; of half a million rows the worst counts.
"""


@dataclass(slots=True)
class Expected:
    """What the first system computed: logits behind the prompt and each step; rows by the number of tokens."""

    logits_BV: list[torch.Tensor] = field(default_factory=list)
    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)


class Judge:
    """Holds one system against what is expected; the first system says what that is. `off` is by name, a sample a step."""

    def __init__(self, expected: Expected, dtype: torch.dtype, *, first: bool) -> None:
        self._expected, self._first = expected, first
        self._bounds, self._dtype = BOUNDS[dtype], dtype
        self._num_taken = 0
        self._taken: tuple[torch.Tensor, torch.Tensor] | None = None
        self.same: dict[str, list[float]] = {}
        self.off: dict[str, list[float]] = {}

    def take(self, logits_BV: torch.Tensor) -> None:
        """What was computed. Finding the likeliest is part of a step, and is timed with it."""
        self._taken = logits_BV, logits_BV.argmax(-1)

    def next_ids(self) -> torch.Tensor:
        """Of the step to come, int64 [B, 1]: the likeliest by the first system."""
        return self._expected.logits_BV[self._num_taken - 1].argmax(-1, keepdim=True)

    def judge(self, name: str) -> None:
        """Compare what was taken last. Raises: WrongNumbers; in float32 the likeliest token must be the same."""
        assert self._taken is not None, "a step has been run"
        (logits_BV, tokens_B), self._taken = self._taken, None
        if self._first:
            self._expected.logits_BV.append(logits_BV.clone())
        expected_BV = self._expected.logits_BV[self._num_taken]
        off = _most_off(logits_BV, expected_BV)
        same = float((tokens_B == expected_BV.argmax(-1)).float().mean())
        self.off.setdefault(name, []).append(off)
        self.same.setdefault(name, []).append(same)
        where = f"{name}, {self._num_taken} tokens behind the prompt"
        if not off <= self._bounds.logits:  # NaN is not
            raise WrongNumbers(f"{where}: logits are off by {off:.2g} of their length, over {self._bounds.logits}")
        if self._dtype == torch.float32 and same < 1:
            raise WrongNumbers(f"{where}: {100 * same:.0f} % of the tokens are those that a DynamicCache gives")
        self._num_taken += 1

    def go_back(self, num_steps: int) -> None:
        """The last steps are computed again, in another way. The first system is then held against itself."""
        self._first = False
        self._num_taken -= num_steps

    def judge_rows(self, cache: Any, num_tokens: int) -> None:
        """Compare rows of the first and the last layer. Raises: WrongNumbers for one that is another's."""
        layers = (0, len(cache.layers) - 1)
        planes = [plane for layer in layers for plane in (cache.layers[layer].keys, cache.layers[layer].values)]
        rows = [plane[:, :, :num_tokens] for plane in planes]
        if self._first:
            self._expected.rows[num_tokens] = rows
        for number, (given, wanted) in enumerate(zip(rows, self._expected.rows[num_tokens], strict=True)):
            what = f"{'KV'[number % 2]} of layer {layers[number // 2]}"
            if given.shape != wanted.shape or wanted.shape[2] != num_tokens:
                raise WrongNumbers(f"{what}: rows {list(given.shape)}, and {num_tokens} tokens were written")
            off = _most_off(given, wanted)
            if not off <= self._bounds.row:
                raise WrongNumbers(f"{what}: a row is off by {off:.2g} of its length, over {self._bounds.row}")


def _most_off(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of vectors in the last dimension, the one that is off most."""
    wanted = wanted.float()
    return float(((given.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


class StepKind(NamedTuple):
    """One way to take steps. `again`: those of the way before are taken back first."""

    name: str
    call: Callable[..., Any]
    again: bool = False


def _run_decode(context: _Context) -> None:
    """All systems at all contexts. Where the first system fails, there is nothing to hold the others against."""
    from transformers import AutoModelForCausalLM

    sizes, recorder = context.sizes, context.recorder
    dtype = torch.bfloat16 if context.settings.on_gpu else torch.float32
    torch.manual_seed(context.settings.seed)
    with context.device:
        config = _config_of(context.decoder)
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False).eval()
    # The first system would load kernels and open libraries for all: two chunks and a step, of which nothing is kept.
    warm_BT = torch.zeros(sizes.batch, 2 * sizes.chunk_tokens + 1, dtype=torch.int64, device=context.device)
    with Caches(DYNAMIC, config, context.device, 0) as caches:
        _prefill(model, warm_BT, caches.open(*warm_BT.shape), sizes.chunk_tokens)
    generator = torch.Generator().manual_seed(context.settings.seed)
    for num_tokens in sizes.contexts:
        name = f"{context.decoder.name} decode: {num_tokens} tokens, batch {sizes.batch}"
        ids_BT = torch.randint(context.decoder.vocabulary, (sizes.batch, num_tokens), generator=generator)
        with recorder.guarded(name, DYNAMIC):
            expected = Expected()
            for system in SYSTEMS:
                recorder.note(f"{name}, {system}")
                with recorder.guarded(name, system) if system != DYNAMIC else nullcontext():
                    _measure_decode(context, name, system, model, ids_BT.to(context.device), expected)
        if num_tokens in sizes.compiled:
            torch.compiler.reset()  # else a StaticCache of another length is compiled for any length
    del model
    release_memory(context.device)


def _measure_decode(context: _Context, name: str, system: str, model: Any, prompt_BT: torch.Tensor, expected: Expected) -> None:
    sizes, device, recorder = context.sizes, context.device, context.recorder
    batch, num_tokens = prompt_BT.shape
    ways, per_way = _ways(context, model, system, num_tokens), sizes.warm_steps + sizes.steps
    total = num_tokens + sum(per_way for way in ways if not way.again)
    token_bytes = batch * context.decoder.row_bytes // ITEM_BYTES * model.dtype.itemsize
    judge = Judge(expected, model.dtype, first=system == DYNAMIC)
    # A budget that nothing here comes near: what is taken is measured in `memory`.
    with Caches(system, model.config, device, total * token_bytes + GIB) as caches:
        cache = caches.open(batch, total)
        with Meter(device) if context.settings.on_gpu else nullcontext() as meter:
            prefill_us = _timed_us(device, lambda: judge.take(_prefill(model, prompt_BT, cache, sizes.chunk_tokens)))
            judge.judge(system)
            step_us = {system: _steps_us(context, judge, ways[0], model, cache)}
            held_bytes = None if meter is None else meter.peak_bytes + caches.own_bytes
        written = num_tokens + per_way
        needed_bytes = written * token_bytes
        judge.judge_rows(cache, written)
        for way in ways[1:]:
            with recorder.guarded(name, way.name) if way.name != system else nullcontext():
                if way.again:
                    cache.crop(-per_way)
                    judge.go_back(per_way)
                    written -= per_way
                took_us = _steps_us(context, judge, way, model, cache)
                written += per_way
                judge.judge_rows(cache, written)
                step_us.setdefault(way.name, []).extend(took_us)
            if way.name not in step_us:
                break  # what the cache has now is not known
    recorder.figure(name, system, "prefill", "tok/s", batch * num_tokens / prefill_us * 1e6)
    if held_bytes is not None:
        recorder.figure(name, system, "peak memory beyond the weights", "GiB", held_bytes / GIB, 1, needed_bytes / GIB)
    bound_s = decode_s(context.decoder, batch, batch * total)
    for way_name, samples in step_us.items():
        recorder.samples(name, way_name, "time per token", "ms", [each / 1e3 for each in samples], bound_s * 1e3)
        recorder.samples(name, way_name, "throughput", "tok/s", [batch / each * 1e6 for each in samples], batch / bound_s)
        if way_name != DYNAMIC:
            same = judge.same[way_name]
            recorder.figure(name, way_name, "same tokens", "%", 100 * sum(same) / len(same))
            recorder.samples(name, way_name, "logits off by", "%", [100 * each for each in judge.off[way_name]])


def _ways(context: _Context, model: Any, system: str, num_tokens: int) -> list[StepKind]:
    """One way after the other, behind one prompt. Compiled steps come last: where they fail, the rest has been measured.

    transformers' own `generate` compiles the steps of a StaticCache on a GPU, in the way taken here, and of no other. A model
    over a VmmCache is one graph of torch.compile with vmmkv's attention; memory is mapped while it runs, so there is no CUDA
    graph. The first system takes as many steps, all of them eager.
    """
    eager, on_gpu = [StepKind(system, model)], context.settings.on_gpu
    attending = [StepKind(system + ATTENDING, model, again=True)] if on_gpu and system != STATIC else []
    if num_tokens not in context.sizes.compiled:
        return eager + attending
    if system == STATIC:
        return [*eager, StepKind(system + COMPILED, model.get_compiled_call(None))]
    if system == VMMKV:
        compiled = torch.compile(model.__call__, fullgraph=True, dynamic=True)
        return [*eager, *attending, StepKind(system + ATTENDING + COMPILED, compiled)]
    return [*eager, *eager, *attending]


def _steps_us(context: _Context, judge: Judge, way: StepKind, model: Any, cache: Any) -> list[float]:
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


def _prefill(model: Any, prompt_BT: torch.Tensor, cache: Any, chunk_tokens: int) -> torch.Tensor:
    """The logits behind the last token, [B, V]. In chunks, each of which sees those before it in the cache."""
    *chunks, last_BT = torch.split(prompt_BT, chunk_tokens, dim=1)
    for chunk_BT in chunks:
        _logits(model, chunk_BT, cache)
    return _logits(model, last_BT, cache)


def _logits(call: Callable[..., Any], ids_BT: torch.Tensor, cache: Any) -> torch.Tensor:
    """Behind the last of these tokens, [B, V]. Without a mask, since nothing is padded."""
    logits_B1V: torch.Tensor = call(input_ids=ids_BT, past_key_values=cache, use_cache=True, logits_to_keep=1).logits
    return logits_B1V[:, -1]


def _timed_us(device: torch.device, run: Callable[[], None]) -> float:
    """Until the device is done with it."""
    synchronize(device)
    began_us = now_us()
    run()
    synchronize(device)
    return now_us() - began_us
