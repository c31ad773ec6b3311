"""The figures that README.md shows, under names of their own: copies of the page's, of the newest rows that are not quick."""

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Final

from bench.page.drawing import Figure
from bench.page.sections import Section

OF_README: Final[Mapping[str, str]] = {
    "sequences-that-fit": "waste-admitted-sequences",
    "shared-prefix": "prefix-total",
    "serve-rates": "serve-rates-llama-3-1-8b-chat-poisson-all",
    "memory-map-slots": "map-vmmkv",
}
"""By the name that README.md has, how the page's figure is called behind its device."""


def copy_figures(found: Sequence[Section], maps: Sequence[Figure], folder: Path) -> Iterator[str]:
    """Write those that there are; a line for each, also for those that there are no rows of, whose files stay as they are."""
    groups = sorted(
        (group for section in found for group in section.groups if not group.quick), key=lambda group: group.date, reverse=True
    )
    named = [(figure, group.origin(figure)) for group in groups for figure in group.figures] + [(figure, "") for figure in maps]
    for name, ending in OF_README.items():
        path = folder / f"{name}.png"
        figure, origin = next(
            ((figure, origin) for figure, origin in named if figure.name == ending or figure.name.endswith(f"-{ending}")),
            (None, ""),
        )
        if figure is None:
            yield f"{path}: not written, since there are no full rows of *-{ending}"
        else:
            path.write_bytes(figure.png)
            yield f"{path}: {origin or figure.title}"
