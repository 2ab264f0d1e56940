"""GET /v1/models and /tokenizer_info, POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any, Final

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.http.errors import ApiError, invalid
from fd_core.server.api.openapi import DirectRoute, endpoint, json_response
from fd_core.server.preprocess.body import BodyFormat
from fd_core.server.preprocess.jobs import chat_prompt
from fd_core.server.schemas import responses
from fd_core.server.schemas.requests import DetokenizeRequest, TokenizeRequest
from fd_core.server.state import ServedName, ServerState, state_of
from fd_core.server.stream.response_format import cancel_on_disconnect
from fd_core.types.checks import check_ids

router = APIRouter(route_class=DirectRoute)
_TOKENIZE: Final = BodyFormat(TokenizeRequest)
_DETOKENIZE: Final = BodyFormat(DetokenizeRequest)
_SLICE: Final = 16_384


@router.get("/v1/models", **endpoint("List the served models", None, responses.ModelList))
async def list_models(request: Request) -> Response:
    """List every name under which the model answers, and its adapters."""
    state = state_of(request)
    cards = [_card(state, name) for name in state.names.values()]
    return json_response(responses.ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


@router.get("/v1/models/{model:path}", **endpoint("Describe a model", None, responses.ModelCard, errors=(401, 404)))
async def get_model(request: Request, model: str) -> Response:
    """Describe the model under one of its names."""
    state = state_of(request)
    return json_response(_card(state, state.served(model)))


def _card(state: ServerState, served: ServedName) -> responses.ModelCard:
    info = state.client.info
    return responses.ModelCard(
        id=served.name,
        created=state.created,
        root=info.model,
        parent=next(iter(state.names)) if served.adapter else None,
        max_model_len=info.max_model_len,
        display_name=served.name,
        created_at=datetime.fromtimestamp(state.created, UTC).isoformat().replace("+00:00", "Z"),
    )


@router.post(
    "/tokenize",
    **endpoint(
        "Tokenize a text or a conversation", TokenizeRequest, responses.TokenizeAnswer, example={"prompt": "a text"}
    ),
)
async def tokenize(request: Request) -> Response:
    """Return the ids of a text, or of a conversation as the chat endpoint would read it."""
    state, body, headers = await _TOKENIZE.read(request)
    state.served(body.model)
    if (body.prompt is None) == (body.messages is None):
        raise invalid("specify either prompt or messages", "prompt")
    if body.messages is not None:
        long = state.images is not None
        ids = list((await cancel_on_disconnect(request, chat_prompt(state, body), long=long)).ids)
    else:
        text, special, reader = body.prompt or "", body.add_special_tokens is not False, state.prompt_reader
        reading = reader.run(len(text), lambda: reader.text(text, special, counted=True))
        ids = list(await cancel_on_disconnect(request, reading))
    answer: dict[str, Any] = {
        "count": len(ids),
        "max_model_len": state.client.info.max_model_len,
        "tokens": await _encoded_list(ids),
        "token_strs": None,
    }
    if body.return_token_strs:
        names = await state.prompt_reader.run(len(ids), lambda: [state.tokenizer.token_text(each) for each in ids])
        answer["token_strs"] = await _encoded_list(names)
    return json_response(answer, headers)


@router.post(
    "/detokenize",
    **endpoint("Detokenize token ids", DetokenizeRequest, responses.DetokenizeAnswer, example={"tokens": [1, 2, 3]}),
)
async def detokenize(request: Request) -> Response:
    """Return the text of token ids."""
    state, body, headers = await _DETOKENIZE.read(request)
    state.served(body.model)
    check_ids(body.tokens, state.client.info.vocab_size, "tokens", text_of=state.tokenizer.token_text)
    ids, skipping = body.tokens, bool(body.skip_special_tokens)
    text = await state.prompt_reader.run(len(ids), lambda: state.tokenizer.decode(ids, skip_special=skipping))
    return json_response(responses.DetokenizeAnswer(text), headers)


@router.get(
    "/tokenizer_info", **endpoint("Describe the tokenizer", None, responses.TokenizerInfoAnswer, errors=(401, 404))
)
async def tokenizer_info(request: Request) -> Response:
    """Return control tokens and the chat template, as vLLM does, if the operator allows it."""
    state = state_of(request)
    if not state.config.enable_tokenizer_info_endpoint:
        message = (
            "/tokenizer_info exposes the chat template and is disabled; start the server with "
            "--enable-tokenizer-info-endpoint"
        )
        raise ApiError(404, message, code="not_enabled")
    tokenizer = state.tokenizer
    added = tokenizer.backend.get_added_tokens_decoder()
    answer = responses.TokenizerInfoAnswer(
        bos_token=tokenizer.bos_token,
        eos_token=tokenizer.eos_token,
        vocab_size=tokenizer.vocab_size,
        model_max_length=state.client.info.max_model_len,
        added_tokens_decoder={
            token_id: responses.AddedTokenInfo(
                token.content, token.lstrip, token.normalized, token.rstrip, token.single_word, token.special
            )
            for token_id, token in sorted(added.items())
        },
        chat_template=state.prompt_reader.template_source,
    )
    return json_response(answer)


async def _encoded_list(values: Sequence[Any]) -> msgspec.Raw:
    """Return numbers or words as JSON, encoded in slices: encoders hold the interpreter while they work."""
    pieces = []
    for begin in range(0, len(values), _SLICE):
        pieces.append(msgspec.json.encode(values[begin : begin + _SLICE])[1:-1])
        await asyncio.sleep(0)
    return msgspec.Raw(b"[%b]" % b",".join(pieces))
