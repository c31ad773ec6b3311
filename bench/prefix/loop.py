"""A serving loop that is the same for every system: admit, compute prompts in chunks beside decode rows, decode by graphs.

    admit, reserve ── launch step n ── pump ── confirm step n - 1 ── admit, reserve ── launch step n + 1 ...
                      |<------------- the device runs step n ------------->|

The host is a step ahead of what it reads, so attaching and mapping for the next step happen while the device works. Token ids
stay on the device: a step reads its tokens where the step before has written them. They come back through pinned memory.

Legend: N new tokens, B sequences, S slots, T positions, E hidden size, R requests.
"""

import itertools
from collections import Counter, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np
import torch

from bench.prefix.addressing import NOBODY, NewRows
from bench.prefix.model import Model
from bench.prefix.systems import Indices, System, TokenIds, calls_since
from bench.timing import capture, now_us
from vmmkv.units import round_up

_SLACK_SHARE: Final = 0.5
"""How much of the last step's time the pump is given while the next one runs."""
_FIRST_STEP_US: Final = 2_000.0
"""What a step is taken for before one of its kind has been seen."""
_LEAST_BATCH: Final = 16
_ALIGNED_ELEMENTS: Final = 4
"""16 bytes of int32: kernels are compiled anew for pointers that are not aligned so."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """A prompt, and how many tokens it wants."""

    prompt: TokenIds
    out: int

    @property
    def max_tokens(self) -> int:
        """All tokens; the last has no row."""
        return len(self.prompt) + self.out


@dataclass(slots=True, kw_only=True, eq=False)
class _Running:
    index: int
    request: Request
    slot: int
    length: int
    """Rows launched, and those that were attached."""
    num_launched: int = 0
    """Output tokens that launched steps give."""
    words: list[int] = field(default_factory=list)
    """Output tokens confirmed."""

    @property
    def prompt_left(self) -> int:
        return max(0, len(self.request.prompt) - self.length)

    def tokens(self) -> TokenIds:
        """Of all rows that are confirmed."""
        said = np.asarray(self.words[: max(0, len(self.words) - 1)], np.int32)
        return np.concatenate([self.request.prompt, said])


@dataclass(slots=True, kw_only=True)
class _Step:
    """Launched, and not yet confirmed. `speaking` are the sequences to which it gives a token each, in the order of `words`."""

    speaking: list[_Running]
    words: torch.Tensor
    is_decode: bool
    done: torch.cuda.Event | None


@dataclass(slots=True, kw_only=True)
class Outcome:
    """What a run of requests came to."""

    total_us: float = 0.0
    first_us: list[float]
    """From the run's beginning until each request's first token was read."""
    words: list[list[int]]
    outputs: dict[int, torch.Tensor] = field(default_factory=dict)
    """[E] normed outputs behind each request's first token: what shows whether its prefix was right."""
    error: float = 0.0
    """By how much of their length they are off, at most; for whoever compares them."""
    held_bytes: int = 0
    """At the peak: sequences and the tree together."""
    used_bytes: int = 0
    """At the peak: running sequences."""
    attach_us: list[float] = field(default_factory=list)
    """In driver calls, of each attachment."""
    methods: Counter[str] = field(default_factory=Counter)
    hit_tokens: int = 0
    prompt_tokens: int = 0
    calls: Counter[str] = field(default_factory=Counter)


class Loop:
    """Runs requests over a system. Not for two runs at once.

    Cost: graphs of all batch sizes are captured at once, some 100 ms each; the first time kernels are compiled.
    Raises: ValueError if the system has fewer slots than the largest batch has rows: its workspace is for one row a slot.
    """

    def __init__(self, model: Model, system: System, *, token_budget: int, most_sequences: int) -> None:
        if (largest := batch_sizes(most_sequences)[-1]) > system.num_slots:
            raise ValueError(f"{system.num_slots} slots: batches of up to {largest} rows want as many")
        self._model, self._system, self._device = model, system, model.device
        self._on_gpu = model.device.type == "cuda"
        self._token_budget, self._most_sequences = token_budget, most_sequences
        size = (1 + system.num_slots, model.max_tokens + 1)
        self._tokens_ST = torch.zeros(size, dtype=torch.int32, device=self._device)
        self._decoders: dict[int, _Decoder] = {}
        self._decoding: list[_Running] = []
        """Whose slots the decoder of their number has."""
        self._running: list[_Running] = []
        self._step_us: dict[bool, float] = {}
        """What the last decode step took, and the last of the others."""
        self._confirmed_us = 0.0
        if self._on_gpu:
            for num_rows in batch_sizes(most_sequences):
                self._warm(num_rows)
                self._decoders[num_rows] = _Decoder(model, system, self._tokens_ST, num_rows)

    def run(self, requests: Sequence[Request], *, first_alone: bool = False) -> Outcome:
        """All requests, there at once. With `first_alone` the others are admitted when the first one's prompt can be shared."""
        outcome = Outcome(first_us=[0.0] * len(requests), words=[[] for _ in requests])
        waiting = deque(enumerate(requests))
        calls = dict(self._system.driver_calls())
        began_us = now_us()
        before: _Step | None = None
        while waiting or self._running or before:
            if not first_alone or outcome.first_us[0]:
                self._admit(waiting, outcome, self._most_sequences)
            elif len(waiting) == len(requests):
                self._admit(waiting, outcome, 1)
            step = self._launch(outcome) if self._running else None
            if step is not None:
                step_us = self._step_us.get(step.is_decode, _FIRST_STEP_US)
                self._system.map_ahead(_SLACK_SHARE * step_us, step_us)
            if before is not None:
                self._confirm(before, outcome, began_us)
            before = step
        outcome.total_us = now_us() - began_us
        outcome.calls = calls_since(calls, self._system)
        return outcome

    # what the host does while a step runs

    def _admit(self, waiting: "deque[tuple[int, Request]]", outcome: Outcome, most: int) -> None:
        """Attach as many as the next step can begin to compute, and at most so many."""
        room = self._token_budget - sum(max(1, running.prompt_left) for running in self._running)
        while waiting and room > 0 and len(self._running) < self._most_sequences and most > 0:
            index, request = waiting.popleft()
            spent_us = self._system.driver_us()
            attached = self._system.attach(request.prompt, request.max_tokens)
            outcome.attach_us.append(self._system.driver_us() - spent_us)
            outcome.methods[attached.method] += 1
            outcome.hit_tokens += attached.num_tokens
            outcome.prompt_tokens += len(request.prompt)
            running = _Running(index=index, request=request, slot=attached.slot, length=attached.num_tokens)
            self._tokens_ST[attached.slot, : len(request.prompt)] = self._upload(torch.from_numpy(request.prompt))
            self._running.append(running)
            room -= running.prompt_left
            most -= 1

    def _confirm(self, step: _Step, outcome: Outcome, began_us: float) -> None:
        """Wait for a step; what its tokens end, or make known, becomes so."""
        if step.done is not None:
            step.done.synchronize()
        at_us = now_us()
        self._step_us[step.is_decode] = at_us - max(began_us, self._confirmed_us)
        self._confirmed_us = at_us
        held_bytes, used_bytes = self._system.memory()
        outcome.held_bytes, outcome.used_bytes = max(outcome.held_bytes, held_bytes), max(outcome.used_bytes, used_bytes)
        for running, word in zip(step.speaking, step.words.tolist(), strict=True):
            running.words.append(word)
            if len(running.words) == 1:
                outcome.first_us[running.index] = at_us - began_us
                self._system.insert(running.slot, running.request.prompt)
            if len(running.words) == running.request.out:
                self._system.finish(running.slot, running.tokens())
                outcome.words[running.index] = running.words

    # launching

    def _launch(self, outcome: Outcome) -> _Step:
        is_decode = all(running.num_launched for running in self._running)
        speaking, words = self._launch_decode() if is_decode else self._launch_mixed(outcome)
        for running in speaking:
            running.num_launched += 1
        self._running = [running for running in self._running if running.num_launched < running.request.out]
        done = None
        if self._on_gpu:
            pinned = torch.empty(words.shape, dtype=words.dtype, pin_memory=True)
            words = pinned.copy_(words, non_blocking=True)
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(torch.cuda.current_stream(self._device))
        else:
            words = words.clone()  # the next step is launched before this one is read
        return _Step(speaking=speaking, words=words, is_decode=is_decode, done=done)

    def _launch_decode(self) -> tuple[list[_Running], torch.Tensor]:
        """A token for each sequence. The device knows from the step before what it needs, unless there are other sequences."""
        running = list(self._running)
        slots, lengths = _array(each.slot for each in running), _array(each.length for each in running)
        self._advance(slots, lengths, np.ones_like(slots))
        # On a CPU no batch is filled up, and so there is a decoder for each number of sequences.
        size = min(size for size in self._decoders if size >= len(running)) if self._on_gpu else len(running)
        if size not in self._decoders:
            self._decoders[size] = _Decoder(self._model, self._system, self._tokens_ST, size)
        decoder = self._decoders[size]
        if self._decoding != running:
            index = np.zeros((2, size), np.int32)
            index[0, len(running) :] = NOBODY
            index[:, : len(running)] = slots, lengths
            decoder.index_2B.copy_(self._upload(torch.from_numpy(index)))
            self._decoding = running
        decoder.launch()
        for each in running:
            each.length += 1
        return running, decoder.words_B[: len(running)]

    def _launch_mixed(self, outcome: Outcome) -> tuple[list[_Running], torch.Tensor]:
        """A token for each sequence that decodes, and chunks of prompts as far as the budget goes."""
        room = self._token_budget
        chosen: list[tuple[_Running, int]] = []
        for each in sorted(self._running, key=lambda each: each.prompt_left > 0):
            count = min(room, max(1, each.prompt_left))
            if count:
                chosen.append((each, count))
                room -= count
        slots, lengths = _array(each.slot for each, _ in chosen), _array(each.length for each, _ in chosen)
        counts = _array(count for _, count in chosen)
        self._advance(slots, lengths, counts)
        starts = np.concatenate([[0], np.cumsum(counts)])
        which = np.repeat(np.arange(len(chosen)), counts)
        positions = lengths[which] + np.arange(starts[-1]) - starts[which]
        speaking_B = np.flatnonzero([count >= each.prompt_left for each, count in chosen])
        parts = (slots[which], positions, slots, lengths + counts, starts, starts[speaking_B + 1] - 1, speaking_B)
        slots_N, positions_N, slots_B, lengths_B, starts_B, last_B, said_B = self._upload_all(parts)
        rows = NewRows(slots_N=slots_N, positions_N=positions_N, slots_B=slots_B, lengths_B=lengths_B, starts=starts_B)
        outputs_BE = self._model.forward(self._tokens_ST[slots_N, positions_N], rows, self._system.addressing, last_B)
        words_B = self._model.next_words(outputs_BE).int()
        self._tokens_ST[slots_B[said_B], lengths_B[said_B]] = words_B
        for each, count in chosen:
            each.length += count
        speaking = [chosen[b][0] for b in speaking_B]
        for row, each in enumerate(speaking):
            if not each.num_launched:
                outcome.outputs[each.index] = outputs_BE[row]
        self._decoding = []
        return speaking, words_B

    def _advance(self, slots: Indices, lengths: Indices, counts: Indices) -> None:
        self._system.reserve(slots, lengths + counts)
        self._system.advance(slots, counts)

    def _upload(self, tensor: torch.Tensor) -> torch.Tensor:
        """In order on the current stream, without waiting for it: which pageable memory would."""
        return tensor.pin_memory().to(self._device, non_blocking=True) if self._on_gpu else tensor

    def _upload_all(self, parts: Sequence[Indices]) -> list[torch.Tensor]:
        """In one copy, as int32, each aligned."""
        ends = np.cumsum([round_up(len(part), _ALIGNED_ELEMENTS) for part in parts])
        packed = np.zeros(ends[-1], np.int32)
        begins = [0, *ends[:-1].tolist()]
        for part, begin in zip(parts, begins, strict=True):
            packed[begin : begin + len(part)] = part
        uploaded = self._upload(torch.from_numpy(packed))
        return [uploaded[begin : begin + len(part)] for part, begin in zip(parts, begins, strict=True)]

    def _warm(self, num_rows: int) -> None:
        """Compile what steps of so many sequences need that are not all decode. Nobody's rows are read or written."""
        starts = torch.arange(0, 2 * num_rows + 1, 2, dtype=torch.int32, device=self._device)
        slots_N = torch.full((2 * num_rows,), NOBODY, dtype=torch.int32, device=self._device)
        positions_N = torch.zeros_like(slots_N)
        slots_B, lengths_B = slots_N[:num_rows], torch.full_like(slots_N[:num_rows], 2)
        rows = NewRows(slots_N=slots_N, positions_N=positions_N, slots_B=slots_B, lengths_B=lengths_B, starts=starts)
        last_B = starts[1:] - 1
        self._model.next_words(self._model.forward(positions_N, rows, self._system.addressing, last_B))


class _Decoder:
    """A decode step of so many rows: on a GPU a graph, which moves its own lengths on."""

    def __init__(self, model: Model, system: System, tokens_ST: torch.Tensor, num_rows: int) -> None:
        self._model, self._addressing, self._tokens_ST = model, system.addressing, tokens_ST
        self.index_2B = torch.zeros(2, num_rows, dtype=torch.int32, device=model.device)
        """Slots, and lengths before the step."""
        self.index_2B[0] = NOBODY
        self.words_B = torch.zeros(num_rows, dtype=torch.int32, device=model.device)
        self._graph = capture(self._step, model.device) if model.device.type == "cuda" else None

    def launch(self) -> None:
        """Queue the step."""
        if self._graph is None:
            self._step()
        else:
            self._graph.replay()

    def _step(self) -> None:
        slots_B, lengths_B = self.index_2B
        ends_B = lengths_B + 1
        rows = NewRows(slots_N=slots_B, positions_N=lengths_B, slots_B=slots_B, lengths_B=ends_B, starts=None)
        tokens_of_B = slots_B.clamp(min=0)
        outputs_BE = self._model.forward(self._tokens_ST[tokens_of_B, lengths_B], rows, self._addressing, None)
        self.words_B.copy_(self._model.next_words(outputs_BE))
        self._tokens_ST[tokens_of_B, ends_B] = self.words_B
        lengths_B.copy_(ends_B)


def batch_sizes(most_sequences: int) -> list[int]:
    """Rows of the decode steps that are captured: each twice the one before, and at last as many as there are sequences.

    Aligned: in `_Decoder.index_2B` the second row begins behind the first one.
    """
    most = round_up(most_sequences, _ALIGNED_ELEMENTS)
    return [*itertools.takewhile(lambda size: size < most, (_LEAST_BATCH << n for n in itertools.count())), most]


def _array(numbers: Iterable[int]) -> Indices:
    return np.fromiter(numbers, np.int64)
