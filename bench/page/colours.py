"""Which series has which colour: what is compared in many figures has the same one in all of them."""

from collections.abc import Sequence
from typing import Final

from bench.page.drawing import COLOURS

_KEPT: Final = {"vmmkv": COLOURS[0], "paged": COLOURS[1], "static": COLOURS[2], "transformers StaticCache": COLOURS[2]}
"""By how the names of series begin: kept for them in figures of systems, of each the first."""
_SYSTEMS: Final = ("vmmkv", "paged", "static", "transformers", "cudaMalloc", "none")


def colours(names: Sequence[str]) -> dict[str, str]:
    """By name. In a figure of systems what is kept for one of them goes to no other while there are colours left."""
    found: dict[str, str] = {}
    for start, colour in _KEPT.items():
        one = next((name for name in names if name.startswith(start)), None)
        if one is not None and colour not in found.values():
            found[one] = colour
    of_systems = any(name.startswith(_SYSTEMS) for name in names)
    kept = set(_KEPT.values()) if of_systems else set()
    left = [colour for colour in COLOURS if colour not in found.values()]
    # Behind all others, since with ten series there is no colour to spare.
    left.sort(key=lambda colour: colour in kept)
    others = [name for name in names if name not in found]
    found |= {name: left[index % len(left)] for index, name in enumerate(others)}
    return {name: found[name] for name in names}
