"""Requests of a decode step that share a prefix, so that attention reads it once for all of them (cascade attention).

    sorted by prompt     | common ............ | own of a |
                         | common ............ | own of b ....... |      -> rows [0, common) of a, the leader, for both,
                         | common ............ |                           and each its own rows from `common` on
                         | other .... |                                  -> in no group

Groups are found by the tokens alone, wherever the rows lie. A leader is a row of the batch, so it lives as long as the step.
When it leaves, there is another batch. Members of a group stand side by side. Legend: B rows of the batch, G groups.
"""

import itertools
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
import torch

from vmmkv.server.engine.attention import SharedPrefixes
from vmmkv.server.engine.kv_backend import Slots, TokenIds
from vmmkv.server.engine.request import RequestTable, num_common
from vmmkv.server.engine.uploads import Uploads, aligned_parts, packed_size

MAX_GROUPS: Final = 8
_MIN_COMMON: Final = 256
"""Tokens of a common prefix below which a group is not faster."""
_MIN_SAVED: Final = 16_384
"""Rows that a group must save a step, for two more launches a layer: see docs/performance.md."""


class PrefixGroup(NamedTuple):
    """Requests with a common prefix: their indices among those compared, and the number of common tokens."""

    members: list[int]
    num_common: int

    @property
    def saved(self) -> int:
        """Rows that a step reads less."""
        return (len(self.members) - 1) * self.num_common


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


def groups_of(prompts: Sequence[Prompt]) -> list[PrefixGroup]:
    """The groups that save most, the largest saving first, at most MAX_GROUPS of them.

    Cost: host work by the tokens that neighbours in sorted order have in common; nothing to speak of where none have.
    """
    order = sorted(range(len(prompts)), key=lambda index: (repr(prompts[index].namespace), prompts[index].key))
    commons = [_num_common(prompts[one], prompts[other]) for one, other in itertools.pairwise(order)]
    found: list[PrefixGroup] = []
    begin = 0
    for end in range(1, len(order) + 1):
        if end == len(order) or not commons[end - 1]:
            if end - begin > 1:
                found += _best(order[begin:end], commons[begin : end - 1])
            begin = end
    found = [group for group in found if group.saved >= _MIN_SAVED]
    return sorted(found, key=lambda group: -group.saved)[:MAX_GROUPS]


def _best(members: list[int], commons: list[int]) -> list[PrefixGroup]:
    """A run of neighbours, cut so that the groups save most: best[j] of all cuts of the members before bounds[j].

    Cost: numpy calls by the places where what neighbours have in common changes; no recursion, which could go as deep.
    """
    common = np.array(commons, np.int64)
    may_cut = np.ones(len(common), np.bool_)  # within a run of equals a cut saves less than at its ends
    may_cut[1:-1] = (common[1:-1] != common[:-2]) | (common[1:-1] != common[2:])
    bounds = np.concatenate([[0], 1 + np.flatnonzero(may_cut), [len(members)]])
    best, begins = np.zeros(len(bounds), np.int64), np.zeros(len(bounds), np.int64)
    least = np.full(len(bounds), np.iinfo(np.int32).max, np.int64)
    """By where a group begins: what its members have in common."""
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


def _num_common(one: Prompt, other: Prompt) -> int:
    least = 4 * _MIN_COMMON
    if one.namespace != other.namespace or len(one.key) < least or one.key[:least] != other.key[:least]:
        return 0
    return num_common(one.tokens, other.tokens)


class BatchOrder:
    """The order of a batch's rows, with the members of prefix groups side by side. It stays until other requests are in it."""

    def __init__(self, table: RequestTable) -> None:
        self._table = table
        self._known: tuple[Slots, Slots, Slots] | None = None
        """Slots as they were scheduled, their epochs, and the slots in order."""
        self._prompts: dict[int, tuple[int, Prompt]] = {}
        """By slot: the epoch, and its prompt as it is compared."""

    def arrange(self, slots: Slots, set_groups: Callable[[Slots, Sequence[PrefixGroup]], None]) -> Slots:
        """The slots in order. `set_groups` is called with a new order and its groups."""
        epochs = self._table.epochs[slots]
        if self._known is None or not (np.array_equal(self._known[0], slots) and np.array_equal(self._known[1], epochs)):
            groups = groups_of([self._prompt_in(slot) for slot in slots.tolist()])
            members = [member for group in groups for member in group.members]
            others = np.ones(len(slots), np.bool_)
            others[members] = False
            ordered = np.concatenate([slots[members], slots[others]])
            self._known = None  # in case `set_groups` raises
            set_groups(ordered, groups)
            self._known = slots, epochs, ordered
        return self._known[2]

    def _prompt_in(self, slot: int) -> Prompt:
        epoch = int(self._table.epochs[slot])
        known = self._prompts.get(slot)
        if known is None or known[0] != epoch:
            request = self._table.requests[slot]
            assert request is not None, "no request runs there"
            known = self._prompts[slot] = epoch, Prompt.of(request.namespace, request.prompt)
        return known[1]


class GroupTensors:
    """The groups of the next batch, on the device, at addresses that do not change."""

    def __init__(self, max_rows: int, device: torch.device) -> None:
        self._sizes = MAX_GROUPS + 1, MAX_GROUPS, MAX_GROUPS, max_rows
        self._packed = torch.zeros(packed_size(self._sizes), dtype=torch.int32, device=device)

    def tensors(self, num_rows: int) -> SharedPrefixes:
        """Of a batch of so many rows."""
        starts_G1, leaders_G, num_rows_G, firsts_B = aligned_parts(self._packed, self._sizes)
        return SharedPrefixes(starts_G1=starts_G1, leaders_G=leaders_G, num_rows_G=num_rows_G, firsts_B=firsts_B[:num_rows])

    def upload(self, slots: Slots, groups: Sequence[PrefixGroup], uploads: Uploads) -> None:
        """The first rows of the batch, whose slots these are, are the members of the first group, then of the next."""
        packed = np.zeros(len(self._packed), np.int32)
        starts, leaders, num_rows, firsts = aligned_parts(packed, self._sizes)
        begin = 0
        for index, group in enumerate(groups):
            end = begin + len(group.members)
            leaders[index], num_rows[index] = slots[begin], group.num_common
            firsts[begin:end] = group.num_common
            starts[index + 1 :] = begin = end
        uploads.into(self._packed, packed)
