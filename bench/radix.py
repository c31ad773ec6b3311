"""The radix tree on the host: what finding, inserting and evicting a prompt costs, and the bytes of a node, by its size.

Conversations of TURNS turns: one of a few system prompts, which all conversations share, then turns that are nobody else's.
Each turn is inserted when it ends, with a piece for every 16 tokens, as an engine does it; a prompt is a whole
conversation so far, as one int32 array. A conversation is as long in a tree of a million nodes as in one of a thousand, so
all figures should be the same for all sizes but for the processor's caches: of a large tree, nothing is in them.

Python's garbage collector is off while a tree grows, and on while it is measured.
"""

import gc
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Final, TypeVar

import numpy as np
import numpy.typing as npt

from bench.report import Report
from bench.rows import Row
from bench.settings import Settings
from bench.timing import Summary, WrongNumbers, exact, now_us, summarize
from vmmkv.prefix.radix_tree import TOKEN_BYTES, Node, Piece, RadixTree

SUITE: Final = "prefix"
SIZES: Final = (1_000, 10_000, 100_000, 1_000_000)
SIZES_BESIDE_A_GPU: Final = SIZES[:3]
"""The largest takes longer than all else, and no GPU: it is measured on a machine without one."""
SIZES_QUICK: Final = SIZES[:2]
TURNS: Final = 10
TURN_TOKENS: Final = (16, 113)
"""From 16 to 112: a question and a short answer; 64 on average."""
SYSTEM_TOKENS: Final = (200, 500, 1000, 2000)
PIECE_TOKENS: Final = 16
"""Rows of Llama-3.1-8B in a page, and of a block of most block tables."""

_VOCABULARY: Final = 128_256
_MOST_CHECKED: Final = 50_000
"""Nodes: to recount more takes longer than to measure."""
_LEAST_MEASURED_BYTES: Final = 4 << 20
"""Of growth of the process: below it, a page of the allocator's more or less is no noise any more."""

_Answer = TypeVar("_Answer")


def num_steps(settings: Settings) -> int:
    """How often `begin` is told."""
    return len(_sizes(settings))


def run(settings: Settings, report: Report) -> None:
    """Every size. Raises WrongNumbers if the tree does not find what it was told."""
    with report.progress(SUITE, num_steps(settings)) as begin:
        for row in measure(settings, begin):
            report.add(row)


def measure(settings: Settings, begin: Callable[[str], None]) -> Iterator[Row]:
    """The rows of one tree that grows from size to size."""
    talks = Talks(max(_sizes(settings)) // TURNS, settings.seed)
    tree: RadixTree[int] = RadixTree(itertools.count().__next__)
    empty_bytes = _resident_bytes()
    num_talks = 0
    for size in _sizes(settings):
        workload = f"a tree of {size:,} nodes"
        begin(workload)
        _grow(tree, talks, range(num_talks, num_talks := size // TURNS))
        # Before the samples, whose prompts and figures take memory as well.
        yield from _memory_rows(tree, _resident_bytes() - empty_bytes, workload)
        probe = Probe(tree, talks, num_talks=num_talks, num_samples=100 if settings.quick else 2000)
        for metric, samples_us in probe.measure().items():
            yield _row(workload, metric, "us", summarize(samples_us))


class Talks:
    """What is said in `num_talks` conversations: all of it at random, and the same again for the same seed."""

    def __init__(self, num_talks: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        # Turns are slices of one text: a million random arrays would take longer than what is measured.
        self._text = random.integers(0, _VOCABULARY, 1 << 20, dtype=np.int32)
        self._systems = [random.integers(0, _VOCABULARY, count, dtype=np.int32) for count in SYSTEM_TOKENS]
        self._begins = random.integers(0, len(self._text) - TURN_TOKENS[1], (num_talks, TURNS), dtype=np.int32)
        self._counts = random.integers(*TURN_TOKENS, (num_talks, TURNS), dtype=np.int32)
        self._random = random

    def prompt(self, talk: int, num_turns: int, *more: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
        """The system prompt, so many turns, and what comes then."""
        begins, counts = (of[talk, :num_turns].tolist() for of in (self._begins, self._counts))
        turns = [self._text[begin : begin + count] for begin, count in zip(begins, counts, strict=True)]
        return np.concatenate((self._systems[talk % len(self._systems)], *turns, *more))

    def news(self) -> npt.NDArray[np.int32]:
        """A turn that no conversation has."""
        turn = self._random.integers(0, _VOCABULARY, int(self._random.integers(*TURN_TOKENS)), dtype=np.int32)
        turn[0] += _VOCABULARY
        return turn

    def pick(self, num_talks: int, count: int) -> list[int]:
        """So many of the first conversations, at random."""
        return [int(talk) for talk in self._random.integers(0, num_talks, count)]


class Probe:
    """Times each operation on a tree of `num_talks` whole conversations, and leaves it so, but for edges that were split."""

    def __init__(self, tree: RadixTree[int], talks: Talks, *, num_talks: int, num_samples: int) -> None:
        self._tree = tree
        self._talks = talks
        self._num_talks = num_talks
        self._num_samples = num_samples

    def measure(self) -> dict[str, list[float]]:
        """By metric, the microseconds of each sample."""
        gc.collect()  # what has come while it was off is not for the first sample to look at
        gc.enable()
        samples: dict[str, list[float]] = {
            "match, next turn": self._matches(),
            "match, next turn, from a list": self._matches(from_list=True),
            "match, new conversation": self._matches(num_turns=0),
        }
        samples |= self._inserts()
        samples |= self._evictions()
        return samples

    def _matches(self, num_turns: int = TURNS, *, from_list: bool = False) -> list[float]:
        samples_us = []
        for talk in self._talks.pick(self._num_talks, self._num_samples):
            prompt = self._talks.prompt(talk, num_turns, news := self._talks.news())
            tokens = prompt.tolist() if from_list else prompt
            match, took_us = _timed(lambda tokens=tokens: self._tree.match(None, tokens))  # type: ignore[misc]
            if match.num_tokens != len(prompt) - len(news):
                raise WrongNumbers(f"{match.num_tokens} tokens match, of {len(prompt)} without the last {len(news)}")
            samples_us.append(took_us)
        return samples_us

    def _inserts(self) -> dict[str, list[float]]:
        """A turn more; one that leaves a conversation inside a turn, so that its edge is split; and a leaf that goes again."""
        samples_us: dict[str, list[float]] = {"insert, next turn": [], "insert, splitting": [], "remove": []}
        for talk in self._talks.pick(self._num_talks, self._num_samples):
            self._insert(self._talks.prompt(talk, TURNS), "insert, next turn", samples_us)
        # A conversation each, for an edge is split in a place once; few, for each leaves a node more.
        for talk in range(min(self._num_samples, self._num_talks // 5)):
            prompt = self._talks.prompt(talk, TURNS)[: -TURN_TOKENS[0] // 2]
            self._insert(prompt, "insert, splitting", samples_us)
        return samples_us

    def _insert(self, known: npt.NDArray[np.int32], metric: str, samples_us: dict[str, list[float]]) -> None:
        """What is known and a turn more, with the pieces of that turn, as an engine hands them in; then the leaf is removed."""
        num_known, prompt = len(known), np.concatenate((known, self._talks.news()))
        pieces = _pieces(num_known, len(prompt))
        inserted, took_us = _timed(lambda: self._tree.insert(None, prompt, pieces))
        samples_us[metric].append(took_us)
        if len(inserted.duplicates) or inserted.node.start != num_known or inserted.node.end != len(prompt):
            raise WrongNumbers(f"{inserted}: wanted [{num_known}, {len(prompt)}) and no duplicates")
        _, took_us = _timed(lambda: self._tree.remove(inserted.node))
        samples_us["remove"].append(took_us)

    def _evictions(self) -> dict[str, list[float]]:
        """The oldest goes, while others are used; then it comes again, as the newest, so that the tree stays as large."""
        samples_us: dict[str, list[float]] = {"touch": [], "oldest_evictable": []}
        for talk in self._talks.pick(self._num_talks, self._num_samples):
            match = self._tree.match(None, self._talks.prompt(talk, TURNS))
            used = match.path[-1]
            samples_us["touch"].append(_timed(lambda used=used: self._tree.touch(used))[1])  # type: ignore[misc]
            oldest, took_us = _timed(self._tree.oldest_evictable)
            samples_us["oldest_evictable"].append(took_us)
            if oldest is None or oldest is used:
                raise WrongNumbers(f"{oldest} is to go first, and {used} was used last")
            tokens = np.concatenate([node.tokens for node in oldest.path()])
            self._tree.insert(None, tokens, self._tree.remove(oldest))
        return samples_us


def _grow(tree: RadixTree[int], talks: Talks, new: range) -> None:
    """Whole conversations: a node a turn, and one for each system prompt."""
    gc.disable()
    try:
        for talk in new:
            num_known = 0
            for num_turns in range(TURNS + 1):
                prompt = talks.prompt(talk, num_turns)
                node: Node[int] = tree.insert(None, prompt, _pieces(num_known, len(prompt))).node
                num_known = node.end
    finally:
        gc.enable()
    if tree.num_nodes < _MOST_CHECKED:
        tree.check()


def _pieces(start: int, end: int) -> list[Piece[int]]:
    first = start // PIECE_TOKENS + 1
    return [Piece(number * PIECE_TOKENS, 0) for number in range(first, end // PIECE_TOKENS + 1)]


def _memory_rows(tree: RadixTree[int], grown_bytes: int, workload: str) -> Iterator[Row]:
    """By what the process has grown; where that is too little to say, nothing."""
    if grown_bytes < _LEAST_MEASURED_BYTES:
        return
    num_nodes = tree.num_nodes
    figures = {
        "memory, a node": grown_bytes / num_nodes,
        "memory, a node without its token ids": (grown_bytes - tree.num_tokens * TOKEN_BYTES) / num_nodes,
    }
    for metric, figure in figures.items():
        yield _row(workload, metric, "B", exact(figure, num_nodes))
    yield _row(workload, "pieces, a node", "1", exact(tree.num_pieces / num_nodes, num_nodes))
    yield _row(workload, "tokens, a node", "1", exact(tree.num_tokens / num_nodes, num_nodes))


def _row(workload: str, metric: str, unit: str, summary: Summary) -> Row:
    return Row(suite=SUITE, workload=workload, system="radix tree", metric=metric, unit=unit, summary=summary)


def _sizes(settings: Settings) -> tuple[int, ...]:
    return SIZES_QUICK if settings.quick else SIZES_BESIDE_A_GPU if settings.on_gpu else SIZES


def _timed(call: Callable[[], _Answer]) -> tuple[_Answer, float]:
    began_us = now_us()
    answer = call()
    return answer, now_us() - began_us


def _resident_bytes() -> int:
    """Of this process."""
    pages = int(Path("/proc/self/statm").read_text(encoding="ascii").split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")
