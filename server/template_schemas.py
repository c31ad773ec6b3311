"""What a request may tell the model's own chat template, as vLLM has it: `chat_template_kwargs`."""

import math
import re
from typing import Annotated, Any, Final, TypeAlias

from pydantic import PlainValidator, WithJsonSchema
from pydantic_core import PydanticCustomError

from vmmkv.server.schema_base import refusal

MAX_VARIABLES: Final = 16
MAX_VARIABLE_CHARS: Final = 1024
"""Of a text."""
_NAME: Final = r"[A-Za-z_][A-Za-z0-9_]{0,63}"
RESERVED: Final = frozenset(
    ("self", "conversation", "conversations", "messages", "tools", "documents", "chat_template", "add_generation_prompt",
     "continue_final_message", "tokenize", "padding", "truncation", "max_length", "return_tensors", "return_dict",
     "return_assistant_tokens_mask", "tokenizer_kwargs", "kwargs", "bos_token", "eos_token", "unk_token", "sep_token",
     "pad_token", "cls_token", "mask_token", "raise_exception", "strftime_now")
)  # fmt: skip
"""What the renderer sets itself: another template, for one, would be the client's program in the server."""

TemplateVariable: TypeAlias = str | float | bool | None
"""One of JSON's scalars."""


def _is_small_scalar(value: Any) -> bool:
    if isinstance(value, str):
        return len(value) <= MAX_VARIABLE_CHARS
    return value is None or isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))


def _as_variables(value: Any) -> dict[str, TemplateVariable]:
    if not isinstance(value, dict) or len(value) > MAX_VARIABLES:
        raise PydanticCustomError("variables", "it must be an object of {limit} names at most", {"limit": MAX_VARIABLES})
    for name, each in value.items():
        if name in RESERVED:
            raise refusal(name, "the server sets this variable of chat templates itself: leave it out")
        if not isinstance(name, str) or not re.fullmatch(_NAME, name):
            raise PydanticCustomError("variables", "its names must be those of variables, in 64 characters at most")
        if not _is_small_scalar(each):
            wanted = f"it must be null, true, false, a number, or a text of {MAX_VARIABLE_CHARS} characters at most"
            raise refusal(name, wanted)
    return value


TemplateVariables = Annotated[
    dict[str, TemplateVariable],
    PlainValidator(_as_variables),
    WithJsonSchema(
        {
            "type": "object",
            "maxProperties": MAX_VARIABLES,
            "propertyNames": {"pattern": f"^{_NAME}$", "not": {"enum": sorted(RESERVED)}},
            "additionalProperties": {"type": ["null", "boolean", "number", "string"], "maxLength": MAX_VARIABLE_CHARS},
        }
    ),
]
