"""A plain model of shared prefixes: a dictionary from what was said, in a namespace, to the stamp of its last token.

Equal tokens in one namespace have equal rows, whoever computed them: so a sequence's rows are known from its tokens alone,
and any byte that came from another prompt, another namespace or nowhere shows.
"""

import contextlib
import sys
from collections.abc import Iterator
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from unittest import mock

import torch

from tests.laws import model
from tests.laws.model import SAMPLE, Kept, Live, Rows, expected, plane, planes_of
from vmmkv import Group, KVCache, KVLayout, Sequence

# Rows that divide the page, four and eight to one: most matches end inside a page, some just at its end. The window is
# narrower than a page, so there are pages of which a sequence has the last rows only.
EVEN = KVLayout(
    groups=(
        Group(layers=(0,), planes=(plane("k", 2, 256, torch.float16), plane("v", 2, 256, torch.float16))),
        Group(layers=(1,), planes=(plane("k", 1, 128, torch.float32), plane("v", 1, 128, torch.float32)), window=3),
    )
)
LAYOUTS = {**model.LAYOUTS, "even": EVEN}
NAMESPACES = ("red", "blue")


class Texts:
    """The dictionary."""

    def __init__(self) -> None:
        self._stamps: dict[tuple[object, tuple[int, ...]], int] = {}
        self._confirmed: set[tuple[object, tuple[int, ...]]] = set()

    def stamps(self, namespace: object, tokens: Seq[int]) -> list[int]:
        """What stands for each token behind those before it."""
        texts = ((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))
        return [self._stamps.setdefault(text, len(self._stamps)) for text in texts]

    def confirm(self, namespace: object, tokens: Seq[int]) -> None:
        """These tokens may be inserted, or have been."""
        self._confirmed.update((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))

    def num_confirmed(self, namespace: object, tokens: Seq[int]) -> int:
        """How many of the first tokens were ever inserted: nobody can hit more."""
        texts = ((namespace, tuple(tokens[:end])) for end in range(1, len(tokens) + 1))
        return sum(text in self._confirmed for text in texts)


@dataclass
class Talk(Live):
    """A running sequence, its tokens, and how many of them the prefix cache knows; None if it does not know the sequence."""

    tokens: list[int] = field(default_factory=list)
    inserted: int | None = None


@dataclass
class Rest(Kept):
    """A parked slot and its tokens."""

    tokens: list[int] = field(default_factory=list)
    is_cut: bool = False
    """Had its sequence more of them? Then the last page can be shared, and is exchanged for whoever adopts it."""


def owner_of(namespace: object) -> int:
    """Whose numbers the rows of a namespace hold."""
    return NAMESPACES.index(str(namespace))


def talk(cache: KVCache, texts: Texts, sequence: Sequence, tokens: Seq[int], *, inserted: int | None) -> Talk:
    """What a sequence should hold that has these tokens."""
    starts = [sequence.start(group) for group in range(len(cache.layout.groups))]
    stamps = texts.stamps(sequence.tenant, tokens)
    rows = Rows(owner_of(sequence.tenant), stamps, starts, model.addresses(cache, sequence.slot))
    return Talk(cache, sequence, rows, tokens=list(tokens), inserted=inserted)


def verify_parked(rest: Rest) -> None:
    """The rows of a parked slot that may still be adopted, or copied from, are what was written."""
    for group, layer, name in planes_of(rest.cache.layout):
        tokens = range(rest.rows.starts[group], rest.parked.length)
        if len(tokens):
            view = rest.cache.view(layer, name)[rest.parked.slot, tokens.start : tokens.stop].cpu()
            wanted = expected(rest.rows, tokens, layer, name, view)
            assert torch.equal(view[..., ::SAMPLE], wanted[..., ::SAMPLE]), (
                f"rows [{tokens.start}, {tokens.stop}) of {name} of layer {layer} in parked slot {rest.parked.slot} "
                f"are not what was written"
            )


def num_common(first: Seq[int], second: Seq[int]) -> int:
    """How many tokens two prompts begin with alike."""
    return next((at for at, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))


@contextlib.contextmanager
def large_extents(num_pages: int) -> Iterator[None]:
    """Large extents of so few pages that short sequences have some; and adopting a slot may lose a page."""
    small = {"LARGE_PAGES": num_pages, "SIZE_CLASSES": (1, num_pages), "MOST_LOST_PAGES": 1}
    modules = [module for name, module in sys.modules.items() if name.startswith("vmmkv.")]
    with contextlib.ExitStack() as patches:
        for module in modules:
            for name in small.keys() & vars(module).keys():
                patches.enter_context(mock.patch.object(module, name, small[name]))
        yield
