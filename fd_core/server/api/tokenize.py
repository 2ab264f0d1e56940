"""POST /tokenize and /detokenize, GET /tokenizer_info."""

from __future__ import annotations

from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import ApiError, invalid
from fd_core.server.api.openapi import endpoint
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.prompts import chat_prompt
from fd_core.server.schemas.requests import DetokenizeRequest, TokenizeRequest
from fd_core.server.schemas.responses import AddedTokenInfo, DetokenizeAnswer, TokenizeAnswer, TokenizerInfoAnswer
from fd_core.server.state.state import state_of
from fd_core.server.stream.encoding import encoded_list
from fd_core.server.stream.streaming import unless_gone
from fd_core.types.checks import check_ids

router = APIRouter()
_TOKENIZE: Final = BodyFormat(TokenizeRequest)
_DETOKENIZE: Final = BodyFormat(DetokenizeRequest)


@router.post("/tokenize", **endpoint("Text to token ids", TokenizeRequest, TokenizeAnswer))
async def tokenize(request: Request) -> Response:
    """Return the ids of a text, or of a conversation as the chat endpoint would read it."""
    state = state_of(request)
    body, headers = await _TOKENIZE.read(request, state)
    state.served(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("give either prompt or messages", "prompt")
    if body.messages is not None:
        ids = list(await unless_gone(request, chat_prompt(state, body)))
    else:
        text, special, reader = body.prompt or "", body.add_special_tokens is not False, state.prompt_reader
        reading = reader.run(len(text), lambda: reader.text(text, special, counted=True))
        ids = list(await unless_gone(request, reading))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.client.info.max_model_len,
        "tokens": await encoded_list(ids),
        "token_strs": None,
    }
    if body.return_token_strs:
        names = await state.prompt_reader.run(len(ids), lambda: [state.tokenizer.token_text(each) for each in ids])
        answer["token_strs"] = await encoded_list(names)
    return Response(msgspec.json.encode(answer), headers=headers, media_type="application/json")


@router.post("/detokenize", **endpoint("Token ids to text", DetokenizeRequest, DetokenizeAnswer))
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state = state_of(request)
    body, headers = await _DETOKENIZE.read(request, state)
    state.served(body.model)
    check_ids(body.tokens, state.client.info.vocab_size, "tokens", state.tokenizer.token_text)
    ids, skipping = body.tokens, bool(body.skip_special_tokens)
    text = await state.prompt_reader.run(len(ids), lambda: state.tokenizer.decode(ids, skip_special=skipping))
    return Response(msgspec.json.encode(DetokenizeAnswer(text)), headers=headers, media_type="application/json")


@router.get("/tokenizer_info", **endpoint("What the tokenizer is", None, TokenizerInfoAnswer, errors=(401, 404)))
async def tokenizer_info(request: Request) -> Response:
    """Tell control tokens and the chat template, as vLLM does, if the operator allows it."""
    state = state_of(request)
    if not state.config.enable_tokenizer_info_endpoint:
        raise ApiError(
            404,
            "/tokenizer_info is served only where the server was started with --enable-tokenizer-info-endpoint: "
            "it shows the chat template",
            code="not_enabled",
        )
    tokenizer = state.tokenizer
    added = tokenizer.backend.get_added_tokens_decoder()
    answer = TokenizerInfoAnswer(
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        vocab_size=tokenizer.vocab_size,
        model_max_length=state.client.info.max_model_len,
        added_tokens_decoder={
            token_id: AddedTokenInfo(
                token.content, token.lstrip, token.normalized, token.rstrip, token.single_word, token.special
            )
            for token_id, token in sorted(added.items())
        },
        chat_template=state.prompt_reader.template_source,
    )
    return Response(msgspec.json.encode(answer), media_type="application/json")
