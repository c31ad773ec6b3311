"""One text as it comes: its tokens to text, and what is known of each token."""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import NamedTuple

from vmmkv.server.detokenize import Detokenizer
from vmmkv.server.prompt_logprobs import LOGPROB_BYTES, unpacked
from vmmkv.server.protocol import FinishReason, Output, PromptLogprobs


@dataclass(frozen=True, slots=True)
class Echo:
    """A prompt with which a text begins, when the Scores of its tokens are wanted too."""

    text: str
    token_ids: Sequence[int]
    offsets: Sequence[int]
    """Where each begins in the text, in characters."""


class Score(NamedTuple):
    """How likely a token of the answer was."""

    token_id: int
    logprob: float | None
    """None for the first of a prompt, which comes after nothing."""
    likeliest: Sequence[tuple[int, float]]
    """Tokens that were likely there, and their log-probabilities; as many as were asked for."""
    offset: int
    """Where the token begins in the text of the answer, in characters."""


@dataclass(frozen=True, slots=True)
class EchoScores:
    """The Scores of a prompt as the engine sent them: to unpack them takes long, and the event loop is not the place for it."""

    echo: Echo
    messages: Sequence[PromptLogprobs]

    @property
    def num_tokens(self) -> int:
        """The first of a prompt among them, of which nothing is sent."""
        return 1 + sum(len(message.logprobs) for message in self.messages) // LOGPROB_BYTES

    @property
    def num_logprobs(self) -> int:
        """Those of the likeliest tokens among them."""
        return sum(len(message.logprobs) + len(message.top_logprobs) for message in self.messages) // LOGPROB_BYTES

    def unpacked(self) -> Iterator[Score]:
        """Of each token, in order."""
        yield Score(self.echo.token_ids[0], None, (), self.echo.offsets[0])
        end = 1
        for message in self.messages:
            logprobs, likeliest = unpacked(message)
            begin, end = end, end + len(logprobs)
            echo = self.echo
            yield from starmap(Score, zip(echo.token_ids[begin:end], logprobs, likeliest, echo.offsets[begin:end], strict=True))


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one candidate, which is a choice of the answer; the last one of each has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None
    scores: Sequence[Score] | None = None
    """Of the new tokens; None if nobody asked."""
    echo_scores: EchoScores | None = None
    """Of a prompt that stands before the new tokens."""

    @property
    def num_logprobs(self) -> int:
        """How many there are to write."""
        of_echo = 0 if self.echo_scores is None else self.echo_scores.num_logprobs
        return of_echo + (len(self.scores) * (1 + len(self.scores[0].likeliest)) if self.scores else 0)

    def all_scores(self) -> Sequence[Score] | None:
        """Those of an echoed prompt too, which takes a few microseconds each."""
        if self.echo_scores is None:
            return self.scores
        return [*self.echo_scores.unpacked(), *(self.scores or ())]

    @staticmethod
    def joined(index: int, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """All that came of one candidate, as if it had come at once."""
        scores = None if deltas[0].scores is None else [score for delta in deltas for score in delta.scores or ()]
        echo_scores = next((delta.echo_scores for delta in deltas if delta.echo_scores is not None), None)
        return TextDelta(index, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, scores, echo_scores)


class Candidate:
    """One text: a choice of the answer, or one that `best_of` may drop. `feed` it what the engine says, `take` what is new."""

    def __init__(self, detokenizer: Detokenizer, *, scored: bool = False, echo: Echo | None = None) -> None:
        """`scored`: who asked wants a Score for each token; those of `echo` come by `feed_prompt`, before any other."""
        self._detokenizer = detokenizer
        self._text = ""
        self._scores: list[Score] | None = [] if scored else None
        self._first_offset = 0 if echo is None else len(echo.text)
        self._echo_scores = None if echo is None else EchoScores(echo, ())
        self._show_echo()
        self._reason: FinishReason | None = None
        self._logprob_sum = 0.0
        self._num_logprobs = 0

    @property
    def num_tokens(self) -> int:
        """So far; those after the one that completed a stop string are not counted."""
        return self._detokenizer.num_tokens

    @property
    def stopped(self) -> bool:
        """A stop string was found: nothing more is wanted of it."""
        return self._detokenizer.stopped

    @property
    def mean_logprob(self) -> float:
        """Of the tokens chosen, the end token among them; the worst there is if they were not numbers."""
        mean = self._logprob_sum / max(1, self._num_logprobs)
        return -math.inf if math.isnan(mean) else mean

    def feed_prompt(self, message: PromptLogprobs) -> None:
        """What the engine said of the prompt that is echoed: of its next tokens, in order."""
        assert self._echo_scores is not None and self._scores is not None, "nobody asked for them"
        self._echo_scores = EchoScores(self._echo_scores.echo, (*self._echo_scores.messages, message))
        self._show_echo()

    def feed(self, outputs: Sequence[Output]) -> None:
        """What the engine said since the last time, in order. What comes after a stop string counts for nothing."""
        if self.stopped:
            return
        before, reason = self.num_tokens, outputs[-1].finish_reason
        token_ids = list(chain.from_iterable(output.token_ids for output in outputs))
        logprobs = list(chain.from_iterable(output.logprobs for output in outputs))
        if self._scores is not None:
            likeliest = list(chain.from_iterable(output.top_logprobs for output in outputs))
            self._feed_scored(token_ids, logprobs, likeliest or [()] * len(token_ids))
            token_ids = []
        if reason is None:
            self._text += self._detokenizer.feed(token_ids)
        elif not self.stopped:
            self._text += self._detokenizer.finish(token_ids)
        self._reason = "stop" if self.stopped else reason
        used = logprobs[: self.num_tokens - before] if self.stopped else logprobs
        self._logprob_sum += sum(used)
        self._num_logprobs += len(used)

    def take(self, index: int) -> TextDelta | None:
        """What is new since the last time, as of candidate `index`. None if there is nothing to show: scores wait for text."""
        if not self._text and self._reason is None:
            return None
        delta = TextDelta(index, self._text, self._reason, self._scores, self._echo_scores)
        self._text, self._echo_scores = "", None
        if self._scores is not None:
            self._scores = []
        return delta

    def _show_echo(self) -> None:
        """Of a prompt that is scored, when all its scores are there."""
        scores = self._echo_scores
        if scores is not None and scores.num_tokens == len(scores.echo.token_ids):
            self._text = scores.echo.text

    def _feed_scored(
        self, token_ids: Sequence[int], logprobs: Sequence[float], likeliest: Sequence[Sequence[tuple[int, float]]]
    ) -> None:
        assert self._scores is not None and len(logprobs) >= len(token_ids), "the engine sent no log-probabilities"
        # Both can be longer by one: an end token has its own, and is not among the tokens.
        for token_id, logprob, likely in zip(token_ids, logprobs, likeliest, strict=False):
            if self.stopped:
                return
            offset = self._first_offset + self._detokenizer.num_characters
            self._scores.append(Score(token_id, logprob, likely, offset))
            self._text += self._detokenizer.feed([token_id])
