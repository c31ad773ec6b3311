"""The base of request bodies: strict, clear about what is unknown or not served, and with null as the default of a field."""

import json
from collections.abc import Mapping
from typing import Any, ClassVar, Final, TypeAlias

from pydantic import BaseModel, ConfigDict, GetJsonSchemaHandler, model_validator
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema, PydanticCustomError

from vmmkv.errors import did_you_mean

Unserved: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Parameters that are not served, each with the values that ask for nothing, besides null."""

_INSTEAD: Final[Mapping[str, str]] = {
    "functions": '; send "tools": [{"type": "function", "function": {...}}]',
    "previous_response_id": '; send the turns before it in "input"',
    "function_call": '; send "tools" and "tool_choice", and in messages "tool_calls"',
}
"""Advice for parameters that others take the place of."""


class WireRequest(BaseModel):
    """Strict (no `"5"` for 5), and clear about parameters that are unknown or not served. Null is the default of a field.

    A model with `extra="allow"` takes unknown parameters once it has all that it requires.
    """

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[Unserved] = {}
    remedies: ClassVar[Mapping[str, str]] = {}
    """Advice for unknown parameters that have another name or place here."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_others(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name, neutral in cls.unserved.items():
            value = without_nulls(data.get(name))
            if value is not None and not any(_are_same(value, other) for other in neutral):
                wanted = f"leave it out or send {' or '.join(map(json.dumps, neutral))}" if neutral else "leave it out"
                wanted += _INSTEAD.get(name, "")
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "The parameter '{param}' is not supported by this server; {wanted}.",
                    {"param": name, "wanted": wanted},
                )
        fields = {field.alias or name: field for name, field in cls.model_fields.items()}
        required = {name for name, field in fields.items() if field.is_required()}
        takes_others = cls.model_config["extra"] == "allow" and required <= data.keys()
        for name in data:
            if name not in fields and name not in cls.unserved and not takes_others:
                near = cls.remedies.get(name) or did_you_mean(name, list(fields))
                context = {"param": encodable(name), "remedy": _ended(f"; {near}" if near else "")}
                raise PydanticCustomError("unknown_parameter", "Unknown parameter: '{param}'{remedy}", context)
        is_null = {name for name, value in data.items() if value is None} - required
        return {name: value for name, value in data.items() if name not in cls.unserved and name not in is_null}

    @classmethod
    def __get_pydantic_json_schema__(cls, core_schema: CoreSchema, handler: GetJsonSchemaHandler) -> JsonSchemaValue:
        """Schema with null beside the values of each field that has a default."""
        reference = handler(core_schema)
        schema = handler.resolve_ref_schema(reference)
        for name, field in schema.get("properties", {}).items():
            if name not in schema.get("required", ()) and {"type": "null"} not in field.get("anyOf", ()):
                schema["properties"][name] = {"anyOf": [field, {"type": "null"}]}
        return reference


def _ended(text: str) -> str:
    return text if text.endswith("?") else f"{text}."


def without_nulls(value: Any) -> Any:
    """A value; an object without those of its parts that have their default."""
    return {name: part for name, part in value.items() if part is not None} if isinstance(value, dict) else value


def _are_same(value: Any, other: Any) -> bool:
    """Are two values of JSON the same? 1 and 1.0 are, 0 and false are not."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def refusal(param: str, message: str) -> PydanticCustomError:
    """Refusal of a field, or of `param` within it, with a message."""
    return PydanticCustomError("combination", "{why}", {"why": encodable(message), "param": param})


def encodable(text: str) -> str:
    """A client's text as UTF-8 can carry it: it may have half of a surrogate pair."""
    return text.encode(errors="backslashreplace").decode()
