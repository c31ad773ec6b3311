"""How an answer by a grammar is asked for over the wire: OpenAI's `response_format`, vLLM's `structured_outputs`."""

import time
from collections.abc import Hashable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal, Self

from pydantic import Field, model_validator

from vmmkv.server import api_errors
from vmmkv.server.api_errors import bad_request
from vmmkv.server.protocol import Ready
from vmmkv.server.schema_base import WireRequest, refusal
from vmmkv.server.structured_output.compiler import CompilerUnavailable, GrammarCompiler
from vmmkv.server.structured_output.schema import MAX_SOURCE_CHARS, Grammar, GrammarRefused, of_choices, of_object, of_schema
from vmmkv.server.turns import QueueFull

# -------- schemas

if TYPE_CHECKING:
    from vmmkv.server.schemas import GenerationRequest

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


# -------- service
# Grammars for the routes: from a request to what the engine is sent, with refusals in OpenAI's shape.


class GrammarService:
    """The compiler of one server, made when the first grammar is asked for; `shared` by several who ask."""

    def __init__(self, *, shared: bool) -> None:
        self._shared = shared
        self._compiler: GrammarCompiler | None = None

    async def start(self, grammar: Grammar, ready: Ready, *, namespace: str | None) -> float:
        """Have the compiler run, if this grammar needs it; how many seconds that took. Raises: ApiError (503)."""
        compiler, began_s = self._compiler_of(ready), time.perf_counter()
        if compiler.knows(grammar, namespace=namespace):
            return 0.0
        try:
            await compiler.start()
        except CompilerUnavailable as error:
            raise api_errors.unavailable(str(error)) from error
        return time.perf_counter() - began_s

    async def compiled(self, request: "GenerationRequest", ready: Ready, *, namespace: str | None, owner: Hashable) -> bytes:
        """What the engine is sent; nothing for a free answer. Raises: ApiError, 400 naming the parameter, 429 or 503."""
        param, grammar = request.grammar
        if grammar is None:
            return b""
        try:
            return await self._compiler_of(ready).compile(grammar, namespace=namespace, owner=owner)
        except GrammarRefused as error:
            raise bad_request(f"Invalid {param}: {error}.", param=param, code="invalid_grammar") from error
        except QueueFull as error:
            raise api_errors.no_turn(error) from error
        except CompilerUnavailable as error:
            raise api_errors.unavailable(str(error)) from error

    async def close(self) -> None:
        """End what runs beside the server. Idempotent."""
        if self._compiler is not None:
            await self._compiler.close()

    def _compiler_of(self, ready: Ready) -> GrammarCompiler:
        if self._compiler is None:
            self._compiler = GrammarCompiler(Path(ready.model), ready.vocabulary_size, ready.end_tokens, shared=self._shared)
        return self._compiler
