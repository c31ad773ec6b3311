"""Laws of prefill on a real GPU."""

import pytest
import torch

if not torch.cuda.is_available():
    # Before triton is imported: tests/kernels settles that it is to be interpreted here.
    pytest.skip("needs an NVIDIA GPU", allow_module_level=True)

from tests.kernels.cases import make_case
from tests.kernels.memories import FORMATS
from tests.kernels.test_prefill import make_prompts
from vmmkv.kernels.prefill import prefill
from vmmkv.kernels.quantise import Kind

pytestmark = pytest.mark.gpu

DEVICE = torch.device("cuda", 0)
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
COUNTS, LENGTHS = (129, 0, 1, 64, 300, 2), (129, 50, 1000, 777, 1300, 2)
USED = sum(COUNTS)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (32, 8, 128, BF16),
        (32, 8, 128, FP16),
        (9, 3, 64, BF16),
        (8, 8, 80, BF16),
        (12, 4, 96, FP16),
        (16, 1, 64, BF16),
        (4, 2, 256, BF16),
        (4, 2, 128, FP32),
        (2, 1, 256, FP32),
    ],
)
def test_prefill_is_right_at_every_shape(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> None:
    prompts = make_prompts(COUNTS, LENGTHS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype, device=DEVICE)
    prompts.assert_right(prefill(*prompts.arguments, out=prompts.poisoned_out()))


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (100, None), (500, 30.0), (None, 5.0)])
def test_windows_and_caps(window: int | None, softcap: float | None) -> None:
    prompts = make_prompts(COUNTS, LENGTHS, heads=8, kv_heads=2, head_dim=128, dtype=BF16, device=DEVICE, window=window)
    out = prefill(*prompts.arguments, window=window, softcap=softcap, out=prompts.poisoned_out())
    prompts.assert_right(out, window=window, softcap=softcap)


@pytest.mark.parametrize(
    ("kind", "scale", "head_dim", "dtype"),
    [
        *((kind, scale, 128, BF16) for kind, scale in FORMATS[1:]),
        ("int4", "token", 64, FP16),
        ("fp8", "token", 256, BF16),
        ("int8", "token", 96, FP32),
    ],
)
def test_quantised_rows_mean_what_their_bits_say(kind: Kind, scale: str, head_dim: int, dtype: torch.dtype) -> None:
    shape = {"heads": 8, "kv_heads": 2, "head_dim": head_dim, "dtype": dtype}
    prompts = make_prompts(COUNTS, LENGTHS, kind=kind, head_scale=scale == "head", device=DEVICE, **shape)
    out = prefill(*prompts.arguments, **prompts.scales, out=prompts.poisoned_out())
    prompts.assert_right(out)
    assert torch.equal(prompts.attend_paged(16)[:USED], out[:USED])


@pytest.mark.parametrize("block", [1, 5, 16, 64, 128])
def test_blocks_give_the_bits_of_slots(block: int) -> None:
    prompts = make_prompts(COUNTS, LENGTHS, heads=8, kv_heads=2, head_dim=128, dtype=BF16, device=DEVICE)
    expected = prefill(*prompts.arguments)[:USED]
    assert torch.equal(prompts.attend_paged(block, out=prompts.poisoned_out())[:USED], expected)


@pytest.mark.parametrize("window", [None, 100])
def test_a_query_rounds_the_same_in_any_chunk_and_batch(window: int | None) -> None:
    prompts = make_prompts(COUNTS, LENGTHS, heads=8, kv_heads=2, head_dim=128, dtype=BF16, device=DEVICE)
    together = prefill(*prompts.arguments, window=window)
    first_query = int(prompts.starts[4])
    for first, stop in ((0, 2), (2, 131), (131, 290), (290, 300)):
        alone = prefill(*prompts.part(4, first, stop).arguments, window=window)
        assert torch.equal(alone, together[first_query + first : first_query + stop])


def test_single_queries_have_the_bits_of_decode() -> None:
    case = make_case([1, 17, 1000, 3000], heads=8, kv_heads=2, head_dim=128, dtype=BF16, device=DEVICE)
    starts = torch.arange(5, dtype=torch.int32, device=DEVICE)
    q_BHD, k, v, lengths_B, slots_B = case.arguments
    assert torch.equal(prefill(q_BHD, k, v, starts, lengths_B, slots_B), case.decode())


def test_a_long_prompt_is_right() -> None:
    prompts = make_prompts([4096], [12_000], heads=2, kv_heads=1, head_dim=128, dtype=BF16, device=DEVICE)
    prompts.assert_right(prefill(*prompts.arguments, out=prompts.poisoned_out()))
