"""One text as it comes: its tokens to text, and what is known of each token."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain, starmap
from typing import NamedTuple

from vmmkv.server.detokenize import Detokenizer
from vmmkv.server.prompt_logprobs import unpacked
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
class TextDelta:
    """New text of one candidate, which is a choice of the answer; the last one of each has a finish reason."""

    index: int
    text: str
    finish_reason: FinishReason | None
    scores: Sequence[Score] | None = None
    """Of the new tokens; None if nobody asked."""

    @staticmethod
    def joined(index: int, deltas: Sequence["TextDelta"]) -> "TextDelta":
        """All that came of one candidate, as if it had come at once."""
        scores = None if deltas[0].scores is None else [score for delta in deltas for score in delta.scores or ()]
        return TextDelta(index, "".join(delta.text for delta in deltas), deltas[-1].finish_reason, scores)


class Candidate:
    """One text: a choice of the answer, or one that `best_of` may drop. `feed` it what the engine says, `take` what is new."""

    def __init__(self, detokenizer: Detokenizer, *, scored: bool = False, echo: Echo | None = None) -> None:
        """`scored`: who asked wants a Score for each token; those of `echo` come by `feed_prompt`, before any other."""
        self._detokenizer = detokenizer
        self._text = ""
        self._scores: list[Score] | None = [] if scored else None
        self._echo = echo
        self._first_offset = 0
        if echo is not None:
            self._first_offset = len(echo.text)
            self._add_scores([None], [()])
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
        self._add_scores(*unpacked(message))

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
        delta = TextDelta(index, self._text, self._reason, self._scores)
        self._text = ""
        if self._scores is not None:
            self._scores = []
        return delta

    def _add_scores(self, logprobs: Sequence[float | None], likeliest: Sequence[Sequence[tuple[int, float]]]) -> None:
        """Of the next tokens of the prompt; when all are there it can be shown."""
        echo, scores = self._echo, self._scores
        assert echo is not None and scores is not None, "nobody asked for them"
        places = slice(len(scores), len(scores) + len(logprobs))
        scores += starmap(Score, zip(echo.token_ids[places], logprobs, likeliest, echo.offsets[places], strict=True))
        if len(scores) == len(echo.token_ids):
            self._text = echo.text

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
