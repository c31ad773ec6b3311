"""A VmmCache in transformers, against DynamicCache and StaticCache: time, memory, the longest context, what fits.

    memory     the peak of what a cache takes while a batch's rows come, over what these rows need
    mixed      how many requests of mixed lengths fit into a budget, each with a cache of its own
    decode     the model, token by token: eager and compiled, with SDPA and with vmmkv's attention

The first two have no model: random keys and values are written pass by pass. On a GPU alone, where torch's
allocator counts what it gives. In `decode` the first system decodes greedily; the others get its tokens, so that the logits of
each of their steps, and their rows, can be held against its own.

B sequences, K kv heads, T tokens, D head dim, V vocabulary
"""

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, Final, NamedTuple

import torch

from bench import workloads
from bench.figures import Drawing, Question
from bench.harness import Recorder, Settings, WrongNumbers, now_us, release_memory, synchronize
from bench.systems.models import ITEM_BYTES, ServedModel, decode_s, model_of
from vmmkv import Pool
from vmmkv.errors import OutOfPages
from vmmkv.units import GIB, MIB, PAGE_BYTES, format_bytes

QUESTIONS: Final = tuple(
    Question("In transformers, eager", "time per token", f"transformers {other}", ours="vmmkv VmmCache")
    for other in ("DynamicCache", "StaticCache")
)
FIGURES: Final = (
    Drawing("decode", "A decode step over each cache", ("time per token",), r".+? decode: (?P<group>.+)"),
    Drawing("admitted", "Requests that fit at once", ("admitted sequences",)),
)

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

_PASS_TOKENS: Final = 4096
"""That one pass writes for each sequence where no model runs. The most that a request of `chat` has as it was published."""


def absent(settings: Settings) -> dict[str, str]:
    """Parts that are left out on a CPU."""
    left_out = [part for part in PARTS[:-1] if settings.wants(part) and not settings.on_gpu]
    return dict.fromkeys(left_out, "a CPU's allocator does not count what it gives")


def run(recorder: Recorder) -> None:
    """Every part that is wanted."""
    settings = recorder.settings
    parts = {"memory": _run_memory, "mixed": _run_mixed, "decode": _run_decode}
    wanted = [name for name in PARTS if settings.wants(name) and name not in absent(settings)]
    with torch.no_grad():
        for name in recorder.track(wanted):
            parts[name](recorder)


def _config_of(model: ServedModel) -> Any:
    """As transformers has it. Imported here: it takes seconds."""
    from transformers import AutoConfig

    return AutoConfig.for_model(**model.config)


# caches and their memory


class Caches(ExitStack):
    """Opens caches of one system, and closes them.

    A pool's budget is two pages less: for its null page, and for the few numbers by slot that a cache has in torch's memory.
    What torch's allocator may give is limited by a meter.
    """

    def __init__(self, system: str, config: Any, device: torch.device, budget_bytes: int) -> None:
        super().__init__()
        self._system, self._config, self._pool = system, config, None
        if system == VMMKV:
            self._pool = Pool(device, budget_bytes=max(budget_bytes, 4 * PAGE_BYTES) - 2 * PAGE_BYTES)
            self.callback(self._pool.close)

    def open(self, num_sequences: int, max_tokens: int) -> Any:
        """An empty cache for a batch. A StaticCache takes what `max_tokens` need at its first pass."""
        from transformers import DynamicCache, StaticCache

        from vmmkv.adapters.transformers import VmmCache

        if self._pool is not None:
            cache = VmmCache(self._config, self._pool, max_tokens=max_tokens, slots=num_sequences)
            self.callback(cache.close)
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
    """Random K and V, written pass by pass where no model runs: one tensor for all layers, so that nothing is allocated."""

    def __init__(self, model: ServedModel, device: torch.device, *, batch: int) -> None:
        self._layers = model.layers
        self.token_bytes: Final = batch * model.row_bytes
        """Of a token of every sequence, in all layers."""
        size = (batch, model.config["num_key_value_heads"], _PASS_TOKENS, model.config["head_dim"])
        self._plane_BKTD: Final = torch.randn(size, device=device).bfloat16()

    def write(self, cache: Any, plan: Sequence[int]) -> None:
        """Passes of so many tokens each through all layers. Raises: WrongNumbers if a layer has another number of tokens."""
        for num_tokens in plan:
            for layer in range(self._layers):
                given_BKTD = self._plane_BKTD[:, :, :num_tokens]
                cache.update(given_BKTD, given_BKTD, layer)
        if (num_kept := cache.get_seq_length()) != sum(plan):
            raise WrongNumbers(f"the cache has {num_kept} tokens, and {sum(plan)} were written")


def chunks_of(num_tokens: int, chunk_tokens: int) -> list[int]:
    """Passes of so many tokens, and one of the rest."""
    chunks, rest = divmod(num_tokens, chunk_tokens)
    return [chunk_tokens] * chunks + [rest] * bool(rest)


# memory, mixed


def _run_memory(recorder: Recorder) -> None:
    settings = recorder.settings
    model, batch, single_tokens = model_of(settings.shape.name, tiny=False), 8, 64
    rows = Rows(model, settings.device, batch=batch)
    for num_tokens, system in itertools.product((512,) if settings.small else (1024, 8192, 32768), SYSTEMS):
        name = f"{model.name} memory: {batch} sequences of {num_tokens} + {single_tokens} tokens"
        plan = [*chunks_of(num_tokens, _PASS_TOKENS), *[1] * single_tokens]
        needed_bytes = sum(plan) * rows.token_bytes
        recorder.note(f"{name}, {system}")
        # A budget that nothing here comes near: what is taken is measured, and not forced.
        with (
            recorder.guarded(name, system),
            Caches(system, _config_of(model), settings.device, 2 * needed_bytes) as caches,
        ):
            cache = caches.open(batch, sum(plan))
            with Meter(settings.device) as meter:
                rows.write(cache, plan)
                peak_bytes, taken_bytes = meter.peak_bytes + caches.own_bytes, meter.taken_bytes + caches.own_bytes
            recorder.figure(name, system, "peak memory", "GiB", peak_bytes / GIB, 1, needed_bytes / GIB)
            recorder.figure(name, system, "peak memory, from the device", "GiB", taken_bytes / GIB, 1, needed_bytes / GIB)


def _run_mixed(recorder: Recorder) -> None:
    """How many requests each system holds at once, taken in one order until one does not fit.

    A StaticCache must be sized for the longest request, since no answer's length is known.
    """
    settings = recorder.settings
    budget_bytes, max_tokens = (64 * MIB, 64) if settings.small else (4 * GIB, _PASS_TOKENS)
    common: Any = {"seed": settings.seed, "vocabulary": 32_000, "count": 1024, "max_tokens": max_tokens}
    chat = workloads.chat(**common, scale=max_tokens / _PASS_TOKENS)
    model = model_of(settings.shape.name, tiny=False)
    rows = Rows(model, settings.device, batch=1)
    name = f"{model.name} mixed: {chat.text}, in {format_bytes(budget_bytes)}"
    sums = itertools.accumulate(rows.token_bytes * (len(ask.prompt) + ask.num_out) for ask in itertools.cycle(chat.asks))
    most = sum(1 for _ in itertools.takewhile(lambda sum_bytes: sum_bytes <= budget_bytes, sums))
    for system in SYSTEMS:
        recorder.note(f"{name}, {system}")
        with recorder.guarded(name, system), Caches(system, _config_of(model), settings.device, budget_bytes) as caches:
            admitted = _admitted(caches, rows, chat.asks, settings.device, budget_bytes, max_tokens)
            if admitted > most:
                raise WrongNumbers(f"{admitted} sequences were admitted, and the budget has rows for {most}")
            recorder.figure(name, system, "admitted sequences", "sequences", admitted, most, most)


def _admitted(
    caches: Caches, rows: Rows, asks: Sequence[workloads.Ask], device: torch.device, budget_bytes: int, max_tokens: int
) -> int:
    running: list[Any] = []
    with Meter(device, budget_bytes) as meter:
        for ask in itertools.cycle(asks):
            cache = caches.open(1, max_tokens)
            try:
                rows.write(cache, [len(ask.prompt), *chunks_of(ask.num_out, 16)])
            except (OutOfPages, torch.OutOfMemoryError):
                break
            if meter.taken_bytes + caches.own_bytes > budget_bytes:
                break
            running.append(cache)
    return len(running)


# decode

BOUNDS: Final = {torch.float32: (1e-3, 1e-3), torch.bfloat16: (0.1, 0.5)}
"""By the model's type, the most by which logits and a row may be off: the length of the difference from the first system's,
over that one's length. What has nothing in common is off by 1.4: a row of another token, or logits behind another prompt.

Adding up in another order changes bfloat16 by 0.4 % at a time, in each layer; of half a million rows the worst counts.
"""


@dataclass(slots=True)
class Expected:
    """What the first system computes, against which the others are held; it is held against itself where it repeats a step."""

    dtype: torch.dtype
    """Of the model."""
    logits_BV: list[torch.Tensor] = field(default_factory=list)
    """Behind the prompt, and behind each step."""
    rows: dict[int, list[torch.Tensor]] = field(default_factory=dict)
    """K and V of the first and the last layer, by the number of tokens."""

    def check(self, name: str, step: int, logits_BV: torch.Tensor) -> None:
        """Step 0 is the prompt. Raises: WrongNumbers; in float32 the likeliest tokens must be the same."""
        if step == len(self.logits_BV):
            self.logits_BV.append(logits_BV.clone())
        expected_BV, (bound, _) = self.logits_BV[step], BOUNDS[self.dtype]
        off = _most_off(logits_BV, expected_BV)
        where = f"{name}, {step} tokens behind the prompt"
        if not off <= bound:  # NaN is not
            raise WrongNumbers(f"{where}: logits are off by {off:.2g} of their length, over {bound}")
        if self.dtype == torch.float32 and not torch.equal(logits_BV.argmax(-1), expected_BV.argmax(-1)):
            raise WrongNumbers(f"{where}: other tokens than a DynamicCache gives")

    def check_rows(self, cache: Any, num_tokens: int) -> None:
        """Raises: WrongNumbers for a row that is another's."""
        layers = (0, len(cache.layers) - 1)
        planes = [plane for layer in layers for plane in (cache.layers[layer].keys, cache.layers[layer].values)]
        rows = [plane[:, :, :num_tokens] for plane in planes]
        for number, (given, wanted) in enumerate(zip(rows, self.rows.setdefault(num_tokens, rows), strict=True)):
            what, (_, bound) = f"{'KV'[number % 2]} of layer {layers[number // 2]}", BOUNDS[self.dtype]
            if given.shape != wanted.shape or wanted.shape[2] != num_tokens:
                raise WrongNumbers(f"{what}: rows {list(given.shape)}, and {num_tokens} tokens were written")
            off = _most_off(given, wanted)
            if not off <= bound:
                raise WrongNumbers(f"{what}: a row is off by {off:.2g} of its length, over {bound}")


def _most_off(given: torch.Tensor, wanted: torch.Tensor) -> float:
    """Of vectors in the last dimension, the one that is off most."""
    wanted = wanted.float()
    return float(((given.float() - wanted).norm(dim=-1) / wanted.norm(dim=-1)).max())


class DecodeSizes(NamedTuple):
    """In tokens and numbers of things. On one H200 `decode` takes some minutes, the other parts a minute together."""

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

    @classmethod
    def of(cls, settings: Settings) -> "DecodeSizes":
        """On a CPU all is done in seconds."""
        batch, steps = settings.sequences, settings.steps
        if settings.small:
            return cls(batch or 1, (64, 256), (), 48, 2, steps or (8 if settings.quick else 32))
        return cls(batch or 8, (1024, 8192, 32768), (1024, 32768), 2048, 6, steps or 16)


class StepKind(NamedTuple):
    """One way to take steps. `again`: those of the way before are taken back first."""

    name: str
    call: Callable[..., Any]
    again: bool = False


def _run_decode(recorder: Recorder) -> None:
    """All systems at all contexts. Where the first system fails, there is nothing to hold the others against."""
    from transformers import AutoModelForCausalLM

    settings, device, sizes = recorder.settings, recorder.settings.device, DecodeSizes.of(recorder.settings)
    served = model_of(settings.shape.name, tiny=settings.small)
    torch.manual_seed(settings.seed)
    with device:
        config, dtype = _config_of(served), torch.bfloat16 if settings.on_gpu else torch.float32
        model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation="sdpa").requires_grad_(False).eval()
    # The first system would load kernels and open libraries for all: two chunks and a step, of which nothing is kept.
    warm_BT = torch.zeros(sizes.batch, 2 * sizes.chunk_tokens + 1, dtype=torch.int64, device=device)
    with Caches(DYNAMIC, config, device, 0) as caches:
        _prefill(model, warm_BT, caches.open(*warm_BT.shape), sizes.chunk_tokens)
    generator = torch.Generator().manual_seed(settings.seed)
    for num_tokens in sizes.contexts:
        name = f"{served.name} decode: {num_tokens} tokens, batch {sizes.batch}"
        ids_BT = torch.randint(served.vocabulary, (sizes.batch, num_tokens), generator=generator).to(device)
        with recorder.guarded(name, DYNAMIC):
            expected = Expected(dtype)
            for system in SYSTEMS:
                recorder.note(f"{name}, {system}")
                with recorder.guarded(name, system) if system != DYNAMIC else nullcontext():
                    _measure_decode(recorder, sizes, served, name, system, model, ids_BT, expected)
        if num_tokens in sizes.compiled:
            torch.compiler.reset()  # else a StaticCache of another length is compiled for any length
    del model
    release_memory(device)


def _measure_decode(
    recorder: Recorder,
    sizes: DecodeSizes,
    served: ServedModel,
    name: str,
    system: str,
    model: Any,
    prompt_BT: torch.Tensor,
    expected: Expected,
) -> None:
    """One way after the other, behind one prompt. Those that fail leave the rows of the ways before."""
    device, (batch, num_tokens) = prompt_BT.device, prompt_BT.shape
    ways = _ways(model, system, on_gpu=recorder.settings.on_gpu, compiled=num_tokens in sizes.compiled)
    per_way = sizes.warm_steps + sizes.steps
    total = num_tokens + per_way * sum(not way.again for way in ways)
    token_bytes = batch * served.row_bytes // ITEM_BYTES * model.dtype.itemsize
    step_us: defaultdict[str, list[float]] = defaultdict(list)

    def take_steps(way: StepKind, num_taken: int) -> None:
        """Behind so many steps. Those that warm up are compared, and not timed."""
        took_us = []
        with _attention_of(model, way.name):
            for step in range(num_taken, num_taken + per_way):
                ids_B1 = expected.logits_BV[step].argmax(-1, keepdim=True)
                synchronize(device)
                began_us = now_us()
                logits_BV = _logits(way.call, ids_B1, cache)
                logits_BV.argmax(-1)
                synchronize(device)
                took_us.append(now_us() - began_us)
                expected.check(way.name, step + 1, logits_BV)
                del logits_BV  # the next step may run in a CUDA graph that reuses its memory
        expected.check_rows(cache, num_tokens + num_taken + per_way)
        step_us[way.name] += took_us[sizes.warm_steps :]

    # A budget that nothing here comes near: what is taken is measured in `memory`.
    with Caches(system, model.config, device, total * token_bytes + GIB) as caches:
        cache = caches.open(batch, total)
        expected.check(system, 0, _prefill(model, prompt_BT, cache, sizes.chunk_tokens))
        num_taken = 0
        for way in ways:
            with recorder.guarded(name, way.name) if way.name != system else nullcontext():
                if way.again:
                    cache.crop(-per_way)
                    num_taken -= per_way
                take_steps(way, num_taken)
                num_taken += per_way
            if way.name not in step_us:
                break  # what the cache has now is not known
    bound_ms = 1e3 * decode_s(served, batch, batch * total)
    for way_name, samples in step_us.items():
        recorder.samples(name, way_name, "time per token", "ms", [each / 1e3 for each in samples], bound_ms)


def _ways(model: Any, system: str, *, on_gpu: bool, compiled: bool) -> list[StepKind]:
    """One way after the other, behind one prompt. Compiled steps come last: where they fail, the rest has been measured.

    transformers' own `generate` compiles the steps of a StaticCache on a GPU, in the way taken here, and of no other. A model
    over a VmmCache is one graph of torch.compile with vmmkv's attention; memory is mapped while it runs, so there is no CUDA
    graph. The first system takes as many steps, all of them eager.
    """
    eager = [StepKind(system, model)]
    attending = [StepKind(system + ATTENDING, model, again=True)] if on_gpu and system != STATIC else []
    if not compiled:
        return eager + attending
    if system == STATIC:
        return [*eager, StepKind(system + COMPILED, model.get_compiled_call(None))]
    if system == VMMKV:
        graph = torch.compile(model.__call__, fullgraph=True, dynamic=True)
        return [*eager, *attending, StepKind(system + ATTENDING + COMPILED, graph)]
    return [*eager, *eager, *attending]


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
