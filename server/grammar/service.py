"""Grammars for the routes: from a request to what the engine is sent, with refusals in OpenAI's shape."""

import time
from collections.abc import Hashable
from pathlib import Path

from vmmkv.server import api_errors
from vmmkv.server.api_errors import bad_request
from vmmkv.server.grammar.asked import Grammar, GrammarRefused
from vmmkv.server.grammar.compiler import CompilerUnavailable, GrammarCompiler
from vmmkv.server.protocol import Ready
from vmmkv.server.schemas import GenerationRequest
from vmmkv.server.turns import QueueFull


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

    async def compiled(self, request: GenerationRequest, ready: Ready, *, namespace: str | None, owner: Hashable) -> bytes:
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
