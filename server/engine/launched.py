"""A step that is under way, and what is said of a token when it has been read back."""

from dataclasses import dataclass

from vmmkv.server.engine.request import Request, Slots, Strand
from vmmkv.server.engine.runner import Logprobs, Readback
from vmmkv.server.protocol import FinishReason, Output


@dataclass(frozen=True, slots=True)
class LaunchedChunk:
    """Part of a launched step: tokens of one strand. Nobody's, if its request does not run any more, or runs again."""

    strand: Strand
    num_admitted: int
    end: int
    """Rows that it has then."""
    is_last: bool
    is_answered: bool = True
    """Does what is sampled behind it count, if it is its strand's last? Not where a grammar has forced other tokens."""

    @property
    def is_live(self) -> bool:
        """Does the same request still run?"""
        request = self.strand.request
        return request.sequence is not None and request.num_admitted == self.num_admitted


@dataclass(frozen=True, slots=True)
class Launched:
    """A step under way: what it gives for whom."""

    readback: Readback
    slots: Slots
    """Of those that decode; the first of its tokens are theirs."""
    epochs: Slots
    """Of the slots, when it was launched."""
    ends: Slots
    """Rows that they have then."""
    chunks: list[LaunchedChunk]

    @property
    def requests(self) -> list[Request]:
        """All that have a part in it through chunks, and still do."""
        return list(dict.fromkeys(chunk.strand.request for chunk in self.chunks if chunk.is_live))


@dataclass(slots=True)
class Counts:
    """Of tokens, since the engine began."""

    prompt_tokens: int = 0
    """Computed."""
    generated_tokens: int = 0


def output_of(request: Request, token: int, reason: FinishReason | None, logprobs: Logprobs | None = None) -> Output:
    """A request's next token, and whether it is its last; a token below 0 is none."""
    return Output(
        request_id=request.ask.request_id,
        token_ids=() if reason == "stop" or token < 0 else (token,),
        finish_reason=reason,
        cached_tokens=0 if request.num_answered else request.num_cached,
        queued_us=0 if request.num_answered else request.queued_us,
        logprobs=() if logprobs is None else (logprobs.chosen,),
        top_logprobs=(tuple(logprobs.likeliest),) if logprobs is not None and logprobs.likeliest else (),
    )
