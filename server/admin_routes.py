"""/kv/reset and /kv/resize: what only the administrator may do. Without an admin key there are no such routes."""

from typing import Annotated

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel, Field

from vmmkv.server import api_errors
from vmmkv.server.client import EngineClient, EngineDead, EngineNotReady, RequestFailed
from vmmkv.server.guard import CALLER
from vmmkv.server.keys import Caller
from vmmkv.server.protocol import Forget, Managed, Resize
from vmmkv.server.schema_base import WireRequest


class ResetRequest(WireRequest):
    """POST /kv/reset: `{}`."""


class ResizeRequest(WireRequest):
    """POST /kv/resize."""

    budget_bytes: Annotated[int, Field(ge=1, lt=1 << 62)]
    """What --kv-budget was."""


class Memory(BaseModel):
    """What there is now."""

    freed_bytes: int
    """That were held and are free, or the device's again."""
    budget_bytes: int
    pool_tokens: int
    """Tokens of one sequence that the budget holds."""


def router(engine: EngineClient) -> APIRouter:
    """The two routes."""
    routes = APIRouter(dependencies=[Depends(_require_administrator)])

    @routes.post("/kv/reset")
    async def reset(body: ResetRequest) -> Memory:
        """Forget every prefix that no running request uses."""
        return await _manage(engine, Forget())

    @routes.post("/kv/resize")
    async def resize(body: ResizeRequest) -> Memory:
        """Give KV memory back to the device, or take more, while requests run."""
        return await _manage(engine, Resize(budget_bytes=body.budget_bytes))

    return routes


async def _require_administrator(request: Request) -> None:
    caller = getattr(request.state, CALLER)
    assert isinstance(caller, Caller)
    if not caller.is_admin:
        raise api_errors.not_the_administrator()


async def _manage(engine: EngineClient, message: Forget | Resize) -> Memory:
    try:
        managed: Managed = await engine.manage(message)
    except (EngineNotReady, EngineDead) as error:
        raise api_errors.unavailable(str(error)) from error
    except RequestFailed as error:
        raise api_errors.bad_request(str(error), param="budget_bytes", code="invalid_value") from error
    return Memory(freed_bytes=managed.freed_bytes, budget_bytes=managed.budget_bytes, pool_tokens=managed.pool_tokens)
