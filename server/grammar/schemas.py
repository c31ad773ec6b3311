"""How an answer by a grammar is asked for over the wire: OpenAI's `response_format`, vLLM's `structured_outputs`."""

from collections.abc import Mapping
from typing import Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from vmmkv.server.grammar.asked import MAX_SOURCE_CHARS, Grammar, GrammarRefused, of_choices, of_object, of_schema
from vmmkv.server.schema_base import WireRequest, refusal

OLDER_NAMES: Final[Mapping[str, str]] = {
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
}
"""vLLM's, before it had `structured_outputs`: refused, with what is served."""

Source = Annotated[str, Field(min_length=1, max_length=MAX_SOURCE_CHARS)]


class JsonSchema(WireRequest):
    """Of `response_format`."""

    name: Annotated[str, Field(max_length=64)] = "response"
    description: Annotated[str, Field(max_length=1024)] | None = None
    """For people: the model does not see it."""
    schema_: Annotated[dict[str, Any], Field(alias="schema")]
    strict: bool | None = None
    """Answers follow the schema in any case."""


class ResponseFormat(WireRequest):
    """OpenAI's."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchema | None = None

    @model_validator(mode="before")
    @classmethod
    def _is_an_object(cls, data: Any) -> Any:
        if not isinstance(data, dict):
            raise refusal(
                "", 'it must be an object whose type is "text", "json_object" or "json_schema", as in {"type": "json_object"}'
            )
        return data

    @model_validator(mode="after")
    def _schema_goes_with_its_type(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise refusal("json_schema", 'a json_schema goes with "type": "json_schema", and no other')
        try:
            self.grammar()
        except GrammarRefused as error:
            raise refusal("json_schema.schema", str(error)) from error
        return self

    def grammar(self) -> Grammar | None:
        """What the answer follows; None if it is plain text. Raises: GrammarRefused."""
        if self.json_schema is not None:
            return of_schema(self.json_schema.schema_)
        return of_object() if self.type == "json_object" else None


class StructuredOutputs(WireRequest):
    """vLLM's: one of these."""

    json_: Annotated[dict[str, Any] | None, Field(alias="json")] = None
    """A schema."""
    regex: Source | None = None
    """That the whole answer matches."""
    choice: list[str] | None = None
    """Of texts."""
    grammar_: Annotated[Source | None, Field(alias="grammar")] = None
    """GBNF, with a rule `root`."""

    @model_validator(mode="after")
    def _is_one(self) -> Self:
        if len(self.model_fields_set) != 1 or self.param == "":
            raise refusal("", "it must have exactly one of json, regex, choice and grammar")
        try:
            self.grammar()
        except GrammarRefused as error:
            raise refusal(self.param, str(error)) from error
        return self

    @property
    def param(self) -> str:
        """The name of the one that is given."""
        values = {"json": self.json_, "regex": self.regex, "choice": self.choice, "grammar": self.grammar_}
        return next((name for name, value in values.items() if value is not None), "")

    def grammar(self) -> Grammar:
        """What the answer follows. Raises: GrammarRefused."""
        if self.json_ is not None:
            return of_schema(self.json_)
        if self.regex is not None:
            return Grammar("regex", self.regex)
        return of_choices(self.choice) if self.choice is not None else Grammar("ebnf", self.grammar_ or "")
