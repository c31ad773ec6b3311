"""The checks of the conformance suite, by name, and the memory and tensors that they use.

A check makes its own memory, calls the attention function, and raises `Wrong` where it is wrong. In every check:

- all layers of a token share a row, so that K and V are strided, and the other layers hold NaN;
- the slots of the sequences are not in the order of the batch;
- slots and pages that were not written are not mapped.

A row is a power of two bytes (a plane of its own fills it up), so rows end where pages end, and the mapped memory of a sequence
can end with its guard, to the byte.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Final, Literal, NamedTuple, get_args

import torch

import vmmkv
from vmmkv.cache import KVCache
from vmmkv.driver import open_driver
from vmmkv.driver.base import Access, Handle
from vmmkv.layout import PLANE_ALIGNMENT_BYTES, Group, KVLayout, Plane
from vmmkv.memory.address_space import wrap
from vmmkv.memory.pool import Pool
from vmmkv.units import GIB, KIB, PAGE_BYTES, ceil_div, round_up
from vmmkv_kernels import reference

Form = Literal["decode", "prefill"]

DTYPES: Final = (torch.float16, torch.bfloat16, torch.float32)


class Wrong(Exception):
    """An attention function did something wrong; the message says what."""


class Skip(Exception):
    """The check does not apply; the message says why."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Subject:
    """An attention function and what it is tested on: the arguments of `conformance`. It is pickled for a child process."""

    attention_fn: Callable[..., torch.Tensor]
    form: Form
    device: torch.device
    dtype: torch.dtype
    heads: int
    kv_heads: int
    head_dim: int
    guard_tokens: int
    error_ratio: float
    error_floor: float
    capturable: bool

    def __post_init__(self) -> None:
        if not callable(self.attention_fn):
            raise TypeError(f"attention_fn is {self.attention_fn!r}; give a function")
        if self.form not in get_args(Form):
            raise ValueError(f"form={self.form!r}: an attention function has the form {' or '.join(get_args(Form))}")
        if self.device.type not in ("cpu", "cuda"):
            raise ValueError(f"device={str(self.device)!r}: there is vmmkv memory on 'cpu' and 'cuda:0'")
        if self.dtype not in DTYPES:
            raise ValueError(f"dtype={self.dtype}: it is one of {', '.join(map(str, DTYPES))}")
        if self.kv_heads < 1 or self.head_dim < 1 or self.heads < 1 or self.heads % self.kv_heads:
            raise ValueError(
                f"heads={self.heads}, kv_heads={self.kv_heads}, head_dim={self.head_dim}: all at least 1, and heads a multiple "
                f"of kv_heads"
            )
        if self.guard_tokens < 0 or self.error_ratio < 1.0 or self.error_floor < 0.0:
            raise ValueError(
                f"guard_tokens={self.guard_tokens}, error_ratio={self.error_ratio}, error_floor={self.error_floor}: at least "
                f"0, 1 and 0"
            )

    @property
    def name(self) -> str:
        """Name of the function."""
        return getattr(self.attention_fn, "__name__", repr(self.attention_fn))

    def __str__(self) -> str:
        dtype = str(self.dtype).removeprefix("torch.")
        heads = f"{self.heads}/{self.kv_heads} heads of {self.head_dim}"
        return f"{self.form}, {dtype}, {heads}, guard_tokens={self.guard_tokens}, on {self.device}"


# memory

BUDGET_BYTES: Final = 4 * GIB
"""Budget of a check's pool, more than any takes; handles are created as they are needed."""

ROW_BYTES: Final = 32 * KIB
"""Bytes of a row. 64 rows are a page, so that sequences of some hundred tokens have several."""

_NUM_LAYERS: Final = 4
_LAYER: Final = _NUM_LAYERS // 2
"""The layer that is attended to, in the middle of a row."""

STALE: Final = 100.0
"""Value of rows past the length, as of another sequence. Larger than all others, so that it shows."""

_SPARE_PAGES: Final = 16
"""Free extents to shuffle, more than a check takes."""

_FAR_PAGES: Final = 7
"""Physical pages that are mapped over and over, for each end of a sequence of gigabytes."""


class MappedRows(NamedTuple):
    """All mapped bytes of a slot from row `first` on, of all layers, as int64 [rows, words]."""

    slot: int
    first: int
    words_TW: torch.Tensor


def layout_of(subject: Subject, row_bytes: int = ROW_BYTES) -> KVLayout:
    """K, V and filling in each of a few layers, so that a row is `row_bytes`, or the next power of two that holds it."""
    dtype = subject.dtype
    kv_bytes = 2 * round_up(subject.kv_heads * subject.head_dim * dtype.itemsize, PLANE_ALIGNMENT_BYTES)
    layer_bytes = max(row_bytes // _NUM_LAYERS, 1 << (kv_bytes - 1).bit_length())
    planes = [Plane(name=name, heads=subject.kv_heads, dim=subject.head_dim, dtype=dtype) for name in ("k", "v")]
    if layer_bytes > kv_bytes:
        planes.append(Plane(name="filling", heads=1, dim=(layer_bytes - kv_bytes) // dtype.itemsize, dtype=dtype))
    return KVLayout(groups=(Group(layers=tuple(range(_NUM_LAYERS)), planes=tuple(planes)),))


class LayerMemory:
    """A cache and the one layer of it that is attended to."""

    def __init__(self, subject: Subject, cache: KVCache) -> None:
        (self.group,) = cache.layout.groups
        self.cache, self.subject = cache, subject
        self.k_STKD, self.v_STKD = cache.k(_LAYER), cache.v(_LAYER)
        self.page_rows = self.group.tokens_under(1)
        self._generator = torch.Generator().manual_seed(0)
        self._written: dict[int, vmmkv.Sequence] = {}
        """Rows written, by slot. Under other slots nothing is mapped but the null page, which is read-only."""

    def open(self, count: int) -> list[vmmkv.Sequence]:
        """Open sequences in every other slot, backwards."""
        return self.cache.open_batch(2 * count)[-1::-2]

    def write(self, sequence: vmmkv.Sequence, num_tokens: int, *, past: float = 0.0) -> None:
        """Grow a sequence to so many tokens: random rows of this layer, NaN in all others, `past` in what is mapped behind."""
        start, cache = sequence.length, self.cache
        self._written[sequence.slot] = sequence
        sequence.grow(num_tokens)
        end = self.num_mapped(sequence)
        for layer, plane in itertools.product(self.group.layers, self.group.planes):
            cache.view(layer, plane.name)[sequence.slot, start:end] = math.nan
        for view_STKD in (self.k_STKD, self.v_STKD):
            new_TKD = torch.randn(num_tokens - start, *view_STKD.shape[2:], generator=self._generator)
            view_STKD[sequence.slot, start:num_tokens] = new_TKD.to(cache.device, view_STKD.dtype)
            view_STKD[sequence.slot, num_tokens:end] = past
        sequence.advance(num_tokens - start)

    def call(self, sequences: Sequence[vmmkv.Sequence], lengths: Sequence[int]) -> "AttentionCall":
        """Write sequences up to these lengths, and prepare a call over them."""
        for sequence, length in zip(sequences, lengths, strict=True):
            self.write(sequence, max(length, sequence.length))
        slots = [sequence.slot for sequence in sequences]
        return AttentionCall(self.subject, self.k_STKD, self.v_STKD, slots, lengths, self.mapped)

    def mapped(self) -> list[MappedRows]:
        """Mapped bytes of all sequences, with guards and other layers."""
        k_STKD, row_bytes = self.k_STKD, self.group.row_bytes
        address = k_STKD.data_ptr() - self.group.offset_bytes(_LAYER, "k")
        found = []
        for slot, sequence in self._written.items():
            num_rows = self.num_mapped(sequence)
            first_byte = address + slot * k_STKD.stride(0) * k_STKD.itemsize
            words_E = wrap(first_byte, num_rows * row_bytes, self.cache.device).view(torch.int64)
            found.append(MappedRows(slot, 0, words_E.view(num_rows, -1)))
        return found

    def num_mapped(self, sequence: vmmkv.Sequence) -> int:
        """Rows that are mapped under a sequence, with its guard: whole pages."""
        return round_up(sequence.limit + self.cache.guard_tokens, self.page_rows)


@contextmanager
def open_memory(
    subject: Subject, *, slots: int, max_tokens: int = 4096, row_bytes: int = ROW_BYTES, shuffled: bool = False
) -> Iterator[LayerMemory]:
    """Open a cache with a pool of its own. shuffled: a growth gets physical pages in a random order."""
    with Pool(subject.device, BUDGET_BYTES) as pool:
        if shuffled:
            extents = pool.acquire(_SPARE_PAGES)
            random.Random(0).shuffle(extents)
            for extent in extents:  # the newest free extent is taken first
                pool.drop(extent)
        layout = layout_of(subject, row_bytes)
        with KVCache(layout, pool, slots=slots, max_tokens=max_tokens, guard_tokens=subject.guard_tokens) as cache:
            yield LayerMemory(subject, cache)


@contextmanager
def far_rows(subject: Subject, num_past: int) -> Iterator["AttentionCall"]:
    """Prepare a call over slot 1, whose rows are a page each: the last `num_past` lie 2**31 elements from the first.

    That would be gigabytes, so a few physical pages are mapped over and over; others under the last rows, whose larger keys
    draw most of the weight. What is mapped is given with each physical page once.
    """
    row_elements = PAGE_BYTES // subject.dtype.itemsize
    border = 2**31 // row_elements
    length = border + num_past
    num_pages = length + subject.guard_tokens
    driver = open_driver(subject.device)
    address = driver.reserve(2 * num_pages * PAGE_BYTES)
    handles: list[Handle] = []
    mapped: list[int] = []

    def put(pages: Iterable[int]) -> None:
        """Map one physical page under all of these addresses."""
        handles.append(driver.create(PAGE_BYTES))
        for page in pages:
            driver.map(address + page * PAGE_BYTES, handles[-1], PAGE_BYTES)
            mapped.append(address + page * PAGE_BYTES)
            driver.set_access(address + page * PAGE_BYTES, PAGE_BYTES, Access.READ_WRITE)

    try:
        # The first page of slot 0, for a tensor's own first address must be mapped; and the guard.
        put([0, *range(num_pages + length, 2 * num_pages)])
        for index in range(_FAR_PAGES):
            put(range(num_pages + index, num_pages + border, _FAR_PAGES))
            put(range(num_pages + border + index, num_pages + length, _FAR_PAGES))
        bytes_E = wrap(address, 2 * num_pages * PAGE_BYTES, driver.device)
        words_PW = bytes_E.view(torch.int64).view(2 * num_pages, -1)
        parts = [(0, 0, 1), (1, 0, _FAR_PAGES), (1, border, num_past)]
        rows = [MappedRows(slot, first, words_PW[slot * num_pages + first :][:count]) for slot, first, count in parts]
        for part in rows:
            part.words_TW.zero_()
        shape = (2, num_pages, subject.kv_heads, subject.head_dim)
        strides = (num_pages * row_elements, row_elements, subject.head_dim, 1)
        k_offset = round_up(subject.kv_heads * subject.head_dim, 8)
        k_STKD, v_STKD = (bytes_E.view(subject.dtype).as_strided(shape, strides, index * k_offset) for index in (1, 2))
        generator = torch.Generator().manual_seed(0)
        for first, count, factor in ((0, _FAR_PAGES, 1.0), (border, min(_FAR_PAGES, num_past), 2.0)):
            for view_STKD in (k_STKD, v_STKD):
                rows_TKD = factor * torch.randn(count, *shape[2:], generator=generator)
                view_STKD[1, first : first + count] = rows_TKD.to(driver.device, subject.dtype)
        yield AttentionCall(subject, k_STKD, v_STKD, [1], [length], lambda: rows)
    finally:
        driver.fence().wait()
        for page_address in mapped:
            driver.unmap(page_address, PAGE_BYTES)
        for handle in handles:
            driver.release(handle)


# calls

_COUNTS: Final = (5, None, 40, 1)
"""Queries of a sequence in prefill, in turns: chunks, the whole of it, and a single one."""


class AttentionCall:
    """A call over sequences in slots of views. Its arguments stay the same tensors whatever the lengths become."""

    def __init__(
        self,
        subject: Subject,
        k_STKD: torch.Tensor,
        v_STKD: torch.Tensor,
        slots: Sequence[int],
        lengths: Sequence[int],
        mapped: Callable[[], list[MappedRows]],
    ) -> None:
        device = subject.device
        self.subject, self.k_STKD, self.v_STKD = subject, k_STKD, v_STKD
        self.slots, self.lengths = slots, lengths
        self._mapped = mapped
        self.counts = [1] * len(slots)
        if subject.form == "prefill":
            wanted = itertools.cycle(_COUNTS)
            self.counts = [min(length, count or length) for length, count in zip(lengths, wanted, strict=False)]
        starts = list(itertools.accumulate(self.counts, initial=0))
        q_NHD = torch.randn(starts[-1], subject.heads, subject.head_dim, generator=torch.Generator().manual_seed(1))
        self.q_NHD = q_NHD.to(device, subject.dtype)
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.lengths_B = torch.tensor(lengths, dtype=torch.int32, device=device)
        self.slots_B = torch.tensor(slots, dtype=torch.int32, device=device)

    def set_lengths(self, lengths: Sequence[int]) -> None:
        """Set the lengths of the sequences, which have grown."""
        self.lengths = lengths
        self.lengths_B.copy_(torch.tensor(lengths, dtype=torch.int32))

    def attend(self) -> torch.Tensor:
        """Call the function. Raises: Wrong if it raises, or returns what is no output."""
        starts = (self.query_starts,) if self.subject.form == "prefill" else ()
        try:
            out = self.subject.attention_fn(self.q_NHD, self.k_STKD, self.v_STKD, *starts, self.lengths_B, self.slots_B)
        except Exception as error:
            raise Wrong(f"it raised {type(error).__name__}: {_first_line(error)}") from error
        if not isinstance(out, torch.Tensor):
            raise Wrong(f"it returned {type(out).__name__}, no tensor")
        got, wanted = ((x.shape, x.dtype, x.device) for x in (out, self.q_NHD))
        if got != wanted:
            raise Wrong(
                f"it returned {tuple(got[0])} of {got[1]} on {got[2]}; the queries are {tuple(wanted[0])} of {wanted[1]}"
            )
        return out

    def judge(self, out_NHD: torch.Tensor) -> None:
        """Compare with the truth: at most `error_ratio` times the error of torch in the same dtype, plus `error_floor`.

        The truth is in float64, so that float32 has an error too. Raises: Wrong, naming the sequence that is worst.
        """
        truth_NHD, peer_NHD = (self._reference(dtype).double() for dtype in (torch.float64, out_NHD.dtype))
        bound = self.subject.error_ratio * (peer_NHD - truth_NHD).abs().max().item() + self.subject.error_floor
        errors_N = (out_NHD.double() - truth_NHD).abs().flatten(1).amax(1).nan_to_num(math.inf)
        worst = int(errors_N.argmax())
        if errors_N[worst].item() <= bound:
            return
        b = next(b for b, end in enumerate(itertools.accumulate(self.counts)) if worst < end)
        finite = bool(out_NHD[worst].isfinite().all())
        given = f"an error of {errors_N[worst].item():.3g}, where {bound:.3g} is allowed" if finite else "NaN or infinity"
        raise Wrong(
            f"{given}, in a sequence of {self.lengths[b]} tokens, query {worst - sum(self.counts[:b])} of {self.counts[b]}"
        )

    def run(self) -> None:
        """Call the function, check that it wrote nothing, and judge its output. Raises: Wrong."""
        with self.writing_nothing():
            out_NHD = self.attend()
        self.judge(out_NHD)

    @contextmanager
    def writing_nothing(self) -> Iterator[None]:
        """Check that the code within changes no bit of mapped memory. Raises: Wrong.

        Cost: a copy of all that is mapped.
        """
        rows = self._mapped()
        before = [mapped.words_TW.clone() for mapped in rows]
        yield
        for mapped, was_TW in zip(rows, before, strict=True):
            if torch.equal(mapped.words_TW, was_TW):
                continue
            row = mapped.first + int((mapped.words_TW != was_TW).any(1).nonzero()[0])
            length = dict(zip(self.slots, self.lengths, strict=True)).get(mapped.slot, 0)
            what = "which it is only to read" if row < length else "which is none of its own"
            raise Wrong(f"it wrote to row {row} of slot {mapped.slot}, {what}: all layers of a token are in one row")

    def _reference(self, dtype: torch.dtype) -> torch.Tensor:
        counts_B = torch.tensor(self.counts)
        return reference.prefill(self.q_NHD, self.k_STKD, self.v_STKD, counts_B, self.lengths_B, self.slots_B, dtype=dtype)


def _first_line(error: BaseException) -> str:
    return next(iter(str(error).splitlines()), "")


# checks

_LENGTHS: Final = (1, 17, 63, 64, 65, 130)
"""Lengths around a tile, around a page (of 64 rows), and of several pages."""

_FEW_LENGTHS: Final = (7, 64, 130)

_GROWN_LENGTHS: Final = ((10, 64, 100), (70, 65, 200))
"""Lengths of the same sequences before and after they have crossed the borders of pages."""

_LATE_CYCLES: Final = 100_000_000
"""Cycles of a delay, some 50 ms of a GPU, in which the host has launched all work."""


def _attend_among(subject: Subject, lengths: tuple[int, ...], *, past: float, shuffled: bool = False) -> None:
    """Sequences in every other slot, backwards, with `past` behind them; in the slots between lie others, full of it."""
    with open_memory(subject, slots=2 * len(lengths), shuffled=shuffled) as memory:
        sequences = memory.cache.open_batch(2 * len(lengths))
        ours, others = sequences[-1::-2], sequences[-2::-2]
        for other in others:
            memory.write(other, 10, past=past)
            for view_STKD in (memory.k_STKD, memory.v_STKD):
                view_STKD[other.slot, : memory.num_mapped(other)] = past
        for part in (2, 1):  # in turns, so that the pages of one do not follow one another
            for sequence, length in zip(ours, lengths, strict=True):
                if length // part:
                    memory.write(sequence, length // part, past=past)
        slots = [sequence.slot for sequence in ours]
        AttentionCall(subject, memory.k_STKD, memory.v_STKD, slots, lengths, memory.mapped).run()


def strides(subject: Subject) -> None:
    """Check strided rows, odd lengths, and slots in any order, with zeros behind as vmmkv maps them."""
    _attend_among(subject, _LENGTHS, past=0.0)


def stale_rows(subject: Subject) -> None:
    """Check that large finite values past the length and in other slots reach no output."""
    _attend_among(subject, _FEW_LENGTHS, past=STALE)


def nan_rows(subject: Subject) -> None:
    """Check that NaN past the length and in other slots reaches no output. NaN times a weight of zero is NaN."""
    _attend_among(subject, _FEW_LENGTHS, past=math.nan)


def shuffled_pages(subject: Subject) -> None:
    """Check pages that follow one another by address and lie anywhere in physical memory."""
    _attend_among(subject, _FEW_LENGTHS, past=0.0, shuffled=True)


def far_slots(subject: Subject) -> None:
    """Check slots 2**31 elements and more apart: the offset of a slot takes 64 bits."""
    row_elements = layout_of(subject).row_bytes // subject.dtype.itemsize
    with open_memory(subject, slots=3, max_tokens=ceil_div(2**31, row_elements)) as memory:
        assert memory.k_STKD.stride(0) >= 2**31, "the slots are to be far apart"
        memory.call(memory.cache.open_batch(3)[::-1], (5, 60, 30)).run()


def far_tokens(subject: Subject) -> None:
    """Check rows of one sequence 2**31 elements and more apart: the offset of a token takes 64 bits."""
    with far_rows(subject, num_past=7) as call:
        call.run()


def unmapped_rows(subject: Subject) -> None:
    """Check over memory that ends with the guard, to the byte; nothing is mapped before the sequence or in other slots."""
    with open_memory(subject, slots=6, row_bytes=PAGE_BYTES) as memory:
        sequences = memory.open(3)
        call = memory.call(sequences, (1, 17, 33))
        for sequence in sequences:
            assert memory.num_mapped(sequence) == sequence.length + subject.guard_tokens, "a row is to be a page"
        call.run()


def aliased_prefix(subject: Subject) -> None:
    """Check sequences that begin with the same physical rows, each at its own addresses, then have rows of their own."""
    with open_memory(subject, slots=8) as memory:
        parent = memory.cache.open()
        memory.write(parent, memory.page_rows + 9)
        family = [*memory.cache.fork(parent, 2), parent]
        memory.call(family, [parent.length + more for more in (1, 40, 70)]).run()


def growth(subject: Subject) -> None:
    """Check two calls with the same tensors, between which sequences grow over pages and no row moves."""
    with open_memory(subject, slots=8) as memory:
        sequences = memory.open(3)
        call = memory.call(sequences, _GROWN_LENGTHS[0])
        call.run()
        _grow(memory, sequences, call)
        call.run()


def graph_replays(subject: Subject) -> None:
    """Check replays of one captured CUDA graph, which reads grown lengths and their slots on the device."""
    if subject.device.type != "cuda":
        raise Skip("there are no graphs on a CPU")
    if not subject.capturable:
        raise Skip("it is said to read on the host what only the device knows, so no graph can capture it")
    with open_memory(subject, slots=8) as memory:
        sequences = memory.open(3)
        call = memory.call(sequences, _GROWN_LENGTHS[0])
        call.run()  # what is compiled or allocated at the first call is no part of the graph
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        try:
            with torch.cuda.graph(graph):
                out_NHD = call.attend()
        except Exception as error:  # ending a capture that has failed raises an error of its own
            raise Wrong(f"no graph could capture it: {_first_line(error.__context__ or error)}") from error
        for grows in (False, True):
            if grows:
                _grow(memory, sequences, call)
            out_NHD.fill_(math.nan)
            with call.writing_nothing():
                graph.replay()
            call.judge(out_NHD)


def _grow(memory: LayerMemory, sequences: Sequence[vmmkv.Sequence], call: AttentionCall) -> None:
    for sequence, length in zip(sequences, _GROWN_LENGTHS[1], strict=True):
        memory.write(sequence, length)
    call.set_lengths(_GROWN_LENGTHS[1])


def stream_order(subject: Subject) -> None:
    """Check that launches come behind earlier work of the current stream, and before its later work.

    Its queries arrive late on that stream, and its output is read there at once. Work on a stream of its own that does not
    wait for them attends from NaN. If the stream does not wait for that work, what is read is what was in the output before:
    a race, which the function is sure to lose only if its work is slower than a launch.
    """
    if subject.device.type != "cuda":
        raise Skip("there are no streams on a CPU")
    with open_memory(subject, slots=2 * len(_LENGTHS)) as memory:
        call = memory.call(memory.open(len(_LENGTHS)), _LENGTHS)
        try:
            call.run()  # what is compiled at the first call would take longer than the queries do
            q_NHD = -call.q_NHD  # others, since a new output may lie where a right one was
            call.q_NHD.fill_(math.nan)
            torch.cuda.synchronize(subject.device)
            torch.cuda._sleep(_LATE_CYCLES)  # type: ignore[no-untyped-call]
            call.q_NHD.copy_(q_NHD)
            out_NHD = call.attend().clone()
            call.judge(out_NHD)
        finally:
            torch.cuda.synchronize(subject.device)  # its memory goes when all streams are done, whatever orders them


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
