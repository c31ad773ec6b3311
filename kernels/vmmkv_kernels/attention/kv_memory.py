"""K and V of one layer as kernels take them, in slots or in blocks: checked once, and how a tile of them is found and loaded.

A tile is TILE rows of one kv head. Its rows lie `stride_t` apart in a slot, or in the blocks that a table names. That is the
only difference between a kernel over slots and the same over blocks (`BLOCK`: 0 for slots, else the rows of a block).

Legend: S slots (in kernels also physical blocks), T rows of a slot, K kv heads, D head dim, W payload width in elements (D, or
D / 2 bytes for int4), P physical blocks, U rows of a block, C columns of a block table. Prefixes: p_ pointer, i_ index, m_
mask.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from vmmkv_kernels import checks
from vmmkv_kernels.attention import MAX_HEAD_DIM
from vmmkv_kernels.quantise import HEAD_SCALE_DTYPE, PAYLOAD_DTYPES, QMAX, TOKEN_SCALE_DTYPE, Kind, kind_of

MAX_SEQUENCES = 4096
"""Most sequences of a launch: every program sums up the tiles of all sequences in its registers."""
MAX_GROUP = 64

TMA_BLOCK = 128
"""Divisor of a block's rows by which the tensor memory accelerator loads blocks in whole tiles."""

_TMA_STRIDE_BYTES = 2**40


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerKV:
    """K and V of one layer, with the strides by which a kernel finds a row.

    Row t of slot s is at [s, t] of the views, or at [tables_SC[s, t // block], t % block] if there are tables.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    tables_SC: torch.Tensor | None
    kind: Kind | None
    """Quantised kind; None for K and V of the query's dtype."""
    head_dim: int

    @property
    def num_slots(self) -> int:
        """Number of slots, S."""
        return (self.k if self.tables_SC is None else self.tables_SC).shape[0]

    @property
    def num_rows(self) -> int:
        """Rows of a slot: T, or C * U."""
        return self.k.shape[1] if self.tables_SC is None else self.tables_SC.shape[1] * self.k.shape[1]

    @property
    def num_kv_heads(self) -> int:
        """Number of kv heads, K."""
        return self.k.shape[2]

    @property
    def block(self) -> int:
        """Rows of a block; 0 in slots."""
        return 0 if self.tables_SC is None else self.k.shape[1]

    @property
    def scale(self) -> str:
        """Place of the scales: "token", "head", or "" for none."""
        if self.k_scale is None:
            return ""
        return "head" if self.k_scale.dim() == 1 else "token"

    @property
    def has_paired_scales(self) -> bool:
        """The scale of V follows that of K for each head, so that one load of 4 bytes has both."""
        k_scale, v_scale = self.k_scale, self.v_scale
        if k_scale is None or v_scale is None or self.scale != "token":
            return False
        is_next = v_scale.data_ptr() - k_scale.data_ptr() == 2 and k_scale.data_ptr() % 4 == 0
        return is_next and k_scale.stride() == v_scale.stride() and not any(stride % 2 for stride in k_scale.stride())

    @property
    def qmax(self) -> float:
        """The largest payload; 1 if not quantised."""
        return 1.0 if self.kind is None else QMAX[self.kind]

    @property
    def payload_bytes(self) -> int:
        """Bytes of one head's K in a row."""
        return self.k.shape[3] * self.k.element_size()

    @property
    def stride_table(self) -> int:
        """Entries from one slot's table to the next."""
        return 0 if self.tables_SC is None else self.tables_SC.stride(0)

    @property
    def strides(self) -> tuple[int, ...]:
        """Strides of a slot (or block), a row and a head of K; of V too; slot and row of each scale; a head of both scales."""
        scales: tuple[int, ...] = (0, 0, 0, 0, 0)
        if self.k_scale is not None and self.v_scale is not None and self.scale == "token":
            scales = (*self.k_scale.stride()[:2], *self.v_scale.stride()[:2], self.k_scale.stride(2))
        return (*self.k.stride()[:3], *self.v.stride()[:3], *scales)

    def check_queries(self, argument: str, q_NHD: torch.Tensor, rows: str) -> None:
        """Refuse anything but aligned [rows, query heads, D] where K and V are."""
        if q_NHD.dim() != 3:
            checks.refuse(argument, f"of shape {tuple(q_NHD.shape)}", f"3 dimensions: [{rows}, query heads, head dim]")
        head_dim = q_NHD.shape[2]
        if head_dim != self.head_dim:
            halves = ": two elements in each byte of int4" if self.kind == "int4" else ""
            checks.refuse(argument, f"of head dim {head_dim}", f"{self.head_dim}, which K and V have{halves}")
        checks.vectors(argument, q_NHD, q_NHD.shape, q_NHD.dtype, self.k.device)

    def check_heads(self, argument: str, num_heads: int) -> int:
        """Refuse more heads, or wider ones, than attention takes. Returns G, the query heads of a kv head."""
        num_kv_heads = self.num_kv_heads
        if num_heads % num_kv_heads or not 0 < num_heads <= MAX_GROUP * num_kv_heads:
            wanted = f"a multiple of the {num_kv_heads} kv heads of K and V, at most {MAX_GROUP} times as many"
            checks.refuse(argument, f"of {num_heads} query heads", wanted)
        if self.head_dim > MAX_HEAD_DIM:
            checks.refuse(argument, f"of head dim {self.head_dim}", f"at most {MAX_HEAD_DIM}")
        return num_heads // num_kv_heads

    def check_sequences(
        self, argument: str, num_sequences: int, lengths_B: torch.Tensor, slots_B: torch.Tensor, limit_S: torch.Tensor | None
    ) -> None:
        """Refuse too many sequences, and lengths, slots or limits that are not as all attention takes them."""
        if num_sequences > MAX_SEQUENCES:
            checks.refuse(argument, f"of {num_sequences} sequences", f"at most {MAX_SEQUENCES} a launch")
        checks.index("lengths_B", lengths_B, num_sequences, self.k.device)
        checks.index("slots_B", slots_B, num_sequences, self.k.device)
        if limit_S is not None:
            checks.limits(limit_S, self.num_slots, self.k.device)

    def check_tile_offsets(self, tile_rows: int) -> None:
        """Refuse a row stride by which an offset inside one tile (or block) would leave 32 bits."""
        rows = self.block or tile_rows
        for argument, plane in (("k_STKW", self.k), ("v_STKW", self.v)):
            if plane.stride(1) * rows >= checks.INT32_END:
                given = f"strided by {plane.stride(1)} elements from row to row"
                checks.refuse(argument, given, f"at most {checks.INT32_END // rows - 1} elements")

    def fits_tma(self, tile_rows: int) -> bool:
        """Can the tensor memory accelerator load tiles? Not of small blocks, nor by strides of 2**40 bytes and more.

        It loads whole tiles, so a sequence's last tile is moved back to end where the sequence ends. Rows before row 0 of a
        slot are outside the tensor: they are filled with zeros, and no memory is touched. A tile of a block stays where it is,
        since it must not lie in two: there the rows behind the sequence's last are loaded as well.
        """
        if self.block % max(tile_rows, TMA_BLOCK) or not checks.has_tma(self.k.device):
            return False
        return max(*self.k.stride(), *self.v.stride()) * self.k.element_size() < _TMA_STRIDE_BYTES


def kv_memory(
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    tables_SC: torch.Tensor | None,
    dtype: torch.dtype,
    device: torch.device,
) -> LayerKV:
    """Check a layer's memory for values of `dtype` on `device`. Raises ValueError naming the argument."""
    checks.floats("the query or the new rows", dtype)
    rows, columns = ("slots", "rows") if tables_SC is None else ("blocks", "rows of a block")
    if k.dim() != 4:
        checks.refuse("k_STKW", f"of shape {tuple(k.shape)}", f"4 dimensions: [{rows}, {columns}, kv heads, head dim]")
    kind = kind_of(k.dtype)
    if kind is None and k.dtype not in checks.FLOAT_DTYPES:
        quantised = ", ".join(f"{str(payload).removeprefix('torch.')} ({name})" for name, payload in PAYLOAD_DTYPES.items())
        checks.refuse("k_STKW", f"of {k.dtype}", f"float16, bfloat16 or float32; or quantised: {quantised}")
    if kind is None and k.dtype != dtype:
        checks.refuse("k_STKW", f"of {k.dtype}", f"{dtype}, as the query or the new rows are; or those of its dtype")
    if 0 in k.shape:
        checks.refuse("k_STKW", f"of shape {tuple(k.shape)}", "at least one of each")
    if kind is not None and k.shape[3] % 2:
        checks.refuse("k_STKW", f"{kind} of {k.shape[3]} bytes a head", "an even number: two are loaded as one int16")
    if k.shape[0] >= checks.INT32_END or k.shape[1] >= checks.INT32_END:
        checks.refuse("k_STKW", f"of shape {tuple(k.shape)}", f"fewer than 2**31 {rows} and rows")
    checks.vectors("k_STKW", k, tuple(k.shape), k.dtype, device)
    checks.vectors("v_STKW", v, tuple(k.shape), k.dtype, device)
    if tables_SC is not None:
        _check_tables(tables_SC, k.shape[1], device)
    _check_scales(k_scale, v_scale, k, kind, device)
    if kind is not None:
        k, v = k.view(torch.uint8), v.view(torch.uint8)
    head_dim = k.shape[3] * 2 if kind == "int4" else k.shape[3]
    return LayerKV(k=k, v=v, k_scale=k_scale, v_scale=v_scale, tables_SC=tables_SC, kind=kind, head_dim=head_dim)


def _check_tables(tables_SC: torch.Tensor, block: int, device: torch.device) -> None:
    if tables_SC.device != device:
        checks.refuse("tables_SC", f"on {tables_SC.device}", f"a tensor on {device}, where the others are")
    if tables_SC.dtype != torch.int32:
        checks.refuse("tables_SC", f"of {tables_SC.dtype}", "int32")
    if tables_SC.dim() != 2 or (tables_SC.shape[1] > 1 and tables_SC.stride(1) != 1):
        given = f"of shape {tuple(tables_SC.shape)} and strides {tables_SC.stride()}"
        checks.refuse("tables_SC", given, "2 dimensions, [slots, blocks of each], the last contiguous")
    if tables_SC.shape[1] * block >= checks.INT32_END:
        checks.refuse("tables_SC", f"of shape {tuple(tables_SC.shape)}", "fewer than 2**31 rows of a slot")


def _check_scales(
    k_scale: torch.Tensor | None, v_scale: torch.Tensor | None, k: torch.Tensor, kind: Kind | None, device: torch.device
) -> None:
    """Refuse scales that are not those of K and V of this kind: both of tokens or both of heads, and alike."""
    if k_scale is None or v_scale is None:
        if k_scale is not None or v_scale is not None:
            checks.refuse("k_scale" if k_scale is None else "v_scale", "missing", "a scale for both K and V, or for neither")
        if kind is not None:
            checks.refuse("k_scale", "missing", f"the scales of {kind} K and V, as cache.k_scale(layer) and v_scale give them")
        return
    if kind is None:
        checks.refuse("k_scale", "given", f"none, since k_STKW is of {k.dtype}")
    for name, scale in (("k_scale", k_scale), ("v_scale", v_scale)):
        if scale.device != device:
            checks.refuse(name, f"on {scale.device}", f"a tensor on {device}, where the others are")
        if scale.dim() == 1 and kind != "fp8":
            given = "of one dimension, a scale for each head"
            checks.refuse(name, given, f"a scale for each token and head, as {kind} needs")
        if scale.dim() == 1:
            checks.exactly(name, scale, HEAD_SCALE_DTYPE, (k.shape[2],), device)
        elif scale.shape != k.shape[:3] or scale.dtype != TOKEN_SCALE_DTYPE:
            given = f"{scale.dtype} of shape {tuple(scale.shape)}"
            wanted = f"{TOKEN_SCALE_DTYPE} of shape {tuple(k.shape[:3])}, a scale for each token and head"
            checks.refuse(name, given, wanted)
    if k_scale.dim() != v_scale.dim():
        checks.refuse("v_scale", f"of {v_scale.dim()} dimensions", f"{k_scale.dim()}, as k_scale has")
    if k_scale.shape[-1] > 1 and k_scale.stride(-1) != v_scale.stride(-1):
        given = f"strided by {v_scale.stride(-1)} from head to head"
        checks.refuse("v_scale", given, f"{k_scale.stride(-1)}, as k_scale is")


def descriptor(base: torch.Tensor, shape: Sequence[int], strides: Sequence[int], box: list[int]) -> TensorDescriptor:
    """Memory of this shape for the tensor memory accelerator, loaded in boxes.

    The strides of dimensions of size 1, which are never followed, are made what a descriptor takes.
    """
    strides = list(strides)
    if 1 in shape:
        unfollowed = checks.ALIGNMENT_BYTES
        strides = [stride if size > 1 else unfollowed for size, stride in zip(shape, strides, strict=True)]
        strides[-1] = 1
    return TensorDescriptor(base, list(shape), strides, box)


def in_pairs(payload: torch.Tensor) -> torch.Tensor:
    """A payload of an even width in int16, two of its bytes each."""
    if any(stride % 2 for stride in payload.stride()[:-1]):  # of a dimension of size 1, which torch does not take either
        strides = [stride if size > 1 else 0 for size, stride in zip(payload.shape[:-1], payload.stride(), strict=False)]
        payload = payload.as_strided(payload.shape, (*strides, 1))
    return payload.view(torch.int16)


@triton.jit
def blocks_of(p_table, row, m_t, TILE: tl.constexpr, BLOCK: tl.constexpr, WHOLE: tl.constexpr):
    """[TILE] blocks of the rows from `row` on, read from a slot's table; with WHOLE the one block that has them all."""
    if WHOLE:
        return tl.load(p_table + row // BLOCK).to(tl.int64)
    else:
        return tl.load(p_table + (row + tl.arange(0, TILE)) // BLOCK, mask=m_t, other=0).to(tl.int64)


@triton.jit
def row_pointers(p, i_s, row, stride_s, stride_t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE] pointers to the rows from `row` on: a 64-bit base, and 32-bit offsets inside the tile or block."""
    i_t = tl.arange(0, TILE)
    if BLOCK == 0:
        return p + (i_s * stride_s + tl.cast(row, tl.int64) * stride_t) + i_t * stride_t
    else:
        return p + i_s * stride_s + ((row + i_t) % BLOCK) * stride_t


@triton.jit
def load_tile(p_rows, m_t, W: tl.constexpr, W_PAD: tl.constexpr):
    """[TILE, W_PAD] from pointers to rows. Rows whose mask is off are zeros, and not loaded."""
    i_w = tl.arange(0, W_PAD)[None, :]
    return tl.load(p_rows[:, None] + i_w, mask=m_t[:, None] & (i_w < W), other=0)


# Two int16 of a payload to the values of `parts_of`, two in a register.
_FP8_TO_FP16 = tl.constexpr("""{
.reg .b32 t;
.reg .b16 even, odd;
prmt.b32 t, $2, 0, 0x3120;
mov.b32 {even, odd}, t;
cvt.rn.f16x2.e4m3x2 $0, even;
cvt.rn.f16x2.e4m3x2 $1, odd;
}""")
_INT8_TO_FP16 = tl.constexpr("""{
.reg .b32 t, c;
mov.b32 c, 0x64806480;
lop3.b32 t, $2, 0x00ff00ff, c, 0x6A;
sub.f16x2 $0, t, c;
shr.b32 t, $2, 8;
lop3.b32 t, t, 0x00ff00ff, c, 0x6A;
sub.f16x2 $1, t, c;
}""")
"""1024 + (x + 128), less 1152; see `dequantise`."""
_INT4_TO_FP16 = tl.constexpr("""{
.reg .b32 t, u, one, zero, sixteenth, zeros;
mov.b32 one, 0x64006400;
mov.b32 zero, 0x64086408;
mov.b32 sixteenth, 0x2c002c00;
mov.b32 zeros, 0xd480d480;
lop3.b32 t, $4, 0x000f000f, one, 0xEA;
sub.f16x2 $0, t, zero;
lop3.b32 t, $4, 0x00f000f0, one, 0xEA;
fma.rn.f16x2 $1, t, sixteenth, zeros;
shr.b32 u, $4, 8;
lop3.b32 t, u, 0x000f000f, one, 0xEA;
sub.f16x2 $2, t, zero;
lop3.b32 t, u, 0x00f000f0, one, 0xEA;
fma.rn.f16x2 $3, t, sixteenth, zeros;
}""")
"""1024 + n, less 1032; and where a nibble is four bits up, (1024 + 16 n) / 16 - 72."""


@triton.jit
def parts_of(payload, DTYPE: tl.constexpr, KIND: tl.constexpr, PACKED: tl.constexpr):
    """A tile of a payload as PARTS tiles of its values, without their scales, in DTYPE; see `element_of`.

    A quantised payload is int16. PACKED: by a GPU's own packed instructions, which give float16 alone.
    """
    if KIND == "":
        return (payload,)
    elif PACKED and KIND == "fp8":
        return tl.inline_asm_elementwise(
            _FP8_TO_FP16, "=r,=r,r", [payload], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PACKED and KIND == "int8":
        return tl.inline_asm_elementwise(
            _INT8_TO_FP16, "=r,=r,r", [payload], dtype=(tl.float16, tl.float16), is_pure=True, pack=2
        )
    elif PACKED:
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16, "=r,=r,=r,=r,r", [payload], dtype=(tl.float16,) * 4, is_pure=True, pack=2
        )
    else:
        bits = payload.to(tl.uint16, bitcast=True)
        even, odd = (bits & 0xFF).to(tl.uint8), (bits >> 8).to(tl.uint8)
        if KIND == "int4":
            even_low, even_high = dequantise_nibbles(even, DTYPE)
            odd_low, odd_high = dequantise_nibbles(odd, DTYPE)
            return even_low, even_high, odd_low, odd_high
        else:
            return dequantise(even, DTYPE, KIND), dequantise(odd, DTYPE, KIND)


@triton.jit
def element_of(i_w, i_part: tl.constexpr, W: tl.constexpr, KIND: tl.constexpr):
    """The elements of a head that part `i_part` has of the columns `i_w` of a payload: every second, of int4 in one half."""
    if KIND == "":
        return i_w
    elif KIND == "int4":
        return 2 * i_w + i_part // 2 + i_part % 2 * (2 * W)
    else:
        return 2 * i_w + i_part


@triton.jit
def dequantise(payload, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """The values of fp8 (e4m3) and int8 bytes, exactly, in DTYPE; without a KIND the tile itself.

    By bits: the payload becomes the top of the mantissa of a float with a known exponent, and one operation takes the surplus
    away. That is fewer instructions than the conversions, which run at a fraction of the rate.
    """
    if KIND == "fp8":
        # Sign, exponent and mantissa shifted into place; the exponents' biases differ by 2**8, or 2**120.
        if tl.float16 == DTYPE:
            bits = payload.to(tl.uint16)
            return (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True) * 256.0
        elif tl.bfloat16 == DTYPE:
            bits = payload.to(tl.uint16)
            return (((bits & 0x80) << 8) | ((bits & 0x7F) << 4)).to(tl.bfloat16, bitcast=True) * 1.329227995784916e36
        else:
            bits = payload.to(tl.uint32)
            return (((bits & 0x80) << 24) | ((bits & 0x7F) << 20)).to(tl.float32, bitcast=True) * 1.329227995784916e36
    elif KIND == "int8":
        if tl.float16 == DTYPE:
            # 1024 + (x + 128)
            return (payload.to(tl.uint16) ^ 0x6480).to(tl.float16, bitcast=True) - 1152.0
        elif tl.bfloat16 == DTYPE:
            # (128 + the low seven bits) - (128, or 256 if negative)
            bits = payload.to(tl.uint16)
            low = ((bits & 0x7F) | 0x4300).to(tl.bfloat16, bitcast=True)
            return low - ((bits & 0x80) | 0x4300).to(tl.bfloat16, bitcast=True)
        else:
            return payload.to(tl.int8, bitcast=True).to(tl.float32)
    else:
        return payload


@triton.jit
def dequantise_nibbles(payload, DTYPE: tl.constexpr):
    """The low and the high nibbles of int4 bytes, each less 8: the first and the second half of the head."""
    if tl.float16 == DTYPE:
        bits = payload.to(tl.uint16)
        low = ((bits & 0xF) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
        high = ((bits >> 4) | 0x6400).to(tl.float16, bitcast=True) - 1032.0
    elif tl.bfloat16 == DTYPE:
        bits = payload.to(tl.uint16)
        low = ((bits & 0xF) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
        high = ((bits >> 4) | 0x4300).to(tl.bfloat16, bitcast=True) - 136.0
    else:
        low = (payload & 0xF).to(tl.float32) - 8.0
        high = (payload >> 4).to(tl.float32) - 8.0
    return low, high


@triton.jit
def values_of(payload, DTYPE: tl.constexpr, KIND: tl.constexpr, TILE: tl.constexpr, D_PAD: tl.constexpr):
    """A tile's payload dequantised, without its scales: [TILE, D_PAD] of the queries' type."""
    if KIND == "int4":
        low, high = dequantise_nibbles(payload, DTYPE)
        return tl.reshape(tl.permute(tl.join(low, high), (0, 2, 1)), [TILE, D_PAD])
    else:
        return dequantise(payload, DTYPE, KIND)
