"""The tensors that an attention function is called with, and whether what it returns is right."""

import itertools
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Final

import torch

from vmmkv.kernels import reference
from vmmkv.testing.caches import MappedRows
from vmmkv.testing.subject import Subject

_COUNTS: Final = (5, None, 40, 1)
"""Queries of a sequence in prefill, in turns: chunks, the whole of it, and a single one."""


class Wrong(Exception):
    """What an attention function did is wrong; the message says what that was."""


class Batch:
    """Sequences in slots of views, and the arguments of a call, which stay the same tensors whatever the lengths become."""

    def __init__(
        self,
        subject: Subject,
        k_STKD: torch.Tensor,
        v_STKD: torch.Tensor,
        slots: Iterable[int],
        lengths: Iterable[int],
        mapped: Callable[[], list[MappedRows]],
    ) -> None:
        device = subject.device
        self.subject, self.k_STKD, self.v_STKD = subject, k_STKD, v_STKD
        self.slots, self.lengths = list(slots), list(lengths)
        self._mapped = mapped
        self.counts = [1] * len(self.slots)
        if subject.form == "prefill":
            wanted = itertools.cycle(_COUNTS)
            self.counts = [min(length, count or length) for length, count in zip(self.lengths, wanted, strict=False)]
        starts = list(itertools.accumulate(self.counts, initial=0))
        generator = torch.Generator().manual_seed(1)
        q_NHD = torch.randn(starts[-1], subject.heads, subject.head_dim, generator=generator)
        self.q_NHD = q_NHD.to(device, subject.dtype)
        self.query_starts = torch.tensor(starts, dtype=torch.int32, device=device)
        self.lengths_B = torch.tensor(self.lengths, dtype=torch.int32, device=device)
        self.slots_B = torch.tensor(self.slots, dtype=torch.int32, device=device)

    def set_lengths(self, lengths: Iterable[int]) -> None:
        """The sequences have grown."""
        self.lengths = list(lengths)
        self.lengths_B.copy_(torch.tensor(self.lengths, dtype=torch.int32))

    def attend(self) -> torch.Tensor:
        """Call the function. Raises: Wrong if it raises, or returns what is no output."""
        starts = (self.query_starts,) if self.subject.form == "prefill" else ()
        try:
            out = self.subject.attention_fn(self.q_NHD, self.k_STKD, self.v_STKD, *starts, self.lengths_B, self.slots_B)
        except Exception as error:
            raise Wrong(f"it raised {type(error).__name__}: {first_line(error)}") from error
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
        errors_N = (out_NHD.double() - truth_NHD).abs().flatten(1).amax(1).nan_to_num(float("inf"))
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
        """Call, see that it wrote nothing, and judge. Raises: Wrong."""
        with self.writing_nothing():
            out_NHD = self.attend()
        self.judge(out_NHD)

    @contextmanager
    def writing_nothing(self) -> Iterator[None]:
        """See that what is done within leaves all that is mapped bit for bit as it was. Raises: Wrong.

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


def first_line(error: BaseException) -> str:
    """Of its message."""
    return next(iter(str(error).splitlines()), "")
