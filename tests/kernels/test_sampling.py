"""Laws of the sampling kernels: token for token what plain torch samples."""

from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from tests.kernels.cases import BF16, DEVICE, FP16, FP32, NAN, dtypes, index, some
from vmmkv_kernels import reference
from vmmkv_kernels.sampling import noise
from vmmkv_kernels.sampling import sample as module
from vmmkv_kernels.sampling.logits import apply_penalties, apply_token_mask
from vmmkv_kernels.sampling.sample import argmax, sample

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


def make_parameters(*filters: dict[str, float]) -> dict[str, torch.Tensor]:
    """Of a slot for each of these; of all FILTERS without any."""
    rows = [DEFAULTS | row for row in filters or FILTERS.values()]
    parameters = {
        f"{name}_S": torch.tensor([row[name] for row in rows], dtype=torch.int32 if name == "top_k" else FP32)
        for name in DEFAULTS
    }
    parameters["seed_S"] = torch.arange(len(rows)) * -0x61C8864680B583EB + 5
    return {name: tensor.to(DEVICE) for name, tensor in parameters.items()}


def make_logits(rows: int, vocabulary: int, dtype: torch.dtype, seed: int = 0) -> torch.Tensor:
    """Within poison, so that a load past the vocabulary shows."""
    wide = torch.full((rows + 1, vocabulary + 13), NAN, dtype=dtype, device=DEVICE)
    generator = torch.Generator().manual_seed(seed)
    wide[:rows, :vocabulary] = (3 * torch.randn(rows, vocabulary, generator=generator)).to(DEVICE, dtype)
    return wide[:rows, :vocabulary]


def assert_tokens_of_torch(
    logits_BV: torch.Tensor, parameters: dict[str, torch.Tensor], position: int = 0, dtype: torch.dtype = torch.int32
) -> list[int]:
    """Row b in slot b, at a position of its own. Returns the tokens."""
    slots_B = index(*range(len(logits_BV)), dtype=dtype)
    tokens: list[int] = sample(logits_BV, slots_B, slots_B * 7 + position, **parameters).tolist()
    assert tokens == reference.sample(logits_BV, slots_B, slots_B * 7 + position, **parameters).tolist()
    return tokens


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
def test_random_words_have_the_same_bits_in_torch(seed: int, position: int) -> None:
    words = torch.zeros(4, 64, dtype=torch.int64, device=DEVICE)
    seeds = index(seed, dtype=torch.int64)
    _store_words[(1,)](words, position, seeds)
    expected = noise.philox(torch.arange(64, device=DEVICE) * 0x3000001, index(position, dtype=torch.int64), seeds)
    assert torch.equal(words, torch.stack(expected))


def test_arithmetic_has_the_same_bits_in_torch() -> None:
    generator = torch.Generator().manual_seed(0)
    size = 8192
    words = torch.randint(0, 2**32, (size,), generator=generator).to(DEVICE)
    words[:6] = index(0, 1, 2**31, 2**30 - 1, 2**32 - 2, 2**32 - 1, dtype=torch.int64)
    x = (torch.rand(size, generator=generator) * 60 + 0.125).to(DEVICE)
    x[:4] = torch.tensor([0.125, 1.0, INFINITY, 1e30])
    gumbel, logs, weights = torch.empty_like(x), torch.empty_like(x), torch.empty(size, dtype=torch.int64, device=DEVICE)
    options = {"enable_fp_fusion": False} if DEVICE.type == "cuda" else {}
    _store_math[(1,)](words, x, gumbel, logs, weights, SIZE=size, **options)
    assert torch.equal(gumbel, noise.gumbel(words))
    assert torch.equal(logs, noise.log(x))
    inverse = torch.tensor(1.7, device=DEVICE)
    assert torch.equal(weights, noise.weights(-x, torch.tensor(-0.125, device=DEVICE), inverse))


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
def test_tokens_are_those_of_torch(vocabulary: int) -> None:
    logits_BV = make_logits(len(FILTERS), vocabulary, FP32, vocabulary)
    assert_tokens_of_torch(logits_BV, make_parameters(), 12_345)


def test_equal_logits_are_kept_and_dropped_together() -> None:
    logits_BV = make_logits(len(FILTERS), 1500, FP16).mul_(0.5).round_().mul_(2)
    logits_BV[:, ::7] *= -0.0  # zeros of both signs
    assert_tokens_of_torch(logits_BV, make_parameters(), dtype=torch.int64)


def test_flat_rows_are_filtered_as_in_torch() -> None:
    """Where the first draws are rejected, and no bound of the groups helps."""
    filters = [{"top_k": 2}, {"top_p": 0.01}, {"top_k": 1100, "top_p": 0.002}, {"top_k": 3, "top_p": 0.5}]
    logits_BV = (torch.rand(4, 2100, generator=torch.Generator().manual_seed(3)) * 1e-3).to(DEVICE)
    assert_tokens_of_torch(logits_BV, make_parameters(*filters))


@pytest.mark.parametrize("programs", [1, 4096])
def test_how_rows_are_cut_changes_nothing(programs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    logits_BV = make_logits(3, 5000, FP32)
    monkeypatch.setattr(module, "PROGRAMS", programs)
    assert_tokens_of_torch(logits_BV, make_parameters(*(FILTERS[name] for name in ("greedy", "plain", "all"))))
    assert argmax(logits_BV).tolist() == logits_BV.argmax(-1).tolist()


@pytest.mark.filterwarnings("ignore:All-NaN slice|invalid value:RuntimeWarning")  # numpy's, in the interpreter
def test_rows_that_are_no_numbers_are_told_and_touch_no_other() -> None:
    logits_BV = torch.zeros(6, 1100, device=DEVICE)
    logits_BV[0, 1099] = logits_BV[1, 0] = NAN
    logits_BV[2] = NAN
    logits_BV[3] = -INFINITY
    logits_BV[4, 7] = logits_BV[4, 1050] = INFINITY
    filters = [{}, {"temperature": 0.0}, FILTERS["all"], {"top_k": 3, "top_p": 0.5}, FILTERS["all"], {"min_p": 0.5}]
    tokens = assert_tokens_of_torch(logits_BV, make_parameters(*filters))
    assert tokens[:4] == [-1, -1, -1, 0] and tokens[4] in (7, 1050)
    assert argmax(logits_BV).tolist() == [-1, -1, -1, 0, 7, 0]


def test_slots_that_are_not_there_are_greedy() -> None:
    logits_BV, slots_B = make_logits(2, 300, FP32), index(-1, 9)
    assert torch.equal(sample(logits_BV, slots_B, slots_B, **make_parameters({})), argmax(logits_BV))


@dtypes
@pytest.mark.parametrize("vocabulary", [1, 1000, 5003, 9000])
def test_argmax_is_the_first_of_the_largest(vocabulary: int, dtype: torch.dtype) -> None:
    logits_BV = make_logits(3, vocabulary, dtype).round_()
    out = torch.empty(3, dtype=torch.int32, device=DEVICE)
    assert argmax(logits_BV, out=out) is out
    assert torch.equal(out, reference.argmax(logits_BV))


def test_no_rows_are_no_tokens() -> None:
    assert argmax(torch.zeros(0, 50, device=DEVICE)).shape == (0,)


@dtypes
@pytest.mark.parametrize("has_bias", [True, False])
def test_penalties_have_the_bits_of_torch(dtype: torch.dtype, has_bias: bool) -> None:
    generator = torch.Generator().manual_seed(1)
    logits_BV = make_logits(4, 2500, dtype)
    before_BV = logits_BV.clone()
    counts_RV = torch.randint(-3, 4, (3, 2500), generator=generator).clamp(min=0).int().to(DEVICE)
    prompt_RV = torch.randint(0, 2, (3, 2500), generator=generator).to(DEVICE, torch.uint8)
    bias_RV = torch.randn(3, 2500, generator=generator).to(DEVICE) if has_bias else None
    state: dict[str, Any] = {
        "state_row_S": index(0, 2, 0, 1),
        "repetition_S": torch.tensor([9.0, 1.3, 9.0, 0.7], device=DEVICE),
        "frequency_S": torch.tensor([9.0, 0.3, 9.0, -0.1], device=DEVICE),
        "presence_S": torch.tensor([9.0, -0.5, 9.0, 1.1], device=DEVICE),
        "counts_RV": counts_RV, "prompt_RV": prompt_RV, "bias_RV": bias_RV,
    }  # fmt: skip
    expected_BV = before_BV.clone()
    slots_B = index(3, 0, 1, 2)
    apply_penalties(logits_BV, slots_B, **state)
    reference.apply_penalties(expected_BV, slots_B, **state)
    assert torch.equal(logits_BV, expected_BV)
    assert (logits_BV != before_BV).any(dim=1).tolist() == [True, False, True, False]


def words_of(may_GV: torch.Tensor, num_words: int) -> torch.Tensor:
    """A bit for each token, the lowest of the first word for token 0; of what is no token, at random."""
    bits_GV = torch.randint(0, 2, (len(may_GV), 32 * num_words), generator=torch.Generator().manual_seed(9))
    bits_GV[:, : may_GV.shape[1]] = may_GV
    places = torch.tensor([1 << bit for bit in range(31)] + [-(1 << 31)], dtype=torch.int64)
    return (bits_GV.view(len(may_GV), num_words, 32) * places).sum(2).int()


@pytest.mark.parametrize("size, more_words", [(1, 0), (31, 0), (32, 1), (33, 0), (2049, 0)])
@pytest.mark.parametrize("dtype", [FP16, BF16, FP32], ids=["fp16", "bf16", "fp32"])
def test_masking_has_the_bits_of_torch(size: int, more_words: int, dtype: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(size)
    logits_BV = torch.randn(6, size + 8, generator=generator).to(DEVICE, dtype)[:, :size]
    logits_BV[1, 0] = NAN
    may_GV = torch.rand(4, size, generator=generator) < torch.tensor([0.5, 0.0, 1.0, 0.01])[:, None]
    expected_BV, reference_BV = logits_BV.clone(), logits_BV.clone()
    for row, may_V in ((4, may_GV[0]), (1, may_GV[1]), (0, may_GV[3])):
        expected_BV[row, ~may_V.to(DEVICE)] = -torch.inf
    words_GW = words_of(may_GV, -(-size // 32) + more_words).to(DEVICE)
    apply_token_mask(logits_BV, index(4, 1, -1, 0), words_GW)
    reference.apply_token_mask(reference_BV, index(4, 1, -1, 0), words_GW)
    for masked_BV in (logits_BV, reference_BV):
        assert torch.equal(masked_BV.nan_to_num(7.0, neginf=-torch.inf), expected_BV.nan_to_num(7.0, neginf=-torch.inf))


def test_a_mask_of_a_row_that_does_not_exist_is_skipped() -> None:
    buffer_BV = torch.ones(4, 40, device=DEVICE)
    apply_token_mask(buffer_BV[1:3], index(2, 5, -9), torch.zeros(3, 2, dtype=torch.int32, device=DEVICE))
    assert (buffer_BV == 1).all()
