"""Tiles of K and V: where their rows lie, how they are loaded, what quantised ones mean. For use inside kernels.

A tile is TILE rows of one kv head. Its rows lie `stride_t` apart in a slot, or in the blocks that a table names: that is
the only difference between a kernel and its block-table twin (`BLOCK`: 0 for slots, else the rows of a block).

Legend: S slots (or physical blocks), D head dim, W payload width in elements: D, and D / 2 bytes for int4.
"""

import triton
import triton.language as tl


@triton.jit
def blocks_of(p_table, row, m_t, TILE: tl.constexpr, BLOCK: tl.constexpr):
    """[TILE] blocks of the rows from `row` on, read from a slot's table."""
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
    """[TILE, W_PAD] from pointers to rows. Rows that the mask has off are not loaded, but zero."""
    i_w = tl.arange(0, W_PAD)[None, :]
    return tl.load(p_rows[:, None] + i_w, mask=m_t[:, None] & (i_w < W), other=0)


# Four bytes of a payload as four elements in two registers; what `dequantise` spells out, two elements an instruction.
_INT8_TO_BF16 = tl.constexpr("""{
.reg .b32 t, a, b;
prmt.b32 t, $2, 0, 0x4140;
lop3.b32 a, t, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
sub.bf16x2 $0, a, b;
prmt.b32 t, $2, 0, 0x4342;
lop3.b32 a, t, 0x007f007f, 0x43004300, 0xEA;
lop3.b32 b, t, 0x00800080, 0x43004300, 0xEA;
sub.bf16x2 $1, a, b;
}""")
_INT8_TO_FP16 = tl.constexpr("""{
.reg .b32 t, c;
mov.b32 c, 0x64806480;
prmt.b32 t, $2, 0, 0x4140;
xor.b32 t, t, c;
sub.f16x2 $0, t, c;
prmt.b32 t, $2, 0, 0x4342;
xor.b32 t, t, c;
sub.f16x2 $1, t, c;
}""")
_FP8_TO_BF16 = tl.constexpr("""{
.reg .b32 t, m, c;
mov.b32 c, 0x7B807B80;
prmt.b32 t, $2, 0, 0x1404;
and.b32 m, t, 0x7f007f00;
shr.b32 m, m, 4;
lop3.b32 t, t, 0x80008000, m, 0xEA;
mul.bf16x2 $0, t, c;
prmt.b32 t, $2, 0, 0x3424;
and.b32 m, t, 0x7f007f00;
shr.b32 m, m, 4;
lop3.b32 t, t, 0x80008000, m, 0xEA;
mul.bf16x2 $1, t, c;
}""")
_FP8_TO_FP16 = tl.constexpr("""{
.reg .b16 l, h;
mov.b32 {l, h}, $2;
cvt.rn.f16x2.e4m3x2 $0, l;
cvt.rn.f16x2.e4m3x2 $1, h;
}""")
_INT4_TO_2X16 = """{
.reg .b32 t, u, c;
mov.b32 c, ZERO;
prmt.b32 t, $4, 0, 0x4140;
lop3.b32 t, t, 0x000f000f, ONE, 0xEA;
sub.TYPE $0, t, c;
prmt.b32 t, $4, 0, 0x4342;
lop3.b32 t, t, 0x000f000f, ONE, 0xEA;
sub.TYPE $1, t, c;
shr.b32 u, $4, 4;
prmt.b32 t, u, 0, 0x4140;
lop3.b32 t, t, 0x000f000f, ONE, 0xEA;
sub.TYPE $2, t, c;
prmt.b32 t, u, 0, 0x4342;
lop3.b32 t, t, 0x000f000f, ONE, 0xEA;
sub.TYPE $3, t, c;
}"""
"""The nibbles become the low bits of ONE's mantissa (128 or 1024, twice), and ZERO (eight more) is taken away."""
_INT4_TO_BF16 = tl.constexpr(_INT4_TO_2X16.replace("ZERO", "0x43084308").replace("ONE", "0x43004300").replace("TYPE", "bf16x2"))
_INT4_TO_FP16 = tl.constexpr(_INT4_TO_2X16.replace("ZERO", "0x64086408").replace("ONE", "0x64006400").replace("TYPE", "f16x2"))


@triton.jit
def unpack(payload, DTYPE: tl.constexpr, KIND: tl.constexpr, IN_PLACE: tl.constexpr):
    """`dequantise` in a GPU's own packed instructions.

    IN_PLACE: in the layout in which the bytes are loaded, and not in that of the dot that takes them: where the dot needs
    them transposed, moving bytes one by one would cost more than moving what they mean, two by two.
    """
    # What has effects is not moved behind a change of layout.
    if tl.bfloat16 == DTYPE:
        ASM: tl.constexpr = _INT8_TO_BF16 if KIND == "int8" else _FP8_TO_BF16
        return tl.inline_asm_elementwise(ASM, "=r,=r,r", [payload], dtype=tl.bfloat16, is_pure=not IN_PLACE, pack=4)
    else:
        ASM_FP16: tl.constexpr = _INT8_TO_FP16 if KIND == "int8" else _FP8_TO_FP16
        return tl.inline_asm_elementwise(ASM_FP16, "=r,=r,r", [payload], dtype=tl.float16, is_pure=not IN_PLACE, pack=4)


@triton.jit
def unpack_nibbles(payload, DTYPE: tl.constexpr, IN_PLACE: tl.constexpr):
    """`dequantise_nibbles` in a GPU's own packed instructions; see `unpack`."""
    if tl.bfloat16 == DTYPE:
        return tl.inline_asm_elementwise(
            _INT4_TO_BF16, "=r,=r,=r,=r,r", [payload], dtype=(tl.bfloat16, tl.bfloat16), is_pure=not IN_PLACE, pack=4
        )
    else:
        return tl.inline_asm_elementwise(
            _INT4_TO_FP16, "=r,=r,=r,=r,r", [payload], dtype=(tl.float16, tl.float16), is_pure=not IN_PLACE, pack=4
        )


@triton.jit
def dequantise(payload, DTYPE: tl.constexpr, KIND: tl.constexpr):
    """What the bytes of fp8 (e4m3) and int8 mean, exactly, in DTYPE; without a KIND the tile itself.

    By bits: the payload becomes the top of the mantissa of a float with a known exponent, and one operation takes the
    surplus away. That costs fewer instructions than the conversions, which run at a fraction of the rate.
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
