"""`vmmkv plan`: what a model's KV cache takes, and how many sequences fit in some memory."""

import argparse
import dataclasses
import json
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from vmmkv.kv_type import KV_KINDS, KV_SCALES, KVType
from vmmkv.units import PAGE_BYTES, format_bytes, parse_bytes

if TYPE_CHECKING:
    import torch

    from vmmkv.layout import KVLayout

SUMMARY = "print how many tokens and sequences fit in some memory, and what is wasted"

EXAMPLES = """\
examples:
  vmmkv plan --model ./Llama-3.1-8B --memory 60GiB
  vmmkv plan --model ./Llama-3.1-8B --memory 60GiB --kv-dtype int4
  vmmkv plan --layers 80 --kv-heads 8 --head-dim 128 --kv-dtype fp16 --memory 320GiB --lengths 4096,100000
  vmmkv plan --model ./my-model --memory 8GiB --guard-tokens 128 --json

The memory is that of the KV cache alone: subtract the weights first. Nothing is allocated and no GPU is needed.
"""

DEFAULT_LENGTHS = "1024,4096,32768"

DTYPE_NAMES = {
    "float32": "float32",
    "fp32": "float32",
    "float16": "float16",
    "fp16": "float16",
    "bfloat16": "bfloat16",
    "bf16": "bfloat16",
}
"""What they are otherwise kept in, as configurations name it and as people do."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class LengthPlan:
    """What sequences of one length take, mapped page by page and reserved at the maximum."""

    num_tokens: int
    num_pages: int
    """Pages of one sequence, those of its guard among them."""
    token_bytes: int
    """Bytes that its tokens need."""
    num_sequences: int
    """Sequences of this length that fit in the memory."""
    waste_fraction: float
    """Part of its pages that holds neither its tokens nor its guard."""
    num_sequences_reserved: int | None
    """The same if each sequence has the maximum allocated; None if this length is beyond it."""
    waste_fraction_reserved: float | None
    """Part of the maximum that holds none of its tokens."""


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """The answer of `vmmkv plan`."""

    kv_dtype: str
    kv_scale: str | None
    """Of quantised K and V: one for each head of each `token`, kept in the row, or a static one for each `head`."""
    layers: int
    groups: int
    row_bytes: int
    """Bytes of a token over all groups."""
    tokens_per_page: float
    """In the mean, over all groups."""
    memory_bytes: int
    memory_pages: int
    guard_tokens: int
    max_tokens: int
    longest_sequence_tokens: int | None
    """The longest single sequence that fits; None if its windows let it have any length."""
    lengths: tuple[LengthPlan, ...]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe this command's options."""
    add = parser.add_argument
    add("--model", metavar="DIR", type=Path, help="a directory with a transformers config.json, or that file")
    add("--layers", metavar="N", type=int, help="instead of --model: the number of layers")
    add("--kv-heads", metavar="N", type=int, help="instead of --model: KV heads of a layer")
    add("--head-dim", metavar="N", type=int, help="instead of --model: elements of a head")
    add("--window", metavar="N", type=int, help="instead of --model: last tokens that all layers attend to (default: all)")
    add("--memory", metavar="SIZE", required=True, help="memory for the KV cache, such as 80GiB")
    add(
        "--max-tokens",
        metavar="N",
        type=int,
        help="the longest sequence allowed (default: the model's, else the longest length)",
    )
    add(
        "--kv-dtype",
        metavar="TYPE",
        default="auto",
        help=f"{', '.join(KV_KINDS)} to quantise; {', '.join(DTYPE_NAMES)}; or auto (the default): the model's, else bf16",
    )
    add(
        "--kv-scale",
        metavar="WHOSE",
        help="of quantised KV: token (the default), each head of each token has one in its row; or head, static, for fp8 alone",
    )
    add("--guard-tokens", metavar="N", type=int, default=0, help="rows kept mapped past the end for TMA kernels (default: 0)")
    add("--lengths", metavar="N,N", default=DEFAULT_LENGTHS, help=f"sequence lengths to plan for (default: {DEFAULT_LENGTHS})")
    add("--json", action="store_true", help="print the plan as JSON")


def run(arguments: argparse.Namespace) -> int:
    """Print the plan on stdout."""
    config = _read_config(arguments)
    dtype = _kv_dtype(arguments.kv_dtype, arguments.kv_scale, config)
    lengths = _parse_lengths(arguments.lengths)
    default_limit = config.get("max_position_embeddings") or max(lengths)
    plan = make_plan(
        layout=_layout(arguments, config, dtype),
        dtype=dtype,
        memory_bytes=parse_bytes(arguments.memory),
        max_tokens=default_limit if arguments.max_tokens is None else arguments.max_tokens,
        guard_tokens=arguments.guard_tokens,
        lengths=lengths,
    )
    print(json.dumps(dataclasses.asdict(plan), indent=2) if arguments.json else format_plan(plan))
    return 0


def make_plan(
    *,
    layout: "KVLayout",
    dtype: "torch.dtype | KVType",
    memory_bytes: int,
    max_tokens: int,
    guard_tokens: int,
    lengths: tuple[int, ...],
) -> Plan:
    """The capacity maths of a layout, whose K and V are of this type, in some memory.

    Raises: ValueError for numbers that are not positive, or memory below one page for each group.
    """
    if max_tokens < 1 or guard_tokens < 0:
        raise ValueError(
            f"max_tokens={max_tokens}, guard_tokens={guard_tokens}: the first is at least 1, the second at least 0"
        )
    num_groups = len(layout.groups)
    memory_pages = memory_bytes // PAGE_BYTES
    if memory_pages < num_groups:
        raise ValueError(
            f"{format_bytes(memory_bytes)} is less than a page of {format_bytes(PAGE_BYTES)} for each of "
            f"{num_groups} {'group' if num_groups == 1 else 'groups'} of layers; give at least "
            f"{format_bytes(num_groups * PAGE_BYTES)}, with its unit"
        )
    longest = layout.tokens_in(memory_pages, guard_tokens)
    return Plan(
        kv_dtype=str(getattr(dtype, "kind", dtype)).removeprefix("torch."),
        kv_scale=getattr(dtype, "scale", None),
        layers=sum(len(group.layers) for group in layout.groups),
        groups=num_groups,
        row_bytes=layout.row_bytes,
        tokens_per_page=PAGE_BYTES / layout.row_bytes,
        memory_bytes=memory_bytes,
        memory_pages=memory_pages,
        guard_tokens=guard_tokens,
        max_tokens=max_tokens,
        longest_sequence_tokens=None if longest == 2**31 - 1 else longest,
        lengths=tuple(_plan_length(layout, num_tokens, memory_pages, guard_tokens, max_tokens) for num_tokens in lengths),
    )


def _plan_length(layout: "KVLayout", num_tokens: int, memory_pages: int, guard_tokens: int, max_tokens: int) -> LengthPlan:
    num_pages = layout.pages_for(num_tokens, guard_tokens)
    token_bytes = layout.token_bytes(num_tokens)
    used_bytes = token_bytes + guard_tokens * layout.row_bytes
    # What a static cache allocates for each sequence; it keeps every row, windows or not.
    reserved_bytes = max_tokens * layout.row_bytes
    fits = num_tokens <= max_tokens
    return LengthPlan(
        num_tokens=num_tokens,
        num_pages=num_pages,
        token_bytes=token_bytes,
        num_sequences=memory_pages // num_pages,
        waste_fraction=1 - used_bytes / (num_pages * PAGE_BYTES),
        num_sequences_reserved=memory_pages * PAGE_BYTES // reserved_bytes if fits else None,
        waste_fraction_reserved=1 - token_bytes / reserved_bytes if fits else None,
    )


def format_plan(plan: Plan) -> str:
    """The plan as text: what a token takes, then a row for each length."""
    longest = "any length" if plan.longest_sequence_tokens is None else f"{plan.longest_sequence_tokens:,} tokens"
    scaled = "" if plan.kv_scale is None else f", scales by {plan.kv_scale}"
    groups = "one group" if plan.groups == 1 else f"{plan.groups} groups"
    facts = (
        ("layers", f"{plan.layers}, in {groups}"),
        ("row, one token", f"{plan.row_bytes:,} bytes ({format_bytes(plan.row_bytes)}) in {plan.kv_dtype}{scaled}"),
        ("tokens in a page", f"{plan.tokens_per_page:.1f} in {format_bytes(PAGE_BYTES)}"),
        ("memory", f"{format_bytes(plan.memory_bytes)}, {plan.memory_pages:,} pages"),
        ("longest sequence", longest),
        ("guard", f"{plan.guard_tokens} rows past the end of each sequence"),
    )
    heads = ("tokens", "KV of one", "pages", "sequences", "waste", f"reserving {plan.max_tokens:,}", "waste")
    rows = [heads] + [
        (
            f"{row.num_tokens:,}",
            format_bytes(row.token_bytes),
            f"{row.num_pages:,}",
            f"{row.num_sequences:,}",
            f"{row.waste_fraction:.1%}",
            "-" if row.num_sequences_reserved is None else f"{row.num_sequences_reserved:,}",
            "-" if row.waste_fraction_reserved is None else f"{row.waste_fraction_reserved:.1%}",
        )
        for row in plan.lengths
    ]
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [f"{name:<18}{value}" for name, value in facts] + [""]
    lines += ["   ".join(cell.rjust(width) for cell, width in zip(row, widths, strict=True)) for row in rows]
    return "\n".join(lines)


def _read_config(arguments: argparse.Namespace) -> Mapping[str, Any]:
    """The model's configuration; empty if the geometry is given by options."""
    geometry = {
        f"--{name.replace('_', '-')}": getattr(arguments, name) for name in ("layers", "kv_heads", "head_dim", "window")
    }
    if arguments.model is None:
        missing = [name for name, value in geometry.items() if value is None and name != "--window"]
        if missing:
            raise ValueError(f"{', '.join(missing)} missing; give --model DIR, or all of --layers, --kv-heads and --head-dim")
        return {}
    given = [name for name, value in geometry.items() if value is not None]
    if given:
        raise ValueError(
            f"--model and {', '.join(given)} were both given; the model's config.json says the same: leave one out"
        )
    path = arguments.model / "config.json" if arguments.model.is_dir() else arguments.model
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"{path} cannot be read: {error.strerror}; --model takes a directory with a config.json") from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    if not isinstance(config, dict):
        raise ValueError(f"{path} holds no JSON object; --model takes a transformers config.json")
    # A model of several kinds of input keeps its decoder's configuration in a part of its own.
    text_config = config.get("text_config")
    return text_config if isinstance(text_config, dict) else config


def _layout(arguments: argparse.Namespace, config: Mapping[str, Any], dtype: "torch.dtype | KVType") -> "KVLayout":
    from vmmkv.layout import KVLayout

    if arguments.model is not None:
        return KVLayout.from_config(config, dtype)
    everything = KVLayout.uniform(
        layers=arguments.layers, kv_heads=arguments.kv_heads, head_dim=arguments.head_dim, dtype=dtype
    )
    return KVLayout(groups=tuple(dataclasses.replace(group, window=arguments.window) for group in everything.groups))


def _kv_dtype(name: str, scale: str | None, config: Mapping[str, Any]) -> "torch.dtype | KVType":
    import torch

    wanted = config.get("dtype") or config.get("torch_dtype") or "bf16" if name == "auto" else name
    if scale not in (None, *KV_SCALES):
        raise ValueError(f"kv-scale {scale!r} is not known; use {' or '.join(KV_SCALES)}")
    if wanted in KV_KINDS:
        return KVType(wanted, scale or "token")
    if scale is not None:
        raise ValueError(f"--kv-scale is of quantised KV, and {wanted} has no scales; add --kv-dtype {' or '.join(KV_KINDS)}")
    if wanted not in DTYPE_NAMES:
        raise ValueError(f"kv-dtype {wanted!r} is not known; use auto or one of {', '.join((*KV_KINDS, *DTYPE_NAMES))}")
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
