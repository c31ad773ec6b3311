"""The OpenAPI document of a server: what FastAPI knows of the routes, and what it cannot know.

That all errors have one form, that an answer may be a stream, which model there is, and whether a key is wanted.
"""

from typing import Any, Final

from fastapi import FastAPI
from fastapi.openapi.utils import get_openapi

from vmmkv.server.answer_schemas import ErrorBody

_ERROR: Final = {"$ref": "#/components/schemas/ErrorBody"}
_STREAMED: Final = ("/v1/completions", "/v1/chat/completions")
_OPEN: Final = ("/health",)


def document(app: FastAPI, *, model: str, has_keys: bool) -> dict[str, Any]:
    """The document, made anew. `model` is the only one that requests can name."""
    whole: dict[str, Any] = get_openapi(title=app.title, version=app.version, description=_ABOUT, routes=app.routes)
    schemas: dict[str, Any] = whole.setdefault("components", {}).setdefault("schemas", {})
    for name in ("HTTPValidationError", "ValidationError"):
        schemas.pop(name, None)
    of_errors = ErrorBody.model_json_schema(ref_template="#/components/schemas/{model}")
    schemas.update(of_errors.pop("$defs"))
    schemas["ErrorBody"] = of_errors
    for name in ("CompletionRequest", "ChatRequest", "TokenizeRequest", "DetokenizeRequest"):
        _name_the_model(schemas[name]["properties"], model)
    if has_keys:
        whole["components"]["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    for path, operations in whole["paths"].items():
        for operation in operations.values():
            answers = operation["responses"]
            answers.pop("422", None)
            for status, what in (("4XX", "The request cannot be answered."), ("5XX", "The server cannot answer.")):
                answers.setdefault(status, {"description": what, "content": {"application/json": {"schema": _ERROR}}})
            if path in _STREAMED:
                answers["200"]["content"]["text/event-stream"] = {}  # its events have no schema in OpenAPI 3.1
            if has_keys and path not in _OPEN:
                operation["security"] = [{"key": []}]
    return whole


def _name_the_model(properties: dict[str, Any], model: str) -> None:
    given = properties["model"]
    is_optional = "anyOf" in given
    properties["model"] = {"enum": [model, None] if is_optional else [model], "title": given["title"]}


_ABOUT: Final = "OpenAI's API over one model. Every error has the form of ErrorBody, and every answer an X-Request-Id."
