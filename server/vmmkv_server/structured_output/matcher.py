"""The place of an answer in its grammar, the tokens that may come next, and threads that compute it within a time limit.

Legend: G rows with a grammar, W words of a mask.
"""

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from queue import Empty, SimpleQueue
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

import numpy as np
import numpy.typing as npt

from vmmkv_server.models import from_directory

if TYPE_CHECKING:
    import xgrammar
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

T = TypeVar("T")

Words = npt.NDArray[np.int32]
"""A mask: bit i of word w tells whether token 32 * w + i may come next."""

_NOT_UTF8: Final = ((0xE0, 0x80, 0x9F), (0xED, 0xA0, 0xBF), (0xF0, 0x80, 0x8F), (0xF4, 0x90, 0xBF))
"""A lead byte, and the range of second bytes that is invalid after it: overlong forms, surrogates, past the last character."""

DIGEST_BYTES: Final = 32
"""In front of a compiled grammar: its SHA-256, by which the engine knows it again without hashing megabytes in its loop."""

CONTEXT_TOKENS: Final = 8
"""Tokens of the answer that are tokenised with the forced text behind them."""

_HEAD_BYTES: Final = 8
"""First bytes of tokens by which those are found that begin with a text."""

_MAX_COMPLETING: Final = 256
"""Masks of tokens that may complete texts, of 20 KB for 150,000 tokens."""


class Vocabulary:
    """The tokens of one model: the bytes of each, and which end an answer. Special ones are no part of a text.

    The compiler's worker and the engine make equal ones, so that the engine can read what the worker has compiled.
    """

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", size: int, end_tokens: Sequence[int]) -> None:
        """`size` is that of the model's logits. The tokenizer may have more tokens, or fewer.

        Takes half a second for 100,000 tokens. Raises: ValueError if no token ends an answer.
        """
        import xgrammar

        if not end_tokens:
            raise ValueError("this model names no end token, without which an answer by a grammar could not end")
        ends = sorted(end_tokens)
        plain = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=ends)
        shown = list(plain.decoded_vocab)
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < size:  # a detokenizer leaves special tokens out
                shown[token_id] = b"" if token.special or token_id in ends else token.content.encode()
        self.info: xgrammar.TokenizerInfo = xgrammar.TokenizerInfo(
            shown,
            xgrammar.VocabType.RAW,
            vocab_size=size,
            stop_token_ids=ends,
            add_prefix_space=plain.add_prefix_space,
        )
        self.token_bytes = list(plain.decoded_vocab)
        """Text of each token, that of special ones included."""
        for token_id, token in tokenizer.added_tokens_decoder.items():
            if token_id < size:
                self.token_bytes[token_id] = token.content.encode()
        self.rust: RustTokenizer = tokenizer.backend_tokenizer
        self.size = size
        self.num_words = -(-size // 32)
        decoded = self.info.decoded_vocab
        self.num_bytes = np.array([len(token) for token in decoded], np.int32)
        self.last_bytes = np.array([token[-1] if token else 0 for token in decoded], np.uint8)
        first_bytes = np.array([token[0] if token else 0 for token in decoded], np.uint8)
        self._longer: dict[int, Words] = {}
        heads = b"".join(token[:_HEAD_BYTES].ljust(_HEAD_BYTES, b"\0") for token in self.token_bytes)
        heads_V = np.frombuffer(heads, f">u{_HEAD_BYTES}").astype(np.uint64)
        self._by_head = heads_V.argsort(kind="stable")
        """Tokens in the order of their first bytes."""
        self._heads = heads_V[self._by_head]
        """First bytes of these tokens, as numbers."""
        self._completing: dict[tuple[bytes, ...], Words] = {}
        self.after = {lead: self._mask((first_bytes < low) | (first_bytes > high)) for lead, low, high in _NOT_UTF8}
        """By the last byte of a text: the tokens that continue it as UTF-8, where xgrammar 0.2.8 allows others too."""
        is_end = np.zeros(size, np.bool_)
        is_end[ends] = True
        self.ends = self._mask(is_end)

    @classmethod
    def load(cls, model_dir: Path, size: int, end_tokens: Sequence[int]) -> Self:
        """From a directory; takes seconds. Raises: OSError, ValueError; ModuleNotFoundError without xgrammar."""
        from transformers import AutoTokenizer

        return cls(from_directory(AutoTokenizer, model_dir), size, end_tokens)

    def read(self, data: bytes) -> "xgrammar.CompiledGrammar":
        """A grammar as `Compilation.compile` gives it, for an equal vocabulary. Raises: RuntimeError, ValueError for others."""
        import xgrammar

        return xgrammar.CompiledGrammar.deserialize_json(data[DIGEST_BYTES:].decode(), self.info)

    def longer(self, num_bytes: int) -> Words:
        """The mask of the tokens with more bytes than this."""
        if num_bytes not in self._longer:
            self._longer[num_bytes] = self._mask(self.num_bytes > num_bytes)
        return self._longer[num_bytes]

    def completing(self, texts: tuple[bytes, ...]) -> Words:
        """The mask of the tokens that may complete one of these texts, and perhaps of a few more. A token may have all of it.

        Takes milliseconds; nothing for texts that it was asked for lately.
        """
        if texts not in self._completing:
            may = np.zeros(self.size, np.bool_)
            heads = {text[start:][:_HEAD_BYTES] for text in texts for start in range(len(text))}
            lows, highs = (
                np.array([int.from_bytes(head.ljust(_HEAD_BYTES, fill), "big") for head in heads], np.uint64)
                for fill in (b"\0", b"\xff")
            )
            begins, ends = np.searchsorted(self._heads, lows), np.searchsorted(self._heads, highs, side="right")
            for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
                may[self._by_head[begin:end]] = True
            num_bytes = np.array([len(token) for token in self.token_bytes])
            for text in texts:
                for token_id in np.flatnonzero(num_bytes > len(text)).tolist():
                    may[token_id] |= text in self.token_bytes[token_id]
            self._completing[texts] = self._mask(may)
            while len(self._completing) > _MAX_COMPLETING:
                del self._completing[next(iter(self._completing))]
        return self._completing[texts]

    def _mask(self, may: npt.NDArray[np.bool_]) -> Words:
        padded = np.zeros(32 * self.num_words, np.bool_)
        padded[: self.size] = may
        return np.packbits(padded, bitorder="little").view(np.int32)


class Matcher:
    """One answer's state in its grammar: the tokens accepted, those that may come next, the text that must.

    All methods but `fill` can take long, and are called within time limits.
    """

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocabulary: Vocabulary) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._words = np.empty((1, vocabulary.num_words), np.int32)
        self._tokens: list[int] = []
        self._num_masked = -1
        """The number of tokens after which `_words` is the mask; -1 for none."""

    @property
    def num_tokens(self) -> int:
        """Tokens that were accepted, and those that it began with."""
        return len(self._tokens)

    @property
    def has_mask(self) -> bool:
        """Is the mask behind the last token there?"""
        return self._num_masked == len(self._tokens)

    def begin(self, text: bytes, tokens: Sequence[int]) -> bool:
        """Begin with the text of an answer's last tokens, or its end. False, and nothing changes, if it is not allowed."""
        assert not self._tokens, "it has begun"
        if text and not self._matcher.accept_string(text):
            return False
        self._tokens += tokens
        return True

    def accept(self, token: int) -> bool:
        """Append a token. False, and nothing changes, if the grammar does not allow it."""
        if not self._matcher.accept_token(token):
            return False
        self._tokens.append(token)
        return True

    def mask(self) -> Words:
        """The mask of the next token, made if it is not there; a view that the next token's overwrites.

        Takes microseconds; within a string, tens or hundreds of them.
        """
        if not self.has_mask:
            if not self._matcher.fill_next_token_bitmask(self._words, 0):
                self._words[:] = -1  # all is allowed, and xgrammar may have left the mask as it was
            last_byte = int(self._vocabulary.last_bytes[self._tokens[-1]]) if self._tokens else 0
            if (after := self._vocabulary.after.get(last_byte)) is not None:
                self._words[0] &= after
            self._num_masked = len(self._tokens)
        words: Words = self._words[0]
        return words

    def fill(self, words: Words) -> None:
        """Copy the mask of the next token, which `mask` has made."""
        assert self.has_mask, "no mask was made behind the last token"
        words[:] = self._words[0]

    def must_end(self) -> bool:
        """Is the answer complete, and can nothing be added to it?"""
        return bool(self._matcher.is_completed()) and not (self.mask() & ~self._vocabulary.ends).any()

    def force(self, max_tokens: int) -> list[int]:
        """Accept and return the tokens that must come next. None if there would be only one: sampling it takes no longer.

        The forced text is tokenised behind the last tokens of the answer, if those stay as they are: the model has computed
        them. A last token that might be part of a longer one is left to the model.
        """
        if max_tokens < 2 or (len(text := self.forced_text()) < 2 and text.isascii()):
            return []
        # All are accepted, unless the tokenizer changes the text that it is given.
        tokens = list(itertools.takewhile(self.accept, self._tokenised(text)[:max_tokens]))
        if tokens and len(tokens) < max_tokens:
            last = tokens.pop()
            self._take_back()
            longer = self._vocabulary.longer(int(self._vocabulary.num_bytes[last]))
            if not (self.mask() & longer).any():
                assert self.accept(last), "it was accepted before"
                tokens.append(last)
        if len(tokens) == 1:
            self._take_back()
            return []
        return tokens

    def forced_text(self) -> str:
        """The text that must come next, in whole characters."""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:
            # Forced bytes can begin or end within a character: up to the first such place they are text.
            return bytes(error.object[: error.start]).decode()

    def _tokenised(self, text: str) -> list[int]:
        rust = self._vocabulary.rust
        if context := self._tokens[-CONTEXT_TOKENS:]:
            together: list[int] = rust.encode(rust.decode(context) + text, add_special_tokens=False).ids
            if together[: len(context)] == context:
                return together[len(context) :]
        return rust.encode(text, add_special_tokens=False).ids

    def _take_back(self) -> None:
        self._matcher.rollback(1)
        self._tokens.pop()
        if len(self._tokens) < self._num_masked:
            self._num_masked = -1  # other tokens may come in their place


# Threads that make calls which cannot be interrupted.
#
# xgrammar's calls are C++: no signal ends them, and they release Python's lock. How long one takes depends on the text as
# well as on the grammar. Calls that come after none of more than 15 ms, with SmolLM2's 49,152 tokens:
#
#     (.{0,3}){0,300}                          the first mask                 5.9 s
#     root ::= root root | [^\n]               a token of 64 characters       2.9 s
#     ((a{0,20}){0,20}){0,20}                  a mask, five tokens on         1.5 s
#     a rule that doubles 22 times             the forced text                1.4 s
#
# Most such grammars are refused by the compiler, which follows some tokens. Others are abandoned here after CALL_S. The way
# to the thread and back takes 10 to 30 us on two busy cores, for any number of calls.

CALL_S: Final = 0.05
"""CPU time of one call, of which a token takes two. A thread that the system does not schedule is not blamed, unless it is a
virtual machine's host that does not: few systems tell that time apart."""
_MAX_THREADS: Final = 8
"""With more, the calls wait for Python's lock: 64 within strings took 17, 4.4, 3.3 and 3.7 ms by 1, 4, 8 and 16 of 64 cores."""
_MIN_CALLS: Final = 4
"""For which a further thread is worth waking."""


class CallOverran(Exception):
    """A call takes too long. It goes on, so its matcher must not be touched again."""


class CallResult(NamedTuple, Generic[T]):
    """The result or error of one call."""

    value: T | None
    error: BaseException | None
    took_s: float
    """CPU time."""

    def get(self) -> T:
        """Raises: the call's error, or CallOverran."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # it is the call's


class CallThreads:
    """Makes calls in threads and waits for them, CALL_S each. A thread whose call overruns is abandoned with it."""

    def __init__(self, call_s: float = CALL_S, num_threads: int | None = None) -> None:
        """`num_threads`: at most; if None, half the cores, up to _MAX_THREADS."""
        self._call_s = call_s
        self._num_threads = num_threads or max(1, min(_MAX_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._threads: list[CallThread] = []
        self._abandoned: list[CallThread] = []

    @property
    def num_abandoned(self) -> int:
        """Threads that still work on abandoned calls."""
        self._abandoned = [thread for thread in self._abandoned if not thread.is_idle]
        return len(self._abandoned)

    def run(self, calls: Sequence[Callable[[], T]], *, num_threads: int = 1) -> list[CallResult[T]]:
        """The outcomes of all calls, in order; their errors are in there. `num_threads`: at most, one at least.

        Where a signal handler raises while this waits, the threads are abandoned and make no further call.
        """
        batch: _CallBatch[T] = _CallBatch(calls, iter(range(len(calls))), {})
        overran: dict[int, CallResult[T]] = {}
        error = CallOverran(f"it takes too long to follow, more than {1000 * self._call_s:g} ms for one step; make it simpler")
        try:
            while num_left := len(calls) - len(batch.outcomes.keys() | overran.keys()):
                num_working = max(1, min(num_threads, self._num_threads, num_left // _MIN_CALLS))
                while len(self._threads) < num_working:
                    self._threads.append(CallThread())
                working = self._threads[:num_working]
                for thread in working:
                    thread.begin(batch)
                for thread in working:
                    left_s = self._call_s
                    while left_s > 0 and not thread.wait(left_s):
                        left_s = thread.left_s(self._call_s)
                    if left_s <= 0:
                        self._abandon([thread])
                        overran[thread.index] = CallResult(None, error, self._call_s)
        except BaseException:
            self._abandon(self._threads)
            raise
        return [overran.get(index) or batch.outcomes[index] for index in range(len(calls))]

    def close(self) -> None:
        """End the threads, an abandoned one after its call. Idempotent."""
        for thread in self._threads:
            thread.end()
        self._threads.clear()

    def _abandon(self, threads: "list[CallThread]") -> None:
        self._abandoned += threads
        self._threads = [thread for thread in self._threads if thread not in threads]
        for thread in threads:
            thread.end()


class _CallBatch(NamedTuple, Generic[T]):
    """Calls that several threads take from."""

    calls: Sequence[Callable[[], T]]
    indices: Iterator[int]
    """Indices of the calls that no thread has taken. `next` of this is one step of the interpreter."""
    outcomes: dict[int, CallResult[T]]


class CallThread:
    """A daemon thread, since a call may never return."""

    def __init__(self) -> None:
        self._batches: SimpleQueue[_CallBatch[Any] | None] = SimpleQueue()
        self._finished: SimpleQueue[None] = SimpleQueue()
        self._taking = threading.Lock()
        """Held while a call is taken, and while the thread is told to take no more."""
        self._began_s: float | None = None
        self._ends = False
        self.index = 0
        """In the batch, of the call that is being made."""
        self.is_idle = True
        self._thread = threading.Thread(target=self._work, name="grammar-calls", daemon=True)
        try:
            self._thread.start()
        except BaseException:  # of a signal handler: it may have started
            self.end()
            raise

    def begin(self, batch: _CallBatch[Any]) -> None:
        """Take part in a batch."""
        self._began_s, self.is_idle = None, False
        self._batches.put(batch)

    def wait(self, seconds: float) -> bool:
        """Has it finished its part of the batch?"""
        with contextlib.suppress(Empty):
            self._finished.get(timeout=seconds)
            return True
        return False

    def left_s(self, call_s: float) -> float:
        """The CPU time that the current call has left. If none, the thread takes no other."""
        with self._taking:
            if self._began_s is None or self._thread.ident is None:
                return call_s
            left_s = call_s + self._began_s - time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            self._ends = left_s <= 0
            return left_s

    def end(self) -> None:
        """Take no further call, and end. Idempotent."""
        self._ends = True
        self._batches.put(None)

    def _work(self) -> None:
        while self._make_calls(self._batches.get()):
            self.is_idle = True
            self._finished.put(None)

    def _make_calls(self, batch: _CallBatch[Any] | None) -> bool:
        """False for None. In a function of its own, so that an idle thread keeps nothing of a batch alive."""
        if batch is None:
            return False
        now_s = time.thread_time()  # a system call of 0.5 to 1.5 us: a call's time begins where the one before ends
        while (index := self._take(batch, now_s)) is not None:
            value, error, began_s = None, None, now_s
            try:
                value = batch.calls[index]()
            except BaseException as raised:
                error = raised
            now_s = time.thread_time()
            batch.outcomes[index] = CallResult(value, error, now_s - began_s)
        return True

    def _take(self, batch: _CallBatch[Any], now_s: float) -> int | None:
        with self._taking:
            if self._ends or (index := next(batch.indices, None)) is None:
                return None
            self.index, self._began_s = index, now_s
            return index
