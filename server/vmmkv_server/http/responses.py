"""Response bodies: OpenAI's completions and chat completions, whole and as chunks of a stream, and those of other routes.

Output ── ChoiceStream ──> TextDelta ── ResponseForm ──> JSON
"""

import time
import uuid
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from itertools import chain
from typing import Annotated, Any, ClassVar, Final, Literal, NamedTuple, TypeAlias

from pydantic import BaseModel, Field

from vmmkv import __version__
from vmmkv_server.chats import AnswerReader
from vmmkv_server.http.errors import ErrorBody
from vmmkv_server.http.schemas import GenerationRequest
from vmmkv_server.http.tools import AnswerFields, answer_fields
from vmmkv_server.protocol import (
    BLOCK_TOKENS,
    DEVICE,
    KV_EVENTS_HWM,
    KV_EVENTS_PENDING,
    KV_EVENTS_REPLAYED,
    LOGPROB_BYTES,
    FinishReason,
    Output,
    PromptLogprobs,
    Ready,
)
from vmmkv_server.sampling_params import SamplingParams
from vmmkv_server.tokenizer import Detokenizer, Echo, TokenTexts

LEAST_LOGPROB: Final = -9999.0
"""Number in place of minus infinity, which JSON does not have; OpenAI's."""

_Sparse = Field(exclude_if=lambda value: value is None)
"""Field that is left out of the answer, rather than null."""


class PromptTokensDetails(BaseModel):
    """Details of the prompts' tokens."""

    cached_tokens: int
    """Tokens found in the prefix cache, so that they were not computed."""
    cached_tokens_details: Annotated[dict[str, int] | None, _Sparse] = None
    """Cached tokens by where they were, as SGLang names it: `device`, `host`, `disk`. Left out if no tier had any."""


class CompletionTokensDetails(BaseModel):
    """Details of the answers' tokens."""

    reasoning_tokens: int
    """Tokens of the reasoning, without the one that ends it."""


class Usage(BaseModel):
    """Tokens: each prompt's once, however many choices it has, and those of all choices and beams."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails
    completion_tokens_details: Annotated[CompletionTokensDetails | None, _Sparse] = None
    """Left out if no answer has reasoning."""
    kv_rows: Annotated[dict[str, int] | None, _Sparse] = None
    """Rows of the KV cache that compactions by `kv_policy` have `kept` at last, and `dropped`. Left out if there were none."""

    @classmethod
    def of(cls, token_counts: tuple[int, Counter[str], int, int], kept_rows: Counter[str]) -> "Usage":
        """Usage from `Generation.token_counts` and `kept_rows`."""
        prompt_tokens, cached, completion_tokens, reasoning_tokens = token_counts
        details = None if cached.keys() <= {DEVICE} else dict(cached)
        return cls(
            prompt_tokens=prompt_tokens,
            completion_tokens=completion_tokens,
            total_tokens=prompt_tokens + completion_tokens,
            prompt_tokens_details=PromptTokensDetails(cached_tokens=cached.total(), cached_tokens_details=details),
            completion_tokens_details=(
                CompletionTokensDetails(reasoning_tokens=reasoning_tokens) if reasoning_tokens else None
            ),
            kv_rows=dict(kept_rows) or None,
        )


class CompletionLogprobs(BaseModel):
    """Log-probabilities of a completion's tokens, or of a chunk's. Lists of one length."""

    text_offset: list[int]
    """Offset of each token in the whole answer, in characters."""
    token_logprobs: list[float | None]
    """Null for the first token of an echoed prompt, which comes after nothing."""
    tokens: list[str]
    top_logprobs: list[dict[str, float] | None]
    """Log-probabilities of the likeliest tokens at each place, and of the chosen one."""


class TopLogprob(BaseModel):
    """A token that could come at some place, and its log-probability."""

    token: str
    logprob: float
    bytes: list[int] | None
    """UTF-8 of the token, which may be a part of a character; null for an id without text."""


class TokenLogprob(TopLogprob):
    """The chosen token, and the likeliest ones."""

    top_logprobs: list[TopLogprob]


class ChatLogprobs(BaseModel):
    """Log-probabilities of a reply's tokens, or of a chunk's."""

    content: list[TokenLogprob]
    refusal: None = None


class Answer(BaseModel):
    """Fields that all answers of generation begin with; every chunk of a stream has the same id and time."""

    id: str
    object: str
    created: int
    model: str


class CompletionChoice(BaseModel):
    """One continuation of one prompt, or its new text in a chunk."""

    index: int
    text: str
    logprobs: CompletionLogprobs | None = None
    finish_reason: FinishReason | None


class Completion(Answer):
    """The answer of /v1/completions, and each chunk of its stream."""

    object: Literal["text_completion"] = "text_completion"
    choices: list[CompletionChoice]
    usage: Annotated[Usage | None, _Sparse] = None


ChatFinishReason: TypeAlias = FinishReason | Literal["tool_calls"]


class AssistantMessage(AnswerFields):
    """A whole reply."""

    role: Literal["assistant"] = "assistant"
    content: str | None
    """Text; null if there is none beside calls or reasoning."""
    refusal: None = None


class ChatChoice(BaseModel):
    """One reply to a conversation."""

    index: int
    message: AssistantMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None


class ChatCompletion(Answer):
    """The answer of /v1/chat/completions."""

    object: Literal["chat.completion"] = "chat.completion"
    choices: list[ChatChoice]
    usage: Usage


class Delta(AnswerFields):
    """New text of a reply; the first one names the role."""

    role: Annotated[Literal["assistant"] | None, _Sparse] = None
    content: Annotated[str | None, _Sparse] = None


class ChunkChoice(BaseModel):
    """New text of one reply, in a chunk."""

    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: ChatFinishReason | None


class ChatCompletionChunk(Answer):
    """A chunk of a streamed chat completion."""

    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    choices: list[ChunkChoice]
    usage: Annotated[Usage | None, _Sparse] = None


class ModelCard(BaseModel):
    """The served model. Fields behind `owned_by` are known once it is loaded; `max_model_len` is in tokens of one request."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "vmmkv"
    max_model_len: int | None = None
    implementation: str | None = None
    """`vmmkv` or `transformers`."""
    kv_cache_dtype: str | None = None
    """A type of torch's, or `fp8`, `int8` or `int4`."""


class ModelList(BaseModel):
    """The answer of /v1/models."""

    object: Literal["list"] = "list"
    data: list[ModelCard]


class Health(BaseModel):
    """The answer of /health: 200 when `ok`, perhaps with a warning as the reason, else 503 and why."""

    status: Literal["ok", "loading", "draining", "asleep", "stuck", "dead"]
    reason: str | None = None


class Version(BaseModel):
    """The answer of /version."""

    version: str


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    """Tokens that one request can have, with its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizedText(BaseModel):
    """The answer of /detokenize."""

    prompt: str


class RenderedRequest(BaseModel):
    """The answer of the render routes, vLLM's GenerateRequest: what the engine would get for one prompt."""

    request_id: str
    token_ids: list[int]
    sampling_params: dict[str, Any]
    """Parameters of vLLM's that there are here, with `max_tokens` as it would be. A grammar is not among them."""
    model: str
    stream: bool
    stream_options: dict[str, Any] | None
    cache_salt: str | None
    priority: int
    features: None = None
    """Features of images: none."""
    kv_transfer_params: None = None

    @classmethod
    def of(
        cls, body: GenerationRequest, prompt: list[int], params: SamplingParams, *, model: str, id_prefix: str
    ) -> "RenderedRequest":
        """Render a request, one of its prompts and that prompt's sampling parameters."""
        sampling = {name: getattr(params, name) for name in _RENDERED}
        return cls.model_construct(
            request_id=f"{id_prefix}-{uuid.uuid4().hex}",
            token_ids=prompt,
            sampling_params=sampling | {"logit_bias": dict(params.logit_bias)},
            model=model,
            stream=bool(body.stream),
            stream_options=None if body.stream_options is None else body.stream_options.model_dump(),
            cache_salt=body.cache_salt,
            priority=body.priority,
        )


_RENDERED: Final = SamplingParams.__dataclass_fields__.keys() - {
    "beam_width",
    "kv_policy",
    "length_penalty",
    "structured_outputs",
}


class ServerInfo(BaseModel):
    """The answer of /server_info, in vLLM's form for `config_format=json`."""

    vllm_config: dict[str, dict[str, Any]]
    vllm_env: dict[str, str] = {}
    system_env: dict[str, str]

    @classmethod
    def of(cls, ready: Ready, model: str) -> "ServerInfo":
        """Description of the engine that has been loaded."""
        limits = ready.limits
        return cls(
            vllm_config={
                "model_config": {"model": model, "max_model_len": limits.max_tokens, "dtype": ready.dtype},
                "cache_config": {
                    "block_size": BLOCK_TOKENS,
                    "num_gpu_blocks": ready.num_blocks,
                    "cache_dtype": ready.kv_cache_dtype,
                },
                "scheduler_config": {"max_num_seqs": limits.max_sequences},
                "parallel_config": {"tensor_parallel_size": ready.num_ranks, "data_parallel_size": 1},
                "device_config": {"device": ready.device},
            },
            system_env={"vmmkv_version": __version__},
        )


class KVEventSource(BaseModel):
    """A publisher of KV events in the answer of /kv_event_sources, as vLLM's configuration has it."""

    enable_kv_cache_events: Literal[True] = True
    publisher: Literal["zmq"] = "zmq"
    endpoint: str
    """`0.0.0.0` in it stands for the host of this server."""
    replay_endpoint: str | None
    topic: str
    buffer_steps: int = KV_EVENTS_REPLAYED
    hwm: int = KV_EVENTS_HWM
    max_queue_size: int = KV_EVENTS_PENDING


class KVMemory(BaseModel):
    """The answer of the administrator's routes."""

    freed_bytes: int
    """Bytes that were held and are free now, or the device's again."""
    budget_bytes: int
    """While it sleeps, that which it has again when it wakes up."""
    pool_tokens: int
    """Tokens of one sequence that the budget holds."""


# Text as it comes.


class Score(NamedTuple):
    """The log-probability of a token of the answer."""

    token_id: int
    logprob: float | None
    """Log-probability; None for the first token of a prompt, which comes after nothing."""
    likeliest: Sequence[tuple[int, float]]
    """The likeliest tokens at its place, and their log-probabilities; as many as were asked for."""
    offset: int
    """Offset of the token in the text of the answer, in characters."""


@dataclass(frozen=True, slots=True)
class EchoScores:
    """The Scores of a prompt, packed as the engine sent them: unpacking takes long, so it is done off the event loop."""

    echo: Echo
    messages: list[PromptLogprobs] = field(default_factory=list)

    @property
    def are_complete(self) -> bool:
        """Has every token a log-probability? The first token of the prompt has one although nothing is sent of it."""
        return 1 + sum(len(message.logprobs) for message in self.messages) // LOGPROB_BYTES == len(self.echo.token_ids)

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities, those of the likeliest tokens among them."""
        return sum(len(message.logprobs) + len(message.top_logprobs) for message in self.messages) // LOGPROB_BYTES

    def unpacked(self) -> Iterator[Score]:
        """The Score of each token, in order. Takes a few microseconds each."""
        scores = [(None, ()), *chain.from_iterable(zip(*message.unpacked(), strict=True) for message in self.messages)]
        for token_id, (logprob, likeliest), offset in zip(self.echo.token_ids, scores, self.echo.offsets, strict=True):
            yield Score(token_id, logprob, likeliest, offset)


@dataclass(frozen=True, slots=True)
class TextDelta:
    """New text of one choice; its last one has a finish reason."""

    index: int
    """Index of the choice."""
    text: str
    finish_reason: FinishReason | None
    scores: Sequence[Score] | None = None
    """Scores of the new tokens; None unless they were asked for."""
    echo_scores: EchoScores | None = None
    """Scores of a prompt that stands before the new tokens; None for none."""
    parts: Sequence[Any] | None = None
    """The text by its parts, if it is read: calls, reasoning, content. Else all of it is content."""
    has_whole_calls: bool = False
    """Has the choice made calls, now or before, all of them whole?"""

    @property
    def num_logprobs(self) -> int:
        """Log-probabilities to write."""
        of_echo = 0 if self.echo_scores is None else self.echo_scores.num_logprobs
        return of_echo + (len(self.scores) * (1 + len(self.scores[0].likeliest)) if self.scores else 0)

    def all_scores(self) -> list[Score]:
        """Scores of an echoed prompt and of the new tokens."""
        return [*(self.echo_scores.unpacked() if self.echo_scores else ()), *(self.scores or ())]


class ChoiceStream:
    """The text of one choice: `feed` it the engine's outputs, `take` what is new.

    The text begins with that of an `echo`. `scored`: keep a Score for each token; those of the echo come by `feed_prompt`,
    before any output. With a `reader` deltas have parts, and tokens of the reasoning are counted: those before `reasoning_end`.
    """

    def __init__(
        self,
        detokenizer: Detokenizer,
        *,
        scored: bool = False,
        echo: Echo | None = None,
        reader: AnswerReader | None = None,
        reasoning_end: int | None = None,
    ) -> None:
        self.detokenizer = detokenizer
        self._text = "" if echo is None else echo.text
        self._first_offset = len(self._text)
        self._scores: list[Score] | None = [] if scored else None
        self._echo_scores = EchoScores(echo) if scored and echo is not None else None
        self._reason: FinishReason | None = None
        self._reader = reader
        self._reasoning_end = reasoning_end
        self._num_before_end: int | None = None
        """Tokens before the first `reasoning_end`."""

    @property
    def num_reasoning_tokens(self) -> int:
        """Tokens of the reasoning so far; 0 if its end is several tokens."""
        if self._reader is None or self._reasoning_end is None or self._reader.is_reasoning is None:
            return 0
        if self._num_before_end is not None:
            return self._num_before_end
        return self.detokenizer.num_tokens if self._reader.is_reasoning else 0

    def feed_prompt(self, message: PromptLogprobs) -> None:
        """Log-probabilities of the next tokens of the echoed prompt, in order."""
        assert self._echo_scores is not None, "they were not asked for"
        self._echo_scores.messages.append(message)

    def feed(self, outputs: Sequence[Output]) -> None:
        """The engine's outputs since the last call, in order. Tokens after a stop string are dropped."""
        if self.detokenizer.stopped:
            return
        reason = outputs[-1].finish_reason
        token_ids = list(chain.from_iterable(output.token_ids for output in outputs))
        end = self._reasoning_end
        if end is not None and self._num_before_end is None and end in token_ids:
            self._num_before_end = self.detokenizer.num_tokens + token_ids.index(end)
        if self._scores is not None:
            self._feed_scored(token_ids, outputs)
            token_ids = []
        if reason is None:
            self._text += self.detokenizer.feed(token_ids)
        elif not self.detokenizer.stopped:
            self._text += self.detokenizer.finish(token_ids)
        self._reason = "stop" if self.detokenizer.stopped else reason

    def take(self, index: int) -> TextDelta | None:
        """New text since the last call, as of choice `index`. None if there is none: scores wait for text."""
        is_waiting = self._echo_scores is not None and not self._echo_scores.are_complete
        if self._reason is None and (is_waiting or not self._text):
            return None
        delta = TextDelta(index, self._text, self._reason, self._scores, self._echo_scores)
        self._text = ""
        if self._reader is not None:
            parts = self._reader.feed(delta.text) + ([] if self._reason is None else self._reader.finish())
            if self._reason is None and not parts:
                return None
            delta = replace(delta, parts=parts, has_whole_calls=self._reader.has_whole_calls)
        self._echo_scores = None
        if self._scores is not None:
            self._scores = []
        return delta

    def _feed_scored(self, token_ids: Sequence[int], outputs: Sequence[Output]) -> None:
        logprobs = list(chain.from_iterable(output.logprobs for output in outputs))
        likeliest = chain.from_iterable(output.top_logprobs or ((),) * len(output.logprobs) for output in outputs)
        assert self._scores is not None and len(logprobs) >= len(token_ids), "the engine sent no log-probabilities"
        # Both can be longer by one: an end token has its own, and is not among the tokens.
        for token_id, logprob, likely in zip(token_ids, logprobs, likeliest, strict=False):
            if self.detokenizer.stopped:
                return
            offset = self._first_offset + self.detokenizer.num_characters
            self._scores.append(Score(token_id, logprob, likely, offset))
            self._text += self.detokenizer.feed([token_id])


# The form of an answer.


class ResponseForm(ABC):
    """The form of one answer. A stream is events of `opening`, of each delta, of usage without deltas if wanted, and an end."""

    id_prefix: ClassVar[str]
    stream_end: ClassVar[str] = "data: [DONE]\n\n"
    """Text behind the last event of a stream."""

    def __init__(self, model: str, tokens: TokenTexts) -> None:
        self.id = f"{self.id_prefix}-{uuid.uuid4().hex}"
        self._head: dict[str, Any] = {"id": self.id, "created": int(time.time()), "model": model}
        self._tokens = tokens

    def opening(self, num_choices: int) -> list[TextDelta]:
        """Deltas that are written before any generated text."""
        return []

    @abstractmethod
    def events(self, deltas: Sequence[TextDelta], usage: Usage | None) -> str:
        """Server-sent events of new text of choices."""

    def error_events(self, error: ErrorBody) -> str:
        """Server-sent events of an error after the start."""
        return f"data: {error.model_dump_json()}\n\n"

    @abstractmethod
    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> BaseModel:
        """The answer, with each choice as one delta, in order."""


class ChunkForm(ResponseForm):
    """A form whose streams are chunks."""

    @abstractmethod
    def chunk(self, deltas: Sequence[TextDelta], usage: Usage | None) -> BaseModel:
        """New text of choices."""

    def events(self, deltas: Sequence[TextDelta], usage: Usage | None) -> str:
        """One event, a chunk."""
        return f"data: {self.chunk(deltas, usage).model_dump_json()}\n\n"


class CompletionForm(ChunkForm):
    """The form of /v1/completions, where a chunk looks like a whole answer."""

    id_prefix = "cmpl"

    def chunk(self, deltas: Sequence[TextDelta], usage: Usage | None) -> Completion:
        """New text of choices."""
        choices = [
            CompletionChoice(
                index=delta.index,
                text=delta.text,
                logprobs=None if delta.scores is None else self._logprobs(delta.all_scores()),
                finish_reason=delta.finish_reason,
            )
            for delta in deltas
        ]
        return Completion(**self._head, choices=choices, usage=usage)

    whole = chunk

    def _logprobs(self, scores: Sequence[Score]) -> CompletionLogprobs:
        return CompletionLogprobs(
            text_offset=[score.offset for score in scores],
            token_logprobs=[None if score.logprob is None else _finite(score.logprob) for score in scores],
            tokens=[self._tokens.text_of(score.token_id) for score in scores],
            top_logprobs=[self._likeliest(score) for score in scores],
        )

    def _likeliest(self, score: Score) -> dict[str, float] | None:
        if score.logprob is None:
            return None
        pairs = (*score.likeliest, (score.token_id, score.logprob))
        return {self._tokens.text_of(token_id): _finite(logprob) for token_id, logprob in pairs}


class ChatForm(ChunkForm):
    """The form of /v1/chat/completions."""

    id_prefix = "chatcmpl"

    def opening(self, num_choices: int) -> list[TextDelta]:
        """An empty delta of each choice, which names its role."""
        return [TextDelta(index, "", None) for index in range(num_choices)]

    def chunk(self, deltas: Sequence[TextDelta], usage: Usage | None) -> ChatCompletionChunk:
        """New text of choices."""
        choices = []
        for delta in deltas:
            is_opening = not delta.text and delta.finish_reason is None
            if delta.parts is not None:
                news = Delta(**answer_fields(delta.parts, is_whole=False))
            else:
                news = Delta(role="assistant", content="") if is_opening else Delta(content=delta.text or None)
            choices.append(ChunkChoice(**self._common(delta), delta=news))
        return ChatCompletionChunk(**self._head, choices=choices, usage=usage)

    def whole(self, deltas: Sequence[TextDelta], usage: Usage) -> ChatCompletion:
        """Every reply."""
        replies = [ChatChoice(**self._common(delta), message=self._message(delta)) for delta in deltas]
        return ChatCompletion(**self._head, choices=replies, usage=usage)

    def _message(self, delta: TextDelta) -> AssistantMessage:
        if delta.parts:
            return AssistantMessage(**answer_fields(delta.parts, is_whole=True))
        return AssistantMessage(content=delta.text if delta.parts is None else "")

    def _common(self, delta: TextDelta) -> dict[str, Any]:
        logprobs = None if delta.scores is None else ChatLogprobs(content=list(map(self._scored, delta.scores)))
        reason = "tool_calls" if delta.has_whole_calls and delta.finish_reason == "stop" else delta.finish_reason
        return {"index": delta.index, "logprobs": logprobs, "finish_reason": reason}

    def _scored(self, score: Score) -> TokenLogprob:
        assert score.logprob is not None, "a chat echoes nothing"
        likeliest = [TopLogprob(**self._named(*each)) for each in score.likeliest]
        return TokenLogprob(**self._named(score.token_id, score.logprob), top_logprobs=likeliest)

    def _named(self, token_id: int, logprob: float) -> dict[str, Any]:
        data = self._tokens.bytes_of(token_id)
        text = self._tokens.text_of(token_id)
        return {"token": text, "logprob": _finite(logprob), "bytes": None if data is None else list(data)}


def _finite(logprob: float) -> float:
    return logprob if logprob > LEAST_LOGPROB else LEAST_LOGPROB  # also for NaN
