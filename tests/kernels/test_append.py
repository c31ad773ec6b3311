"""Laws of the append kernel."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import BF16, DEVICE, FORMATS, FP16, FP32, POISON, Memory, index, make_memory, some
from tests.kernels.test_norm import assert_rounded_alike
from vmmkv_kernels import reference
from vmmkv_kernels.attention.append import append
from vmmkv_kernels.quantise import Kind, dequantise

SLOTS, ROWS, TOKENS, HEADS = 5, 40, 63, 4


def make_tokens(kv_heads: int, head_dim: int, dtype: torch.dtype, *, max_limit: int = ROWS + 9) -> tuple[torch.Tensor, ...]:
    """K, V, q, slots, positions, limits: random cells, of which the last five belong nowhere."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(SLOTS * ROWS, generator=generator)[:TOKENS].to(DEVICE)
    slots_N, positions_N = (cells // ROWS).int(), cells % ROWS
    # Before the slot, past it, past its limit by far, and in no slot at all.
    positions_N[-5:-2] = index(-1, ROWS, 2**31 - 1)
    slots_N[-5:] = index(SLOTS - 1, SLOTS - 1, SLOTS - 1, -1, SLOTS)
    qkv = torch.randn(TOKENS, HEADS + 2 * kv_heads, head_dim, generator=generator).to(DEVICE, dtype)
    # Each token at a magnitude of its own, some of them of zeros.
    qkv *= 2.0 ** torch.arange(-16, TOKENS - 16).clamp(max=12).to(DEVICE)[:, None, None]
    qkv[::8] = 0.0
    q_NHD, k_NKD, v_NKD = qkv.split([HEADS, kv_heads, kv_heads], dim=1)
    return k_NKD, v_NKD, q_NHD, slots_N, positions_N, index(0, 1, 17, ROWS, max_limit)


def make_angles(head_dim: int, positions: int = ROWS) -> dict[str, torch.Tensor]:
    """The tables of a model with base 10,000."""
    frequencies_R = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles_TR = torch.arange(positions)[:, None] * frequencies_R
    return {"cos_TR": angles_TR.cos().to(DEVICE), "sin_TR": angles_TR.sin().to(DEVICE)}


def make_norms(head_dim: int, dtype: torch.dtype) -> dict[str, Any]:
    """Weights around 1, as models have them."""
    weights_2D = (1 + torch.randn(2, head_dim, generator=torch.Generator().manual_seed(2)) / 4).to(DEVICE, dtype)
    return {"q_norm_D": weights_2D[0], "k_norm_D": weights_2D[1], "norm_eps": 1e-6}


def append_to_one_slot(k_NKD: torch.Tensor, v_NKD: torch.Tensor, memory: Memory, **options: Any) -> None:
    """Token n at position n of slot 0."""
    positions_N = torch.arange(len(k_NKD), device=DEVICE)
    where = (torch.zeros_like(positions_N), positions_N, index(*[len(k_NKD)] * len(memory.k)))
    append(k_NKD, v_NKD, memory.k, memory.v, *where, **memory.scales | options)


WRITTEN = [*((FP16, *form) for form in FORMATS), (FP32, None, ""), (FP32, "int8", "token")]


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "kind", "scale", "rope"),
    some(
        [(3, 80, *form, i % 2 == 0) for i, form in enumerate(WRITTEN)],
        [
            (*shape, *form, rope)
            for shape in ((2, 64), (1, 96), (3, 128), (1, 256))
            for form in WRITTEN
            for rope in (False, True)
        ],
    ),
)
def test_tokens_are_written_where_their_limit_allows_and_nowhere_else(
    kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str, rope: bool
) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(kv_heads, head_dim, dtype)
    queries = [q_NHD.clone(), q_NHD.clone()]
    ours, expected = (make_memory((SLOTS, ROWS), kv_heads, head_dim, dtype, kind, scale) for _ in range(2))
    for write, memory, query in zip((append, reference.append), (ours, expected), queries, strict=True):
        options: dict[str, Any] = make_angles(head_dim) | {"q_NHD": query} if rope else {}
        write(k_NKD, v_NKD, memory.k, memory.v, *where, **options, **memory.scales)
    assert (expected.bytes_STE != POISON).any()
    assert torch.equal(ours.bytes_STE, expected.bytes_STE)
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(queries[0], q_NHD) != rope


@pytest.mark.parametrize(("kind", "scale"), [(None, ""), ("int4", "token")])
def test_tokens_are_rotated_by_positions_that_are_not_their_rows(kind: Kind | None, scale: str) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(3, 80, FP16)
    generator = torch.Generator().manual_seed(3)
    positions_N = torch.randperm(2 * TOKENS, generator=generator)[:TOKENS].to(DEVICE)  # half of them known
    angles, queries = make_angles(80, positions=TOKENS), [q_NHD.clone(), q_NHD.clone()]
    ours, expected = (make_memory((SLOTS, ROWS), 3, 80, FP16, kind, scale) for _ in range(2))
    for write, memory, query in zip((append, reference.append), (ours, expected), queries, strict=True):
        write(k_NKD, v_NKD, memory.k, memory.v, *where, positions_N=positions_N, q_NHD=query, **angles, **memory.scales)
    assert (expected.bytes_STE != POISON).any()
    assert torch.equal(ours.bytes_STE, expected.bytes_STE)
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(queries[0][positions_N >= TOKENS], q_NHD[positions_N >= TOKENS])


@pytest.mark.parametrize(
    ("block", "kind", "scale", "rope"),
    some(
        [(5, None, "", False), (16, "int4", "token", True)],
        [(block, *form, rope) for block in (1, 5, 64) for form in FORMATS for rope in (False, True)],
    ),
)
def test_blocks_hold_bit_for_bit_what_slots_do(block: int, kind: Kind | None, scale: str, rope: bool) -> None:
    k_NKD, v_NKD, _, slots_N, positions_N, limit_S = make_tokens(3, 96, FP16, max_limit=ROWS - 1)
    options: dict[str, Any] = make_angles(96) if rope else {}
    expected = make_memory((SLOTS, ROWS), 3, 96, FP16, kind, scale)
    append(k_NKD, v_NKD, expected.k, expected.v, slots_N, positions_N, limit_S, **options, **expected.scales)

    ours, tables_SC = make_memory((SLOTS, ROWS), 3, 96, FP16, kind, scale).in_blocks(block)
    append(k_NKD, v_NKD, ours.k, ours.v, slots_N, positions_N, limit_S, tables_SC=tables_SC, **options, **ours.scales)
    gathered = ours.bytes_STE[tables_SC.long()].flatten(1, 2)
    assert torch.equal(gathered[:, :ROWS], expected.bytes_STE[:SLOTS])
    assert (gathered[:, ROWS:] == POISON).all()
    ours.bytes_STE[tables_SC.long()] = POISON
    assert (ours.bytes_STE == POISON).all(), "a block that no table names was written"


def test_a_token_whose_block_does_not_exist_is_written_nowhere() -> None:
    memory, token_NKD = make_memory((2, 4), 1, 64, FP16), torch.ones(3, 1, 64, dtype=FP16, device=DEVICE)
    tables_SC = index(-1, 2, 2**31 - 1).view(1, 3)
    append(token_NKD, token_NKD, memory.k, memory.v, index(0, 0, 0), index(0, 5, 11), index(12), tables_SC=tables_SC)
    assert (memory.bytes_STE == POISON).all()


@pytest.mark.parametrize(("head_dim", "dtype", "normed"), [(64, FP16, False), (80, FP32, False), (64, FP32, True)])
def test_rotation_and_norms_are_those_of_transformers(head_dim: int, dtype: torch.dtype, normed: bool) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    k_NKD, v_NKD, q_NHD, *_ = make_tokens(3, head_dim, dtype)
    angles, memory = make_angles(head_dim, TOKENS), make_memory((1, TOKENS), 3, head_dim, dtype)
    norms = make_norms(head_dim, dtype) if normed else {}
    given = []
    for name, x_NHD in (("q_norm_D", q_NHD), ("k_norm_D", k_NKD)):
        module = qwen3.Qwen3RMSNorm(head_dim, eps=1e-6).to(DEVICE)
        module.weight.data.copy_(norms.get(name, module.weight.data))
        given.append((module(x_NHD).detach() if normed else x_NHD.float()).transpose(0, 1)[None])
    tables = (torch.cat([table_TR, table_TR], dim=-1)[None] for table_TR in angles.values())
    expected = [x_1HTD[0].transpose(0, 1).to(dtype) for x_1HTD in qwen3.apply_rotary_pos_emb(*given, *tables)]
    append_to_one_slot(k_NKD, v_NKD, memory, q_NHD=q_NHD, **angles, **norms)
    tolerance = 1e-5 if normed else 0.0
    for ours, theirs in zip((q_NHD, memory.k[0]), expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=tolerance, atol=tolerance)
    assert torch.equal(memory.v[0], v_NKD)


def test_queries_go_where_they_are_wanted_and_stay_as_they_were() -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(3, 80, FP16)
    before, memory = q_NHD.clone(), make_memory((SLOTS, ROWS), 3, 80, FP16)
    out_LNHD = torch.full((2, *q_NHD.shape), torch.nan, dtype=FP16, device=DEVICE)
    append(k_NKD, v_NKD, memory.k, memory.v, *where, q_NHD=q_NHD, q_out_NHD=out_LNHD[1], **make_angles(80))
    assert torch.equal(q_NHD, before) and out_LNHD[0].isnan().all()
    append(k_NKD, v_NKD, memory.k, memory.v, *where, q_NHD=q_NHD, **make_angles(80))
    is_known_N = (where[1] >= 0) & (where[1] < ROWS)
    assert torch.equal(out_LNHD[1, is_known_N], q_NHD[is_known_N]) and out_LNHD[1, ~is_known_N].isnan().all()


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "kind", "scale", "rope"),
    some(
        [(2, 64, FP16, "int8", "token", False), (3, 80, FP32, None, "", True)],
        [(*shape, *form, rope) for shape in ((2, 64), (3, 128)) for form in WRITTEN[:-1] for rope in (False, True)],
    ),
)
def test_norming_on_the_way_is_norming_before(
    kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str, rope: bool
) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(kv_heads, head_dim, dtype)
    slots_N, positions_N, limit_S = where
    options: dict[str, Any] = make_angles(head_dim) if rope else {}
    norms = make_norms(head_dim, dtype)
    ours, expected = (make_memory((SLOTS, ROWS), kv_heads, head_dim, dtype, kind, scale) for _ in range(2))

    # Queries without angles are normed alone, and K may be given as queries; nothing is written at position -1.
    nowhere_N = torch.full_like(positions_N, -1)
    normed = [q_NHD.clone(), k_NKD.clone()]
    for x_NHD, name in zip(normed, ("q_norm_D", "k_norm_D"), strict=True):
        given_NHD, norm = x_NHD.clone(), {"q_norm_D": norms[name], "norm_eps": norms["norm_eps"]}
        append(k_NKD, v_NKD, ours.k, ours.v, slots_N, nowhere_N, limit_S, q_NHD=x_NHD, **norm, **ours.scales)
        assert_rounded_alike(x_NHD, reference.rms_norm(given_NHD, norms[name], norms["norm_eps"]))
    assert torch.equal(ours.bytes_STE, expected.bytes_STE)

    query_NHD = q_NHD.clone()
    append(k_NKD, v_NKD, ours.k, ours.v, *where, q_NHD=query_NHD, **options, **norms, **ours.scales)
    turned = {"q_NHD": normed[0]} if rope else {}
    append(normed[1], v_NKD, expected.k, expected.v, *where, **turned, **options, **expected.scales)
    assert (expected.bytes_STE != POISON).any()
    assert torch.equal(ours.bytes_STE, expected.bytes_STE)
    known_N = (positions_N >= 0) & (positions_N < ROWS) if rope else positions_N == positions_N
    assert torch.equal(query_NHD[known_N], normed[0][known_N])
    assert torch.equal(query_NHD[~known_N], q_NHD[~known_N])


@pytest.mark.parametrize(
    ("norms", "dtype"), [(["q_norm_D"], FP16), (["k_norm_D"], FP32), (["q_norm_D", "k_norm_D"], FP16)], ids=["q", "k", "both"]
)
def test_norms_and_rotation_are_those_of_the_reference(norms: list[str], dtype: torch.dtype) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(3, 96, dtype)
    options = make_angles(96) | {"norm_eps": 1e-6}
    options |= {name: weight for name, weight in make_norms(96, dtype).items() if name in norms}
    queries = [q_NHD.clone(), q_NHD.clone()]
    ours, expected = (make_memory((SLOTS, ROWS), 3, 96, dtype) for _ in range(2))
    for write, memory, query in zip((append, reference.append), (ours, expected), queries, strict=True):
        write(k_NKD, v_NKD, memory.k, memory.v, *where, q_NHD=query, **options)
    assert torch.equal(ours.k.isnan(), expected.k.isnan())
    assert torch.equal(ours.v.nan_to_num(), expected.v.nan_to_num())
    for x_NHD, y_NHD in ((ours.k.nan_to_num(), expected.k.nan_to_num()), queries):
        # A rotation subtracts: its error is relative to the vector, not to the element.
        bound_NH1 = 16 * torch.finfo(dtype).eps * y_NHD.float().abs().amax(dim=-1, keepdim=True)
        assert ((x_NHD.float() - y_NHD.float()).abs() <= bound_NH1).all()


def test_a_position_without_an_angle_is_left_alone() -> None:
    memory, qk_NHD = make_memory((1, ROWS), 2, 64, FP16), torch.ones(3, HEADS + 2, 64, dtype=FP16, device=DEVICE)
    q_NHD, k_NKD = qk_NHD.split([HEADS, 2], dim=1)
    where = (index(0, 0, 0), index(-1, 11, 12), index(ROWS))
    append(k_NKD, k_NKD, memory.k, memory.v, *where, q_NHD=q_NHD, **make_angles(64, positions=12))
    written_T = (memory.bytes_STE[0] != POISON).any(dim=-1)
    assert written_T.nonzero().tolist() == [[11]]
    assert (q_NHD != 1).flatten(1).any(dim=1).tolist() == [False, True, False]


@pytest.mark.parametrize("dtype", [FP16, *([BF16] if DEVICE.type == "cuda" else [])], ids=str)
def test_every_float_of_16_bits_rounds_to_fp8_as_torch_rounds_it(dtype: torch.dtype) -> None:
    all_NKD = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(dtype).view(256, 1, 256).to(DEVICE)
    all_NKD = torch.where(all_NKD.isfinite(), all_NKD, torch.zeros_like(all_NKD))
    memory, one_K = make_memory((1, 256), 1, 256, dtype, "fp8"), torch.ones(1, device=DEVICE)
    append_to_one_slot(all_NKD, all_NKD, memory, k_scale=one_K, v_scale=one_K)
    expected = all_NKD.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(memory.k[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize(("kind", "most"), [("int8", 127), ("int4", 7)])
def test_halves_round_to_even(kind: Kind, most: int) -> None:
    k_NKD = (torch.arange(-64, 64) / 2).clamp(-most, most).to(DEVICE, FP16).view(1, 1, 128).contiguous()
    k_NKD[..., 0] = most
    memory = make_memory((1, 1), 1, 128, FP16, kind, "token")
    append_to_one_slot(k_NKD, -k_NKD, memory)
    assert memory.scales["k_scale"].item() == 1.0
    assert torch.equal(dequantise(memory.k, memory.scales["k_scale"])[0], k_NKD.float().round())
    assert torch.equal(dequantise(memory.v, memory.scales["v_scale"])[0], -k_NKD.float().round())


def test_appending_nothing_launches_nothing() -> None:
    memory = make_memory((SLOTS, ROWS), 2, 64, FP16)
    append_to_one_slot(
        torch.empty(0, 2, 64, dtype=FP16, device=DEVICE), torch.empty(0, 2, 64, dtype=FP16, device=DEVICE), memory
    )
    assert (memory.bytes_STE == POISON).all()
