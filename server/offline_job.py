"""One call of `Engine.generate`: its requests to the engine, and its answers as they come."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from tokenizers import Tokenizer

from vmmkv.server.completion import Completion, CompletionOutput
from vmmkv.server.detokenize import Detokenizer, decode_all
from vmmkv.server.prompt_logprobs import unpacked
from vmmkv.server.protocol import FinishReason, Generate, Output, PromptLogprobs
from vmmkv.server.sampling import SamplingParams

SEED_MASK = (1 << 63) - 1
"""Seeds reach the engine as non-negative numbers of 63 bits."""


@dataclass(slots=True, eq=False)
class Answer:
    """An answer that grows."""

    prompt: "Prompt"
    detokenizer: Detokenizer | None
    """Only where a stop string can end it: else all text is made at the end, at once."""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    top_logprobs: list[Sequence[tuple[int, float]]] = field(default_factory=list)
    text: str = ""
    finish_reason: FinishReason | None = None

    def feed(self, output: Output) -> None:
        """Further tokens, and the end if it has one; a stop string cuts what follows it, and is an end too."""
        self.token_ids += output.token_ids
        self.logprobs += output.logprobs
        self.top_logprobs += output.top_logprobs
        self.finish_reason = output.finish_reason
        if self.detokenizer is None:
            return
        is_last = output.finish_reason is not None
        self.text += self.detokenizer.finish(output.token_ids) if is_last else self.detokenizer.feed(output.token_ids)
        if self.detokenizer.stopped:
            del self.token_ids[self.detokenizer.num_tokens :]
            self.finish_reason = "stop"

    def output(self) -> CompletionOutput:
        """As it is given back. An end token's log-probability is left out, as the token is."""
        count, wanted = len(self.token_ids), self.prompt.params.logprobs
        return CompletionOutput(
            text=self.text,
            token_ids=self.token_ids,
            finish_reason=self.finish_reason,
            logprobs=None if wanted is None else self.logprobs[:count],
            top_logprobs=[dict(each) for each in self.top_logprobs[:count]] if wanted else None,
        )


@dataclass(slots=True, eq=False)
class Prompt:
    """A prompt, how it is to be continued, and its answers."""

    token_ids: list[int]
    params: SamplingParams
    seed: int
    """Of its first answer; those that follow have the next ones."""
    priority: int
    max_new_tokens: int
    answers: list[Answer] = field(default_factory=list)
    logprobs: list[float | None] = field(default_factory=lambda: [None])
    top_logprobs: list[Sequence[tuple[int, float]] | None] = field(default_factory=lambda: [None])
    cached_tokens: int = 0
    first_token_s: float | None = None
    finished_s: float = 0.0
    error: str | None = None

    def request(self, request_id: str, index: int) -> Generate:
        """What the engine is asked for its answer of that index."""
        params = self.params
        return Generate(
            request_id=request_id,
            prompt=self.token_ids,
            max_new_tokens=self.max_new_tokens,
            stop_token_ids=list(params.stop_token_ids),
            ignore_eos=params.ignore_eos,
            min_tokens=params.min_tokens,
            temperature=params.temperature,
            top_p=params.top_p,
            top_k=params.top_k,
            min_p=params.min_p,
            presence_penalty=params.presence_penalty,
            frequency_penalty=params.frequency_penalty,
            repetition_penalty=params.repetition_penalty,
            logit_bias=dict(params.logit_bias),
            seed=(self.seed + index) & SEED_MASK,
            want_logprobs=params.logprobs is not None,
            num_logprobs=params.logprobs or 0,
            num_prompt_logprobs=params.prompt_logprobs if index == 0 else None,
            priority=self.priority,
        )

    def completion(self) -> Completion:
        """As it is given back."""
        wanted = self.params.prompt_logprobs
        tops = [None if each is None else dict(each) for each in self.top_logprobs] if wanted else None
        return Completion(
            prompt_token_ids=self.token_ids,
            outputs=[answer.output() for answer in self.answers],
            cached_tokens=self.cached_tokens,
            first_token_s=self.first_token_s,
            finished_s=self.finished_s,
            prompt_logprobs=None if wanted is None else self.logprobs,
            prompt_top_logprobs=tops,
            error=self.error,
        )


class Job:
    """Prompts under way. Give it what the engine says; `unfinished` is empty when all have ended."""

    def __init__(self, name: str, prompts: Sequence[Prompt], tokenizer: Tokenizer | None) -> None:
        """`name` is unique within the engine."""
        self._prompts = prompts
        self._tokenizer = tokenizer
        self.requests: list[Generate] = []
        self.unfinished: dict[str, Answer] = {}
        """By the names of their requests."""
        self.num_new_tokens = 0
        self.num_prompt_tokens = 0
        """Of the prompts of answers that have begun, without what the prefix cache had."""
        for number, prompt in enumerate(prompts):
            for index in range(prompt.params.n):
                request = prompt.request(f"{name}-{number}-{index}", index)
                answer = Answer(prompt, self._detokenizer(prompt))
                prompt.answers.append(answer)
                self.requests.append(request)
                self.unfinished[request.request_id] = answer

    def take(self, outputs: Sequence[Output], now_s: float) -> Iterator[str]:
        """What a step gave, `now_s` seconds after the start. Names the requests that a stop string ended, to be aborted."""
        for output in outputs:
            answer = self.unfinished.get(output.request_id)
            if answer is None:  # it was aborted before this came
                continue
            prompt = answer.prompt
            self.num_new_tokens += len(output.token_ids)
            if not answer.token_ids and not answer.logprobs:
                self.num_prompt_tokens += len(prompt.token_ids) - output.cached_tokens
                if answer is prompt.answers[0]:
                    prompt.cached_tokens = output.cached_tokens
            if prompt.first_token_s is None and prompt.max_new_tokens:
                prompt.first_token_s = now_s
            answer.feed(output)
            if answer.finish_reason is not None:
                self._end(output.request_id, now_s)
                if output.finish_reason is None:
                    yield output.request_id

    def take_prompt(self, message: PromptLogprobs) -> None:
        """What the engine says of a prompt, before its first answer."""
        if (answer := self.unfinished.get(message.request_id)) is not None:
            logprobs, likeliest = unpacked(message)
            answer.prompt.logprobs += logprobs
            answer.prompt.top_logprobs += likeliest

    def fail(self, request_id: str, message: str, now_s: float) -> None:
        """The engine gave up on one request."""
        if (answer := self.unfinished.get(request_id)) is not None:
            answer.prompt.error = message
            self._end(request_id, now_s)

    def completions(self) -> list[Completion]:
        """All of them, in the order of the prompts."""
        self._decode()
        return [prompt.completion() for prompt in self._prompts]

    def _end(self, request_id: str, now_s: float) -> None:
        prompt = self.unfinished.pop(request_id).prompt
        prompt.finished_s = max(prompt.finished_s, now_s)

    def _detokenizer(self, prompt: Prompt) -> Detokenizer | None:
        if not prompt.params.stop:
            return None
        assert self._tokenizer is not None, "a stop string needs a tokenizer"
        params = prompt.params
        return Detokenizer(self._tokenizer, stops=params.stop, context=prompt.token_ids, min_tokens=params.min_tokens)

    def _decode(self) -> None:
        """Make the text of the answers that nobody looked at while they grew."""
        if self._tokenizer is None:
            return
        unread = [answer for prompt in self._prompts for answer in prompt.answers if answer.detokenizer is None]
        texts = decode_all(self._tokenizer, [(answer.prompt.token_ids, answer.token_ids) for answer in unread])
        for answer, text in zip(unread, texts, strict=True):
            answer.text = text
