"""What `Engine.generate` gives back."""

from dataclasses import dataclass

from vmmkv.server.protocol import FinishReason


@dataclass(frozen=True, slots=True, kw_only=True)
class CompletionOutput:
    """One answer to one prompt."""

    text: str
    """Up to the stop string, if one ended it. Empty if the model's directory has no tokenizer."""
    token_ids: list[int]
    """Without the end token; with the tokens of a stop string."""
    finish_reason: FinishReason | None
    """None if its request failed before its end."""
    logprobs: list[float] | None = None
    """Of each token, under the model's own distribution; None if they were not asked for."""
    top_logprobs: list[dict[int, float]] | None = None
    """For each token the likeliest token ids at its place, the likeliest first, with their log-probabilities."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """A prompt and its answers. Times are seconds since `generate` was called."""

    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    """As many as `n`."""
    cached_tokens: int
    """Tokens of the prompt that its first answer found in the prefix cache."""
    first_token_s: float | None
    """When the first token of any of its answers was there; None if there was none."""
    finished_s: float
    """When the last of its answers had ended."""
    prompt_logprobs: list[float | None] | None = None
    """Of each token of the prompt, under the model's own distribution; None for the first, which comes after nothing. None if
    they were not asked for, and not all there if its request failed."""
    prompt_top_logprobs: list[dict[int, float] | None] | None = None
    """For each of them the likeliest token ids at its place, the likeliest first, with their log-probabilities."""
    error: str | None = None
    """Why it failed, if it did; then `outputs` hold what there was."""
