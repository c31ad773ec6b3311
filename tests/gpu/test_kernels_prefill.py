"""Laws of prefill on a real GPU. Where it is a Hopper, bf16 slots with heads of 128 have a kernel of their own."""

import dataclasses
import itertools

import pytest
import torch

from bench.baselines.backend import prefill_as_over_blocks
from tests.kernels.cases import BF16, DEVICE, FORMATS, FP16, FP32, NAN, index, make_case
from vmmkv_kernels.attention.prefill import hopper_kernels, prefill
from vmmkv_kernels.quantise import Kind

COUNTS, LENGTHS = (129, 0, 1, 64, 300, 2), (129, 50, 1000, 777, 1300, 2)
USED = sum(COUNTS)
BF16_128 = {"heads": 8, "kv_heads": 2, "head_dim": 128, "dtype": BF16}
"""What the kernel for Hopper takes."""


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim", "dtype"),
    [
        (32, 8, 128, BF16),
        *((2 * group, 2, 128, BF16) for group in (1, 2, 3, 5, 7, 8, 16, 64)),
        (1, 1, 128, BF16),
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
    case = make_case(LENGTHS, COUNTS, heads=heads, kv_heads=kv_heads, head_dim=head_dim, dtype=dtype)
    case.assert_right(case.attend())


def test_counts_and_offsets_around_every_tile() -> None:
    edges = (2, 63, 64, 65, 127, 128, 129, 191, 193, 256, 257)
    pairs = [(count, count + offset) for count in edges for offset in (0, 1, 63, 127, 128, 129, 500)]
    case = make_case([length for _, length in pairs], [count for count, _ in pairs], **BF16_128)
    case.assert_right(case.attend())


def test_strides_may_be_any() -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128)
    expected = case.attend()
    wide = torch.full((case.q_NHD.shape[0], 13, 128), NAN, dtype=BF16, device=DEVICE)
    wide[:, 2:10] = case.q_NHD
    # K and V with all heads of a slot one behind the other, and each head's rows together.
    k, v = (x.permute(2, 0, 1, 3).contiguous().permute(1, 2, 0, 3) for x in (case.memory.k, case.memory.v))
    others = dataclasses.replace(case, q_NHD=wide[:, 2:10], memory=dataclasses.replace(case.memory, k=k, v=v))
    assert torch.equal(others.attend(), expected)


def test_queries_before_the_first_row_see_nothing() -> None:
    case = make_case([300, 70, 130, 2], [300, 70, 130, 2], **BF16_128)
    expected = case.attend()
    case.lengths_B[:] = torch.tensor([170, 0, -(2**31), 1])
    out = case.attend()
    assert out[:130].eq(0.0).all()
    assert out[130:300].isfinite().all()
    assert out[300:501].eq(0.0).all()
    # A second query whose length is 1 sees one row, and gives its value.
    assert torch.equal(out[501], case.memory.v[case.slots_B[3], 0].repeat_interleave(4, 0))
    assert not torch.equal(out[130:300], expected[130:300])


def test_nothing_is_read_past_limits_or_outside_the_slots() -> None:
    counts, lengths = [300, 5, 200, 130, 129, 2], [1000, 17, 640, 500, 500, 400]
    case = make_case(lengths, counts, **BF16_128)
    expected, limit_S = case.attend(), case.limits(100_000, 777, 0)
    for slot, limit in zip(case.slots_B.tolist(), (777, 0), strict=False):
        case.memory.k[slot, limit:] = case.memory.v[slot, limit:] = NAN
    case.slots_B[3], case.slots_B[4] = -1, case.num_slots
    out = case.attend(limit_S=limit_S)
    assert torch.equal(out[:77], expected[:77])
    assert out[77:300].isfinite().all()
    assert out[300:305].eq(0.0).all()
    assert torch.equal(out[305:505], expected[305:505])
    assert out[505:764].eq(0.0).all()
    assert torch.equal(out[764:766], expected[764:766])
    assert out[766:].isnan().all()
    # A length far past the last row.
    case.lengths_B[5], limit_S[case.slots_B[5]] = 2**31 - 1, 400
    assert case.attend(limit_S=limit_S)[:766].isfinite().all()


@pytest.mark.parametrize("num_sequences", [128, 129, 300, 4096])
def test_any_number_of_sequences(num_sequences: int) -> None:
    counts = [(0, 1, 2, 3, 5)[b % 5] if b % 64 else 130 for b in range(num_sequences)]
    lengths = [max(count, b % 150) for b, count in enumerate(counts)]
    case = make_case(lengths, counts, **{**BF16_128, "kv_heads": 1, "heads": 2})
    out = case.attend()
    if num_sequences <= 300:
        case.assert_right(out)
    for b in (0, 2, 3, 64, 127, num_sequences - 1, num_sequences // 2):
        start, count = int(case.starts[b]), counts[b]
        if count > 1:
            assert torch.equal(case.only(b, 0, count).attend(), out[start : start + count])


def test_the_bits_are_the_same_on_every_run() -> None:
    case = make_case([3000, 700, 10, 4000, 100], [2000, 700, 0, 513, 1], **{**BF16_128, "heads": 32, "kv_heads": 8})
    expected = case.attend()
    for _ in range(50):
        assert torch.equal(case.attend(), expected)


def test_the_kernel_for_hopper_is_used_where_it_applies(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128)
    module = hopper_kernels(DEVICE)
    if torch.cuda.get_device_capability(DEVICE) != (9, 0):
        assert module is None
        pytest.skip("the device is no Hopper")
    assert module is not None
    launches = []
    monkeypatch.setattr(module, "launch_prefill_hopper", lambda *arguments: launches.append(arguments))
    case.attend()
    assert len(launches) == 1
    case.attend(window=50)
    case.attend(softcap=50.0)
    case.attend_in_blocks(16)
    assert len(launches) == 1
    case.attend_in_blocks(128)
    assert len(launches) == 2


@pytest.mark.parametrize(("window", "softcap"), [(1, None), (100, None), (500, 30.0), (None, 5.0)])
def test_windows_and_caps(window: int | None, softcap: float | None) -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128, window=window)
    out = case.attend(window=window, softcap=softcap)
    case.assert_right(out, window=window, softcap=softcap)


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
    case = make_case(LENGTHS, COUNTS, kind=kind, scale=scale, **shape)
    out = case.attend()
    case.assert_right(out)
    assert torch.equal(case.attend_in_blocks(16), out)


@pytest.mark.parametrize("block", [1, 5, 16, 64])
@pytest.mark.parametrize(("head_dim", "dtype"), [(128, FP16), (64, BF16)])
def test_blocks_give_the_bits_of_slots(block: int, head_dim: int, dtype: torch.dtype) -> None:
    case = make_case(LENGTHS, COUNTS, heads=8, kv_heads=2, head_dim=head_dim, dtype=dtype)
    assert torch.equal(case.attend_in_blocks(block), case.attend())


@pytest.mark.parametrize("block", [1, 16])
def test_blocks_are_right_and_as_slots_but_where_hopper_has_a_kernel_for_those(block: int) -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128)
    paged = case.attend_in_blocks(block)
    case.assert_right(paged)
    assert torch.equal(paged, prefill_as_over_blocks(*case.arguments)[:USED]), "by the same kernel the same bits"
    if hopper_kernels(DEVICE) is None:
        assert torch.equal(paged, case.attend())
    # With a window both are the same kernel; a query that is alone in its launch is decode's.
    options = {"window": 100_000}
    assert torch.equal(case.attend_in_blocks(block, **options), case.attend(**options))
    single = sum(COUNTS[:2])
    assert torch.equal(paged[single], case.attend()[single])


@pytest.mark.parametrize("block", [128, 256])
def test_blocks_of_whole_tiles_give_the_bits_of_slots_but_for_single_queries(block: int) -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128)
    paged, expected = case.attend_in_blocks(block), case.attend()
    case.assert_right(paged)
    for begin, end in itertools.pairwise(case.starts.tolist()):
        assert end - begin == 1 or torch.equal(paged[begin:end], expected[begin:end])


@pytest.mark.parametrize("window", [None, 100])
def test_a_query_rounds_the_same_in_any_chunk_and_batch(window: int | None) -> None:
    case = make_case(LENGTHS, COUNTS, **BF16_128)
    together = case.attend(window=window)
    first_query = int(case.starts[4])
    for first, stop in ((0, 2), (2, 131), (131, 290), (290, 300)):
        alone = case.only(4, first, stop).attend(window=window)
        assert torch.equal(alone, together[first_query + first : first_query + stop])


def test_a_query_rounds_the_same_wherever_its_chunk_is_cut() -> None:
    case = make_case([1500], [700], **BF16_128)
    together = case.attend()
    assert torch.equal(case.with_long_indices().attend(), together)
    for size in (2, 37, 64, 128, 255):
        cuts = [*range(0, 699, size), 700]
        for first, stop in itertools.pairwise(cuts if size > 2 else [0, 2, 4, 350, 352, 698, 700]):
            if stop - first > 1:
                assert torch.equal(case.only(0, first, stop).attend(), together[first:stop])


def test_single_queries_have_the_bits_of_decode() -> None:
    case = make_case([1, 17, 1000, 3000], **BF16_128)
    assert torch.equal(prefill(*case.arguments[:3], index(0, 1, 2, 3, 4), *case.arguments[3:]), case.attend())


def test_a_long_prompt_is_right() -> None:
    case = make_case([12_000], [4096], heads=2, kv_heads=1, head_dim=128, dtype=BF16)
    case.assert_right(case.attend())
