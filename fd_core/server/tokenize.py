"""POST /tokenize and /detokenize."""

from __future__ import annotations

from typing import Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.body import BodyFormat
from fd_core.server.errors import invalid
from fd_core.server.openapi import endpoint
from fd_core.server.prompts import chat_ids
from fd_core.server.request_schemas import DetokenizeRequest, TokenizeRequest
from fd_core.server.response_schemas import DetokenizeAnswer, TokenizeAnswer
from fd_core.server.state import state_of

__all__ = ["router"]

router = APIRouter()
_TOKENIZE: Final = BodyFormat(TokenizeRequest)
_DETOKENIZE: Final = BodyFormat(DetokenizeRequest)


@router.post("/tokenize", **endpoint("Text to token ids", TokenizeRequest, TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Return the ids of a text, or of a conversation as the chat endpoint would read it."""
    state = state_of(request)
    body, headers = await _TOKENIZE.read(request, state.config.max_body_bytes)
    state.model_name(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = list(await chat_ids(state, body))
    else:
        text, special, reader = body.prompt or "", body.add_special_tokens is not False, state.prompt_reader
        ids = list(await reader.run(len(text), lambda: reader.text(text, special)))
    answer = TokenizeAnswer(
        tokens=ids,
        count=len(ids),
        max_model_len=state.client.info.max_model_len,
        token_strs=[state.tokenizer.token_text(each) for each in ids] if body.return_token_strs else None,
    )
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.post("/detokenize", **endpoint("Token ids to text", DetokenizeRequest, DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(request)
    body, headers = await _DETOKENIZE.read(request, state.config.max_body_bytes)
    state.model_name(body.model)
    size = state.client.info.vocab_size
    if max(body.tokens, default=0) >= size:
        raise invalid(f"tokens holds the id {max(body.tokens)}, but the vocabulary has {size} ids, from 0 on", "tokens")
    text = state.tokenizer.decode(body.tokens, skip_special=bool(body.skip_special_tokens))
    return Response(msgspec.json.encode(DetokenizeAnswer(text)), headers=headers, media_type="application/json")
