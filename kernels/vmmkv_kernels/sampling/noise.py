"""The arithmetic of sampling in plain torch: random numbers, logarithms and weights, to the bit.

Each function here has a twin in `sample.py` that does the same operations in the same order in a kernel: integers, and float32
additions and multiplications that are each rounded alone. So the same logits give the same token on every device. A library's
logarithm, which differs in the last bit between devices, decides nothing.

Random numbers are counter-based (Philox 4x32-10, Salmon et al., SC 2011): those of one token id are a function of the seed,
the position and the id.

    token ids   [    group 0: 1024 ids    ][    group 1    ] ...
                [ 256 ][ 256 ][ 256 ][ 256 ]                     id = 1024 * (counter // 256) + 256 * word + counter % 256

One counter gives four words, a word for each quarter of its group: so that a kernel, which computes four words at once, reads
consecutive logits with each.

Legend: R rows, V token ids.
"""

from typing import Final

import torch

GROUP: Final = 1024
"""Token ids whose random words come from the same counters."""
QUARTER: Final = GROUP // 4

MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
NUM_ROUNDS: Final = 10
_WORD: Final = 2**32 - 1

SQRT_HALF_BITS: Final = 0x3F3504F3
"""Bits of float32 sqrt(1/2): mantissas are taken from [sqrt(1/2), sqrt(2))."""
LN_2: Final = 0.6931471824645996
LOG: Final = (
    0.08787265419960022, -0.1415964663028717, 0.148347869515419, -0.16588488221168518,
    0.19972050189971924, -0.25001147389411926, 0.3333367109298706, -0.4999999701976776,
)  # fmt: skip
"""log(1 + f) = f + f**2 * polynomial(f) for 1 + f in [sqrt(1/2), sqrt(2)], highest power first; a Chebyshev interpolation."""

LOG2_E: Final = 1.4426950216293335
LN_2_HIGH: Final = 0.693145751953125
"""The first 15 bits of log(2), whose product with an exponent is exact."""
LN_2_LOW: Final = 1.428606765330187e-06
EXP: Final = (0.0013926926767453551, 0.008363774046301842, 0.04166654869914055, 0.16666573286056519, 0.5)
"""exp(r) = 1 + r + r**2 * polynomial(r) for |r| <= log(2) / 2, highest power first; a Chebyshev interpolation."""
COLDEST_EXPONENT: Final = -64.0
"""Smallest exponent: exp of it has weight 0, and smaller ones are taken as this."""

WEIGHT_BITS: Final = 40
"""Bits of a weight, an integer of 2**40 for the likeliest token: sums of integers do not depend on their order."""


def philox(counters: torch.Tensor, positions: torch.Tensor, seeds: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """Four words of 32 bits, as int64, for each counter at a position under a seed; all int64, shapes that broadcast."""
    zero = torch.zeros((), dtype=torch.int64, device=counters.device)
    words = [counters & _WORD, positions & _WORD, zero, zero]
    keys = [seeds & _WORD, (seeds >> 32) & _WORD]
    for _ in range(NUM_ROUNDS):
        products = [words[0] * MULTIPLIERS[0], words[2] * MULTIPLIERS[1]]  # of 64 bits; the sign is the highest of them
        lows, highs = [product & _WORD for product in products], [(product >> 32) & _WORD for product in products]
        words = [highs[1] ^ words[1] ^ keys[0], lows[1], highs[0] ^ words[3] ^ keys[1], lows[0]]
        keys = [(key + step) & _WORD for key, step in zip(keys, KEY_STEPS, strict=True)]
    return tuple(words)


def words(seeds_R: torch.Tensor, positions_R: torch.Tensor, vocabulary_size: int) -> torch.Tensor:
    """[R, V] int64: the 32 random bits of each token id, for int64 seeds and integer positions."""
    num_groups = -(-vocabulary_size // GROUP)
    counters = torch.arange(num_groups * QUARTER, device=seeds_R.device)
    drawn = philox(counters[None], positions_R.long()[:, None], seeds_R[:, None])
    grouped = torch.stack([word.unflatten(1, (num_groups, QUARTER)) for word in drawn], dim=2)
    return grouped.flatten(1)[:, :vocabulary_size]


def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm of positive, normal float32."""
    fraction, exponent = _split(x)
    return _log1p(fraction, exponent)


def gumbel(words_RV: torch.Tensor) -> torch.Tensor:
    """-log(-log(u)) in float32, with u = 1 - (word + 1/2) / 2**32; from -3.2 to 22.9.

    The index of the largest sum of these and logits is a draw from softmax(logits) (Gumbel, 1954).
    """
    scale = 2.0**-32
    below = (words_RV.float() + 0.5) * scale  # 1 - u; each of the two is exact where it is small
    above = ((_WORD - words_RV).float() + 0.5) * scale  # u
    fraction, exponent = _split(above)
    near = below < 0.25
    return -log(-_log1p(torch.where(near, -below, fraction), torch.where(near, 0.0, exponent)))


def weights(logits: torch.Tensor, peak: torch.Tensor, inverse_temperature: torch.Tensor) -> torch.Tensor:
    """int64: exp((logit - peak) / temperature) * 2**40, rounded down, of float32 logits of which none is above the peak."""
    x = torch.where(logits == peak, 0.0, (logits - peak) * inverse_temperature)
    x = x.clamp(min=COLDEST_EXPONENT)
    exponent = torch.floor(x * LOG2_E + 0.5)
    rest = (x - exponent * LN_2_HIGH) - exponent * LN_2_LOW
    power = ((exponent.int() + (127 + WEIGHT_BITS)) << 23).view(torch.float32)
    return ((1.0 + (rest + (rest * rest) * _polynomial(EXP, rest))) * power).long()


def _split(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """f and e of x = (1 + f) * 2**e, with 1 + f in [sqrt(1/2), sqrt(2))."""
    bits = x.view(torch.int32)
    exponent = (bits - SQRT_HALF_BITS) >> 23
    return (bits - (exponent << 23)).view(torch.float32) - 1.0, exponent.float()


def _log1p(fraction: torch.Tensor, exponent: torch.Tensor) -> torch.Tensor:
    return (fraction + (fraction * fraction) * _polynomial(LOG, fraction)) + exponent * LN_2


def _polynomial(coefficients: tuple[float, ...], x: torch.Tensor) -> torch.Tensor:
    total = x * coefficients[0] + coefficients[1]
    for coefficient in coefficients[2:]:
        total = total * x + coefficient
    return total
