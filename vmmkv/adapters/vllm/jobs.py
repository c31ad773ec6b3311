"""ChunkJobs: chunks of an engine's host memory that are stored in tiers, and loaded from them, by a thread.

The engine submits jobs and takes their results, and waits for neither. A chunk is one record. The chunks of a job are read or
written until its result is there, and never after.
"""

import logging
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from vmmkv.driver.base import Driver
from vmmkv.tiers import Get, Put, Refusal, Store
from vmmkv.tiers.mover import Run
from vmmkv.tiers.record import ALIGNMENT_BYTES
from vmmkv.units import round_up

log = logging.getLogger("vllm.vmmkv")

STORE_S: Final = 10.0
LOAD_S: Final = 30.0
"""Times after which jobs that wait for a tier are given up: the engine can use their chunks for nothing else meanwhile."""

CLOSE_S: Final = 5.0
"""Time for jobs to end when no more will be submitted."""

_POLL_US: Final = 2000.0
_PAUSE_S: Final = 0.0005
"""Time of one look at the jobs, and the pause behind it, in which the engine's threads have Python's lock."""


class EndedJob(NamedTuple):
    """The end of a job."""

    number: int
    found: Sequence[bool]
    """Is each chunk stored, or loaded?"""
    seconds: float


@dataclass(frozen=True, slots=True)
class Chunks:
    """Chunks of memory as a `Buffer`: each is a record, whose end is padding if a chunk is no multiple of 4 KiB."""

    address: int
    """Address of chunk 0."""
    chunk_bytes: int
    numbers: Sequence[int]

    @property
    def record_bytes(self) -> int:
        """Size of the record of a chunk."""
        return round_up(self.chunk_bytes, ALIGNMENT_BYTES)

    @property
    def size_bytes(self) -> int:
        """Size of the records."""
        return self.record_bytes * len(self.numbers)

    def copy(self, driver: Driver, runs: Sequence[Run], *, is_load: bool) -> None:
        """Copy chunks. See Buffer.copy."""
        record_bytes = self.record_bytes
        for run in runs:
            for offset in range(0, run.size_bytes, record_bytes):
                number = self.numbers[(run.offset_bytes + offset) // record_bytes]
                place, lent = self.address + number * self.chunk_bytes, run.address + offset
                target, source = (place, lent) if is_load else (lent, place)
                driver.copy(target, source, self.chunk_bytes)


@dataclass(eq=False, slots=True)
class _Job:
    """A job, and what is asked of the store for it: one put, or a get for each chunk, so that one may fail alone."""

    number: int
    keys: Sequence[bytes]
    chunks: Chunks
    is_load: bool
    asked: Sequence[Put | Get] = ()
    submitted_s: float = field(default_factory=time.monotonic)

    @property
    def has_ended(self) -> bool:
        return all(each.done for each in self.asked)

    def result(self) -> EndedJob:
        """The result of a job that has ended."""
        found: list[bool] = []
        for each in self.asked:
            if isinstance(each, Get):
                found.append(bool(each.found))
            else:
                found += [Refusal.THERE in each.answers.values()] * len(self.keys)
        return EndedJob(self.number, found, time.monotonic() - self.submitted_s)

    def failure(self) -> EndedJob:
        """The result of a job that is given up."""
        return EndedJob(self.number, [False] * len(self.keys), time.monotonic() - self.submitted_s)


class ChunkJobs:
    """Jobs that store or load chunks of memory. The caller closes the store's tiers, after the jobs.

    Cost: starts a thread, which sleeps while there is no job.
    """

    def __init__(self, store: Store, address: int, chunk_bytes: int) -> None:
        """`address`: of chunk 0, in memory of the host; the others follow it. The store is closed with the jobs."""
        self._store: Final = store
        self._address, self._chunk_bytes = address, chunk_bytes
        self._changed = threading.Condition()
        """Guards what follows. It is held for some lines of Python, never for a copy."""
        self._submitted: list[_Job] = []
        self._under_way: list[_Job] = []
        self._results: list[EndedJob] = []
        self._end_s = 0.0
        """Time of time.monotonic() at which jobs are given up, since it is being closed; 0 before."""
        self.takes_jobs = True
        """Is the thread there? If not, jobs fail at once."""
        self._thread = threading.Thread(target=self._run, name="vmmkv-jobs", daemon=True)
        self._thread.start()

    def submit(self, number: int, keys: Sequence[bytes], chunks: Sequence[int], *, is_load: bool) -> None:
        """Store these chunks under these keys, or load them. Their memory is the job's until `results` has its number."""
        job = _Job(number, keys, Chunks(self._address, self._chunk_bytes, chunks), is_load)
        with self._changed:
            if self.takes_jobs:
                self._submitted.append(job)
            else:
                self._results.append(job.failure())
            self._changed.notify_all()

    def results(self) -> list[EndedJob]:
        """Take the results that there are."""
        with self._changed:
            results, self._results = self._results, []
        return results

    def drain(self) -> None:
        """Wait until all jobs have a result: 30 s at most, after which they are given up."""
        with self._changed:
            self._changed.wait_for(lambda: not (self._submitted or self._under_way))

    def close(self) -> None:
        """Wait for the jobs, 5 s at most; the rest fails. Tiers keep what they were given when they are closed. Idempotent."""
        with self._changed:
            self._end_s = self._end_s or time.monotonic() + CLOSE_S
            self._changed.notify_all()
        self._thread.join()

    # the thread

    def _run(self) -> None:
        try:
            while self._has_jobs():
                self._store.poll(_POLL_US)
                self._report([job for job in self._under_way if job.has_ended])
                if self._under_way:
                    time.sleep(_PAUSE_S)
        except BaseException:
            log.exception("vmmkv: the thread that stores and loads chunks has ended: nothing is stored or loaded any more")
        finally:
            self._end()

    def _has_jobs(self) -> bool:
        """Wait for jobs, and begin new ones; False if there will be none, or no time for them."""
        with self._changed:
            self._changed.wait_for(lambda: self._submitted or self._under_way or self._end_s)
            new, self._submitted = self._submitted, []
            self._under_way += new
            is_late = 0 < self._end_s < time.monotonic()
        for job in new:
            self._begin(job)
        return bool(self._under_way) and not is_late

    def _begin(self, job: _Job) -> None:
        fence = self._store.fence()  # of no work: the engine's copies have ended
        if job.is_load:
            each = (Chunks(self._address, self._chunk_bytes, [number]) for number in job.chunks.numbers)
            job.asked = [
                self._store.get(key, chunk, timeout_s=LOAD_S, free=fence) for key, chunk in zip(job.keys, each, strict=True)
            ]
        elif job.keys:
            job.asked = [self._store.put(job.keys, job.chunks, timeout_s=STORE_S, written=fence)]

    def _report(self, ended: list[_Job]) -> None:
        with self._changed:
            self._under_way = [job for job in self._under_way if job not in ended]
            self._results += [job.result() for job in ended]
            self._changed.notify_all()

    def _end(self) -> None:
        """Give up what is left, so that nothing reads or writes its chunks any more, and then report it."""
        try:
            self._store.close()
        except BaseException:
            log.exception("vmmkv: the store of chunks was not closed")
        with self._changed:
            self.takes_jobs = False
            self._results += [job.failure() for job in (*self._under_way, *self._submitted)]
            self._under_way, self._submitted = [], []
            self._changed.notify_all()
