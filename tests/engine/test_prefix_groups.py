"""Prefix groups are true, and worth their while; rows of a step may stand in any order."""

import itertools
from collections.abc import Hashable, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.engine.conftest import MakeHarness, prompt_of
from vmmkv_server.engine.attention import AttentionMetadata, CachedAttention
from vmmkv_server.engine.features import prefix_groups
from vmmkv_server.engine.features.prefix_groups import Prompt, SortedPrompts
from vmmkv_server.engine.group_tensors import MAX_GROUPS, GroupTensors, PrefixGroup
from vmmkv_server.engine.request import Slots
from vmmkv_server.engine.uploads import Uploads


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Everything is worth sharing."""
    monkeypatch.setattr(prefix_groups, "MIN_COMMON", 1)
    monkeypatch.setattr(prefix_groups, "MIN_SAVED", 1)


def prompts_of(tokens: Sequence[Sequence[int]], namespaces: Sequence[Hashable] = ()) -> list[Prompt]:
    spaces = namespaces or [None] * len(tokens)
    return [Prompt.of(space, np.array(each, np.int32)) for space, each in zip(spaces, tokens, strict=True)]


def groups_of(prompts: Sequence[Prompt]) -> list[PrefixGroup]:
    batch = SortedPrompts()
    for index, prompt in enumerate(prompts):
        batch.add(index, prompt)
    return batch.groups()


def plain(groups: Sequence[PrefixGroup]) -> list[tuple[list[int], int]]:
    return [(group.members.tolist(), group.num_common) for group in groups]


def num_common(*tokens: Sequence[int]) -> int:
    return sum(1 for _ in itertools.takewhile(lambda column: len(set(column)) == 1, zip(*tokens, strict=False)))


def assert_true(groups: Sequence[PrefixGroup], tokens: Sequence[Sequence[int]], namespaces: Sequence[Hashable] = ()) -> None:
    members = [member for group in groups for member in group.members]
    assert len(set(members)) == len(members), "no request is in two groups"
    assert [group.saved for group in groups] == sorted((group.saved for group in groups), reverse=True)
    for group in groups:
        assert len(group.members) > 1
        assert group.num_common == num_common(*(tokens[member] for member in group.members)) > 0
        assert len({namespaces[member] for member in group.members} if namespaces else {None}) == 1


def most_saved(tokens: Sequence[Sequence[int]]) -> int:
    """By all ways to cut the sorted prompts."""
    order = sorted(tokens)
    best = [0]
    for end in range(1, len(order) + 1):
        best.append(max(best[begin] + (end - begin - 1) * num_common(*order[begin:end]) for begin in range(end)))
    return best[-1]


@pytest.mark.parametrize("ids", [[0], [0, 1], [0, 1, 2], [1, 255, 256, 65_536, 2**24, 2**31 - 1]], ids=len)
def test_groups_are_true_and_save_as_much_as_any_cut(small: None, ids: list[int]) -> None:
    """Ids sort by their value, whatever their bytes."""
    random = np.random.default_rng(len(ids))
    for _ in range(400):
        tokens = [random.choice(ids, size=random.integers(1, 9)).tolist() for _ in range(random.integers(0, 8))]
        groups = groups_of(prompts_of(tokens))
        assert_true(groups, tokens)
        assert sum(group.saved for group in groups) >= most_saved(tokens), tokens


def test_namespaces_are_never_grouped(small: None) -> None:
    random = np.random.default_rng(0)
    every: list[Hashable] = [None, "None", "a", "b"]
    for _ in range(100):
        tokens = [random.integers(2, size=random.integers(1, 9)).tolist() for _ in range(10)]
        spaces = [every[index] for index in random.integers(4, size=10)]
        groups = groups_of(prompts_of(tokens, spaces))
        assert_true(groups, tokens, spaces)
        for space in every:
            own = [each for each, its in zip(tokens, spaces, strict=True) if its == space]
            found = sum(group.saved for group in groups if spaces[group.members[0]] == space)
            assert len(groups) == MAX_GROUPS or found >= most_saved(own)


def test_only_the_groups_that_save_most_are_kept(small: None) -> None:
    tokens = [[letter] * (5 + letter) for letter in range(12) for _ in range(2)]
    groups = groups_of(prompts_of(tokens))
    assert [group.num_common for group in groups] == [5 + letter for letter in range(11, 11 - MAX_GROUPS, -1)]


def test_what_saves_too_little_is_not_shared() -> None:
    long, short = prompt_of(9000), prompt_of(200)
    assert groups_of(prompts_of([[*long, 1], [*long, 2]])) == []
    assert plain(groups_of(prompts_of([[*long, 1], [*long, 2], long]))) == [([2, 0, 1], 9000)]
    assert groups_of(prompts_of([[*short, index] for index in range(100)])) == []


def test_groups_after_any_changes_are_those_of_a_new_batch(small: None) -> None:
    random = np.random.default_rng(5)
    batch, there = SortedPrompts(), dict[int, Prompt]()
    for _ in range(600):
        slot = int(random.integers(12))
        if there.pop(slot, None) is not None:
            batch.remove(slot)
        else:
            tokens, space = random.integers(3, size=random.integers(1, 9)).tolist(), ("a", "b")[random.integers(2)]
            (there[slot],) = prompts_of([tokens], [space])
            batch.add(slot, there[slot])
        fresh = SortedPrompts()
        for other, prompt in there.items():
            fresh.add(other, prompt)
        assert plain(batch.groups()) == plain(fresh.groups())


@pytest.mark.parametrize("step", [0, 1])
def test_many_sharers_beside_fewer_that_share_more(step: int) -> None:
    """As many as may run; each goes on a little from the one before, or all have the same in common but for the last two."""
    text = prompt_of(20_000)
    tokens = [[*text[: 400 + index * step], 500 + index] for index in range(1200)] + [text, text]
    groups = groups_of(prompts_of(tokens))
    assert_true(groups, tokens)
    assert sum(group.saved for group in groups) >= 1200 * 400 + 19_000


def test_where_nothing_is_shared_prompts_are_looked_at_no_further(monkeypatch: pytest.MonkeyPatch) -> None:
    compared = 0

    class Counted(np.ndarray[Any, Any]):
        def __ne__(self, other: object) -> Any:
            nonlocal compared
            compared += 1
            return super().__ne__(other)

    prompts = [
        Prompt(None, each.tokens.view(Counted), each.key) for each in prompts_of([prompt_of(5000, seed) for seed in range(40)])
    ]
    assert groups_of(prompts) == [] and compared == 0
    alike = [prompts[0], Prompt(None, prompts[0].tokens, prompts[0].key)]
    groups_of([*prompts, *alike])
    assert compared == 2, "neighbours that begin alike"


def test_the_device_is_told_where_groups_stand() -> None:
    device = torch.device("cpu")
    placed, uploads = GroupTensors(12, device), Uploads(device)
    placed.upload(np.array([7, 3, 9, 4, 2, 5]), [PrefixGroup(np.arange(3), 600), PrefixGroup(np.arange(2), 300)], uploads)
    shared = placed.tensors(6)
    assert shared.starts_G1.tolist() == [0, 3, *[5] * (MAX_GROUPS - 1)]
    assert shared.leaders_G[:2].tolist() == [7, 4]
    assert shared.num_rows_G.tolist() == [600, 300, *[0] * (MAX_GROUPS - 2)]
    assert shared.firsts_B.tolist() == [600, 600, 600, 300, 300, 0]
    for tensor in (shared.starts_G1, shared.leaders_G, shared.num_rows_G):
        assert tensor.data_ptr() % 16 == 0 and tensor.dtype == torch.int32
    placed.upload(np.zeros(0, np.int64), [], uploads)
    assert uploads.count == 1 and not placed.are_any, "a step without groups looks at none of it"


def test_groups_are_of_the_rows_that_decode_beside_chunks_too(
    small: None, harness: MakeHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[list[int]] = []

    def begin(attention: CachedAttention, step: AttentionMetadata) -> None:
        if step.query_starts is not None and (shared := step.shared) is not None:
            num_grouped = int(shared.starts_G1[-1])
            assert shared.leaders_G[0] == step.slots_B[0]
            assert (step.query_starts.diff()[:num_grouped] == 1).all() and not shared.firsts_B[num_grouped:].any()
            seen.append(shared.firsts_B[:num_grouped].tolist())
        begins(attention, step)

    begins = CachedAttention.begin
    monkeypatch.setattr(CachedAttention, "begin", begin)
    one = harness(ours=True, share=True, step_tokens=20, slots=7)
    monkeypatch.setattr(one.runner, "has_prefix_groups", True)
    asks = {str(index): [*prompt_of(30), *prompt_of(25, index + 1)] for index in range(6)}
    one.serve(asks, 12)
    one.assert_expected(asks, 12)
    assert max(map(len, seen)) >= 3 and all(firsts == [30] * len(firsts) for firsts in seen)


@pytest.mark.parametrize("lookahead", [0, 2])
def test_rows_in_the_order_of_groups_give_the_same_tokens(
    small: None, harness: MakeHarness, monkeypatch: pytest.MonkeyPatch, lookahead: int
) -> None:
    """Members of a group stand side by side, each answer goes to its request, and groups are sought when rows change."""
    stems = [prompt_of(30), prompt_of(30, 1)]
    asks = {str(index): [*stems[index % 2], *prompt_of(index // 2 * 3, index)] for index in range(9)}
    plain = harness(ours=True, share=True, lookahead=lookahead, slots=7)
    for index, (name, prompt) in enumerate(asks.items()):
        plain.ask(name, prompt, 10 + 3 * index, temperature=1.0, seed=index)
    plain.run()
    placed: list[tuple[Slots, list[PrefixGroup]]] = []
    searched = 0

    def searching(prompts: SortedPrompts) -> list[PrefixGroup]:
        nonlocal searched
        searched += 1
        return search(prompts)

    def share(slots: Slots, groups: list[PrefixGroup]) -> None:
        table = one.engine.scheduler.table
        row = 0
        for group in groups:
            owners = [table.requests[slot] for slot in slots[row : row + len(group.members)]]
            assert group.num_common == num_common(*(owner.ask.prompt for owner in owners if owner is not None))
            row += len(group.members)
        placed.append((slots, groups))

    search = SortedPrompts.groups
    monkeypatch.setattr(SortedPrompts, "groups", searching)
    one = harness(ours=True, share=True, lookahead=lookahead, slots=7)
    monkeypatch.setattr(one.runner, "has_prefix_groups", True)
    monkeypatch.setattr(one.runner, "set_prefix_groups", share)
    for index, (name, prompt) in enumerate(asks.items()):
        one.ask(name, prompt, 10 + 3 * index, temperature=1.0, seed=index)
    one.run()
    assert {name: one.tokens(name) for name in asks} == {name: plain.tokens(name) for name in asks}
    assert max(len(groups) for _, groups in placed) == 2
    assert any(slots.tolist() != sorted(slots.tolist()) for slots, _ in placed), "the order is another than that of admission"
    assert searched == len(placed) <= 2 * len(asks), "once for each batch of other rows, not once a step"
