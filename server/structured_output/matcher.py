"""Answers that follow a grammar, in the engine: grammars made ready beside the loop, masks for a step's rows.

    Generate.grammar ── a thread reads it ──> Matcher ──> request      `opened`, when they may be queued
    forward half launched ──> earlier steps read back: the matchers know every token ──> a mask for each row ──> sample

The thread is one, and starts with the first grammar; who asks for none has none. Calls of matchers are made in others, those
of a step in two trips: tokens are accepted; then masks are filled, several at once. A thread can be left alone with a call that
takes too long (`grammar.watch`).

Legend: G rows with a grammar, W words.
"""

import contextlib
import hashlib
import itertools
import os
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final, Generic, NamedTuple, Self, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt

if TYPE_CHECKING:
    import xgrammar
    from tokenizers import Tokenizer as RustTokenizer
    from transformers import PreTrainedTokenizerFast

    from vmmkv.server.engine.request import Request


# -------- vocabulary
# What a grammar must know of a model's tokens: the bytes of each, and which end an answer.

_NOT_UTF8: Final = ((0xE0, 0x80, 0x9F), (0xED, 0xA0, 0xBF), (0xF0, 0x80, 0x8F), (0xF4, 0x90, 0xBF))
"""A first byte, and those that make no character with it: overlong forms, halves of surrogate pairs, beyond the last."""


class Vocabulary:
    """The tokens of one model. Both processes make the same one, so that what one has compiled the other can use."""

    def __init__(self, tokenizer: "PreTrainedTokenizerFast", size: int, end_tokens: Sequence[int]) -> None:
        """`size` is that of the model's logits, which may have more or fewer tokens than the tokenizer.

        Takes half a second for 100,000 tokens. Raises: ValueError if no token ends an answer.
        """
        import xgrammar

        if not end_tokens:
            raise ValueError("this model names no end token, without which an answer by a grammar could not end")
        ends = sorted(end_tokens)
        plain = xgrammar.TokenizerInfo.from_huggingface(tokenizer, vocab_size=size, stop_token_ids=ends)
        encoded = [""] * size
        # Added tokens are marks of the chat template, and no text: a detokenizer leaves them out.
        marks = tokenizer.added_tokens_decoder.keys()
        for token, token_id in tokenizer.get_vocab().items():
            if token_id < size and token_id not in marks:
                encoded[token_id] = token
        self.info: xgrammar.TokenizerInfo = xgrammar.TokenizerInfo(
            encoded, plain.vocab_type, vocab_size=size, stop_token_ids=ends, add_prefix_space=plain.add_prefix_space
        )
        self.rust: RustTokenizer = tokenizer.backend_tokenizer
        self.size = size
        self.num_words = -(-size // 32)
        """int32 words of a mask."""
        self.num_bytes = np.array([len(token) for token in self.info.decoded_vocab], np.int32)
        """Of each token."""
        self.last_bytes = np.array([token[-1] if token else 0 for token in self.info.decoded_vocab], np.uint8)
        """Of each token."""
        self._longer: dict[int, npt.NDArray[np.int32]] = {}
        firsts = np.zeros(32 * self.num_words, np.uint8)
        firsts[:size] = [token[0] if token else 0 for token in self.info.decoded_vocab]
        self.after = {lead: _bits((firsts < low) | (firsts > high)) for lead, low, high in _NOT_UTF8}
        """By the last byte of a text the masks that allow what is UTF-8 behind it, where xgrammar 0.2.8 allows more."""
        self.ends = np.zeros(self.num_words, np.int32)
        """The mask that allows the end tokens alone."""
        for token_id in ends:
            self.ends[token_id // 32] |= np.uint32(1 << (token_id % 32)).view(np.int32)

    def longer(self, num_bytes: int) -> npt.NDArray[np.int32]:
        """The mask that allows the tokens of more bytes than so many."""
        if num_bytes not in self._longer:
            is_longer = np.zeros(32 * self.num_words, np.bool_)
            is_longer[: self.size] = self.num_bytes > num_bytes
            self._longer[num_bytes] = _bits(is_longer)
        return self._longer[num_bytes]

    @classmethod
    def load(cls, model_dir: Path, size: int, end_tokens: Sequence[int]) -> Self:
        """From a directory; takes seconds. Raises: OSError, ValueError; ModuleNotFoundError without xgrammar."""
        from transformers import AutoTokenizer

        tokenizer: Any = AutoTokenizer.from_pretrained(model_dir, local_files_only=True)
        return cls(tokenizer, size, end_tokens)


def _bits(may: npt.NDArray[np.bool_]) -> npt.NDArray[np.int32]:
    """A mask, of one truth for each token."""
    words: npt.NDArray[np.int32] = np.packbits(may, bitorder="little").view(np.int32)
    return words


# -------- matcher
# Where one answer stands in its grammar: what may come next, and what must.

_CONTEXT_TOKENS: Final = 8
"""Of the answer, before what is forced: tokenised with it, so that it comes in the tokens that the model knows it by."""

Words = npt.NDArray[np.int32]
"""A bit for each token of the vocabulary, the lowest of the first word for token 0: may it come next?"""


class Matcher:
    """One answer's way through its grammar; it knows all tokens that were accepted, and nothing of where they came from."""

    def __init__(self, compiled: "xgrammar.CompiledGrammar", vocabulary: Vocabulary) -> None:
        import xgrammar

        self._matcher = xgrammar.GrammarMatcher(compiled)
        self._vocabulary = vocabulary
        self._words = np.zeros((1, vocabulary.num_words), np.int32)
        self._tokens: list[int] = []
        self._num_masked = -1
        """`_words` is what may come behind so many of the tokens; -1: behind none."""

    def accept(self, token: int) -> bool:
        """A token has come; False if the grammar does not allow it, and then nothing has changed."""
        if not self._matcher.accept_token(token):
            return False
        self._tokens.append(token)
        return True

    @property
    def num_words(self) -> int:
        """Of a mask."""
        return self._vocabulary.num_words

    def fill(self, words_GW: Words, row: int) -> None:
        """What may come next, into a row of C-contiguous masks. Microseconds; within a string, tens or hundreds of them."""
        if self._num_masked == len(self._tokens):
            words_GW[row] = self._words[0]
        else:
            self._fill(words_GW, row)

    def _fill(self, words_GW: Words, row: int) -> None:
        if not self._matcher.fill_next_token_bitmask(words_GW, row):
            words_GW[row] = -1  # all is allowed, and xgrammar may have left the mask as it was
        if (
            self._tokens
            and (after := self._vocabulary.after.get(int(self._vocabulary.last_bytes[self._tokens[-1]]))) is not None
        ):
            words_GW[row] &= after

    def mask(self) -> Words:
        """What may come next; a view that the next call writes over."""
        if self._num_masked != len(self._tokens):
            self._fill(self._words, 0)
            self._num_masked = len(self._tokens)
        words: Words = self._words[0]
        return words

    def must_end(self) -> bool:
        """Is the answer whole, and can nothing be added to it?"""
        return bool(self._matcher.is_completed()) and not (self.mask() & ~self._vocabulary.ends).any()

    def force(self, at_most: int) -> list[int]:
        """Accept the tokens that must come next, at most so many; none if there are not two, for one is no shorter way.

        They are what the tokenizer makes of the text, behind the last tokens if it keeps those as they are; the model has
        computed them already. A last one that could be the beginning of a longer one is left to the model.
        """
        if at_most < 2 or (len(text := self.forced_text()) < 2 and text.isascii()):
            return []
        tokens = self._accepted(self._tokenised(text)[:at_most])
        if tokens and len(tokens) < at_most and self._could_be_longer(tokens[-1]):
            self._take_back(1)
            tokens.pop()
        if len(tokens) == 1:
            self._take_back(1)
            return []
        return tokens

    def forced_text(self) -> str:
        """What must come next, whole characters of it."""
        try:
            return str(self._matcher.find_jump_forward_string())
        except UnicodeDecodeError as error:
            # Forced bytes can begin or end within a character: what comes before the first such place is text.
            return bytes(error.object[: error.start]).decode()

    def _tokenised(self, text: str) -> list[int]:
        rust = self._vocabulary.rust
        if context := self._tokens[-_CONTEXT_TOKENS:]:
            together: list[int] = rust.encode(rust.decode(context) + text, add_special_tokens=False).ids
            if together[: len(context)] == context:
                return together[len(context) :]
        alone: list[int] = rust.encode(text, add_special_tokens=False).ids
        return alone

    def _accepted(self, tokens: list[int]) -> list[int]:
        """As many as the grammar accepts: all of them, unless the tokenizer changes the text that it is given."""
        return list(itertools.takewhile(self.accept, tokens))

    def _could_be_longer(self, last: int) -> bool:
        """Could a longer token stand where the last one stands? What comes behind the forced text would decide."""
        self._take_back(1)
        could_be = bool((self.mask() & self._vocabulary.longer(int(self._vocabulary.num_bytes[last]))).any())
        assert self.accept(last), "it was accepted before"
        return could_be

    def _take_back(self, count: int) -> None:
        self._matcher.rollback(count)
        del self._tokens[len(self._tokens) - count :]
        if len(self._tokens) < self._num_masked:
            self._num_masked = -1  # other tokens may come in their place


# -------- watch
# Calls that nobody can interrupt, made in threads that can be left alone with them.
#
#     run ── a thread makes one call after the other, the caller waits ──┬── what each gave, or raised
#                                                                        └── OverTime, for one that takes more than CALL_S: the
#                                                                            thread is left with it, another makes the rest
#     run, spread ── several threads take the next call each, until there is none ── the same
#
# xgrammar's calls are C++, which no signal ends, and release Python's lock. How long one takes depends on the text as well as
# on
# the grammar: whoever chooses both can make the call after a quick one take minutes. Measured with SmolLM2's 49,152 tokens,
# calls
# that come after none of more than 15 ms, and how long they would have held the loop:
#
#     (.{0,3}){0,300}                          the first mask                 5.9 s
#     root ::= root root | [^\n]              a token of 64 characters       2.9 s
#     ((a{0,20}){0,20}){0,20}                  a mask, five tokens on         1.5 s
#     a rule that doubles 22 times             the text that is forced        1.4 s
#
# All of these are OverTime after 50 ms; most are refused before, when they are compiled, for that tries some tokens. The way to
# the thread and back takes 10 to 30 us on two busy cores, whatever number of calls is made there. Calls are spread where most
# of
# their time is C++: what they do in Python still comes one behind the other.

T = TypeVar("T")
CALL_S: Final = 0.05
"""For a call, of which an answer's matcher makes two for one token. Of a thread's own time: one that is not scheduled holds
nobody up for longer than the machine does anyway.
"""
MAX_LEFT: Final = 2
"""Threads that may work on for nobody before nothing new is to be begun: each takes a core."""
_MOST_THREADS: Final = 4
"""That calls are spread over. With more of them Python's lock would be what they wait for."""
_LEAST_CALLS: Final = 4
"""That a further thread is worth waking for."""


class OverTime(Exception):
    """A call takes too long; what it works on is not to be touched again, for it goes on."""


class Outcome(NamedTuple, Generic[T]):
    """What one call gave, or raised."""

    value: T | None
    error: BaseException | None
    took_s: float
    """Of its thread's time."""

    def get(self) -> T:
        """Raises: what the call raised, or OverTime."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value]  # it is the call's


class Watch:
    """Makes calls, and waits for them. `num_threads` are those that it spreads calls over: up to _MOST_THREADS of half the
    cores if None.
    """

    def __init__(self, call_s: float = CALL_S, num_threads: int | None = None) -> None:
        self._call_s = call_s
        self._num_threads = num_threads or max(1, min(_MOST_THREADS, len(os.sched_getaffinity(0)) // 2))
        self._workers: list[_Worker] = []
        self._left: list[_Worker] = []
        """Those that went on."""

    @property
    def num_left(self) -> int:
        """Threads that still work on what nobody waits for."""
        self._left = [worker for worker in self._left if not worker.is_done]
        return len(self._left)

    @property
    def is_full(self) -> bool:
        """Do so many work on for nobody that no more should be risked? What has begun may go on."""
        return self.num_left >= MAX_LEFT

    def run(self, calls: Sequence[Callable[[], T]], *, spread: bool = False) -> list[Outcome[T]]:
        """What each of them gave, in order. Raises nothing of theirs. `spread`: they may be made side by side.

        A signal's handler may raise while it waits: the threads are left with the calls that they make, no other is begun, and
        the next run has threads of its own.
        """
        outcomes: dict[int, Outcome[T]] = {}
        places = iter(range(len(calls)))
        try:
            while left := len(calls) - len(outcomes):
                num_threads = max(1, min(self._num_threads, left // _LEAST_CALLS)) if spread else 1
                while len(self._workers) < num_threads:
                    self._workers.append(_Worker())
                working = self._workers[:num_threads]
                for worker in working:
                    worker.begin(calls, places)
                for worker in working:
                    outcomes.update(self._made(worker))
        except BaseException:
            self._leave(self._workers)
            raise
        return [outcomes[place] for place in range(len(calls))]

    def close(self) -> None:
        """End the threads. Idempotent; one that is left ends after its call."""
        for worker in self._workers:
            worker.end()
        self._workers.clear()

    def _made(self, worker: "_Worker") -> dict[int, Outcome[Any]]:
        """What came of the calls that a thread has taken; it takes none behind one that takes too long."""
        left_s = self._call_s
        while not worker.wait(left_s):
            left_s = worker.left_s(self._call_s)
            if left_s <= 0:
                self._leave([worker])
                error = OverTime(
                    f"it takes too long to follow, more than {1000 * self._call_s:g} ms for one step; make it simpler"
                )
                return {**worker.outcomes, worker.place: Outcome(None, error, self._call_s)}
        return worker.outcomes

    def _leave(self, workers: "list[_Worker]") -> None:
        """Ask nothing more of these."""
        self._left += [worker for worker in workers if worker not in self._left]
        self._workers = [worker for worker in self._workers if worker not in workers]
        for worker in workers:
            worker.end()


class _Worker:
    """A thread, and locks that are flags: they are quicker than conditions, and there is a trip or two a step."""

    def __init__(self) -> None:
        self._asked, self._answered, self._turning = threading.Lock(), threading.Lock(), threading.Lock()
        self._asked.acquire()
        self._answered.acquire()
        self._calls: Sequence[Callable[[], Any]] = ()
        self._places: Iterator[int] = iter(())
        """Of the calls that nobody has taken yet. Others take from it too: that is one step of the interpreter."""
        self.outcomes: dict[int, Outcome[Any]] = {}
        """By their places."""
        self.place = 0
        """Of the call that is being made."""
        self.is_done = True
        self._began_s: float | None = None
        self._ends = False
        self._thread = threading.Thread(target=self._work, name="grammar-calls", daemon=True)  # it may never come back
        try:
            self._thread.start()
        except BaseException:  # of a signal's handler: it may have started
            self.end()
            raise

    def begin(self, calls: Sequence[Callable[[], Any]], places: Iterator[int]) -> None:
        self._calls, self._places, self.outcomes, self._began_s, self.is_done = calls, places, {}, None, False
        self._asked.release()

    def wait(self, seconds: float) -> bool:
        return self._answered.acquire(timeout=seconds)

    def left_s(self, call_s: float) -> float:
        """How much of its time the call that is being made still has. If none, it is the thread's last."""
        with self._turning:
            if self._began_s is None or self._thread.ident is None:
                return call_s
            left_s = call_s + self._began_s - time.clock_gettime(time.pthread_getcpuclockid(self._thread.ident))
            self._ends = left_s <= 0
            return left_s

    def end(self) -> None:
        """Nothing more is asked of it. Idempotent."""
        self._ends = True
        with contextlib.suppress(RuntimeError):  # it has not yet taken what was asked last: it will see that it ends
            self._asked.release()

    def _work(self) -> None:
        while True:
            self._asked.acquire()
            if self._ends and not self._calls:
                return
            began_s = time.thread_time()
            while True:
                with self._turning:
                    self._began_s = began_s
                    if self._ends or (place := next(self._places, None)) is None:
                        break
                    self.place = place
                value, failure = None, None
                try:
                    value = self._calls[place]()
                except BaseException as error:
                    failure = error
                ended_s = time.thread_time()
                self.outcomes[place] = Outcome(value, failure, ended_s - began_s)
                began_s = ended_s
            value = failure = None  # nor anything of the calls is kept while nothing is asked
            self._calls, self._places = (), iter(())
            self.is_done = True
            self._answered.release()
            if self._ends:
                return


# -------- constraints

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

    def begin(self, request: "Request") -> None:
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

    def follow(self, calls: "Sequence[tuple[Request, Callable[[], T]]]", *, spread: bool = False) -> list[T | Exception]:
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
        from vmmkv.server.structured_output.matcher import Matcher

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


def jumps(request: "Request") -> bool:
    """May what is forced be appended without being sampled?

    Not if each token is to be counted, has a log-probability (the prompt's come first), or may be one that ends the answer.
    """
    ask = request.ask
    wants_logprobs = ask.want_logprobs or ask.num_prompt_logprobs is not None
    penalties = (ask.presence_penalty, ask.frequency_penalty, ask.repetition_penalty)
    return not wants_logprobs and not ask.stop_token_ids and penalties == (0.0, 0.0, 1.0)
