"""The part `attention`: a decode step's attention, over all layers, where sequences share a prefix.

Aliased and copied are the same unmodified kernel over the same bytes. But aliases are one memory, and L2, which is indexed by
physical addresses, reads it once for many sequences; so it does under block tables. Nothing is appended: every sequence has the
prefix alone.

Legend: B sequences, H query heads, D head dim.
"""

from collections.abc import Callable
from typing import Final

import numpy as np
import torch

from bench.prefix.addressing import NewRows
from bench.prefix.context import Context
from bench.prefix.contiguous import Sharing, Vmmkv
from bench.prefix.filling import check_rows, fill
from bench.prefix.paged import Paged
from bench.step_work import HBM_BYTES_PER_S
from bench.timing import WrongNumbers, time_for

SYSTEMS: Final[dict[str, Sharing | None]] = {"aliased": Sharing.ALIAS, "copied": Sharing.COMPUTE, "paged": None}
_SECONDS: Final = 0.5
_SECONDS_QUICK: Final = 0.02
_TOLERANCE: Final = 1e-3
"""Bits should be the same; this is for a torch reference that sums up otherwise."""


def workload(context: Context) -> str:
    """How rows name it."""
    return context.named(f"attention of {context.sizes.requests} x {context.sizes.decode_prefix} shared tokens")


def num_steps(context: Context) -> int:
    """How often `begin` is told."""
    return len(SYSTEMS)


def run(context: Context, begin: Callable[[str], None]) -> None:
    """Each addressing, checked against the first one."""
    wanted: list[torch.Tensor] = []
    for name, sharing in SYSTEMS.items():
        begin(f"attention, {name}")
        with context.guarded(f"{workload(context)}: {name}"):
            system = _open(context, sharing)
            try:
                _measure(context, name, system, wanted)
            finally:
                system.close()


def _open(context: Context, sharing: Sharing | None) -> Vmmkv | Paged:
    num_tokens, slots = context.sizes.decode_prefix, context.sizes.requests + 1
    if sharing is None:
        return context.open_paged(slots=slots, max_tokens=num_tokens + 1, num_tokens=num_tokens)
    copies = slots if sharing.is_private else 4
    num_pages = copies * context.pages_for(num_tokens) + 2 * slots
    return context.open_vmmkv(sharing, slots=slots, max_tokens=num_tokens + 1, num_pages=num_pages)


def _copy_rows(context: Context, system: Vmmkv | Paged, source: int, slot: int) -> None:
    num_tokens = context.sizes.decode_prefix
    system.reserve(np.array([slot]), np.array([num_tokens]))
    system.advance(np.array([slot]), np.array([num_tokens]))
    for layer in range(context.shape.layers):
        system.write(layer, slot, *system.rows(layer, source, num_tokens))


def _measure(context: Context, name: str, system: Vmmkv | Paged, wanted: list[torch.Tensor]) -> None:
    shape, sizes, device = context.shape, context.sizes, context.device
    tokens = context.tokens(sizes.decode_prefix + 1, 2)
    source = fill(system, shape, device, tokens[:-1], seed=context.settings.seed)
    slots = []
    for _ in range(sizes.requests):
        attached = system.attach(tokens, len(tokens))
        if name == "copied":
            _copy_rows(context, system, source, attached.slot)
        elif attached.num_tokens != sizes.decode_prefix:
            raise WrongNumbers(f"{attached.num_tokens} of {sizes.decode_prefix} tokens are attached, by {attached.method}")
        slots.append(attached.slot)
    check_rows(system, shape, slots[-1], source, sizes.decode_prefix)
    slots_B = torch.tensor(slots, dtype=torch.int32, device=device)
    lengths_B = torch.full_like(slots_B, sizes.decode_prefix)
    rows = NewRows(slots_N=slots_B, positions_N=lengths_B - 1, slots_B=slots_B, lengths_B=lengths_B, starts=None)
    generator = torch.Generator(device).manual_seed(context.settings.seed)
    size = (len(slots), shape.heads, shape.head_dim)
    q_BHD = torch.randn(size, dtype=shape.dtype, device=device, generator=generator)

    def run_pass() -> list[torch.Tensor]:
        return [system.addressing.attend(layer, q_BHD, rows) for layer in range(shape.layers)]

    outputs = run_pass()
    given = [outputs[0].clone(), outputs[-1].clone()]
    wanted += given if not wanted else []
    for layer, (given_BHD, wanted_BHD) in enumerate(zip(given, wanted, strict=True)):
        if not torch.allclose(given_BHD.float(), wanted_BHD.float(), atol=_TOLERANCE, rtol=_TOLERANCE):
            raise WrongNumbers(f"{('the first', 'the last')[layer]} layer's outputs are not those of the first system")
    times_us = time_for(run_pass, device, _SECONDS_QUICK if context.settings.quick else _SECONDS)
    bytes_read = len(slots) * sizes.decode_prefix * shape.layout.row_bytes
    bound_ms = bytes_read / HBM_BYTES_PER_S * 1e3 if name == "copied" else None
    context.add(workload(context), name, "attention", "ms", [time_us / 1e3 for time_us in times_us], bound_ms)
    for slot in [*slots, source]:
        system.finish(slot, tokens[: sizes.decode_prefix])
