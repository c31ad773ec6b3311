"""The checks, by name. Each makes its own memory, calls the attention function, and raises Wrong where it is wrong.

What every check has: all layers of a token in one row, so that K and V are strided; NaN in the other layers; sequences in slots
that are not in the order of the batch; slots and pages that nobody wrote are not mapped.
"""

from collections.abc import Callable
from typing import Final

import torch

from vmmkv.testing.batch import Batch, Wrong, first_line
from vmmkv.testing.caches import NAN, STALE, Memory, far_rows, layout_of, open_memory
from vmmkv.testing.subject import Subject
from vmmkv.units import PAGE_BYTES, ceil_div

LENGTHS: Final = (1, 17, 63, 64, 65, 130)
"""Around a tile, around a page (of 64 rows), and of several pages."""

_FEW_LENGTHS: Final = (7, 64, 130)

_GROWN_LENGTHS: Final = ((10, 64, 100), (70, 65, 200))
"""Of the same sequences, before and after they have crossed the borders of pages."""

_LATE_CYCLES: Final = 100_000_000
"""Some 50 ms of a GPU, in which the host has launched all there is."""


class Skip(Exception):
    """The check does not apply; the message says why."""


def _attend_among(subject: Subject, lengths: tuple[int, ...], *, past: float, shuffled: bool = False) -> None:
    """Sequences in every other slot, backwards, with `past` behind them; in the slots between lie others, full of it."""
    with open_memory(subject, slots=2 * len(lengths), shuffled=shuffled) as memory:
        sequences = memory.cache.open_batch(2 * len(lengths))
        ours, others = sequences[-1::-2], sequences[-2::-2]
        for other in others:
            memory.write(other, 10, past=past)
            memory.fill(other, past)
        for part in (2, 1):  # in turns, so that the pages of one do not follow one another
            for sequence, length in zip(ours, lengths, strict=True):
                if length // part:
                    memory.write(sequence, length // part, past=past)
        _batch(memory, [sequence.slot for sequence in ours], lengths).run()


def _batch(memory: Memory, slots: list[int], lengths: tuple[int, ...]) -> Batch:
    return Batch(memory.subject, memory.k_STKD, memory.v_STKD, slots, lengths, memory.mapped)


def strides(subject: Subject) -> None:
    """Strided rows, odd lengths, slots in any order, behind them zeros as vmmkv maps them."""
    _attend_among(subject, LENGTHS, past=0.0)


def stale_rows(subject: Subject) -> None:
    """Large finite values past the length and in other slots reach no output."""
    _attend_among(subject, _FEW_LENGTHS, past=STALE)


def nan_rows(subject: Subject) -> None:
    """Nor does NaN, which is still NaN after a product with a weight of zero."""
    _attend_among(subject, _FEW_LENGTHS, past=NAN)


def shuffled_pages(subject: Subject) -> None:
    """Pages that follow one another by address lie anywhere in physical memory."""
    _attend_among(subject, _FEW_LENGTHS, past=0.0, shuffled=True)


def far_slots(subject: Subject) -> None:
    """Slots 2**31 elements and more apart: the offset of a slot takes 64 bits."""
    row_elements = layout_of(subject).row_bytes // subject.dtype.itemsize
    with open_memory(subject, slots=3, max_tokens=ceil_div(2**31, row_elements)) as memory:
        sequences = memory.cache.open_batch(3)[::-1]
        lengths = (5, 60, 30)
        for sequence, length in zip(sequences, lengths, strict=True):
            memory.write(sequence, length, past=0.0)
        assert memory.k_STKD.stride(0) >= 2**31, "the slots are to be far apart"
        _batch(memory, [sequence.slot for sequence in sequences], lengths).run()


def far_tokens(subject: Subject) -> None:
    """Rows of one sequence 2**31 elements and more apart: the offset of a token takes 64 bits."""
    with far_rows(subject, num_past=7) as (k_STKD, v_STKD, length, mapped_rows):
        Batch(subject, k_STKD, v_STKD, [1], [length], lambda: mapped_rows).run()


def unmapped_rows(subject: Subject) -> None:
    """Nothing is mapped past the guard, to the byte; nor before the sequence, nor in any other slot."""
    with open_memory(subject, slots=5, row_bytes=PAGE_BYTES) as memory:
        lengths = (1, 17, 33)
        sequences = memory.cache.open_batch(5)[::-2]
        for sequence, length in zip(sequences, lengths, strict=True):
            memory.write(sequence, length, past=0.0)
            assert memory.mapped_rows(sequence) == length + subject.guard_tokens, "a row is to be a page"
        _batch(memory, [sequence.slot for sequence in sequences], lengths).run()


def aliased_prefix(subject: Subject) -> None:
    """Sequences that begin with the very same physical rows, each at its own addresses, then go their own ways."""
    with open_memory(subject, slots=8) as memory:
        (parent,) = memory.cache.open_batch(1)
        memory.write(parent, memory.page_rows + 9, past=0.0)
        family = [*memory.cache.fork(parent, 2), parent]
        for sequence, more in zip(family, (1, 40, 70), strict=True):
            memory.write(sequence, sequence.length + more, past=0.0)
        slots, lengths = zip(*((sequence.slot, sequence.length) for sequence in family), strict=True)
        _batch(memory, list(slots), lengths).run()


def growth(subject: Subject) -> None:
    """Between two calls with the same tensors sequences grow over pages; what was there stays where it was."""
    with open_memory(subject, slots=8) as memory:
        sequences = memory.cache.open_batch(5)[::-2]
        batch = _batch(memory, [sequence.slot for sequence in sequences], _GROWN_LENGTHS[0])
        for lengths in _GROWN_LENGTHS:
            for sequence, length in zip(sequences, lengths, strict=True):
                memory.write(sequence, length, past=0.0)
            batch.set_lengths(lengths)
            batch.run()


def graph_replays(subject: Subject) -> None:
    """The same between replays of one captured CUDA graph: a kernel reads lengths and slots on the device."""
    if subject.device.type != "cuda":
        raise Skip("there are no graphs on a CPU")
    if not subject.capturable:
        raise Skip("it is said to read on the host what only the device knows, so no graph can capture it")
    with open_memory(subject, slots=8) as memory:
        sequences = memory.cache.open_batch(5)[::-2]
        batch = _batch(memory, [sequence.slot for sequence in sequences], _GROWN_LENGTHS[0])
        graph, out_NHD = torch.cuda.CUDAGraph(), torch.empty(0)
        for step, lengths in enumerate(_GROWN_LENGTHS):
            for sequence, length in zip(sequences, lengths, strict=True):
                memory.write(sequence, length, past=0.0)
            batch.set_lengths(lengths)
            if step == 0:
                batch.run()  # what is compiled or allocated at the first call is no part of the graph
                torch.cuda.synchronize()
                try:
                    with torch.cuda.graph(graph):
                        out_NHD = batch.attend()
                except Exception as error:  # ending a capture that has failed raises an error of its own
                    raise Wrong(f"no graph could capture it: {first_line(error.__context__ or error)}") from error
            out_NHD.fill_(NAN)
            with batch.writing_nothing():
                graph.replay()
            batch.judge(out_NHD)


def stream_order(subject: Subject) -> None:
    """What it launches comes behind what the current stream has been given before, and before what it is given next.

    Its queries arrive late on that stream, and its output is read there at once. Work on a stream of its own that does not
    wait for them attends from NaN. If the stream does not wait for that work, what is read is what was in the output before:
    a race, which the function is sure to lose only if its work is slower than a launch.
    """
    if subject.device.type != "cuda":
        raise Skip("there are no streams on a CPU")
    with open_memory(subject, slots=2 * len(LENGTHS)) as memory:
        sequences = memory.cache.open_batch(2 * len(LENGTHS))[::-2]
        for sequence, length in zip(sequences, LENGTHS, strict=True):
            memory.write(sequence, length, past=0.0)
        batch = _batch(memory, [sequence.slot for sequence in sequences], LENGTHS)
        try:
            batch.run()  # what is compiled at the first call would take longer than the queries do
            q_NHD = -batch.q_NHD  # others, since a new output may lie where a right one was
            batch.q_NHD.fill_(NAN)
            torch.cuda.synchronize(subject.device)
            torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
            batch.q_NHD.copy_(q_NHD)
            out_NHD = batch.attend().clone()
            batch.judge(out_NHD)
        finally:
            torch.cuda.synchronize(subject.device)  # its memory goes when all streams are done, whoever orders them


CHECKS: Final[dict[str, Callable[[Subject], None]]] = {
    "strides": strides,
    "stale rows past the length": stale_rows,
    "NaN past the length": nan_rows,
    "shuffled pages": shuffled_pages,
    "64-bit slot offsets": far_slots,
    "64-bit token offsets": far_tokens,
    "unmapped past the guard": unmapped_rows,
    "aliased prefix": aliased_prefix,
    "growth between calls": growth,
    "growth between graph replays": graph_replays,
    "order among streams": stream_order,
}
