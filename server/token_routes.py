"""/tokenize and /detokenize, as vLLM has them: what a prompt or a conversation is to the model, and back."""

from collections.abc import Callable
from typing import Annotated, ClassVar, Self

from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, Field, model_validator

from vmmkv.server.api_errors import bad_request
from vmmkv.server.protocol import Ready
from vmmkv.server.schema_base import Unserved, WireRequest, refusal
from vmmkv.server.schemas import ChatMessage
from vmmkv.server.template_schemas import TemplateVariables
from vmmkv.server.tokenizer import INLINE_CHARS, Away, PromptError, Tokenizer

Require = Callable[[str | None], tuple[Ready, Tokenizer]]
"""The engine's limits and the tokenizer of a model, the one there is if None. Raises: ApiError."""
AwayFor = Callable[[Request], Away]
"""How what takes long is done for whoever sent a request."""


class TokenizeRequest(WireRequest):
    """POST /tokenize: one prompt, or one conversation in the model's chat template."""

    unserved: ClassVar[Unserved] = {
        "add_generation_prompt": (True,),
        "continue_final_message": (False,),
        "chat_template": (),
        "tools": ([],),
        "mm_processor_kwargs": ({},),
    }
    model: str | None = None
    prompt: str | None = None
    messages: Annotated[list[ChatMessage], Field(min_length=1)] | None = None
    chat_template_kwargs: TemplateVariables | None = None
    add_special_tokens: bool = True
    """Whether a prompt gets the model's own start token, as /v1/completions gives it one; templates write their own."""
    return_token_strs: bool = False

    @model_validator(mode="after")
    def _one_of_both(self) -> Self:
        if (self.prompt is None) == (self.messages is None):
            raise refusal("prompt", "send either prompt or messages")
        if self.chat_template_kwargs and self.messages is None:
            raise refusal("chat_template_kwargs", "chat_template_kwargs is only for messages")
        return self


class Tokens(BaseModel):
    """The answer of /tokenize."""

    count: int
    max_model_len: int
    """Tokens that one request can have, with its answer."""
    tokens: list[int]
    token_strs: list[str] | None = None


class DetokenizeRequest(WireRequest):
    """POST /detokenize."""

    model: str | None = None
    tokens: list[int]


class Text(BaseModel):
    """The answer of /detokenize."""

    prompt: str


def router(require: Require, away_for: AwayFor) -> APIRouter:
    """The two routes."""
    routes = APIRouter()

    @routes.post("/tokenize", response_model=Tokens)
    async def tokenize(request: Request, body: TokenizeRequest) -> Response:
        """The token ids of a text."""
        ready, tokenizer = require(body.model)
        away = away_for(request)
        try:
            if body.messages is not None:
                ids = await tokenizer.encode_chat(body.messages, body.chat_template_kwargs, away=away)
            else:
                assert body.prompt is not None
                (ids,) = await tokenizer.encode([body.prompt], add_special_tokens=body.add_special_tokens, away=away)
        except PromptError as error:
            param = "prompt" if body.messages is None else "messages"
            raise bad_request(f"Invalid {param}: {error}.", param=param, code="invalid_value") from error
        limit = min(ready.max_tokens, ready.pool_tokens)

        def answer() -> Response:
            texts = list(map(tokenizer.texts.text_of, ids)) if body.return_token_strs else None
            tokens = Tokens.model_construct(count=len(ids), max_model_len=limit, tokens=ids, token_strs=texts)
            return Response(tokens.model_dump_json(), media_type="application/json")

        found: Response = answer() if len(ids) <= INLINE_CHARS else await away(answer)
        return found

    @routes.post("/detokenize")
    async def detokenize(request: Request, body: DetokenizeRequest) -> Text:
        """The text of token ids, special tokens among it."""
        _, tokenizer = require(body.model)
        try:
            (text,) = await tokenizer.said([body.tokens], skip_special_tokens=False, away=away_for(request))
        except PromptError as error:
            raise bad_request(f"Invalid tokens: {error}.", param="tokens", code="invalid_value") from error
        return Text(prompt=text)

    return routes
