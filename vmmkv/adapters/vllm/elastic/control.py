"""BudgetControl: a thread by which the budget changes while an engine serves: `vmmkv resize`, and an arbiter.

The thread notes a budget. It is applied under the memory's lock: by the engine before each step, or by the thread while the
engine makes none. A step that finds too little memory for a running request waits for the arbiter for a moment: vLLM would
preempt one.
"""

import contextlib
import logging
import os
import selectors
import socket
import threading
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any, Final

from vmmkv.adapters.vllm.elastic.memory import ElasticBlocks
from vmmkv.errors import BudgetError
from vmmkv.holder.listening import listen, lock
from vmmkv.holder.messages import VERSION, Message, close_all, peer, receive, send
from vmmkv.holder.sharing import SharedBudget
from vmmkv.units import ceil_div, format_bytes

log = logging.getLogger("vllm.vmmkv")

_BEAT_S: Final = 1.0
"""Time between two reports to the arbiter while nothing asks for one."""
_SETTLING_S: Final = 0.01
"""Time between two tries to unmap what is to go, in an engine that makes no steps."""
_GRANT_S: Final = 0.25
"""Time that a step waits for the arbiter, and in which it does not ask again for what it did not get."""
_WANT_S: Final = 0.1
"""Time in which it does not ask again."""
_WANTED_PART: Final = 16
"""An engine that would keep more prefixes asks for this part of its addresses."""


class BudgetControl:
    """The budget of an engine, from outside. `settle` brings memory nearer to its budget, and is called with `memory.lock`.

    Raises: HolderUnavailable if the socket `control` is in use, or cannot be made.
    """

    def __init__(
        self,
        memory: ElasticBlocks,
        settle: Callable[[], None],
        *,
        control: Path | None = None,
        shared: SharedBudget | None = None,
    ) -> None:
        self._memory, self._settle, self._shared = memory, settle, shared
        self._asked = deque[int](maxlen=1)
        """Budget in bytes that is not applied yet. Its append and pop are atomic."""
        self._lacked_bytes = 0
        """Bytes that the arbiter is to be told of: in one report, or in each while a step waits for them."""
        self._is_waiting = False
        self._wants_more = False
        """Would the engine keep more prefixes?"""
        self._answered = threading.Condition()
        """Notified of each budget that the arbiter sets."""
        self._reported_s = self._refused_s = 0.0
        self._reported_bytes = self._granted_bytes = 0
        self._must_stop = False
        with contextlib.ExitStack() as undo:
            self._selector = undo.enter_context(selectors.DefaultSelector())
            self._wake_fds = os.pipe()
            for fd in self._wake_fds:
                undo.callback(os.close, fd)
            self._selector.register(self._wake_fds[0], selectors.EVENT_READ, self._woken)
            if control is not None:
                undo.callback(os.close, lock(control))
                listener = undo.enter_context(listen(control))
                undo.callback(control.unlink, missing_ok=True)
                self._selector.register(listener, selectors.EVENT_READ, lambda: self._accept(listener))
            if shared is not None:
                undo.callback(shared.close)
                self._selector.register(shared.connection, selectors.EVENT_READ, self._receive_budget)
            self._undo = undo.pop_all()
        self._thread = threading.Thread(target=self._run, name="vmmkv-elastic", daemon=True)
        self._thread.start()

    # the engine's thread, with the memory's lock

    def apply(self) -> None:
        """Apply the budget that was asked for, and bring memory nearer to it."""
        if self._asked:
            self._memory.set_budget(max(self._asked.pop(), self._memory.group_bytes))
        self._settle()

    def ask(self, num_blocks: int, is_running: bool) -> None:
        """Ask the arbiter for memory of so many blocks more; for a running request, wait for it for a moment."""
        shared = self._shared
        if shared is None or shared.is_gone or time.monotonic() < self._refused_s:
            return
        groups = ceil_div(num_blocks, self._memory.group_blocks)
        needed_bytes = self._memory.state().mapped_bytes + groups * self._memory.group_bytes
        with self._answered:
            self._lacked_bytes, number = groups * self._memory.group_bytes, shared.num_reports + 1
            self._is_waiting = is_running
            self._wake()
            if is_running:
                self._answered.wait_for(
                    lambda: (
                        shared.is_gone
                        or (shared.num_answered >= number and (shared.budget_bytes >= needed_bytes or not shared.is_coming))
                    ),
                    _GRANT_S,
                )
                self._is_waiting, self._lacked_bytes = False, 0
        if self._asked and self._asked[0] >= self._memory.state().budget_bytes:
            self.apply()  # a lower one waits for the next step: this one may have found prefixes that would go
        if self._memory.state().budget_bytes < needed_bytes:
            self._refused_s = time.monotonic() + _GRANT_S

    def would_keep_more(self) -> None:
        """Ask the arbiter, without waiting, for memory for more prefixes."""
        if self._shared is not None and not self._wants_more and time.monotonic() - self._reported_s > _WANT_S:
            self._wants_more = True
            self._wake()

    def close(self) -> None:
        """End the thread, and the share. The caller does not have the lock. Idempotent."""
        if not self._must_stop:
            self._must_stop = True
            self._wake()
            self._thread.join()
            self._undo.close()

    # the thread

    def _run(self) -> None:
        while not self._must_stop:
            is_settled = not self._asked and not self._memory.is_leaving
            for key, _ in self._selector.select(_BEAT_S if is_settled else _SETTLING_S):
                try:
                    key.data()
                except OSError:  # of one connection, or for want of descriptors
                    log.exception("vmmkv: elastic memory cannot read one of its sockets")
            if (self._asked or self._memory.is_leaving) and self._memory.lock.acquire(timeout=_SETTLING_S):
                try:
                    self.apply()
                except Exception:
                    log.exception("vmmkv: elastic memory cannot be brought to its budget now")
                finally:
                    self._memory.lock.release()
            is_news = self._memory.state().mapped_bytes < self._reported_bytes  # which others may wait for
            if is_news or time.monotonic() - self._reported_s >= _BEAT_S:
                self._report()

    def _wake(self) -> None:
        os.write(self._wake_fds[1], b"x")

    def _woken(self) -> None:
        os.read(self._wake_fds[0], 4096)
        if not self._must_stop:
            self._report()

    def _report(self) -> None:
        """Tell the arbiter what there is."""
        if self._shared is None or self._shared.is_gone:
            return
        state, self._reported_s = self._memory.state(), time.monotonic()
        self._reported_bytes = state.mapped_bytes
        wanted_bytes = state.mapped_bytes + state.reserved_bytes // _WANTED_PART if self._wants_more else state.used_bytes
        self._wants_more = False
        with self._answered:
            needed_bytes = state.mapped_bytes + self._lacked_bytes if self._lacked_bytes else state.used_bytes
            if not self._is_waiting:
                self._lacked_bytes = 0
            self._shared.report(mapped_bytes=state.mapped_bytes, needed_bytes=needed_bytes, wanted_bytes=wanted_bytes)

    def _receive_budget(self) -> None:
        assert self._shared is not None
        with self._answered:
            self._shared.receive()
            if self._shared.is_gone:
                self._selector.unregister(self._shared.connection)
                log.error("vmmkv: the holder at %s is gone; the budget of elastic memory stays", self._shared.path)
            elif self._shared.budget_bytes != self._granted_bytes:
                self._granted_bytes = self._shared.budget_bytes
                self._asked.append(self._granted_bytes)
            self._answered.notify_all()

    def _accept(self, listener: socket.socket) -> None:
        connection, _ = listener.accept()
        _, uid = peer(connection)
        if uid != os.getuid():
            connection.close()
            return
        connection.setblocking(False)
        self._selector.register(connection, selectors.EVENT_READ, lambda: self._read(connection))
        self._answer(connection, {"version": VERSION})

    def _read(self, connection: socket.socket) -> None:
        try:
            heard = receive(connection)
            answer = None
            if heard is not None:
                close_all(heard[1])
                answer = self._answer_to(heard[0])
        except OSError:
            answer = None
        if answer is None:
            self._selector.unregister(connection)
            connection.close()
        else:
            self._answer(connection, answer)

    def _answer(self, connection: socket.socket, message: dict[str, Any]) -> None:
        with contextlib.suppress(OSError):  # it has ended, which the next read tells
            send(connection, message)

    def _answer_to(self, message: Message) -> dict[str, Any] | None:
        """The answer to a request; None for what is no request."""
        match message.get("do"):
            case "state":
                return self._state()
            case "resize":
                budget_bytes = message.whole("budget_bytes")
                try:
                    self._check(budget_bytes)
                except BudgetError as error:
                    return {"error": str(error)}
                self._asked.append(budget_bytes)
                return self._state()
        return None

    def _check(self, budget_bytes: int) -> None:
        if self._shared is not None and not self._shared.is_gone:
            raise BudgetError(f"the budget of this engine is set by the holder at {self._shared.path}, for all that share it")
        if not self._memory.group_bytes <= budget_bytes <= self._memory.reserved_bytes:
            raise BudgetError(
                f"a budget of {format_bytes(budget_bytes)} cannot be: this engine has reserved "
                f"{format_bytes(self._memory.reserved_bytes)}, and maps {format_bytes(self._memory.group_bytes)} at a time"
            )

    def _state(self) -> dict[str, Any]:
        state = self._memory.state()
        budget_bytes = next(iter(self._asked.copy()), state.budget_bytes)
        sizes = state._asdict() | {"budget_bytes": budget_bytes, "group_bytes": self._memory.group_bytes}
        return {**sizes, "is_settled": state.mapped_bytes <= budget_bytes, "pid": os.getpid()}
