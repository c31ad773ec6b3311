"""Errors as OpenAI's clients expect them: `{"error": {"message", "type", "param", "code"}}` and a status."""

import difflib
import functools
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, Final, Literal

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.routing import BaseRoute, Route

from vmmkv.units import counted
from vmmkv_server.engine_client import EngineDead, EngineNotReady, MapUnavailable, RequestFailed
from vmmkv_server.tokenizer import TemplateBroken

_OF_THE_SERVER: Final = (EngineDead, EngineNotReady, MapUnavailable, RequestFailed, TemplateBroken)


class ErrorDetail(BaseModel):
    """Description of an error."""

    message: str
    type: str
    param: str | None = None
    code: str | None = None


class ErrorBody(BaseModel):
    """The body of every answer that is an error."""

    error: ErrorDetail


class ApiError(Exception):
    """A request's end with an HTTP status other than 200; `param` names the parameter at fault, if there is one."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str = "invalid_request_error",
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.body = ErrorBody(error=ErrorDetail(message=message, type=type, param=param, code=code))
        self.headers = headers or {}

    def response(self, further_headers: Mapping[str, str] = MappingProxyType({})) -> JSONResponse:
        """The error as an HTTP response."""
        return JSONResponse(self.body.model_dump(), status_code=self.status, headers={**self.headers, **further_headers})


def invalid(param: str, why: object, *, code: str = "invalid_value") -> ApiError:
    """400, and what is wrong with the parameter."""
    return ApiError(400, _invalid(param, why), param=param, code=code)


def _invalid(param: str, why: object) -> str:
    return f"Invalid {param}: {why}" + ("" if str(why).endswith("?") else ".")


def internal_error(message: str) -> ApiError:
    """500: this request failed, others may not."""
    return ApiError(500, message, type="server_error", code="internal_error")


def unavailable(message: str, *, retry_after_s: int = 1) -> ApiError:
    """503: the engine is loading or gone, or the server is about to stop."""
    headers = {"Retry-After": str(retry_after_s)}
    return ApiError(503, message, type="server_error", code="service_unavailable", headers=headers)


def too_many(message: str, *, of: Literal["requests", "tokens"], retry_after_s: int) -> ApiError:
    """429: it may work later. The type says what there were too many of, as OpenAI's does."""
    message = f"{message} Try again in {retry_after_s} s."
    return ApiError(429, message, type=of, code="rate_limit_exceeded", headers={"Retry-After": str(retry_after_s)})


def too_late(message: str, headers: Mapping[str, str]) -> ApiError:
    """408: the request, or its answer, took too long."""
    return ApiError(408, message, type="timeout", code="request_timeout", headers=headers)


def not_the_administrator() -> ApiError:
    """403: only the server's admin key opens the administrator's routes."""
    message = "This route is for the administrator: send 'Authorization: Bearer KEY' with the KEY of the server's --admin-key."
    return ApiError(403, message, code="insufficient_permissions")


def install(app: FastAPI, routes: Iterable[BaseRoute]) -> None:
    """Give every error of `app` this form, also those that FastAPI and Starlette raise themselves.

    A 404 names what its client may have meant of `routes`.
    """
    paths = defaultdict[str, list[str]](list)
    for route in routes:
        if isinstance(route, Route) and "{" not in route.path:
            for method in route.methods or ():
                paths[method].append(route.path)
    for kind in (ApiError, *_OF_THE_SERVER, RequestValidationError, HTTPException, Exception):
        app.add_exception_handler(kind, functools.partial(_response, paths))


async def _response(paths: Mapping[str, Sequence[str]], request: Request, error: Exception) -> JSONResponse:
    """`paths`: those of the routes, by method."""
    if isinstance(error, HTTPException) and isinstance(error.__cause__, ValueError | RecursionError):
        error = ApiError(400, f"The body is not valid JSON: {_unread(error.__cause__)}.", code="invalid_json")
    elif isinstance(error, HTTPException):
        method, path = request.method, request.scope["path"]
        remedy = ""
        if error.status_code == 404:
            remedy = f"; {_instead(path, paths.get(method, ()))}"
        elif error.status_code == 405:
            remedy = f"; send {(error.headers or {}).get('Allow', 'another method')}"
        error = ApiError(error.status_code, f"{method} {path}: {error.detail}{remedy}", headers=error.headers)
    return from_exception(error).response()  # Starlette logs the traceback of what is unexpected


def _unread(error: ValueError | RecursionError) -> str:
    """Reason that Python's JSON parser did not take a body, where FastAPI does not say it."""
    match error:
        case RecursionError():
            return "it is nested too deeply; send a flatter one"
        case UnicodeDecodeError():
            return f"byte {error.start} is {error.object[error.start]:#04x}, which is not {error.encoding}; send it in UTF-8"
        case _:
            return "it has an integer of too many digits; send a smaller one"


_OTHER_APIS: Final = {
    **dict.fromkeys(("/responses", "/messages", "/api/chat"), "/v1/chat/completions"),
    **dict.fromkeys(("/generate", "/completion", "/api/generate"), "/v1/completions"),
}
"""Paths of other APIs, without /v1, and the route here that does the same."""


def _instead(path: str, routes: Sequence[str]) -> str:
    """Advice about a path that is no route: a route with more or less before it, one that does the same, or
    one that is spelt alike.
    """
    for route in sorted(routes, key=len):
        if route != "/" and (route.endswith(path) or path.endswith(route)):
            return f"did you mean {route}?"
    tails, tail = {route.removeprefix("/v1"): route for route in routes}, path.removeprefix("/v1")
    if (instead := _OTHER_APIS.get(tail)) in routes:
        return f"this server has {instead} instead"
    if near := difflib.get_close_matches(tail[:64], tails, n=1):
        return f"did you mean {tails[near[0]]}?"
    return "the routes of this server are in /openapi.json"


def from_exception(error: Exception) -> ApiError:
    """The error that a client gets for an exception. For a bug it names the kind, and none of the server's insides."""
    match error:
        case ApiError():
            return error
        case RequestFailed():
            return internal_error(str(error))
        case TemplateBroken():
            return internal_error(f"No chat can be served: {error}. Completions work.")
        case EngineDead() | EngineNotReady() | MapUnavailable():
            return unavailable(str(error))
        case RequestValidationError():
            return _from_validation(error.errors()[0], error.body)  # OpenAI's form has room for one
        case _:
            return internal_error(f"The server failed on this request ({type(error).__name__}); its log has the details.")


def _from_validation(error: Mapping[str, Any], body: Any) -> ApiError:
    """One of pydantic's complaints about a body."""
    context = error.get("ctx", {})
    field = context["discriminator"].strip("'") if error["type"] == "union_tag_invalid" else context.get("param")
    path = _without_tags([*error["loc"][1:], *filter(None, [field])], body)
    param = ".".join(path) or None
    match error["type"]:
        case "json_invalid":
            return ApiError(400, f"The body is not valid JSON: {context.get('error', error['msg'])}.", code="invalid_json")
        case "missing" | "model_attributes_type" if not path:  # no body, or one that is no object
            message, code = "The body must be a JSON object, sent with Content-Type: application/json.", "invalid_body"
        case "missing":
            message, code = f"Missing required parameter: {param!r}.", "missing_required_parameter"
        case "unsupported_parameter" | "unknown_parameter" as code:
            message = error["msg"]
        case _:
            message, code = _invalid(param or "body", _in_words(error)), "invalid_value"
    return ApiError(400, message, param=param, code=code)


def _without_tags(path: Sequence[str | int], body: Any) -> list[str]:
    """The place of an error in a body, without the names that pydantic gives to alternatives, such as types of items."""
    found, here = list[str](), body
    for place, part in enumerate(path):
        if isinstance(here, dict):
            if part not in here and place < len(path) - 1:
                continue
            here = here.get(part)
        elif isinstance(here, list) and isinstance(part, int) and part < len(here):
            here = here[part]
        else:
            here = None
        found.append(str(part))
    return found


def _in_words(error: Mapping[str, Any]) -> str:
    """pydantic's message, without Python's types and pydantic's own steps."""
    context = error.get("ctx", {})
    match error["type"]:
        case "model_type" | "model_attributes_type" | "dict_type":
            return "it must be a JSON object"
        case "list_type":
            return "it must be a list"
        case "union_tag_invalid":
            return f"{context['tag']!r} is not served; there are {context['expected_tags']}"
        case "too_short":
            return f"it must have {counted(context['min_length'], 'item')} at least, and has {context['actual_length']}"
        case "too_long":
            return f"it may have {counted(context['max_length'], 'item')} at most, and has {context['actual_length']}"
        case _:
            return str(error["msg"])
