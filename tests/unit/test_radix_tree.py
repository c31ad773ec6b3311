"""A radix tree over token ids: what is found, what is handed back, and what goes first."""

import itertools
import math
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest

from vmmkv.prefix.radix_tree import Node, Piece, RadixTree

Tree: TypeAlias = RadixTree[str]


class Seconds:
    """A clock that stands until it is set."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def tree(seconds: Seconds) -> Tree:
    return RadixTree(itertools.count(1).__next__, seconds)


def pieces(prefix: str, *end_tokens: int) -> list[Piece[str]]:
    return [Piece(end, f"{prefix}{end}") for end in end_tokens]


def values(held: Sequence[Piece[str]]) -> list[str]:
    return [piece.value for piece in held]


def spans(tree: Tree) -> list[tuple[int, int]]:
    tree.check()
    return sorted((node.start, node.end) for node in tree.nodes())


def evict_all(tree: Tree) -> list[Node[str]]:
    """In order; what `evictable` said in advance is what goes."""
    foreseen = list(tree.evictable())
    gone = []
    while (node := tree.oldest_evictable()) is not None:
        tree.remove(node)
        tree.check()
        gone.append(node)
    assert gone == foreseen
    return gone


# finding


def test_a_match_ends_at_a_node_or_inside_an_edge(tree: Tree) -> None:
    node = tree.insert("red", [1, 2, 3, 4]).node
    for tokens, num_tokens in (([1], 1), ([1, 2, 9], 2), ([1, 2, 3, 4], 4), ([1, 2, 3, 4, 5], 4)):
        match = tree.match("red", tokens)
        assert (match.path, match.num_tokens) == ([node], num_tokens)
    assert tree.match("red", [2]).path == []
    assert tree.match("red", []).num_tokens == 0


def test_token_ids_are_compared_over_all_of_their_bits(tree: Tree) -> None:
    tree.insert("red", [5, 2**31 - 1, 6])
    assert tree.match("red", [5, 2**31 - 1, 6]).num_tokens == 3
    for other in (2**31 - 2, 2**30, 2**31 - 1 - 2**16, 0):
        assert tree.match("red", [5, other, 6]).num_tokens == 1


@pytest.mark.parametrize("num_tokens", [1, 2, 63, 64, 65, 4096, 100_003])
def test_the_first_token_that_differs_is_found_in_edges_of_any_length(tree: Tree, num_tokens: int) -> None:
    tokens = np.random.default_rng(0).integers(0, 2**31, num_tokens)
    tree.insert("red", tokens)
    for at in {0, 1, num_tokens // 2, num_tokens - 1}:
        if at < num_tokens:
            other = tokens.copy()
            other[at] ^= 1
            assert tree.match("red", other).num_tokens == at
            assert tree.match("red", tokens[: at + 1]).num_tokens == at + 1
    assert tree.match("red", np.append(tokens, 0)).num_tokens == num_tokens


def test_lists_and_arrays_of_any_integers_are_alike(tree: Tree) -> None:
    node = tree.insert("red", [1, 2, 300]).node
    assert node.tokens.tolist() == [1, 2, 300]
    assert not node.tokens.flags.writeable
    dtypes = (np.uint16, np.int32, np.int64, np.uint64, ">i4")
    for tokens in ((1, 2, 300), *(np.array([1, 2, 300], dtype) for dtype in dtypes), np.array([1, 0, 2, 0, 300])[::2]):
        assert tree.insert("red", tokens).node is node
    assert tree.num_nodes == 1


@pytest.mark.parametrize(
    "tokens", [[1, -1], [2**31], [1.5], ["a"], np.array([-1]), np.array([2**31]), np.array([0.5]), np.ones((2, 2), np.int32)]
)
def test_what_is_no_token_id_is_refused(tree: Tree, tokens: Sequence[int]) -> None:
    for call in (tree.match, tree.insert):
        with pytest.raises(ValueError, match=r"tokens: .*wanted"):
            call("red", tokens)
    assert spans(tree) == []


def test_namespaces_never_meet(tree: Tree) -> None:
    red = tree.insert("red", [1, 2, 3], pieces("red", 2)).node
    blue = tree.insert(("blue", None), [1, 2, 4], pieces("blue", 2))
    assert blue.duplicates == []
    assert tree.match("red", [1, 2, 4]).path == [red]
    assert tree.match("green", [1, 2, 3]).num_tokens == 0
    tree.remove(red)
    assert tree.match("red", [1, 2, 3]).num_tokens == 0
    assert tree.match(("blue", None), [1, 2, 4]).path == [blue.node]


# inserting and splitting


def test_an_insert_ends_a_node_exactly_where_the_tokens_end(tree: Tree) -> None:
    whole = tree.insert("red", [1, 2, 3, 4, 5]).node
    inner = tree.insert("red", [1, 2, 3]).node
    assert (inner.start, inner.end, whole.start, whole.end) == (0, 3, 3, 5)
    assert whole.parent is inner
    assert tree.insert("red", [1, 2, 3]).node is inner
    longer = tree.insert("red", [1, 2, 3, 4, 5, 6]).node
    assert (longer.parent, longer.path()) == (whole, [inner, whole, longer])
    assert spans(tree) == [(0, 3), (3, 5), (5, 6)]


def test_a_split_sends_pieces_to_their_side_and_keeps_the_lower_node(tree: Tree) -> None:
    node = tree.insert("red", [1, 2, 3, 4, 5, 6], pieces("p", 2, 4, 6)).node
    below = tree.insert("red", [1, 2, 3, 4, 5, 6, 7]).node
    tree.lock(node)
    tree.pin(node, 5.0)
    upper = tree.split(node, 4)
    assert (values(upper.pieces), values(node.pieces)) == (["p2", "p4"], ["p6"])
    assert (upper.start, upper.end, node.start, node.end) == (0, 4, 4, 6)
    assert (node.parent, below.parent) == (upper, node)
    assert (upper.locks, upper.pinned_until, node.locks, node.pinned_until) == (0, None, 1, 5.0)
    assert tree.num_pieces == 3
    tree.check()


def test_residents_of_a_node_are_residents_of_both_halves_on_their_own(tree: Tree) -> None:
    node = tree.insert("red", [1, 2, 3, 4]).node
    assert not node.has_residents
    node.residents.add(7)
    upper = tree.split(node, 1)
    assert upper.residents == node.residents == {7}
    upper.residents.add(8)
    assert node.residents == {7}
    assert node.has_residents


def test_duplicates_are_handed_back_and_the_first_stays(tree: Tree) -> None:
    tree.insert("red", [1, 2, 3, 4], pieces("a", 2, 4))
    again = tree.insert("red", [1, 2, 3, 4], pieces("b", 1, 2, 3, 4))
    assert values(again.duplicates) == ["b2", "b4"]
    assert values(again.node.pieces) == ["b1", "a2", "b3", "a4"]
    longer = tree.insert("red", [1, 2, 3, 4, 5, 6], pieces("c", 2, 4, 6))
    assert values(longer.duplicates) == ["c2", "c4"]
    other = tree.insert("red", [1, 2, 9, 9], pieces("d", 2, 4))
    assert values(other.duplicates) == ["d2"], "only what is on the same path"
    assert tree.num_pieces == 6
    tree.check()


@pytest.mark.parametrize(
    ("end_tokens", "complaint"), [([0], "wanted after 0"), ([4], "up to 3"), ([2, 1], "out of order"), ([1, 1], "two for one")]
)
def test_pieces_that_do_not_fit_are_refused_before_anything_changes(tree: Tree, end_tokens: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tree.insert("red", [1, 2, 3], pieces("p", *end_tokens))
    assert spans(tree) == []
    with pytest.raises(ValueError, match="at least one"):
        tree.insert("red", [])


# removing


def test_a_leaf_that_goes_leaves_its_parent_a_leaf_and_a_namespace_goes_with_its_last(tree: Tree) -> None:
    upper = tree.insert("red", [1, 2], pieces("p", 1)).node
    lower = tree.insert("red", [1, 2, 3, 4], pieces("p", 3, 4)).node
    assert tree.oldest_evictable() is lower
    assert values(tree.remove(lower)) == ["p3", "p4"]
    assert (tree.oldest_evictable(), upper.is_leaf) == (upper, True)
    assert values(tree.remove(upper)) == ["p1"]
    assert (tree.num_nodes, tree.num_tokens, tree.num_pieces) == (0, 0, 0)
    assert tree.oldest_evictable() is None
    tree.check()


def test_a_node_that_is_no_leaf_or_in_use_is_not_removed(tree: Tree) -> None:
    upper = tree.insert("red", [1, 2]).node
    lower = tree.insert("red", [1, 2, 3, 4]).node
    tree.lock(lower)
    for refuse in (tree.remove, lambda node: tree.trim(node, node.end)):
        with pytest.raises(AssertionError, match="no leaf"):
            refuse(upper)
        with pytest.raises(AssertionError, match="in use"):
            refuse(lower)
    tree.unlock(lower)
    tree.remove(lower)
    with pytest.raises(AssertionError, match="in no tree"):
        tree.remove(lower)
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(upper)


def test_trimming_gives_back_the_pieces_past_the_new_end(tree: Tree) -> None:
    tree.insert("red", [1, 2])
    leaf = tree.insert("red", [1, 2, 3, 4, 5], pieces("p", 1, 3, 4, 5)).node
    assert tree.trim(leaf, 5) == []
    assert values(tree.trim(leaf, 3)) == ["p4", "p5"]
    assert (leaf.end, leaf.tokens.tolist(), tree.num_tokens, tree.num_pieces) == (3, [3], 3, 2)
    assert tree.match("red", [1, 2, 3, 4, 5]).num_tokens == 3
    for num_tokens in (2, 4):
        with pytest.raises(ValueError, match=f"trim to {num_tokens}"):
            tree.trim(leaf, num_tokens)
    tree.check()


# what goes first


def test_the_least_recently_used_leaf_goes_first(tree: Tree) -> None:
    nodes = [tree.insert("red", [token, 0]).node for token in range(6)]
    tree.touch(nodes[1])
    tree.touch(nodes[0])
    tree.insert("red", [3, 0])
    assert evict_all(tree) == [nodes[i] for i in (2, 4, 5, 1, 0, 3)]


def test_locks_and_those_below_them_stay(tree: Tree) -> None:
    parent = tree.insert("red", [1]).node
    locked = tree.insert("red", [1, 2]).node
    below = tree.insert("red", [1, 2, 3]).node
    tree.lock(locked)
    tree.lock(locked)
    assert evict_all(tree) == [below]
    tree.unlock(locked)
    assert evict_all(tree) == []
    tree.unlock(locked)
    assert evict_all(tree) == [locked, parent]


def test_a_pin_holds_until_its_time_and_then_the_leaf_has_its_old_place(tree: Tree, seconds: Seconds) -> None:
    pinned, ever, other = (tree.insert("red", [token]).node for token in (1, 2, 3))
    tree.pin(pinned, 10.0)
    tree.pin(ever, math.inf)
    assert tree.oldest_evictable() is other
    seconds.now = 9.9
    assert tree.oldest_evictable() is other
    seconds.now = 10.0
    assert list(tree.evictable()) == [pinned, other]
    assert evict_all(tree) == [pinned, other]
    tree.pin(ever, None)
    assert evict_all(tree) == [ever]


def test_pins_that_are_renewed_again_and_again_take_no_more_memory(tree: Tree) -> None:
    nodes = [tree.insert("red", [token]).node for token in range(3)]
    for until in range(1, 3000):
        tree.pin(nodes[until % 3], float(until + 10))
        tree.oldest_evictable()
    assert len(tree._order._pins) < 100
    tree.check()


def test_leaves_that_are_removed_out_of_order_leave_nothing_behind(tree: Tree) -> None:
    tree.insert("red", [0])
    for token in range(1, 3000):
        tree.remove(tree.insert("red", [token]).node)
    assert len(tree._order._recency) < 100
    tree.check()


def test_turns_of_a_conversation_that_are_no_leaves_any_more_are_not_queued_for_long(tree: Tree) -> None:
    for num_tokens in range(1, 1000):
        tree.insert("red", range(num_tokens))
    assert len(tree._order._recency) < 200
    tree.check()
