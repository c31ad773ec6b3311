"""Laws that decode and prefill have in common: `counts` are the new tokens of each sequence, for prefill."""

from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from tests.kernels.cases import FORMATS, FP16, FP32, LENGTHS, SMALL, index, make_case, some
from vmmkv_kernels.attention.decode import decode
from vmmkv_kernels.attention.prefill import prefill
from vmmkv_kernels.quantise import Kind

pytestmark = pytest.mark.usefixtures("cut_prefill")

DECODED = ((0, 1, 17, 129), None)
PREFILLED = ((33, 12, 40, 71), (33, 0, 1, 7))
CAPPED = {"softcap": 5.0, "scale": 0.7}

attentions = pytest.mark.parametrize(("lengths", "counts"), [DECODED, PREFILLED], ids=["decode", "prefill"])


@attentions
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype", "kind", "scale", "block", "options"),
    some(
        [
            (6, 2, 64, FP16, None, "", 5, {"window": 63}),
            (2, 1, 256, FP16, None, "", 64, {}),
            (2, 1, 64, FP16, "fp8", "token", 5, {"window": 63}),
            (3, 1, 80, FP32, "int4", "token", 16, CAPPED),
        ],
        [
            (3, 1, 80, FP32, None, "", 16, CAPPED),
            (17, 1, 16, FP16, None, "", 16, {"window": 1}),
            (2, 1, 96, FP16, "fp8", "head", 16, {}),
            (2, 2, 64, FP16, "int8", "token", 16, {}),
            *((*shape, dtype, None, "", 7, options)
              for shape in ((4, 2, 64), (2, 1, 96), (4, 2, 128), (3, 1, 256), (1, 1, 16)) for dtype in (FP16, FP32)
              for options in ({"window": 17}, {"softcap": 0.5})),
            *((group, 1, 16, FP16, None, "", 1, {}) for group in (2, 3, 5, 8, 15, 16, 64)),
            *((*shape, dtype, *form, 128, {"window": 63})
              for shape in ((3, 1, 80), (2, 1, 256), (2, 2, 96)) for dtype in (FP16, FP32) for form in FORMATS[1:]),
        ],
    ),
)  # fmt: skip
def test_attention_is_right_and_has_the_same_bits_in_blocks_and_by_pointers(
    lengths: Sequence[int], counts: Sequence[int] | None, heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype,
    kind: Kind | None, scale: str, block: int, options: dict[str, Any], by_pointers: Callable[[], None],
) -> None:  # fmt: skip
    shape = {"heads": heads, "kv_heads": kv_heads, "head_dim": head_dim, "dtype": dtype}
    case = make_case(lengths, counts, kind=kind, scale=scale, window=options.get("window"), **shape)
    out = case.attend(**options)
    case.assert_right(out, **options)
    assert torch.equal(case.with_long_indices().attend_in_blocks(block, **options), out)
    by_pointers()
    assert torch.equal(case.attend(**options), out)


@pytest.mark.parametrize(
    ("lengths", "counts"),
    some(
        [(LENGTHS, None), ([1, 0, 32, 64, 96, 97, 63, 100], [1, 0, 31, 32, 33, 2, 0, 65])],
        [([length], [length]) for length in (1, 15, 63, 111, 127, 128)],
    ),
)
def test_sequences_may_have_any_length_and_queries_start_anywhere(lengths: Sequence[int], counts: Sequence[int] | None) -> None:
    case = make_case(lengths, counts, **SMALL)
    case.assert_right(case.attend())


@pytest.mark.filterwarnings("ignore:overflow encountered in exp2")
@pytest.mark.parametrize("counts", [None, (1, 70)], ids=["decode", "prefill"])
@pytest.mark.parametrize(("softcap", "scale"), [(None, 300.0), (30.0, 300.0), (None, 1e-6)])
def test_an_extreme_score_gives_no_nan(
    softcap: float | None, scale: float, counts: Sequence[int] | None, cut_decode: Callable[..., None]
) -> None:
    cut_decode()
    case = make_case([1, 111], counts, **SMALL | {"dtype": FP32})
    assert case.attend(scale=scale, softcap=softcap).isfinite().all()


def test_no_queries_launch_nothing() -> None:
    case = make_case([5], [5], **SMALL)
    memory = (case.memory.k, case.memory.v)
    assert decode(case.q_NHD[:0], *memory, index(), index()).shape == (0, 2, 64)
    assert prefill(case.q_NHD[:0], *memory, index(0), index(), index()).shape == (0, 2, 64)
    assert prefill(case.q_NHD, *memory, index(0), index(), index(), out=case.poisoned_out()).isnan().all()
