"""Loads from tiers as a prefix cache knows them, and what a listener hears. `vmmkv.tiers.transfers` stores and loads."""

import math
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from typing import Protocol

import numpy as np
import numpy.typing as npt

from vmmkv.layout import KVLayout
from vmmkv.prefix.radix_tree import TreeListener
from vmmkv.tier import ListenedTier


class Fetch:
    """A load of records into the tree, for all that wait for it. Made by `PrefixCache.fetch`, which counts who waits.

    When it is `done`, `attach` finds the loaded rows, up to the first record that was missed.
    """

    def __init__(self, give_up: "Callable[[Fetch], None]", *, known: int, num_tokens: int) -> None:
        self.num_tokens = num_tokens
        """Tokens that `attach` finds when it is done; an upper bound until then."""
        self.done = False
        self.ended_s = math.inf
        """Time of time.perf_counter at which it was done: nothing looks at once."""
        self.bytes_by_tier: Counter[str] = Counter()
        """Bytes of its records by the name of the tier that has them. Empty until that is found, and for a fetch of none."""
        self.loaded_bytes: Counter[str] = Counter()
        """Bytes of the loaded records by the name of their tier."""
        self.waiting = 1
        """Calls of `PrefixCache.fetch` that returned it, less those of `give_up`."""
        self.known_tokens = known
        """Tokens that were on the device when it began."""
        self._give_up = give_up

    @property
    def size_bytes(self) -> int:
        """Bytes of all its records."""
        return self.bytes_by_tier.total()

    def give_up(self) -> None:
        """Wait no longer. A fetch that nothing waits for ends: `attach` finds what has come of its beginning."""
        self._give_up(self)

    def __repr__(self) -> str:
        return f"<Fetch of {self.size_bytes} bytes for {self.num_tokens} tokens, {'done' if self.done else 'under way'}>"


class PathKeys(Protocol):
    """Keys of the records of a path: each is a page of one group."""

    @property
    def layout(self) -> KVLayout:
        """Layout of the rows."""

    @property
    def namespace(self) -> Hashable:
        """Namespace of the tokens."""

    @property
    def tokens(self) -> npt.NDArray[np.int32]:
        """Tokens of the path."""

    @property
    def by_group(self) -> Sequence[Sequence[bytes]]:
        """Keys by group and page, as far as they are hashed."""

    def end(self, index: int, record: int) -> int:
        """Number of tokens that must be known for a page of a group to be."""

    def is_start_of(self, tokens: npt.NDArray[np.int32]) -> bool:
        """Do these tokens begin with the path's?"""


class PrefixListener(TreeListener, Protocol):
    """Listener that hears also which records tiers have, of tiers that know when they go (`ListenedTier`).

    It hears their keys, and the pages that these stand for. It must return at once, from any thread, and must not use the tree.
    """

    def described(self, tier: ListenedTier, path: PathKeys, places: Sequence[tuple[int, int]] | None) -> None:
        """Hear that a tier is about to get the records at these groups and pages of a path. None: it may have any of them.

        No lock of the tier is held: a listener that has lost what it heard may call `tier.listen` again.
        """

    def held(self, tier: str, keys: Sequence[bytes], is_held: bool) -> None:
        """Hear that a tier, by name, has these records from now on, or no more. Either follows for what it was about to get.

        It must not use a tier.
        """
