"""Laws of the sampling kernels: token for token what plain torch samples."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cases import NAN, some
from tests.kernels.test_checks import Refusal, assert_refused, meta, spread
from vmmkv.kernels import reference
from vmmkv.kernels.sampling import noise
from vmmkv.kernels.sampling import sample as module
from vmmkv.kernels.sampling.logits import apply_penalties, apply_token_mask
from vmmkv.kernels.sampling.sample import argmax, sample

INFINITY = float("inf")
FILTERS = {
    "greedy": {"temperature": 0.0, "top_k": 3},
    "plain": {},
    "cold": {"temperature": 0.3},
    "top_k": {"top_k": 5, "temperature": 1.5},
    "top_k_1": {"top_k": 1},
    "top_k_many": {"top_k": 700, "temperature": 3.0},
    "top_p": {"top_p": 0.8},
    "top_p_small": {"top_p": 0.05, "temperature": 2.0},
    "top_p_tiny": {"top_p": 1e-46},
    "min_p": {"min_p": 0.2},
    "min_p_1": {"min_p": 1.0},
    "all": {"top_k": 20, "top_p": 0.9, "min_p": 0.05, "temperature": 1.2},
}
"""Of one slot each; row b has slot b."""
DEFAULTS = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}


def make_parameters(device: torch.device, filters: list[dict[str, float]] | None = None) -> dict[str, torch.Tensor]:
    rows = [DEFAULTS | row for row in (FILTERS.values() if filters is None else filters)]
    parameters = {
        f"{name}_S": torch.tensor([row[name] for row in rows], dtype=torch.int32 if name == "top_k" else torch.float32)
        for name in DEFAULTS
    }
    parameters["seed_S"] = torch.arange(len(rows)) * -0x61C8864680B583EB + 5
    return {name: tensor.to(device) for name, tensor in parameters.items()}


def make_logits(rows: int, vocabulary: int, dtype: torch.dtype, device: torch.device, seed: int = 0) -> torch.Tensor:
    """Within poison, so that a load past the vocabulary shows."""
    wide = torch.full((rows + 1, vocabulary + 13), NAN, dtype=dtype, device=device)
    generator = torch.Generator().manual_seed(seed)
    wide[:rows, :vocabulary] = (3 * torch.randn(rows, vocabulary, generator=generator)).to(device, dtype)
    return wide[:rows, :vocabulary]


def index(values: list[int], device: torch.device, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=device)


@triton.jit
def _store_words(p_out, position, p_seed):
    i_c = tl.arange(0, 64)
    words = module.philox((i_c * 0x3000001).to(tl.uint32), position, tl.load(p_seed))
    for i in tl.static_range(4):
        tl.store(p_out + i * 64 + i_c, words[i].to(tl.int64))


@triton.jit
def _store_math(p_words, p_x, p_gumbel, p_log, p_weights, SIZE: tl.constexpr):
    i = tl.arange(0, SIZE)
    x = tl.load(p_x + i)
    tl.store(p_gumbel + i, module.gumbel(tl.load(p_words + i).to(tl.uint32)))
    tl.store(p_log + i, module.log(x))
    tl.store(p_weights + i, module.weights(-x, -0.125, 1.7))


def test_philox_gives_the_published_numbers() -> None:
    words = noise.philox(torch.tensor(0), torch.tensor(0), torch.tensor(0))
    assert " ".join(f"{int(word):08x}" for word in words) == "6627e8d5 e169c58d bc57ac4c 9b00dbd8"


@pytest.mark.parametrize(
    ("seed", "position"), [(0, 0), (1, 77), (-1, 2**31 - 1), (2**63 - 1, 5), (-(2**63), 77), (0x123456789ABCDEF, 0)]
)
def test_random_words_have_the_same_bits_in_torch(seed: int, position: int, device: torch.device) -> None:
    words = torch.zeros(4, 64, dtype=torch.int64, device=device)
    seeds = index([seed], device, torch.int64)
    _store_words[(1,)](words, position, seeds)
    expected = noise.philox(torch.arange(64, device=device) * 0x3000001, index([position], device, torch.int64), seeds)
    assert torch.equal(words, torch.stack(expected))


def test_arithmetic_has_the_same_bits_in_torch(device: torch.device) -> None:
    generator = torch.Generator().manual_seed(0)
    size = 8192
    words = torch.randint(0, 2**32, (size,), generator=generator).to(device)
    words[:6] = index([0, 1, 2**31, 2**30 - 1, 2**32 - 2, 2**32 - 1], device, torch.int64)
    x = (torch.rand(size, generator=generator) * 60 + 0.125).to(device)
    x[:4] = torch.tensor([0.125, 1.0, INFINITY, 1e30])
    gumbel, logs, weights = torch.empty_like(x), torch.empty_like(x), torch.empty(size, dtype=torch.int64, device=device)
    options = {"enable_fp_fusion": False} if device.type == "cuda" else {}
    _store_math[(1,)](words, x, gumbel, logs, weights, SIZE=size, **options)
    assert torch.equal(gumbel, noise.gumbel(words))
    assert torch.equal(logs, noise.log(x))
    inverse = torch.tensor(1.7, device=device)
    assert torch.equal(weights, noise.weights(-x, torch.tensor(-0.125, device=device), inverse))


def test_arithmetic_is_that_of_mathematics() -> None:
    x = torch.logspace(-30, 30, 4001, dtype=torch.float64)
    torch.testing.assert_close(noise.log(x.float()).double(), x.float().double().log(), rtol=3e-7, atol=1e-7)
    words = torch.cat([torch.arange(2000), 2**32 - 1 - torch.arange(2000), torch.randint(0, 2**32, (2000,))])
    uniform = (words.double() + 0.5) / 2**32
    torch.testing.assert_close(noise.gumbel(words).double(), -(-(-uniform).log1p()).log(), rtol=1e-6, atol=1e-6)
    x = torch.linspace(-25, 0, 4001)
    weights = noise.weights(x, torch.tensor(0.0), torch.tensor(1.0)).double() / 2**noise.WEIGHT_BITS
    torch.testing.assert_close(weights, x.double().exp(), rtol=3e-7, atol=2.0**-39)
    assert weights[-1] == 1.0


@pytest.mark.parametrize("vocabulary", some([1, 1100], [700, 1024, 2500]))
def test_tokens_are_those_of_torch(vocabulary: int, device: torch.device) -> None:
    logits_BV = make_logits(len(FILTERS), vocabulary, torch.float32, device, vocabulary)
    parameters = make_parameters(device)
    slots_B = index(list(range(len(FILTERS))), device)
    for position in (12_345,) if vocabulary <= 1100 else (0, 12_345):
        positions_B = slots_B * 7 + position
        ours = sample(logits_BV, slots_B, positions_B, **parameters)
        assert ours.tolist() == reference.sample(logits_BV, slots_B, positions_B, **parameters).tolist()


@pytest.mark.parametrize("index_dtype", some([torch.int64], [torch.int32]))
def test_equal_logits_are_kept_and_dropped_together(index_dtype: torch.dtype, device: torch.device) -> None:
    logits_BV = make_logits(len(FILTERS), 1500, torch.float16, device).mul_(0.5).round_().mul_(2)
    logits_BV[:, ::7] *= -0.0  # zeros of both signs
    parameters = make_parameters(device)
    slots_B = index(list(range(len(FILTERS))), device, index_dtype)
    ours = sample(logits_BV, slots_B, slots_B, **parameters)
    assert ours.tolist() == reference.sample(logits_BV, slots_B, slots_B, **parameters).tolist()


def test_flat_rows_are_filtered_as_in_torch(device: torch.device) -> None:
    """Where the first draws are rejected, and no bound of the groups helps."""
    filters = [{"top_k": 2}, {"top_p": 0.01}, {"top_k": 1100, "top_p": 0.002}, {"top_k": 3, "top_p": 0.5}]
    generator = torch.Generator().manual_seed(3)
    logits_BV = (torch.rand(4, 2100, generator=generator) * 1e-3).to(device)
    parameters = make_parameters(device, filters)
    slots_B = index([0, 1, 2, 3], device)
    ours = sample(logits_BV, slots_B, slots_B, **parameters)
    assert ours.tolist() == reference.sample(logits_BV, slots_B, slots_B, **parameters).tolist()


@pytest.mark.parametrize("programs", [1, 4096])
def test_how_rows_are_cut_changes_nothing(programs: int, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    names = ("greedy", "plain", "all")
    logits_BV = make_logits(3, 5000, torch.float32, device)
    parameters = make_parameters(device, [FILTERS[name] for name in names])
    slots_B = index([0, 1, 2], device)
    expected = reference.sample(logits_BV, slots_B, slots_B, **parameters).tolist()
    monkeypatch.setattr(module, "_PROGRAMS", programs)
    assert sample(logits_BV, slots_B, slots_B, **parameters).tolist() == expected
    assert argmax(logits_BV).tolist() == logits_BV.argmax(-1).tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")  # numpy's, in the interpreter
def test_rows_that_are_no_numbers_are_told_and_touch_no_other(device: torch.device) -> None:
    logits_BV = torch.zeros(6, 1100, device=device)
    logits_BV[0, 1099] = logits_BV[1, 0] = NAN
    logits_BV[2] = NAN
    logits_BV[3] = -INFINITY
    logits_BV[4, 7] = logits_BV[4, 1050] = INFINITY
    filters = [{}, {"temperature": 0.0}, FILTERS["all"], {"top_k": 3, "top_p": 0.5}, FILTERS["all"], {"min_p": 0.5}]
    parameters = make_parameters(device, filters)
    slots_B = index(list(range(6)), device)
    ours = sample(logits_BV, slots_B, slots_B, **parameters).tolist()
    assert ours[:4] == [-1, -1, -1, 0] and ours[4] in (7, 1050)
    assert ours == reference.sample(logits_BV, slots_B, slots_B, **parameters).tolist()
    assert argmax(logits_BV).tolist() == [-1, -1, -1, 0, 7, 0]


def test_slots_that_are_not_there_are_greedy(device: torch.device) -> None:
    logits_BV = make_logits(2, 300, torch.float32, device)
    slots_B = index([-1, 9], device)
    assert torch.equal(sample(logits_BV, slots_B, slots_B, **make_parameters(device, [{}])), argmax(logits_BV))


@pytest.mark.parametrize("vocabulary", [1, 1000, 5003, 9000])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_the_likeliest_is_the_first_of_the_largest(vocabulary: int, dtype: torch.dtype, device: torch.device) -> None:
    logits_BV = make_logits(3, vocabulary, dtype, device).round_()
    out = torch.empty(3, dtype=torch.int32, device=device)
    assert argmax(logits_BV, out=out) is out
    assert torch.equal(out, reference.argmax(logits_BV))


def test_no_rows_are_no_tokens(device: torch.device) -> None:
    assert argmax(torch.zeros(0, 50, device=device)).shape == (0,)


@pytest.mark.parametrize("has_bias", [True, False])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["fp16", "fp32"])
def test_penalties_have_the_bits_of_torch(dtype: torch.dtype, has_bias: bool, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = make_logits(4, 2500, dtype, device)
    before_BV = logits_BV.clone()
    counts_RV = torch.randint(-3, 4, (3, 2500), generator=generator).clamp(min=0).int().to(device)
    prompt_RV = torch.randint(0, 2, (3, 2500), generator=generator).to(device, torch.uint8)
    bias_RV = torch.randn(3, 2500, generator=generator).to(device) if has_bias else None
    state: dict[str, Any] = {
        "state_row_S": index([0, 2, 0, 1], device),
        "repetition_S": torch.tensor([9.0, 1.3, 9.0, 0.7], device=device),
        "frequency_S": torch.tensor([9.0, 0.3, 9.0, -0.1], device=device),
        "presence_S": torch.tensor([9.0, -0.5, 9.0, 1.1], device=device),
        "counts_RV": counts_RV, "prompt_RV": prompt_RV, "bias_RV": bias_RV,
    }  # fmt: skip
    expected_BV = before_BV.clone()
    slots_B = index([3, 0, 1, 2], device)
    apply_penalties(logits_BV, slots_B, **state)
    reference.apply_penalties(expected_BV, slots_B, **state)
    assert torch.equal(logits_BV, expected_BV)
    assert (logits_BV != before_BV).any(dim=1).tolist() == [True, False, True, False]


@pytest.mark.parametrize(
    "refusal",
    [
        ("logits_BV", lambda logits: logits[0], "2 dimensions"),
        ("logits_BV", lambda logits: logits.long(), "float16, bfloat16 or float32"),
        ("logits_BV", spread, "stride 1"),
        ("logits_BV", lambda logits: logits.new_zeros(1, 1).expand(2, 2**20 + 1), "1048576"),
        ("slots_B", lambda slots: slots[:1], "(2,)"),
        ("positions_B", lambda positions: positions.float(), "int32 or int64"),
        ("temperature_S", lambda temperature: temperature.double(), "torch.float32"),
        ("top_k_S", lambda top_k: top_k.long(), "torch.int32"),
        ("top_p_S", lambda top_p: top_p[:-1], "of shape"),
        ("min_p_S", meta, "contiguous"),
        ("seed_S", spread, "contiguous"),
        ("out", lambda out: out.long(), "torch.int32"),
    ],
    ids=lambda refusal: refusal[0],
)
def test_sample_names_what_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments = {
        "logits_BV": make_logits(2, 64, torch.float32, device),
        "slots_B": index([0, 1], device),
        "positions_B": index([0, 1], device),
        "out": index([0, 0], device),
    }
    assert_refused(sample, arguments | make_parameters(device, [{}, {"temperature": 0.0}]), refusal)


# Token masks


def words_of(may_GV: torch.Tensor, num_words: int) -> torch.Tensor:
    """A bit for each token, the lowest of the first word for token 0; of what is no token, at random."""
    bits_GV = torch.randint(0, 2, (len(may_GV), 32 * num_words), generator=torch.Generator().manual_seed(9))
    bits_GV[:, : may_GV.shape[1]] = may_GV
    places = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int64)
    return (bits_GV.view(len(may_GV), num_words, 32) * places).sum(2).int()


@pytest.mark.parametrize("size, more_words", [(1, 0), (31, 0), (32, 1), (33, 0), (2049, 0)])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=["fp16", "bf16", "fp32"])
def test_masking_has_the_bits_of_torch(device: torch.device, size: int, more_words: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_BV = torch.randn(6, size + 8, generator=generator).to(dtype)[:, :size]
    logits_BV[1, 0] = float("nan")
    may_GV = torch.rand(4, size, generator=generator) < torch.tensor([0.5, 0.0, 1.0, 0.01])[:, None]
    expected_BV, ours_BV = logits_BV.clone(), logits_BV.to(device)
    for row, may_V in ((4, may_GV[0]), (1, may_GV[1]), (0, may_GV[3])):
        expected_BV[row, ~may_V] = -torch.inf
    rows_G, words_GW = torch.tensor([4, 1, -1, 0], dtype=torch.int32), words_of(may_GV, -(-size // 32) + more_words)
    apply_token_mask(ours_BV, rows_G.to(device), words_GW.to(device))
    assert torch.equal(ours_BV.cpu().nan_to_num(7.0, neginf=-torch.inf), expected_BV.nan_to_num(7.0, neginf=-torch.inf))
    reference_BV = logits_BV.clone()
    reference.apply_token_mask(reference_BV, rows_G, words_GW)
    assert torch.equal(reference_BV.nan_to_num(7.0, neginf=-torch.inf), expected_BV.nan_to_num(7.0, neginf=-torch.inf))


def test_a_mask_of_a_row_that_does_not_exist_is_skipped(device: torch.device) -> None:
    buffer_BV = torch.ones(4, 40, device=device)
    index = torch.tensor([2, 5, -9], device=device)
    apply_token_mask(buffer_BV[1:3], index, torch.zeros(3, 2, dtype=torch.int32, device=device))
    assert (buffer_BV == 1).all()


@pytest.mark.parametrize(
    "refusal",
    [
        ("logits_BV", lambda logits: logits[0], "2 dimensions"),
        ("logits_BV", lambda logits: logits.long(), "float16, bfloat16 or float32"),
        ("logits_BV", spread, "the last one contiguous"),
        ("rows_G", lambda rows: rows.float(), "int32 or int64"),
        ("rows_G", lambda rows: rows[0], "(0,)"),
        ("words_GW", lambda words: words.long(), "contiguous torch.int32"),
        ("words_GW", lambda words: words[:, :1], "(2, 2)"),
        ("words_GW", lambda words: words[:1], "(2, 2)"),
        ("words_GW", meta, "on meta; wanted"),
    ],
    ids=lambda refusal: refusal[0],
)
def test_a_token_mask_names_the_argument_it_refuses(refusal: Refusal, device: torch.device) -> None:
    arguments: dict[str, Any] = {
        "logits_BV": torch.zeros(3, 40, device=device),
        "rows_G": torch.zeros(2, dtype=torch.int32, device=device),
        "words_GW": torch.zeros(2, 2, dtype=torch.int32, device=device),
    }
    assert_refused(apply_token_mask, arguments, refusal)
