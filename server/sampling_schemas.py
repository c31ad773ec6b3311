"""How tokens are chosen, as asked for over the wire: OpenAI's parameters, and vLLM's beside them."""

import re
from collections.abc import Iterator
from typing import Annotated, Any, Final

from pydantic import BeforeValidator, Field
from pydantic_core import PydanticCustomError

from vmmkv.server.sampling import MAX_BIAS, MAX_PENALTY, MAX_REPETITION_PENALTY
from vmmkv.server.schema_base import WireRequest

MAX_LOGIT_BIASES: Final = 1024
MAX_LOGPROBS: Final = 20
"""Of the likeliest tokens at each place."""
MAX_PROMPT_LOGPROBS: Final = 1 << 17
"""Of the prompts of one request, all their choices together, those of the likeliest tokens among them: each is named in the
answer, which takes a few microseconds, some of them under Python's lock without a pause."""
PROMPT_TOKEN_WEIGHT: Final = 4
"""What a token of a prompt counts for there beside its likeliest: it has a text, a place and a table of its own."""


def _as_token_ids(value: Any) -> Any:
    """`logit_bias` has token ids as strings, for JSON's objects have no other keys."""
    if not isinstance(value, dict):
        return value
    if len(value) > MAX_LOGIT_BIASES:
        raise PydanticCustomError(
            "logit_bias", "it has {given} tokens and may have {limit}", {"given": len(value), "limit": MAX_LOGIT_BIASES}
        )
    strange = next((key for key in value if not re.fullmatch(r"[0-9]{1,10}", str(key))), None)
    if strange is not None:
        raise PydanticCustomError(
            "logit_bias", 'its keys must be token ids, as in {"50256": -100}, and {key} is none', {"key": repr(strange)}
        )
    return {int(key): bias for key, bias in value.items()}


Penalty = Annotated[float, Field(ge=-MAX_PENALTY, le=MAX_PENALTY, allow_inf_nan=False)]
Bias = Annotated[float, Field(ge=-MAX_BIAS, le=MAX_BIAS, allow_inf_nan=False)]


class SamplingFields(WireRequest):
    """What decides which token comes next. What is absent or null asks for nothing; temperature and top_p are 1 then."""

    temperature: Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1, allow_inf_nan=False)] | None = None
    top_k: Annotated[int, Field(ge=-1, lt=1 << 31)] | None = None
    """Not OpenAI's: only the likeliest so many can be drawn; 0 or -1 for all."""
    min_p: Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)] | None = None
    """Not OpenAI's: only tokens at least so likely as this share of the likeliest one can be drawn."""
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    repetition_penalty: (
        Annotated[float, Field(ge=1 / MAX_REPETITION_PENALTY, le=MAX_REPETITION_PENALTY, allow_inf_nan=False)] | None
    ) = None
    """Not OpenAI's: above 1, tokens of the prompt and the answer are less likely to come again."""
    logit_bias: Annotated[dict[int, Bias], BeforeValidator(_as_token_ids)] | None = None
    """Added to the logits of these tokens; 100 or -100 as good as forces or forbids one."""
    seed: Annotated[int, Field(ge=-(1 << 63), lt=1 << 63)] | None = None

    def shaping(self) -> Iterator[str]:
        """The names of those that are set and change which token comes next, but for the temperature and the seed."""
        neutral: dict[str, tuple[Any, ...]] = {
            "top_p": (1,),
            "top_k": (0, -1),
            "min_p": (0,),
            "presence_penalty": (0,),
            "frequency_penalty": (0,),
            "repetition_penalty": (1,),
            "logit_bias": ({},),
        }
        for name, values in neutral.items():
            if getattr(self, name) not in (None, *values):
                yield name
