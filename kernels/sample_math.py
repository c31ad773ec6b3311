"""Inside the sampling kernels: the twins of `noise.py`, operation by operation. They are launched without fused multiply-adds.

A *key* is a float's order as an int32. Prefixes: i_ index.
"""

import triton
import triton.language as tl

from vmmkv.kernels import noise

GROUP = tl.constexpr(noise.GROUP)
QUARTER = tl.constexpr(noise.QUARTER)
LEAST_KEY = tl.constexpr(-(2**31))
NO_TOKEN = tl.constexpr(2**31 - 1)

_MULTIPLIERS = tl.constexpr(noise.MULTIPLIERS)
_KEY_STEPS = tl.constexpr(noise.KEY_STEPS)
_NUM_ROUNDS = tl.constexpr(noise.NUM_ROUNDS)
_SQRT_HALF_BITS = tl.constexpr(noise.SQRT_HALF_BITS)
_LN_2 = tl.constexpr(noise.LN_2)
_LOG = tl.constexpr(noise.LOG)
_LOG_SIZE = tl.constexpr(len(noise.LOG))
_LOG2_E = tl.constexpr(noise.LOG2_E)
_LN_2_HIGH = tl.constexpr(noise.LN_2_HIGH)
_LN_2_LOW = tl.constexpr(noise.LN_2_LOW)
_EXP = tl.constexpr(noise.EXP)
_EXP_SIZE = tl.constexpr(len(noise.EXP))
_COLDEST_EXPONENT = tl.constexpr(noise.COLDEST_EXPONENT)
_WEIGHT_BITS = tl.constexpr(noise.WEIGHT_BITS)


@triton.jit
def philox(counters, position, seed):
    """Four uint32 words for each counter (uint32), at a position (int32), under a seed (int64)."""
    key_0 = seed.to(tl.uint32)
    key_1 = (seed >> 32).to(tl.uint32)
    word_0 = counters
    word_1 = tl.zeros_like(counters) + position.to(tl.uint32)
    word_2 = tl.zeros_like(counters)
    word_3 = tl.zeros_like(counters)
    for _ in tl.static_range(_NUM_ROUNDS):
        product_0 = word_0.to(tl.uint64) * _MULTIPLIERS[0]
        product_1 = word_2.to(tl.uint64) * _MULTIPLIERS[1]
        word_0 = (product_1 >> 32).to(tl.uint32) ^ word_1 ^ key_0
        word_2 = (product_0 >> 32).to(tl.uint32) ^ word_3 ^ key_1
        word_1 = product_1.to(tl.uint32)
        word_3 = product_0.to(tl.uint32)
        key_0 = (key_0.to(tl.uint64) + _KEY_STEPS[0]).to(tl.uint32)
        key_1 = (key_1.to(tl.uint64) + _KEY_STEPS[1]).to(tl.uint32)
    return word_0, word_1, word_2, word_3


@triton.jit
def _polynomial(x, COEFFICIENTS: tl.constexpr, SIZE: tl.constexpr):
    total = x * COEFFICIENTS[0] + COEFFICIENTS[1]
    for i in tl.static_range(2, SIZE):
        total = total * x + COEFFICIENTS[i]
    return total


@triton.jit
def _split(x):
    bits = x.to(tl.int32, bitcast=True)
    exponent = (bits - _SQRT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).to(tl.float32, bitcast=True) - 1.0, exponent.to(tl.float32)


@triton.jit
def _log1p(fraction, exponent):
    return (fraction + (fraction * fraction) * _polynomial(fraction, _LOG, _LOG_SIZE)) + exponent * _LN_2


@triton.jit
def log(x):
    """Natural logarithm of positive, normal float32."""
    fraction, exponent = _split(x)
    return _log1p(fraction, exponent)


@triton.jit
def gumbel(words):
    """Of uint32 words."""
    below = (words.to(tl.float32) + 0.5) * (2.0**-32)
    above = ((words ^ 0xFFFFFFFF).to(tl.float32) + 0.5) * (2.0**-32)
    fraction, exponent = _split(above)
    near = below < 0.25
    return -log(-_log1p(tl.where(near, -below, fraction), tl.where(near, 0.0, exponent)))


@triton.jit
def weights(logits, peak, inverse_temperature):
    """int64; what is past the vocabulary is -inf, and weighs nothing."""
    x = tl.where(logits == peak, 0.0, (logits - peak) * inverse_temperature)
    x = tl.maximum(x, _COLDEST_EXPONENT)
    exponent = tl.floor(x * _LOG2_E + 0.5)
    rest = (x - exponent * _LN_2_HIGH) - exponent * _LN_2_LOW
    power = ((exponent.to(tl.int32) + (127 + _WEIGHT_BITS)) << 23).to(tl.float32, bitcast=True)
    return ((1.0 + (rest + (rest * rest) * _polynomial(rest, _EXP, _EXP_SIZE))) * power).to(tl.int64)


@triton.jit
def key_of(x):
    """int32 in the order of float32; of both zeros the same."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def first_of_largest(values, tokens):
    """The largest value of a tile, and the lowest of its token ids; no value is NaN."""
    largest = tl.max(values)
    return largest, tl.min(tl.where(values == largest, tokens, NO_TOKEN))
