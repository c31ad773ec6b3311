"""Geometry: rows, planes, windows, pages; known values, and laws over random layouts."""

import itertools
import math
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from vmmkv.errors import LayoutError, VmmkvError
from vmmkv.layout import KV_KINDS, PLANE_ALIGNMENT_BYTES, ROW_ALIGNMENT_BYTES, SECTOR_BYTES, Group, KVLayout, KVType, Plane
from vmmkv.units import KIB, PAGE_BYTES

LLAMA_8B = {
    "model_type": "llama", "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "hidden_size": 4096,
    "head_dim": 128,
}  # fmt: skip
SMOLLM2 = {
    "model_type": "llama",
    "num_hidden_layers": 30,
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "hidden_size": 576,
}


def uniform(layers: int = 2, kv_heads: int = 2, head_dim: int = 64, **options: Any) -> KVLayout:
    return KVLayout.uniform(layers=layers, kv_heads=kv_heads, head_dim=head_dim, **{"dtype": torch.float16, **options})


INT8_ROW = 32 * (2048 + 32), 30 * (384 + 16) + 32
"""Of LLAMA_8B and SMOLLM2: layers * (payload + scales), padded to 128 bytes."""


@pytest.mark.parametrize(
    ("dtype", "llama_8b", "smollm2"),
    [
        (torch.bfloat16, 128 * KIB, 23_040),
        (KVType("fp8", "head"), 32 * 2048, 30 * 384),
        (KVType("fp8"), *INT8_ROW),
        (KVType("int8"), *INT8_ROW),
        (KVType("int4"), 32 * (1024 + 32), 30 * (192 + 16) + 32),
    ],
    ids=str,
)
def test_rows_of_known_models(dtype: Any, llama_8b: int, smollm2: int) -> None:
    assert KVLayout.from_config(LLAMA_8B, dtype).row_bytes == llama_8b
    assert KVLayout.from_config(SimpleNamespace(**SMOLLM2), dtype).row_bytes == smollm2


TINY = {"num_hidden_layers": 4, "num_attention_heads": 2, "head_dim": 64}


def own_class(**fields: Any) -> SimpleNamespace:
    """A configuration object of a class that is not transformers'."""
    return SimpleNamespace(**TINY, **fields)


KINDS = {"layer_types": ["sliding_attention", "full_attention"] * 2}
QWEN = {
    **TINY, "num_key_value_heads": 2, "hidden_size": 128, "model_type": "qwen2", "use_sliding_window": True,
    "sliding_window": 9,
}  # fmt: skip


@pytest.mark.parametrize(
    ("config", "windows"),
    [
        (TINY, {None: (0, 1, 2, 3)}),
        ({"text_config": SimpleNamespace(**TINY)}, {None: (0, 1, 2, 3)}),
        ({**TINY, "sliding_window": 128}, {128: (0, 1, 2, 3)}),
        ({**TINY, "sliding_window": 128, "use_sliding_window": False}, {None: (0, 1, 2, 3)}),
        ({**TINY, "sliding_window": 128, **KINDS}, {128: (0, 2), None: (1, 3)}),
        ({**TINY, "num_key_value_heads": 2, "sliding_window": 128, "model_type": "gemma2"}, {128: (0, 2), None: (1, 3)}),
        ({**QWEN, "max_window_layers": 2}, {None: (0, 1), 9: (2, 3)}),
        ({**QWEN, "model_type": "qwen3", "use_sliding_window": False}, {None: (0, 1, 2, 3)}),
        ({**QWEN, "model_type": "cohere2"}, {9: (0, 1, 2), None: (3,)}),
        ({**TINY, "sliding_window": 128, "sliding_window_pattern": 4}, {128: (0, 1, 2), None: (3,)}),
    ],
)
def test_layers_of_one_window_share_a_group(config: dict[str, Any], windows: dict[int | None, tuple[int, ...]]) -> None:
    given = config if "model_type" in config else SimpleNamespace(**config)
    layout = KVLayout.from_config(given, torch.float16)
    assert {group.window: group.layers for group in layout.groups} == windows
    for layer in range(4):
        assert layer in layout.groups[layout.group_of[layer]].layers
    assert layout.row_bytes == 4 * 2 * 2 * 64 * 2, "without key-value heads every head has its own"


def test_layers_of_one_shape_share_a_group_and_readers_of_others_rows_have_none() -> None:
    """Gemma 4: heads of another number and size in full layers, and the last layers read the rows of earlier ones."""
    config = {
        **TINY, "model_type": "gemma4_text", "num_key_value_heads": 2, "global_head_dim": 128, "num_global_key_value_heads": 1,
        "attention_k_eq_v": True, "num_hidden_layers": 6, "num_kv_shared_layers": 2, "sliding_window": 9,
        "layer_types": ["sliding_attention", "sliding_attention", "full_attention"] * 2,
    }  # fmt: skip
    layout = KVLayout.from_config(config, torch.float16)
    assert [(group.layers, group.window) for group in layout.groups] == [((0, 1, 3), 9), ((2,), None)]
    assert [(group.plane("k").heads, group.plane("v").dim) for group in layout.groups] == [(2, 64), (1, 128)]


@pytest.mark.parametrize(
    ("layers", "kv_heads", "head_dim", "parts"),
    [(80, 64, 128, [40, 40]), (64, 72, 128, [32, 32]), (7, 256, 1024, [2, 2, 2, 1])],
)
def test_rows_of_more_than_a_page_are_several_groups(layers: int, kv_heads: int, head_dim: int, parts: list[int]) -> None:
    layout = uniform(layers, kv_heads, head_dim, windows=[100] * layers)
    assert [len(group.layers) for group in layout.groups] == parts
    assert [layer for group in layout.groups for layer in group.layers] == list(range(layers))
    assert {group.window for group in layout.groups} == {100}


def test_planes_stand_in_order_each_aligned() -> None:
    """MLA-like widths: K of 192, V of 128, and fp8 planes that need padding to the alignment."""
    group = Group(
        layers=(3, 5),
        planes=(
            Plane(name="k", heads=2, dim=192, dtype=torch.bfloat16),
            Plane(name="scale", heads=1, dim=3, dtype=torch.float8_e4m3fn),
            Plane(name="v", heads=2, dim=128, dtype=torch.bfloat16),
        ),
    )
    assert dict(group.plane_offsets) == {"k": 0, "scale": 768, "v": 784}
    assert group.layer_bytes == 784 + 512
    assert group.offset_bytes(5, "v") == 1296 + 784
    assert group.row_bytes == 2688  # 2 * 1296 = 2592, padded to 21 * 128
    assert group.mixes_dtypes
    assert group.plane("v").size_bytes == 512


def test_quantised_planes_have_the_width_that_kernels_load() -> None:
    layout = uniform(layers=4, head_dim=192, value_dim=128, windows=[None, 100] * 2, dtype=KVType("int4"))
    assert [(group.window, group.layers) for group in layout.groups] == [(None, (0, 2)), (100, (1, 3))]
    assert [layout.groups[1].plane(name).dim for name in ("k", "v")] == [96, 64]
    plane = uniform(kv_heads=3, head_dim=80, dtype=KVType("int4")).groups[0].plane("k")
    assert (plane.dim, plane.head_stride, plane.size_bytes) == (40, 48, 144), "a head of 80 is 40 bytes in int4, and takes 48"
    static = uniform(dtype=KVType("fp8", "head")).groups[0]
    assert [(plane.name, plane.dtype) for plane in static.planes] == [(name, torch.float8_e4m3fn) for name in ("k", "v")]
    assert not static.mixes_dtypes


@given(
    kind=st.sampled_from(KV_KINDS),
    layers=st.integers(1, 40),
    kv_heads=st.integers(1, 40),
    half_dim=st.integers(1, 100),
    half_value_dim=st.none() | st.integers(1, 100),
)
def test_the_law_of_quantised_rows(kind: str, layers: int, kv_heads: int, half_dim: int, half_value_dim: int | None) -> None:
    value_dim = None if half_value_dim is None else 2 * half_value_dim
    (group,) = uniform(layers, kv_heads, 2 * half_dim, value_dim=value_dim, dtype=KVType(kind)).groups
    places = sorted(
        (start, start + plane.size_bytes)
        for layer in group.layers
        for plane in group.planes
        for start in [group.offset_bytes(layer, plane.name)]
    )
    assert places[0][0] == 0 and places[-1][1] <= group.row_bytes
    assert all(end <= start for (_, end), (start, _) in itertools.pairwise(places)), "two planes overlap"
    scales_start = min(group.offset_bytes(layer, "scales") for layer in group.layers)
    scale_bytes = kv_heads * 4
    for layer in group.layers:
        for name in ("k", "v"):
            start = group.offset_bytes(layer, name)
            assert start % PLANE_ALIGNMENT_BYTES == 0
            assert start + group.plane(name).size_bytes <= scales_start, "a payload stands behind scales"
        start = group.offset_bytes(layer, "scales")
        assert start % 4 == 0, "a pair of scales is one load"
        sectors = (start + scale_bytes - 1) // SECTOR_BYTES - start // SECTOR_BYTES + 1
        assert sectors == math.ceil(scale_bytes / SECTOR_BYTES), "scales lie in more sectors than they must"


def test_rows_straddle_pages_and_a_slot_is_a_whole_number_of_both() -> None:
    group = KVLayout.from_config(SMOLLM2, torch.bfloat16).groups[0]  # 91.02 rows in a page
    assert group.tokens_under(1) == 91
    assert [group.pages_between(0, end) for end in (0, 1, 91, 92, 182, 183)] == [0, 1, 1, 2, 2, 3]
    assert group.pages_between(91, 92) == 2  # this row lies in two pages
    assert group.pages_between(92, 92) == 0
    assert group.pages_between(92, 93) == 1
    assert [group.slot_tokens(num_tokens) for num_tokens in (1, 4096, 4097, 8192)] == [4096, 4096, 8192, 8192]


def test_a_windowed_group_keeps_its_window_and_gives_back_the_rest() -> None:
    layout = uniform(layers=2, windows=[100, None], head_dim=1024, kv_heads=8)  # a row of a layer is 32 KiB, 64 in a page
    windowed, full = layout.groups
    assert layout.start_for(full, 10_000) == 0
    assert [layout.start_for(windowed, num_tokens) for num_tokens in (0, 99, 100, 101)] == [0, 0, 1, 2]
    assert layout.token_bytes(1000) == windowed.row_bytes * 99 + full.row_bytes * 1000
    assert layout.pages_for(1000) == windowed.pages_between(901, 1000) + full.pages_between(0, 1000)
    assert layout.pages_for(1000, guard_tokens=64) == layout.pages_for(1000) + 2


layouts = st.builds(
    lambda layers, kv_heads, head_dim, dtype, window: uniform(
        layers, kv_heads, head_dim, dtype=dtype, windows=[window if layer % 2 else None for layer in range(layers)]
    ),
    layers=st.integers(1, 12),
    kv_heads=st.integers(1, 8),
    head_dim=st.integers(1, 200),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float8_e4m3fn]),
    window=st.none() | st.integers(1, 500),
)


@given(layout=layouts, num_tokens=st.integers(0, 5000))
def test_the_law_of_rows_and_pages(layout: KVLayout, num_tokens: int) -> None:
    for group in layout.groups:
        assert group.row_bytes % ROW_ALIGNMENT_BYTES == 0
        assert all(
            group.offset_bytes(layer, plane.name) % PLANE_ALIGNMENT_BYTES == 0
            for layer in group.layers
            for plane in group.planes
        )
        last = group.planes[-1]
        assert group.offset_bytes(group.layers[-1], last.name) + last.size_bytes <= group.row_bytes
        num_pages = group.pages_between(0, num_tokens)
        assert group.tokens_under(num_pages) >= num_tokens
        assert num_pages == 0 or group.tokens_under(num_pages - 1) < num_tokens
        slot_tokens = group.slot_tokens(max(1, num_tokens))
        assert slot_tokens >= num_tokens
        assert slot_tokens * group.row_bytes % PAGE_BYTES == 0


@given(layout=layouts, num_pages=st.integers(0, 2000), guard_tokens=st.integers(0, 256))
def test_the_longest_sequence_fits_and_one_token_more_does_not(layout: KVLayout, num_pages: int, guard_tokens: int) -> None:
    num_tokens = layout.tokens_in(num_pages, guard_tokens)
    if num_tokens:
        assert layout.pages_for(num_tokens, guard_tokens) <= num_pages
    if num_tokens < 2**31 - 1:
        assert layout.peak_pages(num_tokens + 1, guard_tokens) > num_pages


K = Plane(name="k", heads=1, dim=8, dtype=torch.float16)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Plane(name="k", heads=0, dim=8, dtype=torch.float16), "heads=0.*at least 1"),
        (lambda: Plane(name="k", heads=1, dim=-8, dtype=torch.float16), "dim=-8.*at least 1"),
        (lambda: Plane(name="a plane", heads=1, dim=8, dtype=torch.float16), "identifier"),
        (lambda: Group(layers=(), planes=(K,)), "at least one layer"),
        (lambda: Group(layers=(1, 1), planes=(K,)), "different numbers"),
        (lambda: Group(layers=(-1,), planes=(K,)), "from 0"),
        (lambda: Group(layers=(0,), planes=()), "at least one plane"),
        (lambda: Group(layers=(0,), planes=(K, K)), "one name"),
        (lambda: Group(layers=(0,), planes=(K,), window=0), "at least 1 token"),
        (
            lambda: Group(layers=tuple(range(200)), planes=uniform(kv_heads=32, head_dim=128).groups[0].planes),
            "at most 128 layers",
        ),
        (lambda: uniform(kv_heads=8192, head_dim=128), "more than a page of 2.0 MiB; use a smaller head count"),
        (lambda: uniform(layers=1, kv_heads=4096, head_dim=256), "smaller head count"),
        (lambda: KVLayout(groups=()), "at least one group"),
        (lambda: KVLayout(groups=(Group(layers=(0, 1), planes=(K,)), Group(layers=(1,), planes=(K,)))), r"two groups: \[1\]"),
        (lambda: uniform(layers=0), "at least 1"),
        (lambda: uniform(layers=2, windows=[None]), "1 window for 2 layers"),
        (lambda: uniform().groups[0].offset_bytes(0, "q"), "no plane 'q'.*k, v"),
        (lambda: uniform().groups[0].offset_bytes(2, "k"), "no layer 2 in this group; it has 0, 1"),
        (lambda: uniform(dtype=KVType("fp8", "head")).groups[0].offset_bytes(0, "scales"), "no plane 'scales'.*it has k, v"),
        (lambda: KVType("int3"), "kind='int3'.*fp8, int8, int4"),
        (lambda: KVType("fp8", "row"), "scale='row'.*token or to a head"),
        (lambda: KVType("int4", "head"), "int4 has no range.*scale='token' works, or kind='fp8'"),
        (lambda: uniform(head_dim=63, dtype=KVType("int4")), "head size 63 is odd; int8 works, or an even size"),
        (
            lambda: uniform(dtype="int4"),
            "dtype='int4': .* torch.bfloat16, .* torch.float32 .*=KVType.'fp8'. or KVType.'int8'. or KVType.'int4'.$",
        ),
        (
            lambda: uniform(dtype=torch.int64),
            "dtype=torch.int64: .*bfloat16, torch.float16, torch.float32.*int8 and .*uint8",
        ),
        (lambda: uniform(dtype=torch.complex64), "dtype=torch.complex64: .*torch.bfloat16"),
        (lambda: uniform(dtype=torch.bool), "dtype=torch.bool: .*torch.bfloat16"),
        (lambda: uniform(value_dim=0), "plane 'v' has heads=2, dim=0"),
        (lambda: uniform(kv_heads=2.5), "kv_heads=2.5 is not a whole number"),
        (lambda: uniform(windows=[4.5, None]), "4.5 is not a whole number"),
        (lambda: uniform(layers=True), "is not a whole number"),
        (lambda: uniform(layers=2.0), "is not a whole number"),
        (lambda: uniform(layers="2"), "is not a whole number"),
        (lambda: uniform(head_dim=64.0), "is not a whole number"),
        (lambda: Group(layers=(0, 1.0), planes=(K,)), "layers=1.0 is not a whole number"),
        (lambda: Plane(name="k", heads=1, dim=8.0, dtype=torch.float16), "dim=8.0 is not a whole number"),
        (lambda: KVLayout.from_config({}, torch.float16), "has no model_type"),
        (lambda: KVLayout.from_config(own_class(kv_lora_rank=512), torch.float16), "kv_lora_rank"),
        (
            lambda: KVLayout.from_config(own_class(layer_types=["fog"] * 4), torch.float16),
            "layers of type fog",
        ),
        (
            lambda: KVLayout.from_config(own_class(layer_types=["conv"] * 4), torch.float16),
            "that keep a state",
        ),
        (
            lambda: KVLayout.from_config(own_class(hybrid_override_pattern="M*M-"), torch.float16),
            "by hybrid_override_pattern",
        ),
        (
            lambda: KVLayout.from_config(own_class(**KINDS, sliding_window=9, mamba_d_state=16), torch.float16),
            "by mamba_d_state",
        ),
        (
            lambda: KVLayout.from_config({**QWEN, "model_type": "qwen3_next"}, torch.float16),
            r"keeps a state \(gated delta rule\) in layers 0 to 2;",
        ),
        (lambda: KVLayout.from_config({**QWEN, "model_type": "fog"}, torch.float16), "model_type='fog', which is not known"),
        (lambda: KVLayout.from_config(own_class(multi_query=True), torch.float16), "by multi_query"),
    ],
)
def test_a_geometry_that_cannot_be_is_refused_in_words(make: Any, message: str) -> None:
    with pytest.raises(LayoutError, match=message) as caught:
        make()
    assert isinstance(caught.value, VmmkvError)
    assert isinstance(caught.value, ValueError)


@pytest.mark.parametrize("row_kib", [700, 96, 1024, 2048])
@pytest.mark.parametrize("guard_tokens", [0, 3])
def test_a_window_that_slides_never_needs_more_than_its_peak(row_kib: int, guard_tokens: int) -> None:
    plane = Plane(name="k", heads=1, dim=row_kib * 1024 // 4, dtype=torch.float32)
    layout = KVLayout(groups=(Group(layers=(0,), planes=(plane,), window=5), Group(layers=(1,), planes=(plane,))))
    group = layout.groups[0]
    for num_tokens in range(1, 60):
        # The nth row is mapped before any that it makes superfluous goes.
        worst = max(group.pages_between(layout.start_for(group, n - 1), n + guard_tokens) for n in range(1, num_tokens + 1))
        peak = group.peak_pages(num_tokens, guard_tokens, sliding=True)
        assert worst <= peak <= worst + 1
        pages = layout.peak_pages(num_tokens, guard_tokens)
        assert layout.tokens_in(pages, guard_tokens) >= num_tokens
        assert layout.peak_pages(layout.tokens_in(pages, guard_tokens), guard_tokens) <= pages


def test_windows_alone_hold_any_length_but_a_whole_prompt_does_not() -> None:
    assert uniform(windows=[64, None]).tokens_in(0) == 0
    layout = uniform(windows=[64, 64])
    assert layout.tokens_in(4) == 2**31 - 1
    assert layout.tokens_in(4, sliding=False) == layout.groups[0].tokens_under(4)
