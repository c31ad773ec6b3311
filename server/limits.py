"""Whether a request can ever fit, however little else runs: said the same way over HTTP and to callers in this process."""

from dataclasses import dataclass
from typing import Literal

from vmmkv.units import counted, format_bytes


class DoesNotFit(ValueError):
    """A request that could never run; `at_fault` says what must change, its words say how."""

    def __init__(self, message: str, *, at_fault: Literal["prompt", "max_tokens"], empty: bool = False) -> None:
        super().__init__(message)
        self.at_fault = at_fault
        self.empty = empty
        """It has no tokens at all."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one request can have; `of_model` is the tokens that the model's positions or a slot reach."""

    model: str
    """The name that whoever asks knows."""
    of_model: int
    of_pool: int
    """Tokens of one sequence that the whole KV budget holds."""
    budget_bytes: int

    @property
    def tokens(self) -> int:
        """Of a prompt and its answer together."""
        return min(self.of_model, self.of_pool)

    def fit(self, num_prompt_tokens: int, wanted: int | None, *, default: int | None = None) -> int:
        """How many new tokens a request may have: what it `wanted`, else `default`, else whatever fits.

        Raises: DoesNotFit if the prompt is empty or the request could never fit, whatever else runs.
        """
        if num_prompt_tokens == 0:
            raise DoesNotFit("The prompt has no tokens; send at least one.", at_fault="prompt", empty=True)
        room = self.tokens - num_prompt_tokens
        if wanted is not None and wanted <= room:
            return wanted
        if wanted is None and room > 0:
            return room if default is None else min(default, room)
        raise DoesNotFit(self._too_long(num_prompt_tokens, wanted, room), at_fault="prompt" if room <= 0 else "max_tokens")

    def _too_long(self, num_prompt_tokens: int, wanted: int | None, room: int) -> str:
        limit = self.tokens
        if self.of_pool < self.of_model:
            reason = f"all that the KV budget of {format_bytes(self.budget_bytes)} can hold; a larger budget would hold more"
        else:
            reason = f"the most that {self.model} takes here"
        given = f"{counted(num_prompt_tokens, 'token')} of prompt"
        if wanted is not None:
            given = f"{num_prompt_tokens + wanted} tokens, {num_prompt_tokens} of prompt and {wanted} new"
        num_new = 1 if wanted is None else wanted
        remedy = f"shorten the prompt to {counted(limit - num_new, 'token')}" if limit > num_new else ""
        if wanted is not None and room > 0:
            remedy = f"lower max_tokens to {room}" + (f" or {remedy}" if remedy else "")
        remedy = remedy or f"shorten the prompt and lower max_tokens to {limit} together at most"
        return f"This request is for {given}, but one request can have {limit} ({reason}): {remedy}."
