"""Replicas of `vmmkv serve` under Ray Serve, behind its router by prefixes.

    pip install 'ray[serve]==2.60.0' httpx
    serve run deploy/ray_serve.yaml

A replica is an actor with a server of its own as a child, of the `vmmkv` on its PATH. Ray starts it again when it dies.
"""

import contextlib
import ctypes
import json
import re
import shlex
import signal
import subprocess
import threading
from collections.abc import AsyncIterator
from typing import Any, NamedTuple

import httpx
from fastapi import FastAPI, Request
from fastapi.responses import StreamingResponse
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.handle import DeploymentHandle

PREFIX_ROUTER = "ray.llm._internal.serve.routing_policies.prefix_aware.prefix_aware_router.PrefixCacheAffinityRouter"
"""ray.serve.llm.request_router has the same class, and needs vLLM to be imported."""


class Forwarded(NamedTuple):
    """A request. The router reads `prompt`."""

    method: str
    path: str
    body: bytes
    prompt: str

    @classmethod
    def of(cls, method: str, path: str, body: bytes) -> "Forwarded":
        """With the texts that begin alike where prompts do; never empty, which the router cannot take."""
        asked: Any = None
        with contextlib.suppress(ValueError):
            asked = json.loads(body or b"null")
        match asked:
            case {"messages": [*messages]}:
                texts = [str(each.get("content") if isinstance(each, dict) else each) for each in messages]
            case _:
                texts = [str(asked.get("prompt", path) if isinstance(asked, dict) else path)]
        return cls(method, path, body, "\n".join([*texts, ""]))


@serve.deployment(health_check_period_s=2, health_check_timeout_s=10)
class Replica:
    """One server, on any port of this machine."""

    def __init__(self, model: str, options: str) -> None:
        command = ["vmmkv", "serve", "--model", model, "--port", "0", *shlex.split(options)]
        self._server = subprocess.Popen(command, stderr=subprocess.PIPE, text=True, preexec_fn=_die_with_parent)
        assert self._server.stderr is not None
        for line in self._server.stderr:
            print(line, end="")
            if found := re.search(r"at (http://\S+)/v1", line):
                break
        else:
            raise RuntimeError(f"{shlex.join(command)} ended with {self._server.wait()}")
        threading.Thread(target=self._pass_on_the_log, daemon=True).start()
        self._client = httpx.AsyncClient(base_url=found[1], timeout=None, limits=httpx.Limits(max_connections=None))

    async def answer(self, request: Forwarded) -> AsyncIterator[tuple[int, str] | bytes]:
        """The status and the content's type, then the content. A client that leaves ends the request in the engine."""
        async with self._client.stream(
            request.method, request.path, content=request.body, headers={"Content-Type": "application/json"}
        ) as answer:
            yield answer.status_code, answer.headers["Content-Type"]
            async for part in answer.aiter_raw():
                yield part

    def check_health(self) -> None:
        """For Ray, which starts another replica if this raises."""
        if self._server.poll() is not None:
            raise RuntimeError(f"the server ended with {self._server.returncode}")

    def _pass_on_the_log(self) -> None:
        assert self._server.stderr is not None
        for line in self._server.stderr:
            print(line, end="")


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)


app = FastAPI()


@serve.deployment
@serve.ingress(app)
class Ingress:
    """OpenAI's routes, forwarded."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas.options(stream=True)

    @app.api_route("/v1/{path:path}", methods=["GET", "POST"])
    async def forward(self, path: str, request: Request) -> StreamingResponse:
        """To the replica that the router chooses. A replica that dies before it answers: 503."""
        forwarded = Forwarded.of(request.method, f"/v1/{path}", await request.body())
        parts = self._replicas.answer.remote(forwarded)
        status, content_type = await anext(parts)
        return StreamingResponse(parts, status_code=status, media_type=content_type)


def build(args: dict[str, Any]) -> serve.Application:
    """The application of ray_serve.yaml's `args`."""
    replicas = Replica.options(
        num_replicas=args["replicas"],
        max_ongoing_requests=1024,
        ray_actor_options={"num_gpus": args["gpus"], "num_cpus": 0},
        request_router_config=RequestRouterConfig(request_router_class=PREFIX_ROUTER),
    ).bind(args["model"], args["options"])
    return Ingress.options(max_ongoing_requests=4096, ray_actor_options={"num_cpus": 0}).bind(replicas)
