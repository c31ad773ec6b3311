"""Requests that share a prefix, so that attention reads it once for all that decode in a step (cascade attention).

    sorted by prompt     | common ............ | own of a |
                         | common ............ | own of b ....... |      -> rows [0, common) of a, the leader, for both,
                         | common ............ |                           and each its own rows from `common` on
                         | other .... |                                  -> in no group

Groups are found by the tokens alone, wherever the rows lie. A leader is a row of the batch, so it lives as long as the step.
When it leaves, there is another batch. Members of a group stand side by side. Legend: B rows of the batch, G groups.
"""

from array import array
from bisect import bisect_left
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from vmmkv.prefix.radix_tree import num_common
from vmmkv_server.engine.feature import Feature
from vmmkv_server.engine.features import Core
from vmmkv_server.engine.group_tensors import MAX_GROUPS, PrefixGroup
from vmmkv_server.engine.kv_backend import Slots, TokenIds
from vmmkv_server.engine.request import RequestTable
from vmmkv_server.engine.step import Step

MIN_COMMON: Final = 256
"""Tokens of a common prefix below which a group is not faster."""
MIN_SAVED: Final = 16_384
"""Rows that a group must save a step, for two more launches a layer: see docs/performance.md."""

_MAX_BOUNDS: Final = 256
"""Places at which a run of prompts is cut into groups: the time grows by their square."""


class PrefixGroups(Feature):
    """Groups the rows that decode, where the runner's steps can attend to a common prefix as one problem."""

    def __init__(self, core: Core) -> None:
        self._runner, self._memory, self._table = core.runner, core.memory, core.scheduler.table
        self._order = BatchOrder(self._table)

    def launched(self, step: Step) -> None:
        """The members of groups stand side by side."""
        if self._runner.has_prefix_groups and len(step.slots):
            step.slots = self._order.arrange(step.slots, self._runner.set_prefix_groups)
            step.ends, step.epochs = self._memory.lengths[step.slots], self._table.epochs[step.slots]


@dataclass(frozen=True, slots=True)
class Prompt:
    """A prompt in its namespace, as it is sorted and compared."""

    namespace: Hashable
    tokens: TokenIds
    key: bytes

    @classmethod
    def of(cls, namespace: Hashable, tokens: TokenIds) -> "Prompt":
        """Cost: a copy."""
        return cls(namespace, tokens, tokens.astype(">i4").tobytes())


class SortedPrompts:
    """The prompts of a batch in sorted order, and what neighbours have in common; it is changed as requests come and go.

    Cost: a change looks at the prompts that are neighbours then, and moves 24 bytes for each prompt behind it.
    """

    def __init__(self) -> None:
        self._prompts: dict[int, Prompt] = {}
        """Prompt of each slot."""
        self._order: list[tuple[str, bytes, int]] = []
        """Namespace, key and slot of each prompt, sorted."""
        self._slots = array("q")
        """Slots in that order."""
        self._commons = array("q")
        """Tokens that the prompts [i - 1] and [i] of the order have in common, at [i]; 0 at both ends."""

    def add(self, slot: int, prompt: Prompt) -> None:
        """A request joins the batch."""
        entry = _entry(slot, prompt)
        index = bisect_left(self._order, entry)
        self._prompts[slot] = prompt
        self._order.insert(index, entry)
        self._slots.insert(index, slot)
        self._commons[index : index + 1] = array("q", [self._num_common(index), self._num_common(index + 1)])

    def remove(self, slot: int) -> None:
        """A request leaves the batch. Its neighbours have in common what both had in common with it."""
        index = bisect_left(self._order, _entry(slot, self._prompts.pop(slot)))
        del self._order[index], self._slots[index]
        self._commons[index : index + 2] = array("q", [min(self._commons[index : index + 2])])

    def groups(self) -> list[PrefixGroup]:
        """The groups that save most, the largest saving first, at most MAX_GROUPS of them.

        Cost: numpy calls over all prompts, and `_best` for each run of neighbours that may save enough.
        """
        commons, slots = np.array(self._commons), np.array(self._slots)
        ends = np.flatnonzero(commons == 0)
        """Runs of prompts with a common prefix are [ends[i], ends[i + 1])."""
        if len(ends) < 2:
            return []
        most = np.maximum.reduceat(commons, ends[:-1]) * (np.diff(ends) - 1)
        found: list[PrefixGroup] = []
        for run in np.flatnonzero(most >= MIN_SAVED).tolist():
            begin, end = ends[run], ends[run + 1]
            found += _best(slots[begin:end], commons[begin + 1 : end])
        found = [group for group in found if group.saved >= MIN_SAVED]
        return sorted(found, key=lambda group: -group.saved)[:MAX_GROUPS]

    def _num_common(self, index: int) -> int:
        """Number of first tokens that the prompts [index - 1] and [index] have in common; 0 for less than MIN_COMMON."""
        if not 0 < index < len(self._order):
            return 0
        one, other = (self._prompts[slot] for slot in self._slots[index - 1 : index + 1])
        least = 4 * MIN_COMMON
        if one.namespace != other.namespace or len(one.key) < least or one.key[:least] != other.key[:least]:
            return 0
        return num_common(one.tokens, other.tokens)


def _entry(slot: int, prompt: Prompt) -> tuple[str, bytes, int]:
    return repr(prompt.namespace), prompt.key, slot


def _best(members: Slots, common: Slots) -> list[PrefixGroup]:
    """A run of neighbours, cut so that the groups save most: best[j] of all cuts of the members before bounds[j].

    Cost: numpy calls by the places where what neighbours have in common changes, of which _MAX_BOUNDS or so are tried; no
    recursion, which could go as deep.
    """
    least_common = int(common.min())
    if (common - least_common).sum() <= least_common:  # all that a cut could gain is no more than what it loses
        return [PrefixGroup(members, least_common)]
    coarse, bounds = common, _bounds(common)
    while len(bounds) > _MAX_BOUNDS:
        coarse = coarse // 2
        bounds = _bounds(coarse)
    best, begins = np.zeros(len(bounds), np.int64), np.zeros(len(bounds), np.int64)
    least = np.full(len(bounds), np.iinfo(np.int32).max, np.int64)
    """Tokens that the members of a group have in common, by where it begins."""
    for end in range(1, len(bounds)):
        first, last = bounds[end - 1], bounds[end]
        if first:
            least[: end - 1] = np.minimum(least[: end - 1], common[first - 1])
        if last - first > 1:
            least[:end] = np.minimum(least[:end], common[first : last - 1].min())
        saved = best[:end] + (last - bounds[:end] - 1) * least[:end]
        begins[end] = saved.argmax()
        best[end] = saved[begins[end]]
    groups: list[PrefixGroup] = []
    end = len(bounds) - 1
    while end:
        first, last = bounds[begins[end]], bounds[end]
        if last - first > 1:
            groups.append(PrefixGroup(members[first:last], int(common[first : last - 1].min())))
        end = int(begins[end])
    return groups


def _bounds(common: Slots) -> Slots:
    """Places of cuts that may save: within a run of equals a cut saves less than at its ends."""
    may_cut = np.ones(len(common), np.bool_)
    may_cut[1:-1] = (common[1:-1] != common[:-2]) | (common[1:-1] != common[2:])
    return np.concatenate([[0], 1 + np.flatnonzero(may_cut), [len(common) + 1]])


class BatchOrder:
    """The order of a batch's rows, with the members of prefix groups side by side. It stays until other requests are in it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._known: tuple[Slots, Slots, Slots] | None = None
        """Slots as they were scheduled, their epochs, and the slots in order."""
        self._prompts = SortedPrompts()
        self._epochs_S = np.zeros(len(table.epochs), np.int32)
        """Epoch whose prompt is in `_prompts`, by slot; 0 for none."""

    def arrange(self, slots: Slots, set_groups: Callable[[Slots, Sequence[PrefixGroup]], None]) -> Slots:
        """The slots in order. `set_groups` is called with a new order and its groups."""
        epochs = self._table.epochs.take(slots)
        if self._known is None or not (np.array_equal(self._known[0], slots) and np.array_equal(self._known[1], epochs)):
            self._update(slots, epochs)
            groups = self._prompts.groups()
            members = np.concatenate([slots[:0], *(group.members for group in groups)])
            is_member_S = np.zeros(len(self._epochs_S), np.bool_)
            is_member_S[members] = True
            ordered = np.concatenate([members, slots[~is_member_S.take(slots)]])
            self._known = None  # in case `set_groups` raises
            set_groups(ordered, groups)
            self._known = slots, epochs, ordered
        return self._known[2]

    def _update(self, slots: Slots, epochs: Slots) -> None:
        """Add the prompts that have come since the last batch, and remove those that have gone."""
        now_S = np.zeros_like(self._epochs_S)
        now_S[slots] = epochs
        for slot in np.flatnonzero(now_S != self._epochs_S).tolist():
            if self._epochs_S[slot]:
                self._prompts.remove(slot)
            if now_S[slot]:
                request = self._table.requests[slot]
                assert request is not None, "no request runs there"
                # Rows that are dropped are shared with no other.
                self._prompts.add(slot, Prompt.of(request.namespace, request.prompt[: None if request.shape.keeps_rows else 0]))
            self._epochs_S[slot] = now_S[slot]
