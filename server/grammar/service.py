"""Grammars for the routes: from a request to what the engine is sent, with refusals in OpenAI's shape."""

from pathlib import Path

from vmmkv.server import api_errors
from vmmkv.server.api_errors import bad_request
from vmmkv.server.grammar.asked import GrammarRefused
from vmmkv.server.grammar.compiler import CompilerBusy, GrammarCompiler
from vmmkv.server.protocol import Ready
from vmmkv.server.schemas import GenerationRequest


class GrammarService:
    """The compiler of one server, made when the first grammar is asked for."""

    def __init__(self, compiler: GrammarCompiler | None = None) -> None:
        self._compiler = compiler

    async def compiled(self, request: GenerationRequest, ready: Ready) -> bytes:
        """What the engine is sent; nothing for a free answer. Raises: ApiError, 400 naming the parameter, or 503."""
        param, grammar = request.grammar
        if grammar is None:
            return b""
        if self._compiler is None:
            self._compiler = GrammarCompiler(Path(ready.model), ready.vocabulary_size, ready.end_tokens)
        try:
            return await self._compiler.compile(grammar)
        except GrammarRefused as error:
            raise bad_request(f"Invalid {param}: {error}.", param=param, code="invalid_grammar") from error
        except CompilerBusy as error:
            raise api_errors.unavailable(str(error)) from error

    async def close(self) -> None:
        """End what runs beside the server. Idempotent."""
        if self._compiler is not None:
            await self._compiler.close()
