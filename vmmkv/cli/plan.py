"""`vmmkv plan`: the memory of a model's KV cache, and the number of sequences that fit."""

import dataclasses
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Self

import typer

from vmmkv.arguments import check_num_layers, json_object
from vmmkv.errors import VmmkvError
from vmmkv.layout import KV_KIND_ALIASES, KV_KINDS, KV_SCALES, Group, KVLayout, KVType, Plane, kv_planes
from vmmkv.model_config import (
    Attention,
    Compressed,
    IndexKeys,
    Latent,
    ModelConfig,
    Part,
    SharedRows,
    State,
    has_transformers,
    read,
)  # fmt: skip
from vmmkv.units import PAGE_BYTES, ceil_div, counted, format_bytes, parse_bytes
from vmmkv_server.models import KNOWN_CONFIGS

if TYPE_CHECKING:
    import torch

SUMMARY = "print how many tokens and sequences fit in some memory, what is wasted, and whether tiers pay"

EXAMPLES = """\
examples:
  vmmkv plan --model llama-3.1-8b --memory 60GiB
  vmmkv plan --model ./Llama-3.1-8B --memory 60GiB --kv-cache-dtype int4
  vmmkv plan --layers 80 --kv-heads 8 --head-dim 128 --memory 320GiB
  vmmkv plan --model ./my-model --memory 8GiB --lengths 4096,100000 --json
  vmmkv plan --model llama-3.1-8b --memory 60GiB --host-budget 256GiB
  vmmkv plan --model ./Llama-3.1-70B --memory 20GiB --tensor-parallel-size 8

The memory is that of the KV cache alone: subtract the weights first. Nothing
is allocated and no GPU is needed.
"""

DEFAULT_LENGTHS = "1024,4096,32768"

DEFAULT_BANDWIDTHS = "50,5"
"""GB/s of loads to a GPU on 16 lanes of PCIe 5, and from a fast NVMe disk."""

_ANY_LENGTH = 2**31 - 1
"""Result of KVLayout.tokens_in if all layers have windows."""

_SHORT_NAMES = {"float32": "fp32", "float16": "fp16", "bfloat16": "bf16"}
DTYPE_NAMES = {name: dtype for dtype, short in _SHORT_NAMES.items() for name in (dtype, short)}
"""The torch types of K and V that are not quantised, by their names and short names."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """Memory of sequences of one length, mapped page by page and reserved at the maximum."""

    num_tokens: int
    num_pages: int
    """Pages of one sequence, those of its guard among them."""
    token_bytes: int
    """Bytes that the tokens of one sequence need."""
    num_sequences: int
    """Sequences of this length that fit in the memory."""
    waste_fraction: float
    """Part of a sequence's pages that holds neither its tokens nor its guard."""
    num_sequences_reserved: int
    """Sequences that fit if each has the maximum allocated."""
    waste_fraction_reserved: float
    """Part of the maximum that holds no token of the sequence."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class SourcePlan:
    """A source of a known prefix: a tier, or computing it."""

    name: str
    held_tokens: int | None
    """Tokens that the tier has room for; None for computing."""
    gb_per_s: float
    """Rate of loads; for computing, the rate that a tier must exceed to be faster."""
    tokens_per_s: float
    """Rate at the longest length: a model with windows loads fewer rows."""
    seconds: tuple[float, ...]
    """Time for a prefix of each length."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `vmmkv plan`."""

    kv_cache_dtype: str
    kv_scale: str | None
    """Scales of quantised K and V: one for each head of each `token`, kept in the row, or a static one for each `head`."""
    layers: int
    """Layers that keep something."""
    model_layers: int
    """All layers of the model."""
    groups: int
    row_bytes: int
    """Bytes of a token over all groups."""
    growing_bytes: int
    """Bytes of a token that stay as a sequence grows: those without a window."""
    tokens_per_page: float | None
    """Mean over all groups; None for a model that keeps nothing by token."""
    state_bytes: int
    """Bytes that a sequence keeps whatever its length."""
    state_kinds: dict[str, int]
    """Layers that keep a state, by its kind."""
    not_run: str | None
    """Reason for which `vmmkv serve` refuses the model; None if it runs, as far as the configuration says."""
    tensor_parallel_size: int
    """GPUs that share the model. The fields below are of each GPU."""
    memory_bytes: int
    memory_pages: int
    guard_tokens: int
    max_tokens: int
    model_tokens: int | None
    """The longest sequence that the model can have; None if that is not known."""
    longest_sequence_tokens: int | None
    """The longest single sequence that fits and that the model can have; None if it can have any length."""
    lengths: tuple[LengthPlan, ...]
    lengths_beyond_max_tokens: tuple[int, ...]
    """Lengths asked for that are more than `max_tokens`, which is planned in their place."""
    sources: tuple[SourcePlan, ...]
    """The tiers asked for, and computing if its rate was given."""


def run(
    memory: Annotated[str, typer.Option(metavar="SIZE", help="memory for the KV cache, such as 80GiB")],
    model: Annotated[
        str | None,
        typer.Option(metavar="NAME|DIR", help=f"{', '.join(KNOWN_CONFIGS)}, or a directory with a transformers config.json"),
    ] = None,
    layers: Annotated[int | None, typer.Option(metavar="N", help="instead of --model: the number of layers")] = None,
    kv_heads: Annotated[int | None, typer.Option(metavar="N", help="instead of --model: KV heads of a layer")] = None,
    head_dim: Annotated[int | None, typer.Option(metavar="N", help="instead of --model: elements of a head")] = None,
    window: Annotated[
        int | None,
        typer.Option(metavar="N", help="instead of --model: last tokens that all layers attend to", show_default="all"),
    ] = None,
    tensor_parallel_size: Annotated[
        int, typer.Option(metavar="N", help="GPUs that share the heads; the plan, and the memory, are those of each")
    ] = 1,
    max_tokens: Annotated[
        int | None,
        typer.Option(metavar="N", help="the longest sequence allowed", show_default="the model's, else the longest length"),
    ] = None,
    kv_cache_dtype: Annotated[
        str,
        typer.Option(
            metavar="TYPE",
            help=f"{', '.join(KV_KINDS)} to quantise; {', '.join(DTYPE_NAMES)}; or auto: the model's, else bf16",
        ),
    ] = "auto",
    kv_scale: Annotated[
        str | None,
        typer.Option(
            metavar="WHOSE",
            help="of quantised KV: token, each head of each token has one in its row; or head, static, for fp8 alone",
            show_default="token",
        ),
    ] = None,
    guard_tokens: Annotated[int, typer.Option(metavar="N", help="rows kept mapped past the end for TMA kernels")] = 0,
    lengths: Annotated[str, typer.Option(metavar="N,N", help="sequence lengths to plan for")] = DEFAULT_LENGTHS,
    host_budget: Annotated[str | None, typer.Option(metavar="SIZE", help="of a host tier: pinned memory for prefixes")] = None,
    disk_budget: Annotated[str | None, typer.Option(metavar="SIZE", help="of a disk tier")] = None,
    bandwidths: Annotated[str, typer.Option(metavar="HOST,DISK", help="GB/s of loads from the two tiers")] = DEFAULT_BANDWIDTHS,
    prefill_rate: Annotated[float | None, typer.Option(metavar="N", help="tokens a second that the model computes")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="print the plan as JSON")] = False,
) -> int:
    """Print the plan on stdout."""
    config, dtype, memory_of = _read_model(model, (layers, kv_heads, head_dim, window), kv_cache_dtype, kv_scale)
    asked = _Asked(
        config=config,
        not_run=None if model is None or config is None else _refusal(model, config),
        dtype=dtype,
        memory_of=memory_of,
        memory_bytes=_parse_size("--memory", memory),
        lengths=_parse_lengths(lengths),
        max_tokens=max_tokens,
        guard_tokens=guard_tokens,
        tensor_parallel_size=tensor_parallel_size,
        tiers=_parse_tiers(host_budget, disk_budget, bandwidths),
        prefill_rate=prefill_rate,
    )
    plan = make_plan(asked)
    print(json.dumps(dataclasses.asdict(plan), indent=2) if as_json else format_plan(plan))
    return 0


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class _Asked:
    """The options of `vmmkv plan`, parsed and checked."""

    config: ModelConfig | None
    """The model's, or None if its numbers were given."""
    not_run: str | None
    """Reason for which `vmmkv serve` refuses the model."""
    dtype: "torch.dtype | KVType"
    memory_of: "_Memory"
    """Memory of sequences on one GPU."""
    memory_bytes: int
    lengths: tuple[int, ...]
    max_tokens: int | None
    guard_tokens: int
    tensor_parallel_size: int
    tiers: Mapping[str, tuple[int, float]]
    """Budget in bytes and GB/s, by name."""
    prefill_rate: float | None

    def __post_init__(self) -> None:
        """Check the options by themselves, and beside the model. Raises: ValueError."""
        for option, value, least in (
            ("--max-tokens", self.longest, 1),
            ("--guard-tokens", self.guard_tokens, 0),
            ("--tensor-parallel-size", self.tensor_parallel_size, 1),
        ):
            if value < least:
                raise ValueError(f"{option} {value}: it must be at least {least}")
        if self.tensor_parallel_size > 1 and "disk" in self.tiers:
            raise ValueError("--disk-budget: a disk does not work with several GPUs; leave out one of the two")
        num_heads = self.tensor_parallel_size if self.config is None else self.config.num_heads
        if self.tensor_parallel_size > num_heads:
            raise ValueError(
                f"--tensor-parallel-size {self.tensor_parallel_size}: this model has {num_heads} attention heads to share; "
                f"lower it to {num_heads} or less"
            )
        if self.model_tokens is not None and self.longest > self.model_tokens:
            raise ValueError(f"--max-tokens {self.longest} is more than this model's positions reach, {self.model_tokens}")
        if self.prefill_rate is not None and not self.prefill_rate > 0:
            raise ValueError(f"--prefill-rate {self.prefill_rate:g}: tokens a second are more than 0")

    @property
    def model_tokens(self) -> int | None:
        """The longest sequence that the model can have; None if that is not known."""
        return None if self.config is None else self.config.max_tokens

    @property
    def longest(self) -> int:
        """The longest sequence allowed: `max_tokens`, else the model's, else the longest length asked for."""
        return (self.model_tokens or max(self.lengths)) if self.max_tokens is None else self.max_tokens


def make_plan(asked: _Asked) -> Plan:
    """The plan of some options. Raises: ValueError if not even one token fits, or the model keeps nothing of tokens."""
    config, model_tokens, max_tokens = asked.config, asked.model_tokens, asked.longest
    memory_of = asked.memory_of.of_rank(asked.tensor_parallel_size)
    memory_pages = asked.memory_bytes // PAGE_BYTES
    _check_fits(memory_of, asked)
    fitting = memory_of.tokens_in(memory_pages, asked.guard_tokens)
    most = min(fitting, model_tokens or fitting)
    planned = tuple(dict.fromkeys(min(num_tokens, max_tokens) for num_tokens in asked.lengths))
    return Plan(
        kv_cache_dtype=str(getattr(asked.dtype, "kind", asked.dtype)).removeprefix("torch."),
        kv_scale=getattr(asked.dtype, "scale", None),
        layers=memory_of.num_layers,
        model_layers=memory_of.num_layers if config is None else len(config.layers),
        groups=len(memory_of.groups),
        row_bytes=memory_of.row_bytes,
        growing_bytes=sum(group.row_bytes for group in memory_of.groups if group.window is None),
        tokens_per_page=PAGE_BYTES / memory_of.row_bytes if memory_of.row_bytes else None,
        state_bytes=memory_of.state_bytes,
        state_kinds={} if config is None else _state_kinds(config),
        not_run=asked.not_run,
        tensor_parallel_size=asked.tensor_parallel_size,
        memory_bytes=asked.memory_bytes,
        memory_pages=memory_pages,
        guard_tokens=asked.guard_tokens,
        max_tokens=max_tokens,
        model_tokens=model_tokens,
        longest_sequence_tokens=None if most == _ANY_LENGTH else most,
        lengths=tuple(
            _plan_length(memory_of, num_tokens, memory_pages, asked.guard_tokens, max_tokens) for num_tokens in planned
        ),
        lengths_beyond_max_tokens=tuple(each for each in asked.lengths if each > max_tokens),
        sources=_plan_sources(memory_of, planned, asked.tiers, asked.prefill_rate),
    )


def _check_fits(memory_of: "_Memory", asked: _Asked) -> None:
    """Check that the memory holds a sequence of one token, and that tiers have rows to keep. Raises: ValueError."""
    least_pages = memory_of.pages_for(1, 0)
    if not least_pages:
        raise ValueError("this model keeps nothing of the tokens: there is no KV cache to plan")
    if asked.memory_bytes // PAGE_BYTES < least_pages:
        raise ValueError(
            f"{format_bytes(asked.memory_bytes)} is less than a sequence of one token takes, {counted(least_pages, 'page')} of "
            f"{format_bytes(PAGE_BYTES)}; give at least {format_bytes(least_pages * PAGE_BYTES)}"
        )
    if asked.tiers and not memory_of.row_bytes:
        raise ValueError("this model keeps nothing by token, and tiers keep rows of tokens: leave out their budgets")


@dataclasses.dataclass(frozen=True, kw_only=True)
class _Memory(KVLayout):
    """Memory of sequences: rows by token, in no group if the model keeps nothing by token, and a state for each."""

    num_layers: int
    """Layers that keep something."""
    state_bytes: int = 0

    def __post_init__(self) -> None:
        if self.groups:
            super().__post_init__()

    @classmethod
    def of(cls, config: ModelConfig, dtype: "torch.dtype | KVType") -> "_Memory":
        """Memory of a model by its configuration, whether the engine runs its layers or not.

        Vectors of latent attention, index keys and compressed rows are counted by bytes, as one layer for each window.
        """
        import torch

        attending: dict[int, tuple[tuple[Plane, ...], int | None]] = {}
        vectors, state_bytes = Counter[int | None](), 0
        for layer, parts in enumerate(config.layers):
            for part in parts:
                if isinstance(part, Attention):
                    planes = kv_planes(part.heads, part.key_dim, part.value_dim, dtype)
                    attending[layer] = planes, part.window or part.chunk
                elif isinstance(part, State):
                    state_bytes += part.size_bytes(2 if isinstance(dtype, KVType) else dtype.itemsize)
                else:
                    vectors[getattr(part, "window", None)] += _vector_bytes(part, dtype)
        groups = KVLayout.of_rows(attending).groups if attending else ()
        for number, (window, size_bytes) in enumerate(vectors.items(), start=len(config.layers)):
            if size_bytes:
                plane = Plane(name="vectors", heads=1, dim=size_bytes, dtype=torch.uint8)
                groups += (Group(layers=(number,), planes=(plane,), window=window),)
        num_layers = sum(any(not isinstance(part, SharedRows) for part in parts) for parts in config.layers)
        return cls(groups=groups, num_layers=num_layers, state_bytes=state_bytes)

    def of_rank(self, num_ranks: int) -> Self:
        """Memory on one of several ranks: heads and states are shared, and vectors are on each."""
        return dataclasses.replace(super().of_rank(num_ranks), state_bytes=ceil_div(self.state_bytes, num_ranks))

    @property
    def _state_pages(self) -> int:
        return ceil_div(self.state_bytes, PAGE_BYTES)

    def pages_for(self, num_tokens: int, guard_tokens: int = 0) -> int:
        """Pages that one sequence holds: those of its rows, and of its state."""
        return self._state_pages + super().pages_for(num_tokens, guard_tokens)

    def peak_pages(self, num_tokens: int, guard_tokens: int = 0, *, sliding: bool = True) -> int:
        """Pages that one sequence holds at most on its way: those of its rows, and of its state."""
        return self._state_pages + super().peak_pages(num_tokens, guard_tokens, sliding=sliding)


def _vector_bytes(part: Part, dtype: "torch.dtype | KVType") -> int:
    """Bytes of a token in what a layer keeps beside keys, values and a state."""
    match part:
        case IndexKeys(scaled=True):
            return part.dim + 4 * ceil_div(part.dim, 128)
        case Latent() | IndexKeys() | Compressed():
            scale_bytes = 2 if isinstance(dtype, KVType) and dtype.scale == "token" else 0
            size_bytes = (dtype.width(part.dim) if isinstance(dtype, KVType) else part.dim * dtype.itemsize) + scale_bytes
            return ceil_div(size_bytes, part.num_tokens) if isinstance(part, Compressed) else size_bytes
    return 0


def _state_kinds(config: ModelConfig) -> dict[str, int]:
    return dict(Counter(part.kind for parts in config.layers for part in parts if isinstance(part, State)))


def _parse_tiers(host_budget: str | None, disk_budget: str | None, bandwidths: str) -> dict[str, tuple[int, float]]:
    """Budget in bytes and GB/s of each tier. Raises: ValueError."""
    try:
        host_gb_per_s, disk_gb_per_s = map(float, bandwidths.split(","))
    except ValueError:
        host_gb_per_s = disk_gb_per_s = 0.0
    if not (host_gb_per_s > 0 and disk_gb_per_s > 0):
        raise ValueError(f"--bandwidths {bandwidths!r}: write GB/s of the host and of the disk, such as {DEFAULT_BANDWIDTHS}")
    asked = {"host": (host_budget, host_gb_per_s), "disk": (disk_budget, disk_gb_per_s)}
    return {name: (_parse_size(f"--{name}-budget", size), rate) for name, (size, rate) in asked.items() if size is not None}


def _parse_size(option: str, text: str) -> int:
    """Bytes of a size. Raises: ValueError for no size, and for so few bytes without a unit that one is missing."""
    size_bytes, given = parse_bytes(text), text.strip()
    if size_bytes < PAGE_BYTES and given[-1].isdigit():
        raise ValueError(f"{option} {given} has no unit, and as bytes it is less than a page: write {given}GiB, or {given}MiB")
    return size_bytes


def _plan_sources(
    memory_of: _Memory, lengths: tuple[int, ...], tiers: Mapping[str, tuple[int, float]], prefill_rate: float | None
) -> tuple[SourcePlan, ...]:
    loaded_bytes = [memory_of.token_bytes(num_tokens) for num_tokens in lengths]
    token_gb = loaded_bytes[lengths.index(max(lengths))] / max(lengths) / 1e9
    sources = [
        SourcePlan(
            name=name,
            held_tokens=budget_bytes // PAGE_BYTES * PAGE_BYTES // memory_of.row_bytes,
            gb_per_s=gb_per_s,
            tokens_per_s=gb_per_s / token_gb,
            seconds=tuple(size_bytes / gb_per_s / 1e9 for size_bytes in loaded_bytes),
        )
        for name, (budget_bytes, gb_per_s) in tiers.items()
    ]
    if prefill_rate is not None:
        seconds = tuple(num_tokens / prefill_rate for num_tokens in lengths)
        gb_per_s = prefill_rate * token_gb
        sources.append(
            SourcePlan(name="computed", held_tokens=None, gb_per_s=gb_per_s, tokens_per_s=prefill_rate, seconds=seconds)
        )
    return tuple(sources)


def _plan_length(memory_of: _Memory, num_tokens: int, memory_pages: int, guard_tokens: int, max_tokens: int) -> LengthPlan:
    num_pages = memory_of.pages_for(num_tokens, guard_tokens)
    token_bytes, state_bytes = memory_of.token_bytes(num_tokens), memory_of.state_bytes
    used_bytes = state_bytes + token_bytes + guard_tokens * memory_of.row_bytes
    # A static cache allocates this for each sequence; it keeps every row, windows or not.
    reserved_bytes = state_bytes + max_tokens * memory_of.row_bytes
    return LengthPlan(
        num_tokens=num_tokens,
        num_pages=num_pages,
        token_bytes=token_bytes,
        num_sequences=memory_pages // num_pages,
        waste_fraction=1 - used_bytes / (num_pages * PAGE_BYTES),
        num_sequences_reserved=memory_pages * PAGE_BYTES // reserved_bytes,
        waste_fraction_reserved=1 - (state_bytes + token_bytes) / reserved_bytes,
    )


def format_plan(plan: Plan) -> str:
    """The plan as text: what a token takes, then a row for each length."""
    tokens = plan.longest_sequence_tokens
    longest = "any length" if tokens is None else counted(tokens, "token", ",")
    if tokens is not None and tokens == plan.model_tokens:
        longest += ", the most that the model can have"
    scaled = "" if plan.kv_scale is None else f", scales by {plan.kv_scale}"
    groups = "one group" if plan.groups == 1 else f"{plan.groups} groups"
    of_each = "" if plan.tensor_parallel_size == 1 else f", on each of {plan.tensor_parallel_size} GPUs"
    of_layers = f"{plan.layers}" if plan.layers == plan.model_layers else f"{plan.layers} of {plan.model_layers} keep something"
    facts = [
        ("layers", f"{of_layers}, in {groups}" if plan.groups else of_layers),
        ("row, one token", f"{plan.row_bytes:,} bytes ({format_bytes(plan.row_bytes)}) in {plan.kv_cache_dtype}{scaled}"),
    ]
    if plan.growing_bytes != plan.row_bytes:
        facts.append(("beyond windows", f"{plan.growing_bytes:,} bytes of each token stay"))
    if plan.state_bytes:
        kinds = ", ".join(f"{kind} in {counted(layers, 'layer')}" for kind, layers in plan.state_kinds.items())
        facts.append(("state", f"{plan.state_bytes:,} bytes ({format_bytes(plan.state_bytes)}) of a sequence: {kinds}"))
    if plan.tokens_per_page is not None:
        facts.append(("tokens in a page", f"{plan.tokens_per_page:.1f} in {format_bytes(PAGE_BYTES)}"))
    facts += [
        ("memory", f"{format_bytes(plan.memory_bytes)}, {counted(plan.memory_pages, 'page', ',')}{of_each}"),
        ("longest sequence", longest),
        ("guard", f"{counted(plan.guard_tokens, 'row')} past the end of each sequence"),
    ]
    heads = ("tokens", "KV of one", "pages", "sequences", "waste", f"reserving {plan.max_tokens:,}", "its waste")
    rows = [heads] + [
        (
            f"{row.num_tokens:,}",
            format_bytes(row.token_bytes),
            f"{row.num_pages:,}",
            f"{row.num_sequences:,}",
            f"{row.waste_fraction:.1%}" if row.num_sequences else "-",
            f"{row.num_sequences_reserved:,}",
            f"{row.waste_fraction_reserved:.1%}" if row.num_sequences_reserved else "-",
        )
        for row in plan.lengths
    ]
    lines = [f"{name:<18}{value}" for name, value in facts] + ["", *_table(rows)]
    if plan.sources:
        of_lengths = (f"s for {row.num_tokens:,}" for row in plan.lengths)
        of_sources = [("a prefix", "tokens held", "GB/s", "tokens/s", *of_lengths), *map(_source_row, plan.sources)]
        lines += ["", *_table(of_sources)]
    if plan.lengths_beyond_max_tokens:
        beyond = " and ".join(f"{num_tokens:,}" for num_tokens in plan.lengths_beyond_max_tokens)
        limit = "the model can have" if plan.max_tokens == plan.model_tokens else "--max-tokens"
        lines += ["", f"{beyond}: more than {limit}; {counted(plan.max_tokens, 'token', ',')} planned instead"]
    if plan.not_run:
        lines += ["", f"vmmkv serve refuses this model: {plan.not_run}"]
    return "\n".join(lines)


def _source_row(source: SourcePlan) -> tuple[str, ...]:
    held = "-" if source.held_tokens is None else f"{source.held_tokens:,}"
    seconds = (f"{each:.3f}" for each in source.seconds)
    return source.name, held, f"{source.gb_per_s:.1f}", f"{source.tokens_per_s:,.0f}", *seconds


def _table(rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]


def _check_one_is_given(model: str | None, numbers: Mapping[str, int | None]) -> None:
    """Check that either a model is given or its numbers, all but the window. Raises: ValueError."""
    if model is None:
        missing = [f"--{name}" for name, value in numbers.items() if value is None and name != "window"]
        if missing:
            raise ValueError(
                f"{', '.join(missing)} missing; give --model NAME or DIR, or all of --layers, --kv-heads and --head-dim"
            )
    elif given := [f"--{name}" for name, value in numbers.items() if value is not None]:
        raise ValueError(
            f"--model and {', '.join(given)} were both given; the model's config.json says the same: leave one out"
        )


def _read_model(
    model: str | None, sizes: Sequence[int | None], kv_cache_dtype: str, kv_scale: str | None
) -> "tuple[ModelConfig | None, torch.dtype | KVType, _Memory]":
    """The configuration of --model, if it was given, the type of K and V, and the memory of sequences. Raises: ValueError."""
    numbers = dict(zip(("layers", "kv-heads", "head-dim", "window"), sizes, strict=True))
    _check_one_is_given(model, numbers)
    config = None if model is None else _read_config(model)
    dtype = _kv_cache_dtype(kv_cache_dtype, kv_scale, config)
    return config, dtype, _uniform(numbers, dtype) if config is None else _Memory.of(config, dtype)


def _read_config(model: str) -> ModelConfig:
    """The configuration of a directory or a file, or else of a name of KNOWN_CONFIGS."""
    if (path := _path(model)) is None:
        return read(KNOWN_CONFIGS[model.lower()])
    path = path / "config.json" if path.is_dir() else path
    try:
        return read(json_object(path))
    except OSError as error:
        works = f"{', '.join(KNOWN_CONFIGS)}, or a directory with a transformers config.json"
        raise ValueError(f"{path} cannot be read: {error.strerror}; --model takes {works}") from error


def _path(model: str) -> Path | None:
    """The path that --model names; None for a name of KNOWN_CONFIGS where nothing has this path."""
    path = Path(model).expanduser()
    return path if path.exists() or model.lower() not in KNOWN_CONFIGS else None


def _refusal(model: str, config: ModelConfig) -> str | None:
    """The sentence by which `vmmkv serve` refuses a model; None if the model runs, as far as the configuration says.

    Without transformers, and of a name of KNOWN_CONFIGS, only the layers are judged.
    """
    from vmmkv_server.engine import servable

    path = _path(model)
    try:
        if path is None or not has_transformers():
            servable.check_layers(config, on_gpu=True)
        else:
            servable.check_directory(path.parent if path.name == "config.json" else path)
    except (VmmkvError, ValueError) as error:
        return str(error)
    return None


def _uniform(numbers: Mapping[str, int | None], dtype: "torch.dtype | KVType") -> _Memory:
    """Memory of a model of layers that are alike, by the options in place of --model."""
    layers, kv_heads, head_dim, window = numbers.values()
    assert layers is not None and kv_heads is not None and head_dim is not None, "the numbers have been checked"
    check_num_layers(layers)
    layout = KVLayout.uniform(layers=layers, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, windows=[window] * layers)
    return _Memory(groups=layout.groups, num_layers=len(layout.group_of))


def _kv_cache_dtype(name: str, scale: str | None, config: ModelConfig | None) -> "torch.dtype | KVType":
    import torch

    wanted = KV_KIND_ALIASES.get(name, name)
    if name == "auto":
        wanted = (None if config is None else config.dtype) or "bf16"
        if wanted not in DTYPE_NAMES:
            raise ValueError(
                f"config.json has dtype (torch_dtype) {wanted!r}, which is no type of K and V; give --kv-cache-dtype bf16, or "
                f"one of {', '.join((*KV_KINDS, *DTYPE_NAMES))}"
            )
    if scale not in (None, *KV_SCALES):
        raise ValueError(f"--kv-scale {scale!r} is not known; use {' or '.join(KV_SCALES)}")
    if wanted in KV_KINDS:
        if scale == "head" and wanted != "fp8":
            raise ValueError(
                f"--kv-scale head is for fp8 alone: {wanted} has no range for a static scale of a whole head; "
                "use --kv-scale token, or --kv-cache-dtype fp8"
            )
        return KVType(wanted, scale or "token")
    if scale is not None:
        raise ValueError(
            f"--kv-scale is of quantised KV, and {wanted} has no scales; add --kv-cache-dtype {' or '.join(KV_KINDS)}"
        )
    if wanted not in DTYPE_NAMES:
        raise ValueError(f"--kv-cache-dtype {wanted!r} is not known; use auto or one of {', '.join((*KV_KINDS, *DTYPE_NAMES))}")
    dtype: torch.dtype = getattr(torch, DTYPE_NAMES[wanted])
    return dtype


def _parse_lengths(text: str) -> tuple[int, ...]:
    try:
        lengths = tuple(int(part) for part in text.split(","))
    except ValueError:
        lengths = ()
    if not lengths or min(lengths) < 1:
        raise ValueError(
            f"--lengths {text!r} is not a list of lengths; write numbers from 1 with commas, such as {DEFAULT_LENGTHS}"
        )
    return lengths
