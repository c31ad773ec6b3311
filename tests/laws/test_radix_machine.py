"""The radix tree under random use, against dictionaries: every prefix, every piece and every node by its whole path.

Two token ids and short prompts, so that nearly every prompt has a prefix in common with others. The model keeps the use of
a node in all of its ancestors at once, which the tree does only when it matters.
"""

import itertools
import math
from collections import Counter
from dataclasses import dataclass, field
from typing import TypeAlias

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from tests.laws.machine import cases
from vmmkv.prefix import radix_tree
from vmmkv.prefix.radix_tree import Lookup, Node, Piece, RadixTree

MAX_TOKENS = 9

Path: TypeAlias = tuple[str, tuple[int, ...]]
"""A namespace, and all tokens from the first on."""

spaces = st.sampled_from(["red", "blue"])
prompts = st.lists(st.integers(0, 1), max_size=MAX_TOKENS).map(tuple)
picks = st.integers(0, 30)
places = st.sets(st.tuples(st.integers(1, MAX_TOKENS), st.integers(0, 1)), max_size=8).map(sorted)
untils = st.just(math.inf) | st.integers(-1, 12)


@dataclass
class Mark:
    """What the model knows of a node, by the path to its end."""

    stamp: int
    locks: int = 0
    residents: set[int] = field(default_factory=set)


def is_prefix(short: Path, long: Path) -> bool:
    return short[0] == long[0] and long[1][: len(short[1])] == short[1]


class RadixMachine(RuleBasedStateMachine):
    """`marks` has the nodes, `held` the pieces by path and group, `values` where each value is that was ever made.

    `pins` says until when, by the path that is kept and the path that was asked for, and `ends` where the latter ends.
    """

    @initialize()
    def make(self):
        self.clock = itertools.count(1)
        self.last_stamp = 0
        self.time = 0.0
        self.tree: RadixTree[int] = RadixTree(self.tick, lambda: self.time)
        self.marks: dict[Path, Mark] = {}
        self.held: dict[tuple[Path, int], int] = {}
        self.pins: dict[tuple[Path, Path], float] = {}
        self.ends: dict[Path, Path] = {}
        self.num_values = 0
        self.returned: Counter[int] = Counter()
        self.lookups: list[tuple[Path, Lookup[int]]] = []

    def tick(self) -> int:
        self.last_stamp = next(self.clock)
        return self.last_stamp

    # the model

    def known(self, path: Path) -> int:
        """How many tokens of it are a prefix of some node's path, by brute force."""
        lengths = range(len(path[1]), 0, -1)
        return next((n for n in lengths if any(is_prefix((path[0], path[1][:n]), end) for end in self.marks)), 0)

    def start(self, path: Path) -> int:
        """Where the edge of a node begins."""
        return max((len(end[1]) for end in self.marks if end != path and is_prefix(end, path)), default=0)

    def cut(self, path: Path) -> None:
        """A node ends there, if the path is known."""
        below = [end for end in self.marks if is_prefix(path, end)]
        if path[1] and below and path not in self.marks:
            node = min(below, key=lambda end: len(end[1]))
            stamp = max(self.marks[end].stamp for end in below)
            self.marks[path] = Mark(stamp, residents=set(self.marks[node].residents))

    def use(self, path: Path) -> None:
        for end, mark in self.marks.items():
            if is_prefix(end, path):
                mark.stamp = self.last_stamp

    def leaves(self, marks: dict[Path, Mark]) -> list[Path]:
        return [end for end in marks if not any(end != other and is_prefix(end, other) for other in marks)]

    def order(self) -> list[Path]:
        """Leaf by leaf, what may go."""
        left = dict(self.marks)
        gone = []
        while True:
            free = [end for end in self.leaves(left) if not left[end].locks and self.pinned_until(end) is None]
            if not free:
                return gone
            gone.append(min(free, key=lambda end: left[end].stamp))
            del left[gone[-1]]

    def pinned_until(self, path: Path) -> float | None:
        """By the pins that have not ended."""
        return max((until for (kept, _), until in self.pins.items() if kept == path and until > self.time), default=None)

    # the tree

    def nodes(self) -> dict[Path, Node[int]]:
        return {self.path(node): node for node in self.tree.nodes()}

    def path(self, node: Node[int]) -> Path:
        nodes = node.path()
        tokens = tuple(token for each in nodes for token in each.tokens.tolist())
        return nodes[0].parent.namespace, tokens

    def pick(self, pick: int, *, free_leaf: bool = False) -> tuple[Path, Node[int]] | None:
        nodes = self.nodes()
        leaves = self.leaves(self.marks)
        paths = [path for path in sorted(nodes) if not free_leaf or (path in leaves and not self.marks[path].locks)]
        return (paths[pick % len(paths)], nodes[paths[pick % len(paths)]]) if paths else None

    def pieces(self, places, start: int, end: int) -> list[Piece[int]]:
        first = self.num_values
        fitting = [(at, group) for at, group in places if start < at <= end]
        self.num_values += len(fitting)
        return [Piece(at, first + index, group) for index, (at, group) in enumerate(fitting)]

    def give_back(self, path: Path, past: int, pieces: list[Piece[int]]) -> None:
        """They are those that the model has on the node's edge past a token, and each comes back once."""
        gone = {place: value for place, value in self.held.items() if place[0] in self.prefixes(path, past)}
        assert {((path[0], path[1][: p.end_token]), p.group): p.value for p in pieces} == gone
        assert len(pieces) == len(gone)
        self.returned.update(gone.values())
        for place in gone:
            del self.held[place]

    def prefixes(self, path: Path, past: int) -> set[Path]:
        return {(path[0], path[1][:n]) for n in range(past + 1, len(path[1]) + 1)}

    # rules

    @rule(space=spaces, tokens=prompts.filter(bool), places=places)
    def insert(self, space, tokens, places):
        path = (space, tokens)
        pieces = self.pieces(places, 0, len(tokens))
        inserted = self.tree.insert(space, list(tokens), pieces)
        self.cut((space, tokens[: self.known(path)]))
        self.marks.setdefault(path, Mark(0))
        self.use(path)
        assert self.path(inserted.node) == path
        duplicates = []
        for piece in pieces:
            place = ((space, tokens[: piece.end_token]), piece.group)
            if place in self.held:
                duplicates.append(piece)
            else:
                self.held[place] = piece.value
        assert inserted.duplicates == duplicates
        self.returned.update(piece.value for piece in duplicates)

    @rule(space=spaces, tokens=prompts)
    def match(self, space, tokens):
        match = self.tree.match(space, tokens)
        assert match.num_tokens == self.known((space, tokens))
        ends = [self.path(node)[1] for node in match.path]
        assert all(end == tokens[: len(end)] for end in ends[:-1])
        assert ends == [] or ends[-1][: match.num_tokens] == tokens[: match.num_tokens]

    @rule(space=spaces, tokens=prompts)
    def look_up(self, space, tokens):
        self.lookups.append(((space, tokens), Lookup(space, tokens)))

    @rule()
    def resume(self):
        for path, lookup in self.lookups:
            assert self.tree.resume(lookup) == self.tree.match(*path)

    @precondition(lambda self: self.marks)
    @rule(pick=picks)
    def touch(self, pick):
        path, node = self.pick(pick)
        self.tree.touch(node)
        self.use(path)

    @precondition(lambda self: self.marks)
    @rule(pick=picks, at=st.integers(1, MAX_TOKENS))
    def split(self, pick, at):
        path, node = self.pick(pick)
        num_tokens = self.start(path) + at
        if num_tokens < len(path[1]):
            upper = self.tree.split(node, num_tokens)
            self.cut((path[0], path[1][:num_tokens]))
            assert self.path(node) == path
            assert self.path(upper) == (path[0], path[1][:num_tokens])

    @precondition(lambda self: self.marks)
    @rule(pick=picks, places=places)
    def replace(self, pick, places):
        path, node = self.pick(pick)
        pieces = self.pieces(places, node.start, node.end)
        self.give_back(path, self.start(path), self.tree.replace(node, pieces))
        self.held |= {((path[0], path[1][: piece.end_token]), piece.group): piece.value for piece in pieces}

    @precondition(lambda self: self.marks)
    @rule(pick=picks)
    def lock(self, pick):
        path, node = self.pick(pick)
        self.tree.lock(node)
        self.marks[path].locks += 1

    @precondition(lambda self: any(mark.locks for mark in self.marks.values()))
    @rule(pick=picks)
    def unlock(self, pick):
        locked = sorted(path for path, mark in self.marks.items() if mark.locks)
        path = locked[pick % len(locked)]
        self.tree.unlock(self.nodes()[path])
        self.marks[path].locks -= 1

    @rule(space=spaces, tokens=prompts, until=untils)
    def pin(self, space, tokens, until):
        known, asked = self.known((space, tokens)), (space, tokens)
        node = self.tree.pin(space, list(tokens), self.time + until)
        assert (node.end if node else 0) == known
        if known:
            kept = (space, tokens[:known])
            assert self.path(node) == kept
            self.cut(kept)
            self.use(kept)
            before = {pin: end for pin, end in self.pins.items() if pin[1] == asked}
            if max(before.values(), default=0) <= self.time:  # it had ended
                self.pins = {pin: end for pin, end in self.pins.items() if pin not in before}
                before = {}
            until = max([self.time + until, *before.values()])
            self.pins |= dict.fromkeys([*before, (kept, asked)], until)
            self.ends[asked] = kept

    @precondition(lambda self: self.pins)
    @rule(pick=picks, other=picks)
    def keep_too(self, pick, other):
        """The owner of the tree lets what keeps one node keep one below, too."""
        (path, node), (from_path, from_node) = self.pick(pick), self.pick(other)
        if is_prefix(from_path, path):
            self.tree.keep(node, from_node.pins)
            for kept, asked in [pin for pin in self.pins if pin[0] == from_path]:
                self.keep(path, asked, self.pins[kept, asked])

    def keep(self, kept: Path, asked: Path, until: float) -> None:
        self.pins[kept, asked] = max(until, self.pins.get((kept, asked), until))

    @rule(space=spaces, tokens=prompts)
    def unpin(self, space, tokens):
        self.tree.unpin(space, list(tokens))
        self.pins = {(kept, asked): until for (kept, asked), until in self.pins.items() if asked != (space, tokens)}

    @precondition(lambda self: self.pins)
    @rule(pick=picks)
    def unpin_what_is_pinned(self, pick):
        self.unpin(*sorted(asked for _, asked in self.pins)[pick % len(self.pins)])

    @rule(seconds=st.integers(1, 8))
    def wait(self, seconds):
        self.time += seconds

    @precondition(lambda self: self.marks)
    @rule(pick=picks, slot=st.integers(0, 3))
    def reside(self, pick, slot):
        path, node = self.pick(pick)
        node.add_resident(slot)
        self.marks[path].residents.add(slot)

    @rule(count=st.integers(1, 4))
    def evict(self, count):
        for _ in range(count):
            node, order = self.tree.eviction.oldest(), self.order()
            assert (node and self.path(node)) == (order[0] if order else None)
            if node is None:
                return
            self.remove_leaf(order[0], node)

    @rule(pick=picks)
    def remove(self, pick):
        if picked := self.pick(pick, free_leaf=True):
            self.remove_leaf(*picked)

    def remove_leaf(self, path: Path, node: Node[int]) -> None:
        start = self.start(path)
        self.give_back(path, start, self.tree.remove(node))
        del self.marks[path]
        for kept, asked in [pin for pin in self.pins if pin[0] == path]:
            until = self.pins.pop((kept, asked))
            if start and self.ends[asked] == path:
                self.ends[asked] = path[0], path[1][:start]
                self.keep(self.ends[asked], asked, until)

    # always

    @invariant()
    def the_tree_is_the_model(self):
        self.tree.check()
        nodes = self.nodes()
        assert nodes.keys() == self.marks.keys()
        for path, node in nodes.items():
            mark = self.marks[path]
            assert (node.start, node.end) == (self.start(path), len(path[1]))
            until = node.pinned_until if self.tree.is_pinned(node) else None
            assert (node.locks, until) == (mark.locks, self.pinned_until(path))
            assert node.residents.keys() == mark.residents
            assert node.stamp == mark.stamp if node.is_leaf else node.stamp <= mark.stamp
        assert self.tree.num_nodes == len(self.marks)
        assert self.tree.num_tokens == sum(len(path[1]) - self.start(path) for path in self.marks)

    @invariant()
    def every_piece_is_held_or_returned_once(self):
        held = {((path[0], path[1][: p.end_token]), p.group): p.value for path, n in self.nodes().items() for p in n.pieces}
        assert held == self.held
        assert self.returned + Counter(held.values()) == Counter(range(self.num_values))

    @invariant()
    def what_could_go_is_told_in_its_order(self):
        assert [self.path(node) for node in self.tree.eviction.each()] == self.order()

    def teardown(self):
        if not hasattr(self, "tree"):
            return
        for path, node in self.nodes().items():
            for _ in range(self.marks[path].locks):
                self.tree.unlock(node)
            self.marks[path].locks = 0
        self.tree.unpin_all()
        self.pins.clear()
        self.evict(len(self.marks))
        assert self.tree.num_nodes == self.tree.num_tokens == 0
        assert self.returned == Counter(range(self.num_values))


TestRadixMachine, TestRadixMachineAtLength = cases(RadixMachine, 60, 1000)


@pytest.fixture(autouse=True)
def sweeping_at_once(monkeypatch):
    """Heaps are swept as soon as half of their entries are of no use; by default a tree this small has too few of them."""
    monkeypatch.setattr(radix_tree, "SWEEP_SLACK", 0)
