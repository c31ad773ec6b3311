"""What quantised K and V are kept as. What the bits mean is said, and done, in kernels/quantise.py."""

from dataclasses import dataclass
from typing import TYPE_CHECKING, Final

from vmmkv.errors import LayoutError

if TYPE_CHECKING:
    import torch

_PAYLOAD_DTYPES: Final = {"fp8": "float8_e4m3fn", "int8": "int8", "int4": "uint8"}

KV_KINDS: Final = tuple(_PAYLOAD_DTYPES)
KV_SCALES: Final = ("token", "head")


@dataclass(frozen=True, slots=True)
class KVType:
    """K and V that are kept quantised: a *payload* of few bits an element, times a scale. `KVType("int4")`.

    `kind`: "fp8" is float8_e4m3fn; "int8"; "int4" is uint8 of half the width, two elements in a byte.
    `scale`: "token" is a float16 for each head of each token, kept in the row; "head" is static, one for each head of a
    layer, kept by whoever runs the kernels and in no row (fp8 alone: it has the range for that).

    Raises: LayoutError for any other kind or scale.
    """

    kind: str
    scale: str = "token"

    def __post_init__(self) -> None:
        if self.kind not in KV_KINDS:
            raise LayoutError(f"kind={self.kind!r}: K and V are quantised to {', '.join(KV_KINDS)}")
        if self.scale not in KV_SCALES:
            raise LayoutError(f"scale={self.scale!r}: a scale belongs to a {' or to a '.join(KV_SCALES)}")
        if self.scale == "head" and self.kind != "fp8":
            raise LayoutError(
                f"{self.kind} has no range for a static scale of a whole head; scale='token' works, or kind='fp8'"
            )

    @property
    def dtype(self) -> "torch.dtype":
        """Of the payload's elements."""
        import torch  # the command line knows the kinds without it

        dtype: torch.dtype = getattr(torch, _PAYLOAD_DTYPES[self.kind])
        return dtype

    def width(self, dim: int) -> int:
        """Payload elements of a vector of `dim`. Raises LayoutError for an odd one in int4."""
        if self.kind == "int4" and dim % 2:
            raise LayoutError(f"int4 keeps two elements in a byte, and head size {dim} is odd; int8 works, or an even size")
        return dim // 2 if self.kind == "int4" else dim

    def __str__(self) -> str:
        return f"{self.kind}, scales by {self.scale}"
