"""Answers that follow a grammar, in the engine: grammars made ready beside the loop, masks for a step's rows.

    Generate.grammar ── a thread reads it ──> Matcher ──> request      `opened`, when they may be queued
    forward half launched ──> earlier steps read back: the matchers know every token ──> a mask for each row ──> sample

The thread is one, and starts with the first grammar; who asks for none has none. Calls of matchers are made in others, those
of a step in two trips: tokens are accepted; then masks are filled, several at once. A thread can be left alone with a call that
takes too long (`grammar.watch`).

Legend: G rows with a grammar, W words.
"""

import hashlib
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from types import ModuleType
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeVar

import msgspec
import torch

from vmmkv.kernels import sample_reference
from vmmkv.server.engine.requests import Request
from vmmkv.server.engine.uploads import ALIGNED_ELEMENTS, Uploads
from vmmkv.server.grammar.watch import Watch
from vmmkv.units import round_up

if TYPE_CHECKING:
    from vmmkv.server.grammar.matcher import Matcher
    from vmmkv.server.grammar.vocabulary import Vocabulary

T = TypeVar("T")
CACHE_BYTES: Final = 64 << 20
"""Of grammars that are kept ready, by namespace and what came over the wire."""

_NAP_S: Final = 0.0005
"""While nothing else is to do; reading a grammar takes some ten milliseconds."""

FOLLOW_S: Final = 0.2
FOLLOW_TOKEN_S: Final = 0.002
"""Of the loop's time, what one answer's grammar may take in all: so much, and so much more for each token. Most take tens of
microseconds a token; a short expression can take seconds, and everybody waits for them.
"""

LOOP_SHARE: Final = 0.25
"""Of the loop's time, what all grammars together may take: beyond that, and FOLLOW_S at once, an answer has its tokens' share
and CROWDED_S alone. Else an answer's many choices, each slow and none too slow, would stop the loop for seconds.
"""
CROWDED_S: Final = 0.01


class TooSlow(Exception):
    """A grammar takes more of the loop's time than one answer may have."""


class TokenMasks(NamedTuple):
    """Which tokens may come next, of some rows of a step; on the host, and to be sent in one piece."""

    rows: list[int]
    words_GW: torch.Tensor
    """int32, to be written to: a view of `packed`."""
    packed: torch.Tensor
    """From `Uploads.blank`: the masks, and behind them, aligned, their rows."""

    @classmethod
    def of(cls, rows: list[int], num_words: int, uploads: Uploads) -> "TokenMasks":
        """For these rows; what the masks say is not set."""
        num_elements = len(rows) * num_words
        begin = round_up(num_elements, ALIGNED_ELEMENTS)
        packed = uploads.blank(begin + len(rows))
        packed.numpy()[begin:] = rows
        return cls(rows, packed[:num_elements].view(len(rows), num_words), packed)


class Constraints:
    """Reads grammars for one model. `load` gives its vocabulary, and is called in the thread when the first grammar comes."""

    def __init__(self, load: "Callable[[], Vocabulary]") -> None:
        self._load = load
        self._vocabulary: Vocabulary | None = None
        self._thread: ThreadPoolExecutor | None = None
        self._coming: dict[str, tuple[Request, Future[Any]]] = {}
        self._ready: OrderedDict[tuple[Hashable, bytes], tuple[Any, int]] = OrderedDict()
        self._watch = Watch()
        self._balance_s = FOLLOW_S
        """What all grammars may take before the loop is crowded."""
        self._charged_s = time.perf_counter()

    @property
    def num_coming(self) -> int:
        """Requests whose grammars are being read."""
        return len(self._coming)

    def begin(self, request: Request) -> None:
        """Have a request's grammar read. The request itself does not keep it: it can have megabytes."""
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammar")
        future = self._thread.submit(self._compiled, request.ask.grammar, request.namespace)
        request.ask = msgspec.structs.replace(request.ask, grammar=b"")
        self._coming[request.ask.request_id] = request, future

    def forget(self, request_id: str) -> None:
        """Its client is gone."""
        if (gone := self._coming.pop(request_id, None)) is not None:
            gone[1].cancel()  # if it has not begun: nobody would want what is read

    def opened(self) -> "list[tuple[Request, Matcher | Exception]]":
        """Those whose grammar has been read since, each with where its answer begins, or why it cannot."""
        done = [name for name, (_, future) in self._coming.items() if future.done()]
        found: list[tuple[Request, Matcher | Exception]] = []
        for name in done:
            request, future = self._coming.pop(name)
            error = future.exception()
            if error is None:
                try:
                    found.append((request, self._matcher(future.result())))
                    continue
                except Exception as failure:
                    error = failure
            if not isinstance(error, Exception):
                raise error
            found.append((request, error))
        return found

    def follow(self, calls: Sequence[tuple[Request, Callable[[], T]]], *, spread: bool = False) -> list[T | Exception]:
        """What these calls of their requests' matchers give, or why one gives nothing; charged to the requests.

        A matcher that has failed is not to be called again: something may still work on it. `spread`: in several threads.
        """
        found: list[T | Exception] = []
        began_s = time.perf_counter()
        self._balance_s = min(FOLLOW_S, self._balance_s + LOOP_SHARE * (began_s - self._charged_s))
        self._charged_s = began_s
        outcomes = self._watch.run([call for _, call in calls], spread=spread)
        # Side by side they hold the loop for less than they take; a thread that is not scheduled holds it for more.
        held_s, took_s = time.perf_counter() - began_s, sum(outcome.took_s for outcome in outcomes)
        loop_share = min(1.0, held_s / took_s) if took_s else 0.0
        for (request, _), outcome in zip(calls, outcomes, strict=True):
            request.grammar_s += outcome.took_s
            self._balance_s -= outcome.took_s * loop_share
            at_once_s = FOLLOW_S if self._balance_s > 0 else CROWDED_S
            used_s = request.grammar_s - at_once_s
            is_over = used_s > 0 and used_s > FOLLOW_TOKEN_S * request.num_generated  # which is looked up for few
            try:
                found.append(outcome.get() if not is_over else TooSlow("it takes too long to follow; make it simpler"))
            except Exception as error:
                found.append(error)
        return found

    def close(self) -> None:
        """End the threads, and read nothing more. Idempotent; a thread that is at work ends behind that."""
        for request_id in list(self._coming):
            self.forget(request_id)
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)
            self._thread = None
        self._watch.close()

    @property
    def is_full(self) -> bool:
        """Is so much still being worked on for nobody that no answer by a grammar should begin?"""
        return self._watch.is_full

    def nap(self) -> None:
        """Leave the interpreter to the thread for a moment: there is nothing else to do."""
        time.sleep(_NAP_S)

    def _matcher(self, compiled: Any) -> "Matcher":
        from vmmkv.server.grammar.matcher import Matcher

        assert self._vocabulary is not None, "it was there to read the grammar"
        return Matcher(compiled, self._vocabulary)

    def _compiled(self, data: bytes, namespace: Hashable) -> Any:
        """In the thread, which alone has the cache. Namespaces share nothing: nobody finds out by the time that it takes what
        others have asked.
        """
        import xgrammar

        if self._vocabulary is None:
            self._vocabulary = self._load()
        name = namespace, hashlib.sha256(data).digest()
        if name in self._ready:
            self._ready.move_to_end(name)
            return self._ready[name][0]
        compiled = xgrammar.CompiledGrammar.deserialize_json(data.decode(), self._vocabulary.info)
        self._ready[name] = compiled, len(data)
        while sum(size for _, size in self._ready.values()) > CACHE_BYTES:
            self._ready.popitem(last=False)
        return compiled


def jumps(request: Request) -> bool:
    """May what is forced be appended without being sampled?

    Not if each token is to be counted, has a log-probability (the prompt's come first), or may be one that ends the answer.
    """
    ask = request.ask
    wants_logprobs = ask.want_logprobs or ask.num_prompt_logprobs is not None
    penalties = (ask.presence_penalty, ask.frequency_penalty, ask.repetition_penalty)
    return not wants_logprobs and not ask.stop_token_ids and penalties == (0.0, 0.0, 1.0)


def apply_masks(logits_BV: torch.Tensor, masks: TokenMasks, uploads: Uploads) -> None:
    """-inf, in place, for the tokens that may not come next. A copy to the device and a launch; waits for nothing."""
    operations: ModuleType = sample_reference
    if logits_BV.is_cuda:
        from vmmkv.kernels import token_mask as operations
    sent = uploads.send(masks.packed)
    num_rows, num_words = masks.words_GW.shape
    operations.forbid(logits_BV, sent[len(sent) - num_rows :], sent[: num_rows * num_words].view(num_rows, num_words))
