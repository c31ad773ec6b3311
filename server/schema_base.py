"""What every request body has in common: strict types, no unknown names, and plain words about what is not served."""

from collections.abc import Mapping
from typing import Any, ClassVar, TypeAlias

from pydantic import BaseModel, ConfigDict, model_validator
from pydantic_core import PydanticCustomError

Unserved: TypeAlias = Mapping[str, tuple[Any, ...]]
"""Names of parameters, each with the values that ask for nothing, besides null."""


class WireRequest(BaseModel):
    """Strict (no `"5"` for 5), closed to unknown fields, and plain about those of OpenAI's that it does not serve."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)
    unserved: ClassVar[Unserved] = {}
    """What is refused."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_unserved(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            return data
        for name in cls.unserved.keys() & data.keys():
            value, neutral = data[name], cls.unserved[name]
            # Types are compared too, for 0 == False: the one may ask for something where the other does not.
            if value is not None and not any(type(value) is type(other) and value == other for other in neutral):
                wanted = f"leave it out or send {' or '.join(map(repr, neutral))}" if neutral else "leave it out"
                raise PydanticCustomError(
                    "unsupported_parameter",
                    "The parameter '{param}' is not supported by this server; {wanted}.",
                    {"param": name, "wanted": wanted},
                )
        return {name: value for name, value in data.items() if name not in cls.unserved}


def refusal(param: str, message: str) -> PydanticCustomError:
    """A complaint about what several parameters say together, with the one to name."""
    why = message.encode(errors="backslashreplace").decode()  # it may quote half of a surrogate pair
    return PydanticCustomError("combination", "{why}", {"why": why, "param": param})
