"""What reads a memory: the project's kernels, torch's SDPA, FlashAttention-3 (see fa3), FlashInfer (see from_flashinfer), and
the reference on a CPU.

Each is a function that is bound to one copy of a batch and then called for each layer. What does not apply raises
Inapplicable, which is no failure: SDPA knows no lengths, no slots and no blocks.
"""

from collections.abc import Callable

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from bench.kernels.batch import Attend, Batch
from bench.kernels.fa3 import bind_fa3
from bench.kernels.from_flashinfer import NAME as FLASHINFER
from bench.kernels.from_flashinfer import bind_flashinfer, is_installed
from bench.kernels.measure import Inapplicable
from bench.kernels.memories import Planes, rows_of
from bench.settings import Settings
from vmmkv.kernels import reference

Bind = Callable[[Batch, int], Attend]


def decode_systems(settings: Settings) -> dict[str, Bind]:
    """By name, what attends for one query a sequence, ours first."""
    return _systems(settings, "decode", bind_decode)


def prefill_systems(settings: Settings) -> dict[str, Bind]:
    """By name, what attends for any number of queries, ours first."""
    return _systems(settings, "prefill", bind_prefill)


def _systems(settings: Settings, name: str, ours: Bind) -> dict[str, Bind]:
    if not settings.on_gpu:
        return {"reference": bind_reference, "SDPA": lambda batch, copy: _bind_sdpa(batch, copy, None)}
    systems: dict[str, Bind] = {
        name: ours,
        "SDPA flash": lambda batch, copy: _bind_sdpa(batch, copy, SDPBackend.FLASH_ATTENTION),
        "SDPA cuDNN": lambda batch, copy: _bind_sdpa(batch, copy, SDPBackend.CUDNN_ATTENTION),
    }
    if settings.fa3 is not None:
        systems["FA3"] = bind_fa3
    if is_installed():
        systems[FLASHINFER] = bind_flashinfer
    return systems


def bind_decode(batch: Batch, copy: int) -> Attend:
    """`decode`, over slots or over blocks."""
    from vmmkv.kernels.attention.decode import decode

    where = (batch.lengths_B, batch.slots_B(copy))
    tables_SC = batch.memory.tables_SC
    return lambda planes, out: decode(
        batch.q_NHD, planes.k, planes.v, *where, tables_SC=tables_SC, out=out, k_scale=planes.k_scale, v_scale=planes.v_scale
    )


def bind_prefill(batch: Batch, copy: int) -> Attend:
    """`prefill`, over slots or over blocks."""
    from vmmkv.kernels.attention.prefill import prefill

    where = (batch.query_starts, batch.lengths_B, batch.slots_B(copy))
    tables_SC = batch.memory.tables_SC
    return lambda planes, out: prefill(
        batch.q_NHD, planes.k, planes.v, *where, tables_SC=tables_SC, out=out, k_scale=planes.k_scale, v_scale=planes.v_scale
    )


def bind_reference(batch: Batch, copy: int) -> Attend:
    """Plain torch in float32, a sequence at a time: on a CPU, where the kernels cannot run."""
    case, size = batch.case, len(batch.case.lengths)
    layer_of = {id(planes): layer for layer, planes in enumerate(batch.memory.layers)}

    def attend(planes: Planes, out: torch.Tensor) -> torch.Tensor:
        for b, (length, count) in enumerate(zip(case.lengths, case.queries, strict=True)):
            k_TKD, v_TKD = rows_of(batch.memory, layer_of[id(planes)], copy * size + b, length)
            rows = slice(int(batch.starts[b]), int(batch.starts[b + 1]))
            positions = torch.arange(length - count, length, device=batch.device)
            out[rows] = reference.attend(batch.q_NHD[rows], k_TKD, v_TKD, positions)
        return out

    return attend


def _bind_sdpa(batch: Batch, copy: int, backend: SDPBackend | None) -> Attend:
    """Over the batched view where all lengths are the same; for prefill over the view of a single sequence."""
    case, slots = batch.case, batch.slots(copy)
    if batch.memory.tables_SC is not None or batch.memory.form.quantised is not None:
        raise Inapplicable("SDPA takes neither block tables nor quantised K and V")
    if not case.is_uniform or slots != list(range(slots[0], slots[0] + len(slots))):
        raise Inapplicable("SDPA takes one tensor: sequences of one length, in slots that adjoin")
    if not case.is_decode and len(slots) > 1:
        raise Inapplicable("SDPA takes batches of one query each, or one sequence")
    whole = case.queries[0] == case.longest
    if not case.is_decode and not whole and backend is not SDPBackend.FLASH_ATTENTION:
        raise Inapplicable("only SDPA's flash backend has a causal mask for queries late in a sequence, without a tensor of it")
    # [B, H, 1, D], or [1, H, N, D].
    queries = batch.q_NHD[:, :, None] if case.is_decode else batch.q_NHD.transpose(0, 1)[None]

    def attend(planes: Planes, out: torch.Tensor) -> torch.Tensor:
        keys, values = (
            plane[slots[0] : slots[0] + len(slots), : case.longest].transpose(1, 2) for plane in (planes.k, planes.v)
        )
        if case.is_decode or whole:
            given = scaled_dot_product_attention(queries, keys, values, is_causal=not case.is_decode, enable_gqa=True)
        else:
            mask = causal_lower_right(case.queries[0], case.longest)
            given = scaled_dot_product_attention(queries, keys, values, attn_mask=mask, enable_gqa=True)
        return given[:, :, 0] if case.is_decode else given[0].transpose(0, 1)

    if backend is None:
        return attend

    def attend_by_backend(planes: Planes, out: torch.Tensor) -> torch.Tensor:
        with sdpa_kernel(backend):
            return attend(planes, out)

    return attend_by_backend
