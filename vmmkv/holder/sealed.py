"""Prefixes that outlive the engine: a holder's log seals extents of the tree, and the next engine takes them from there.

    extend ──> waiting ──fence──> sealed ──the tree drops it──> dropped, and its memory may be written
                                    │
                                    └── the engine ends ──> next engine: the tree, without handles ──attach──> imported

An extent that the tree holds is never written, and a drop is logged before the tree lets go of it. So each extent that the log
names is whole, whenever the engine ends. The caller holds the pool's lock.

Other processes can write to the log, so `restore` checks all that it reads. If anything cannot be, nothing of it counts.
"""

import ast
import hashlib
import itertools
import logging
import operator
import reprlib
from collections import deque
from collections.abc import Hashable, Iterator, Mapping, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from vmmkv.arguments import checked_name
from vmmkv.driver.base import Fence
from vmmkv.errors import HolderGone, LogDamaged
from vmmkv.holder.log import LogContents, Sealed
from vmmkv.holder.source import HolderSource
from vmmkv.layout import KVLayout
from vmmkv.memory.extents import SIZE_CLASSES, Extent
from vmmkv.memory.pool import Pool
from vmmkv.prefix.index import IndexFollower, Placed, PrefixIndex, end_token
from vmmkv.prefix.radix_tree import TOKEN_BYTES, Node, Piece, Tokens, piece_place
from vmmkv.units import PAGE_BYTES, counted

log = logging.getLogger(__name__)

_stamp: Final = operator.attrgetter("stamp")


class SealedPrefixes(IndexFollower):
    """The extents of one prefix tree that its pool's holder has sealed. Made empty; `restore` comes before any other call."""

    waits_for_writes = True

    def __init__(self, index: PrefixIndex, layout: KVLayout, pool: Pool, identity: bytes) -> None:
        assert isinstance(pool.source, HolderSource), "without a holder nothing outlives the process"
        self._index = index
        self._layout = layout
        self._pool = pool
        self._source: Final = pool.source
        self._holder: Final = pool.source.holder
        self._log = self._holder.log
        self._identity = identity
        self._waiting: deque[tuple[Fence | None, Hashable, bytes, dict[Extent, Piece[Placed]]]] = deque()
        self._places: dict[Extent, int] = {}
        """The place of each sealed extent's seal in the log."""

    # from an earlier process

    def restore(self) -> None:
        """Take the extents that the log names into the tree; free all others, and those past the budget.

        Nothing counts if the log is damaged, or of another identity: a line in Python's log says so.
        Cost: host work by the tokens and extents that are named, and a round trip for each 1,024. Nothing is imported.
        """
        self._holder.has_prefixes = True
        contents, left = LogContents(), dict[int, int]()
        try:
            known = {extent.serial for extent in self._pool.extents()}
            left = {serial: size for serial, size in self._holder.handles().items() if serial not in known}
            contents = self._read(left)
        except LogDamaged as error:
            self._holder.say_damaged(error)
        except HolderGone:
            pass  # nothing can be imported any more
        if contents.identity == self._identity:
            self._insert(contents)
        elif contents.live:
            log.warning(
                "starting cold: the holder at %s has %s of another layout, dtype or fingerprint, and frees them",
                *(self._holder.path, counted(len(contents.live), "extent", ",")),
            )
        restored = {extent.serial for extent in self._places}
        unused = contents.live.keys() - restored
        if contents.identity != self._identity or not all(self._log.drop(serial) for serial in unused):
            self._rewrite()  # without them
        self._holder.release([serial for serial in left if serial not in restored])
        self._index.followers.append(self)  # from now on; what came back is sealed already
        self._pool.shrink_to(self._pool.budget_bytes)
        self._index.restored = sorted((node for node in self._index.tree.nodes() if node.is_leaf), key=_stamp)
        if self._places:
            log.info("%s came back from the holder at %s", counted(len(self._places), "extent", ","), self._holder.path)

    def _read(self, left: Mapping[int, int]) -> LogContents:
        """The log, of which all can be if it is of this identity; `left`: bytes by serial. Raises: LogDamaged."""
        contents = self._log.read()
        if contents.identity == self._identity:
            for seal in contents.seals.values():
                check_seal(seal, self._layout)
            for serial, place in contents.live.items():
                wanted = contents.seals[place].num_pages * PAGE_BYTES
                if left.get(serial) != wanted:
                    raise LogDamaged(f"handle {serial} has {left.get(serial, 'no')} bytes, and its seal {wanted}")
            _check_places(contents)
        return contents

    def _insert(self, contents: LogContents) -> None:
        """Insert the sealed prefixes."""
        serial_at = {place: serial for serial, place in contents.live.items()}
        covered: set[int] = set()
        paths: list[list[int]] = []
        for last in reversed(serial_at):  # a child comes after its parent
            if last not in covered:
                path = _places_to(contents.seals, last)
                paths.append([place for place in path if place in serial_at and place not in covered])
                covered.update(path)
        for places in reversed(paths):  # what was sealed last was used last
            self._insert_path(contents.seals, places)

    def _insert_path(self, seals: dict[int, Sealed], places: list[int]) -> None:
        path = [seals[place] for place in _places_to(seals, places[-1])]
        tokens = np.frombuffer(b"".join(seal.tokens for seal in path), np.int32)
        place_of = {self._source.kept(seals[place].serial, seals[place].num_pages): place for place in places}
        sealed = {extent: seals[place] for extent, place in place_of.items()}
        held = add_sealed(self._index, self._pool, _namespace(path[0]), tokens, sealed)
        self._places |= {extent: place_of[extent] for extent in held}

    # to the log

    def added(self, namespace: Hashable, tokens: Tokens, pieces: Sequence[Piece[Placed]], written: Fence | None) -> None:
        """Seal these extents of the tree once `written` has passed; None: they are written."""
        packed = np.asarray(tokens, np.int32).tobytes()
        self._waiting.append((written, namespace, packed, {piece.value.extent: piece for piece in pieces}))
        self.look()

    def look(self) -> None:
        """Seal what waits and whose fence has passed. Never blocks. Cost: some 10 us an extent."""
        while self._waiting and ((written := self._waiting[0][0]) is None or written.done()):
            _, namespace, packed, pieces = self._waiting.popleft()
            if pieces:
                self._seal(namespace, packed, list(pieces.values()))

    def unwritten(self) -> Fence | None:
        """The fence of the extents that wait longest; None if none wait. Call `look` first."""
        return self._waiting[0][0] if self._waiting else None

    def dropped(self, extent: Extent) -> None:
        """The tree is about to let go of an extent. It may be written when this returns."""
        for _, _, _, pieces in self._waiting:
            pieces.pop(extent, None)
        if self._places.pop(extent, None) is None:
            return
        extent.sealed = False
        if not self._log.drop(extent.serial):
            self._rewrite()  # without it
        extent.lent = bool(self._log.num_borrowers)  # one that comes later does not find it

    def give_up(self) -> list[Fence]:
        """The engine ends in order: wait for the last fences, seal what is left, and leave all with the holder."""
        for written, *_ in self._waiting:
            if written is not None:
                written.wait()
        self.look()
        self._holder.has_prefixes = False
        self._index.followers.remove(self)  # the holder keeps what the tree lets go from now on
        return []

    def _seal(self, namespace: Hashable, packed: bytes, pieces: Sequence[Piece[Placed]]) -> None:
        """Seal extents that the tree has on the path of these tokens."""
        parent, start = None, 0
        path = self._index.tree.match(namespace, np.frombuffer(packed, np.int32)).path
        for above in itertools.chain.from_iterable(node.pieces for node in path):
            if above.end_token <= pieces[0].end_token and above.value.extent in self._places:
                parent, start = self._places[above.value.extent], above.end_token
        for piece in pieces:
            tokens = packed[start * TOKEN_BYTES : piece.end_token * TOKEN_BYTES]
            place = self._log.seal(_seal(piece, parent, namespace, tokens))
            if place is None:
                log.warning(
                    "the log of the holder at %s is full: the next engine computes this prefix again", self._holder.path
                )
                break
            self._places[piece.value.extent], piece.value.extent.sealed = place, True
            parent, start = place, piece.end_token
        if self._log.is_due:
            self._rewrite()

    def _rewrite(self) -> None:
        extents, seals = [], []
        for extent, seal in self._seals():
            extents.append(extent)
            seals.append(seal)
        places = self._log.rewrite(self._identity, seals)
        before = self._places
        self._places = {extent: place for extent, place in zip(extents, places, strict=True) if place is not None}
        for extent in before.keys() - self._places.keys():  # those that the tree is letting go of, too
            extent.sealed, extent.lent = False, bool(self._log.num_borrowers)

    def _seals(self) -> Iterator[tuple[Extent, Sealed]]:
        """The sealed extents of the tree, parents first; a parent is the number of an earlier one."""
        number = 0
        behind: dict[Node[Placed], tuple[int | None, bytes]] = {}  # the last seal on the path to a node, and the tokens since
        for node in self._index.tree.nodes():
            assert node.parent is not None
            parent, tokens = behind.get(node.parent, (None, b""))
            at = node.start - len(tokens) // TOKEN_BYTES
            tokens += node.edge
            for piece in node.pieces:
                if piece.value.extent in self._places:
                    num_bytes = (piece.end_token - at) * TOKEN_BYTES
                    yield piece.value.extent, _seal(piece, parent, self._index.tree.namespace_of(node), tokens[:num_bytes])
                    parent, tokens, at = number, tokens[num_bytes:], piece.end_token
                    number += 1
            behind[node] = parent, tokens

    def check(self) -> None:
        """The log says what the tree holds; AssertionError if not."""
        contents = self._log.read()
        assert contents.identity == self._identity, "the log is of another identity"
        by_serial = {extent.serial: place for extent, place in self._places.items()}
        assert contents.live == by_serial, "the log and the tree seal different extents"
        wanted = {}
        for node in self._index.tree.nodes():
            packed = b"".join(above.edge for above in node.path())
            for piece in node.pieces:
                if piece.value.extent in self._places:
                    tokens = packed[: piece.end_token * TOKEN_BYTES]
                    wanted[piece.value.extent.serial] = _seal(piece, None, self._index.tree.namespace_of(node), tokens)
        found = {}
        for serial, place in contents.live.items():
            path = [contents.seals[each] for each in _places_to(contents.seals, place)]
            tokens = b"".join(seal.tokens for seal in path)
            found[serial] = path[-1]._replace(parent=None, namespace=path[0].namespace, tokens=tokens)
        assert found == wanted, "the log says something else of an extent than the tree"
        assert all(extent.sealed for extent in self._places), "an extent does not know that it is sealed"


def add_sealed(
    index: PrefixIndex, pool: Pool, namespace: Hashable, tokens: npt.NDArray[np.int32], extents: Mapping[Extent, Sealed]
) -> list[Extent]:
    """Add extents that another process has sealed to a tree, for these tokens. Returns those that it holds now."""
    pieces: list[Piece[Placed]] = []
    for extent, seal in extents.items():
        pool.take_in(extent)
        pieces.append(Piece(seal.end_token, Placed(seal.page, extent, seal.first_token), seal.group))
    pieces.sort(key=piece_place)
    index.add(namespace, tokens[: pieces[-1].end_token], pieces)
    held = [extent for extent in extents if extent.shared]
    for extent in extents:
        pool.drop(extent)
    return held


def _seal(piece: Piece[Placed], parent: int | None, namespace: Hashable, tokens: bytes) -> Sealed:
    page, extent, first_token = piece.value
    name = repr(namespace).encode() if parent is None else b""
    return Sealed(extent.serial, parent, piece.end_token, first_token, piece.group, page, extent.num_pages, name, tokens)


def _check_places(contents: LogContents) -> None:
    """Check that no two live handles hold the same rows: no tree has two. Raises: LogDamaged. Cost: a hash of all tokens."""
    hashes: dict[int, Any] = {}
    for place, seal in contents.seals.items():
        hashes[place] = hashlib.blake2b(seal.namespace) if seal.parent is None else hashes[seal.parent].copy()
        hashes[place].update(seal.tokens)
    taken: dict[tuple[bytes, int], int] = {}
    for serial, place in contents.live.items():
        other = taken.setdefault((hashes[place].digest(), contents.seals[place].group), serial)
        if other != serial:
            raise LogDamaged(f"handles {other} and {serial} are sealed for the same rows")


def check_seal(seal: Sealed, layout: KVLayout) -> None:
    """Check a seal against the layout of this engine. Raises: LogDamaged for one that no engine with this layout writes."""
    if (
        seal.group >= len(layout.groups)
        or seal.num_pages not in SIZE_CLASSES
        or seal.page % seal.num_pages
        or seal.end_token != end_token(layout.groups[seal.group], seal.page + seal.num_pages)
        or np.frombuffer(seal.tokens, np.int32).min(initial=0) < 0
    ):
        raise LogDamaged(
            f"a seal of handle {seal.serial} for group {seal.group}, pages [{seal.page}, {seal.page + seal.num_pages}) and "
            f"{seal.end_token} tokens"
        )
    if seal.parent is None:
        _namespace(seal)


def _namespace(seal: Sealed) -> Hashable:
    """The namespace of a seal without a parent. Raises: LogDamaged."""
    try:
        namespace = checked_name("namespace", ast.literal_eval(seal.namespace.decode()))
        if repr(namespace).encode() == seal.namespace:
            return namespace
    except (ValueError, TypeError, SyntaxError, MemoryError, RecursionError):
        pass
    raise LogDamaged(f"a seal of handle {seal.serial} for the namespace {reprlib.repr(seal.namespace)}")


def _places_to(seals: dict[int, Sealed], last: int) -> list[int]:
    """The places of the seals on the path to one, in order."""
    places: list[int] = []
    place: int | None = last
    while place is not None:
        places.append(place)
        place = seals[place].parent
    places.reverse()
    return places
