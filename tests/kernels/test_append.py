"""Laws of the append kernel."""

from typing import Any

import pytest
import torch

from tests.kernels.cases import FORMATS, NAN, POISON, make_memory, some
from tests.kernels.test_checks import append_arguments, assert_refused, meta, misaligned, spread
from tests.kernels.test_norm import assert_rounded_alike
from vmmkv.kernels import reference
from vmmkv.kernels.attention.append import append
from vmmkv.kernels.quantise import Kind, dequantise
from vmmkv.units import ceil_div

SLOTS, ROWS, TOKENS, HEADS = 5, 40, 63, 4

dtypes = pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])


def make_tokens(
    kv_heads: int, head_dim: int, dtype: torch.dtype, device: torch.device, *, max_limit: int = ROWS + 9
) -> tuple[torch.Tensor, ...]:
    """K, V, q, slots, positions, limits: random cells, of which the last five belong nowhere."""
    generator = torch.Generator().manual_seed(0)
    cells = torch.randperm(SLOTS * ROWS, generator=generator)[:TOKENS].to(device)
    slots_N, positions_N = (cells // ROWS).int(), cells % ROWS
    # Before the slot, past it, past its limit by far, and in no slot at all.
    positions_N[-5:-2] = torch.tensor([-1, ROWS, 2**31 - 1], device=device)
    slots_N[-5:] = torch.tensor([SLOTS - 1, SLOTS - 1, SLOTS - 1, -1, SLOTS], device=device)
    limit_S = torch.tensor([0, 1, 17, ROWS, max_limit], dtype=torch.int32, device=device)
    qkv = torch.randn(TOKENS, HEADS + 2 * kv_heads, head_dim, generator=generator).to(device, dtype)
    # Each token at a magnitude of its own, some of them of zeros.
    qkv *= 2.0 ** torch.arange(-16, TOKENS - 16).clamp(max=12).to(device)[:, None, None]
    qkv[::8] = 0.0
    q_NHD, k_NKD, v_NKD = qkv.split([HEADS, kv_heads, kv_heads], dim=1)
    return k_NKD, v_NKD, q_NHD, slots_N, positions_N, limit_S


def make_angles(head_dim: int, device: torch.device, positions: int = ROWS) -> dict[str, torch.Tensor]:
    """The tables of a model with base 10,000."""
    frequencies_R = 10_000.0 ** (-torch.arange(0, head_dim, 2) / head_dim)
    angles_TR = torch.arange(positions)[:, None] * frequencies_R
    return {"cos_TR": angles_TR.cos().to(device), "sin_TR": angles_TR.sin().to(device)}


WRITTEN = [(torch.float16, kind, scale) for kind, scale in FORMATS] + [
    (torch.float32, None, ""),
    (torch.float32, "int8", "token"),
]


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
    kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str, rope: bool, device: torch.device
) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(kv_heads, head_dim, dtype, device)
    queries = [q_NHD.clone(), q_NHD.clone()]
    memories = [make_memory((SLOTS, ROWS), kv_heads, head_dim, dtype, kind, scale, device) for _ in range(2)]
    for write, memory, query in zip((append, reference.append), memories, queries, strict=True):
        options: dict[str, Any] = make_angles(head_dim, device) | {"q_NHD": query} if rope else {}
        write(k_NKD, v_NKD, memory.k, memory.v, *where, **options, **memory.scales)
    ours, expected = memories
    assert (expected.bytes_STE != POISON).any()
    assert torch.equal(ours.bytes_STE, expected.bytes_STE)
    assert torch.equal(queries[0], queries[1])
    assert torch.equal(queries[0], q_NHD) != rope


@pytest.mark.parametrize(
    ("block", "kind", "scale", "rope"),
    some(
        [(5, None, "", False), (16, "int4", "token", True)],
        [(block, *form, rope) for block in (1, 5, 64) for form in FORMATS for rope in (False, True)],
    ),
)
def test_blocks_hold_bit_for_bit_what_slots_do(
    block: int, kind: Kind | None, scale: str, rope: bool, device: torch.device
) -> None:
    k_NKD, v_NKD, _, slots_N, positions_N, limit_S = make_tokens(3, 96, torch.float16, device, max_limit=ROWS - 1)
    options: dict[str, Any] = make_angles(96, device) if rope else {}
    expected = make_memory((SLOTS, ROWS), 3, 96, torch.float16, kind, scale, device)
    append(k_NKD, v_NKD, expected.k, expected.v, slots_N, positions_N, limit_S, **options, **expected.scales)

    columns = ceil_div(ROWS, block)
    blocks = SLOTS * columns + 3
    ours = make_memory((blocks, block), 3, 96, torch.float16, kind, scale, device)
    order = torch.randperm(blocks, generator=torch.Generator().manual_seed(7)).to(device)
    tables_SC = order[: SLOTS * columns].view(SLOTS, columns).int()
    append(k_NKD, v_NKD, ours.k, ours.v, slots_N, positions_N, limit_S, tables_SC=tables_SC, **options, **ours.scales)
    gathered = ours.bytes_STE[tables_SC.long()].flatten(1, 2)
    assert torch.equal(gathered[:, :ROWS], expected.bytes_STE[:SLOTS])
    assert (gathered[:, ROWS:] == POISON).all()
    assert (ours.bytes_STE[order[SLOTS * columns :]] == POISON).all()
    assert (ours.bytes_STE[blocks] == POISON).all()


def test_a_token_whose_block_does_not_exist_is_written_nowhere(device: torch.device) -> None:
    memory = make_memory((2, 4), 1, 64, torch.float16, None, "", device)
    token_NKD = torch.ones(3, 1, 64, dtype=torch.float16, device=device)
    tables_SC = torch.tensor([[-1, 2, 2**31 - 1]], dtype=torch.int32, device=device)
    limit_S = torch.full((1,), 12, dtype=torch.int32, device=device)
    slots_N, positions_N = torch.zeros(3, dtype=torch.int32, device=device), torch.tensor([0, 5, 11], device=device)
    append(token_NKD, token_NKD, memory.k, memory.v, slots_N, positions_N, limit_S, tables_SC=tables_SC)
    assert (memory.bytes_STE == POISON).all()


@dtypes
@pytest.mark.parametrize("head_dim", [64, 80])
def test_rotation_is_that_of_transformers(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    llama = pytest.importorskip("transformers.models.llama.modeling_llama")
    k_NKD, v_NKD, q_NHD, *_ = make_tokens(3, head_dim, dtype, device)
    positions_N = torch.arange(TOKENS, device=device)
    angles = make_angles(head_dim, device, TOKENS)
    cos_1TD, sin_1TD = (torch.cat([table_TR, table_TR], dim=-1)[None] for table_TR in angles.values())
    q_1HTD, k_1KTD = (x_NHD.float().transpose(0, 1)[None] for x_NHD in (q_NHD, k_NKD))
    q_1HTD, k_1KTD = llama.apply_rotary_pos_emb(q_1HTD, k_1KTD, cos_1TD, sin_1TD)

    memory = make_memory((1, TOKENS), 3, head_dim, dtype, None, "", device)
    limit_S = torch.full((1,), TOKENS, dtype=torch.int32, device=device)
    append(k_NKD, v_NKD, memory.k, memory.v, torch.zeros_like(positions_N), positions_N, limit_S, q_NHD=q_NHD, **angles)
    assert torch.equal(memory.k[0], k_1KTD[0].transpose(0, 1).to(dtype))
    assert torch.equal(memory.v[0], v_NKD)
    assert torch.equal(q_NHD, q_1HTD[0].transpose(0, 1).to(dtype))


def make_norms(head_dim: int, dtype: torch.dtype, device: torch.device) -> dict[str, Any]:
    """Weights around 1, as models have them."""
    generator = torch.Generator().manual_seed(2)
    weights_2D = (1 + torch.randn(2, head_dim, generator=generator) / 4).to(device, dtype)
    return {"q_norm_D": weights_2D[0], "k_norm_D": weights_2D[1], "norm_eps": 1e-6}


NORMED = [*((torch.float16, *form) for form in FORMATS), (torch.float32, None, "")]


@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "dtype", "kind", "scale", "rope"),
    some(
        [(2, 64, torch.float16, "int8", "token", False), (3, 80, torch.float32, None, "", True)],
        [(*shape, *form, rope) for shape in ((2, 64), (3, 128)) for form in NORMED for rope in (False, True)],
    ),
)
def test_norming_on_the_way_is_norming_before(
    kv_heads: int, head_dim: int, dtype: torch.dtype, kind: Kind | None, scale: str, rope: bool, device: torch.device
) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(kv_heads, head_dim, dtype, device)
    slots_N, positions_N, limit_S = where
    options: dict[str, Any] = make_angles(head_dim, device) if rope else {}
    norms = make_norms(head_dim, dtype, device)
    ours, expected = (make_memory((SLOTS, ROWS), kv_heads, head_dim, dtype, kind, scale, device) for _ in range(2))

    # Queries without angles are normed alone, and K may be given as queries; nothing is written at position -1.
    nowhere_N = torch.full_like(positions_N, -1)
    normed = [q_NHD.clone(), k_NKD.clone()]
    for x_NHD, name in zip(normed, ("q_norm_D", "k_norm_D"), strict=True):
        given_NHD = x_NHD.clone()
        norm = {"q_norm_D": norms[name], "norm_eps": norms["norm_eps"]}
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


@dtypes
@pytest.mark.parametrize("norms", [["q_norm_D"], ["k_norm_D"], ["q_norm_D", "k_norm_D"]], ids=["q", "k", "both"])
def test_norms_and_rotation_are_those_of_the_reference(norms: list[str], dtype: torch.dtype, device: torch.device) -> None:
    k_NKD, v_NKD, q_NHD, *where = make_tokens(3, 96, dtype, device)
    options = make_angles(96, device) | {"norm_eps": 1e-6}
    options |= {name: weight for name, weight in make_norms(96, dtype, device).items() if name in norms}
    queries = [q_NHD.clone(), q_NHD.clone()]
    ours, expected = (make_memory((SLOTS, ROWS), 3, 96, dtype, None, "", device) for _ in range(2))
    for write, memory, query in zip((append, reference.append), (ours, expected), queries, strict=True):
        write(k_NKD, v_NKD, memory.k, memory.v, *where, q_NHD=query, **options)
    assert torch.equal(ours.k.isnan(), expected.k.isnan())
    assert torch.equal(ours.v.nan_to_num(), expected.v.nan_to_num())
    for x_NHD, y_NHD in ((ours.k.nan_to_num(), expected.k.nan_to_num()), queries):
        # A rotation subtracts: its error is relative to the vector, not to the element.
        bound_NH1 = 16 * torch.finfo(dtype).eps * y_NHD.float().abs().amax(dim=-1, keepdim=True)
        assert ((x_NHD.float() - y_NHD.float()).abs() <= bound_NH1).all()


def test_norms_are_those_of_transformers(device: torch.device) -> None:
    qwen3 = pytest.importorskip("transformers.models.qwen3.modeling_qwen3")
    k_NKD, v_NKD, q_NHD, *_ = make_tokens(2, 64, torch.float32, device)
    norms = make_norms(64, torch.float32, device)
    positions_N = torch.arange(TOKENS, device=device)
    angles = make_angles(64, device, TOKENS)
    cos_1TD, sin_1TD = (torch.cat([table_TR, table_TR], dim=-1)[None] for table_TR in angles.values())
    modules = {name: qwen3.Qwen3RMSNorm(64, eps=1e-6).to(device) for name in ("q_norm_D", "k_norm_D")}
    with torch.no_grad():
        for name, module in modules.items():
            module.weight.copy_(norms[name])
        normed = [modules["q_norm_D"](q_NHD), modules["k_norm_D"](k_NKD)]
    turned = qwen3.apply_rotary_pos_emb(*(x_NHD.transpose(0, 1)[None] for x_NHD in normed), cos_1TD, sin_1TD)
    q_expected_NHD, k_expected_NKD = (x_1HTD[0].transpose(0, 1) for x_1HTD in turned)

    memory = make_memory((1, TOKENS), 2, 64, torch.float32, None, "", device)
    limit_S = torch.full((1,), TOKENS, dtype=torch.int32, device=device)
    where = (torch.zeros_like(positions_N), positions_N, limit_S)
    append(k_NKD, v_NKD, memory.k, memory.v, *where, q_NHD=q_NHD, **angles, **norms)
    torch.testing.assert_close(memory.k[0], k_expected_NKD, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(q_NHD, q_expected_NHD, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "refusal",
    [
        ("q_norm_D", lambda weight: weight[:32], "(64,)"),
        ("q_norm_D", lambda weight: weight.float(), "torch.float16"),
        ("q_norm_D", meta, "where the others are"),
        ("k_norm_D", spread, "stride 1"),
        ("k_norm_D", misaligned, "16 bytes"),
        ("norm_eps", lambda _: 0.0, "positive"),
        ("norm_eps", lambda _: NAN, "positive"),
    ],
    ids=lambda refusal: refusal[0],
)
def test_append_names_what_it_refuses_of_a_norm(refusal: Any, device: torch.device) -> None:
    q_NHD = torch.zeros(3, 4, 64, dtype=torch.float16, device=device)
    assert_refused(append, append_arguments(device) | {"q_NHD": q_NHD} | make_norms(64, torch.float16, device), refusal)


def test_a_norm_of_queries_wants_queries(device: torch.device) -> None:
    with pytest.raises(ValueError, match=r"^q_norm_D is given without q_NHD; wanted both"):
        append(**append_arguments(device), **make_norms(64, torch.float16, device))


def test_a_position_without_an_angle_is_left_alone(device: torch.device) -> None:
    memory = make_memory((1, ROWS), 2, 64, torch.float16, None, "", device)
    k_NKD = torch.ones(3, 2, 64, dtype=torch.float16, device=device)
    q_NHD = torch.ones(3, HEADS, 64, dtype=torch.float16, device=device)
    positions_N = torch.tensor([-1, 11, 12], device=device)
    limit_S = torch.full((1,), ROWS, dtype=torch.int32, device=device)
    angles = make_angles(64, device, positions=12)
    slots_N = torch.zeros_like(positions_N)
    append(k_NKD, k_NKD, memory.k, memory.v, slots_N, positions_N, limit_S, q_NHD=q_NHD, **angles)
    written_T = (memory.bytes_STE[0] != POISON).any(dim=-1)
    assert written_T.nonzero().tolist() == [[11]]
    assert (q_NHD != 1).flatten(1).any(dim=1).tolist() == [False, True, False]


def test_every_float16_rounds_to_fp8_as_torch_rounds_it(device: torch.device) -> None:
    all_NKD = torch.arange(-(2**15), 2**15, dtype=torch.int16).view(torch.float16).view(256, 1, 256).to(device)
    all_NKD = all_NKD.nan_to_num(0.0)
    memory = make_memory((1, 256), 1, 256, torch.float16, "fp8", "", device)
    one_K = torch.ones(1, device=device)
    positions_N = torch.arange(256, device=device)
    limit_S = torch.full((1,), 256, dtype=torch.int32, device=device)
    slots_N = torch.zeros_like(positions_N)
    append(all_NKD, all_NKD, memory.k, memory.v, slots_N, positions_N, limit_S, k_scale=one_K, v_scale=one_K)
    expected = all_NKD.float().clamp(-448, 448).to(torch.float8_e4m3fn)
    assert torch.equal(memory.k[0].view(torch.uint8), expected.view(torch.uint8))


@pytest.mark.parametrize("kind", ["int8", "int4"])
def test_halves_round_to_even(kind: Kind, device: torch.device) -> None:
    most = {"int8": 127, "int4": 7}[kind]
    k_NKD = (torch.arange(-64, 64) / 2).clamp(-most, most).to(device, torch.float16).view(1, 1, 128).contiguous()
    k_NKD[..., 0] = most
    memory = make_memory((1, 1), 1, 128, torch.float16, kind, "token", device)
    zero_N = torch.zeros(1, dtype=torch.int32, device=device)
    append(k_NKD, -k_NKD, memory.k, memory.v, zero_N, zero_N, zero_N + 1, **memory.scales)
    assert memory.scales["k_scale"].item() == 1.0
    assert torch.equal(dequantise(memory.k, memory.scales["k_scale"])[0], k_NKD.float().round())
    assert torch.equal(dequantise(memory.v, memory.scales["v_scale"])[0], -k_NKD.float().round())


def test_appending_nothing_launches_nothing(device: torch.device) -> None:
    memory = torch.full((SLOTS, ROWS, 2, 2, 64), NAN, dtype=torch.float16, device=device)
    limit_S = torch.full((SLOTS,), ROWS, dtype=torch.int32, device=device)
    none_NKD = torch.empty(0, 2, 64, dtype=torch.float16, device=device)
    none_N = torch.empty(0, dtype=torch.int32, device=device)
    append(none_NKD, none_NKD, memory[:, :, 0], memory[:, :, 1], none_N, none_N, limit_S)
    assert memory.isnan().all()
