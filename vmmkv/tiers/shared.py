"""Stores that engines on several machines share: the base of a tier over a client. `contrib` has those of Redis and Mooncake.

    name      "vmmkv:" and the key in hex, which hashes tokens, layout, model and namespace
    value     | magic | length | checksum | record |     checked when it is loaded; removed if it is wrong

How much there may be, and what is evicted, is the store's own affair. A store that does not answer is left alone until a thread
finds that it answers again. What can write to the store can write what models read: let only engines reach it.
"""

import importlib
import struct
import threading
import time
from abc import abstractmethod
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import entry_points
from typing import Any, Final

import torch

from vmmkv.errors import TierUnavailable, did_you_mean
from vmmkv.tier import RecordListener, Tier, Transfer
from vmmkv.tiers.answering import Answering
from vmmkv.tiers.record import RECORD_BYTES, checksum_of
from vmmkv.tiers.threaded import MissedError, ThreadedTier, missed

ENTRY_POINTS: Final = "vmmkv.tiers"
"""The group of entry points by which packages add stores: its names are schemes of URLs, its objects make a `Tier` of one."""

_HEADER: Final = struct.Struct("<8sQI")
"""Magic, length of the record, and checksum of key and record."""

_MAGIC: Final = b"vmmkv 1\0"

KNOWN_S: Final = 30.0
"""Time for which the answer that a record is there is believed."""

LACKED_S: Final = 2.0
"""Time for which the answer that a record is not there is believed: another engine may store it."""

_MOST_KNOWN: Final = 1 << 17
"""Answers that are kept, of each kind."""


def open_store(url: str, **options: Any) -> Tier:
    """The tier over the store at `url`, by its scheme, made with `options` such as `record_bytes`. It need not answer yet.

    Raises: ValueError for a scheme that no package has, naming those that there are; TierUnavailable if its client is missing.
    No message has the URL, which may have a password.
    """
    scheme = url.partition("://")[0] if "://" in url else ""
    found = {entry.name: entry for entry in entry_points(group=ENTRY_POINTS)}
    if scheme not in found:
        there = ", ".join(f"{name}://" for name in sorted(found)) or "none: install vmmkv, with pip"
        raise ValueError(
            f"no store has the scheme {scheme!r}; there are {there}; packages add theirs by the entry points {ENTRY_POINTS}. "
            + did_you_mean(scheme, found)
        )
    try:
        make = found[scheme].load()
    except (ImportError, AttributeError) as error:
        raise TierUnavailable(f"{found[scheme].value}, the tier for {scheme}://, cannot be imported: {error}") from error
    tier: Tier = make(url, **options)
    return tier


class Refused(Exception):
    """The store answers and does not take a record: it is full, or the record is too large for it."""


class SharedTier(ThreadedTier):
    """Records in a store that other engines use too, over a client whose calls block.

    A subclass says how to ask, get, put and remove; it is called from several threads. An error of the client means that the
    store does not answer. It is then left alone: see `Answering`.
    """

    def __init__(self, where: str, *, timeout_s: float, record_bytes: int = RECORD_BYTES) -> None:
        """`where`: the store, without passwords. `timeout_s`: no call takes longer."""
        super().__init__(0, record_bytes)
        self.value_bytes: Final = _HEADER.size + record_bytes
        """Length of a value that is a record."""
        self.where: Final = where
        self.timeout_s: Final = timeout_s
        self._known: OrderedDict[bytes, float] = OrderedDict()
        """Records that are there, and until when that is believed."""
        self._lacked: OrderedDict[bytes, float] = OrderedDict()
        """Records that are not there, and until when that is believed."""
        self._asked: set[bytes] = set()
        """Keys that the store is being asked for, or will be."""
        self.on_kept: RecordListener = lambda keys, is_held: None
        """Hears of each record that this tier has put into the store; from a thread."""
        self._to_ask: list[bytes] = []
        """Keys of its next question: all that are looked up while it answers the last one."""
        self.answering: Final = Answering(
            where,
            timeout_s,
            probe=lambda: self.ask([]),
            failed=lambda: self._count("errors", 1),
            left_alone=self._begin_pause,
        )

    # what a subclass does

    @abstractmethod
    def ask(self, names: Sequence[str]) -> list[bool]:
        """Ask which of these values are there. Called without names to learn whether the store answers."""

    @abstractmethod
    def get(self, name: str) -> Any:
        """A value, as a buffer. Raises MissedError if it is not there.

        What is no value of `value_bytes` need not be read: any other bytes tell that it is no record. An error means that the
        store does not answer, and must not depend on the value.
        """

    @abstractmethod
    def put(self, name: str, header: bytes, record: memoryview) -> None:
        """Keep a value of two parts. Raises Refused if the store does not take it."""

    @abstractmethod
    def remove(self, name: str) -> None:
        """Delete a value. Raises Refused if the store answers and does not do it."""

    def complaint_of(self, error: Exception) -> str | None:
        """Complaint of a store that answers against this client, and the way out, without passwords; None for no answer."""
        return None

    def hang_up(self) -> None:
        """End the calls under way, which are late, if the client can do that."""
        return

    # what ThreadedTier asks

    def open(self, device: torch.device) -> None:
        """Get ready for copies, and ask once whether the store answers, without waiting for it. See Tier.open."""
        super().open(device)
        if self.answering.begin(self.name):
            with self.lock:
                self._asked.clear()  # what a close has cancelled
                self._to_ask.clear()
            self.answering.probe()  # so that the log says at the start if it does not answer

    def lookup(self, keys: Sequence[bytes]) -> list[bool] | None:
        """Look up which of these records the store has; None while it is asked. Raises: TierUnavailable if it is down."""
        self.answering.check()
        now_s = time.monotonic()
        with self.lock:
            found = [self._known.get(key, 0.0) > now_s for key in keys]
            unknown = [
                key for key, is_there in zip(keys, found, strict=True) if not is_there and self._lacked.get(key, 0.0) <= now_s
            ]
            if not unknown or not self.answering.can_ask:
                return found
            if new := [key for key in unknown if key not in self._asked]:
                self._asked.update(new)
                self._to_ask += new
                self.answering.submit(self._ask)
            return None

    def learn(self, keys: Sequence[bytes]) -> None:
        """Believe that the store has these records, which another process has put there, whatever it has answered before."""
        self._learn(keys, [True] * len(keys))

    def load(self, key: bytes) -> Transfer | None:
        """Begin to load a record into a buffer. A miss while the store is left alone; None if no buffer is free."""
        return missed(key) if self.answering.is_left_alone else super().load(key)

    def held_bytes(self) -> int:
        """Bytes of the records that are known to be there."""
        return len(self._known) * self.record_bytes

    def write(self, key: bytes, data: memoryview) -> None:
        """Put a record with its checksum into the store; called from a thread. Raises: Refused; errors of the client."""
        try:
            with self._call():
                self.put(_name(key), _HEADER.pack(_MAGIC, len(data), checksum_of(key, data)), data)
        except Refused:
            self._count("refused_records", 1)
            raise
        self._learn([key], [True])
        self.on_kept([key], True)

    def read(self, key: bytes, data: memoryview) -> None:
        """Fill `data` with a record of the store; called from a thread. A value that is not the record is removed.

        Raises: MissedError if it is not there; OSError for a value that is not the record; errors of the client.
        """
        try:
            with self._call():
                value = memoryview(self.get(_name(key))).cast("B")
        except MissedError:
            self._learn([key], [False])
            raise
        header, record = bytes(value[: _HEADER.size]), value[_HEADER.size :]
        if len(record) == len(data) and header == _HEADER.pack(_MAGIC, len(data), checksum_of(key, record)):
            data[:] = record
            return
        try:
            with self._call():
                self.remove(_name(key))
        finally:
            self._learn([key], [False])
        raise OSError(f"{self.where} gave {len(value)} bytes for {_name(key)} that are not the record")

    def close(self) -> None:
        """End calls and threads, and give the memory back. Waits `timeout_s` for records that are being written."""
        late = threading.Timer(self.timeout_s, self.answering.leave_alone, [TimeoutError()])
        late.start()
        try:
            self.answering.end()
            super().close()
        finally:
            late.cancel()

    def _ask(self) -> None:
        with self.lock:
            keys, self._to_ask = self._to_ask, []
        if not keys:
            return  # the last question had them
        try:
            with self._call():
                found = self.ask([_name(key) for key in keys])
            self._learn(keys, found)
        except Exception:  # whatever it is: nothing is known of them
            self._count("errors", 1)
        finally:
            with self.lock:
                self._asked.difference_update(keys)

    def _learn(self, keys: Sequence[bytes], found: Sequence[bool]) -> None:
        now_s = time.monotonic()
        with self.lock:
            for key, is_there in zip(keys, found, strict=True):
                self._known.pop(key, None)
                self._lacked.pop(key, None)
                if is_there:
                    self._known[key] = now_s + KNOWN_S
                else:
                    self._lacked[key] = now_s + LACKED_S
            for answers in (self._known, self._lacked):
                while len(answers) > _MOST_KNOWN:
                    answers.popitem(last=False)

    @contextmanager
    def _call(self) -> Iterator[None]:
        """Run a call of the client, whose errors mean that the store does not answer."""
        with self.answering.call():
            try:
                yield
            except (MissedError, Refused):
                raise
            except Exception as error:
                self.answering.leave_alone(error)
                raise

    def _begin_pause(self, error: Exception) -> str | None:
        with self.lock:
            self._known.clear()  # it may come back empty
            self._lacked.clear()
        self.hang_up()
        return self.complaint_of(error)

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.where}>"


def _name(key: bytes) -> str:
    return f"vmmkv:{key.hex()}"


def client_of(module: str, extra: str) -> Any:
    """A client package of a store, which an extra of vmmkv installs. Raises: TierUnavailable if it cannot be imported."""
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise TierUnavailable(
            f"{extra}:// needs a client that cannot be imported ({error}); in a checkout: pip install '.[{extra}]'"
        ) from error
