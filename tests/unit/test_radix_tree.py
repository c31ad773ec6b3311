"""A radix tree where tests/laws/test_radix_machine.py does not reach: real token ids, long edges, bad input, memory."""

import itertools
import time
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import pytest

from vmmkv.prefix.radix_tree import Piece, RadixTree

Tree: TypeAlias = RadixTree[str]


@pytest.fixture
def tree() -> Tree:
    return RadixTree(itertools.count(1).__next__)


def pieces(prefix: str, *end_tokens: int) -> list[Piece[str]]:
    return [Piece(end, f"{prefix}{end}") for end in end_tokens]


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
    assert not list(tree.nodes())


@pytest.mark.parametrize(
    ("end_tokens", "complaint"), [([0], "wanted after 0"), ([4], "up to 3"), ([2, 1], "out of order"), ([1, 1], "two for one")]
)
def test_pieces_that_do_not_fit_are_refused_before_anything_changes(tree: Tree, end_tokens: list[int], complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        tree.insert("red", [1, 2, 3], pieces("p", *end_tokens))
    assert not list(tree.nodes())
    with pytest.raises(ValueError, match="at least one"):
        tree.insert("red", [])


def test_a_node_that_is_no_leaf_or_in_use_is_not_removed(tree: Tree) -> None:
    upper = tree.insert("red", [1, 2]).node
    lower = tree.insert("red", [1, 2, 3, 4]).node
    tree.lock(lower)
    with pytest.raises(AssertionError, match="no leaf"):
        tree.remove(upper)
    with pytest.raises(AssertionError, match="in use"):
        tree.remove(lower)
    tree.unlock(lower)
    tree.remove(lower)
    with pytest.raises(AssertionError, match="in no tree"):
        tree.remove(lower)
    with pytest.raises(AssertionError, match="not locked"):
        tree.unlock(upper)


def test_leaves_that_are_removed_out_of_order_leave_nothing_behind(tree: Tree) -> None:
    tree.insert("red", [0])
    for token in range(1, 3000):
        tree.remove(tree.insert("red", [token]).node)
    assert tree.eviction.num_entries < 100
    tree.check()
    leaves = [tree.insert("red", [token]).node for token in range(3000)]
    tree.pin("red", [0], float("inf"))
    tree.eviction.oldest()  # looks past it
    for leaf in reversed(leaves):
        tree.remove(leaf)
    assert tree.eviction.num_entries < 100


def test_turns_of_a_conversation_that_are_no_leaves_any_more_are_not_queued_for_long(tree: Tree) -> None:
    for num_tokens in range(1, 1000):
        tree.insert("red", range(num_tokens))
    assert tree.eviction.num_entries < 200
    tree.check()


def test_pins_that_have_ended_go_with_the_prompts_that_are_evicted(tree: Tree) -> None:
    shared = tree.insert("red", [1, 2, 3]).node
    for token in range(100):
        tree.insert("red", [1, 2, 3, token])
        leaf = tree.pin("red", [1, 2, 3, token], time.monotonic() + (1e-9 if token else float("inf")))
        assert leaf is not None
        tree.remove(leaf)
        tree.check()
    assert len(shared.pins) == 1, "that of the first one lives, and keeps what is left"


def test_a_pin_holds_nothing_of_tokens_that_are_not_known_and_ended_ones_go(tree: Tree) -> None:
    node = tree.insert("red", [1]).node
    assert tree.pin("red", [1, *range(100_000)], float("inf")) is node
    (pin,) = node.pins
    assert [len(pin.key[1]), *pin.nodes] == [16, node]
    for token in range(100):
        tree.pin("red", [1, token], time.monotonic() + 1e-9)
    assert len(node.pins) <= 2
    tree.check()
    tree.unpin("red", [1, *range(100_000)])
    tree.remove(node)
    tree.check()
