"""GET /v1/models."""

from __future__ import annotations

from datetime import UTC, datetime

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from fd_core.server.api.openapi import endpoint
from fd_core.server.schemas.responses import ModelCard, ModelList
from fd_core.server.state.state import ServedName, ServerState, state_of

router = APIRouter()


@router.get("/v1/models", **endpoint("List the names of the model", None, ModelList))
async def list_models(request: Request) -> Response:
    """List every name under which the model answers, and its adapters."""
    state = state_of(request)
    cards = [_card(state, name) for name in state.names.values()]
    return _json(ModelList(data=cards, first_id=cards[0].id, last_id=cards[-1].id))


@router.get("/v1/models/{model:path}", **endpoint("Describe the model", None, ModelCard, errors=(401, 404)))
async def get_model(request: Request, model: str) -> Response:
    """Describe the model under one of its names."""
    state = state_of(request)
    return _json(_card(state, state.served(model)))


def _card(state: ServerState, served: ServedName) -> ModelCard:
    info = state.client.info
    return ModelCard(
        id=served.name,
        created=state.created,
        root=info.model,
        parent=next(iter(state.names)) if served.adapter else None,
        max_model_len=info.max_model_len,
        display_name=served.name,
        created_at=datetime.fromtimestamp(state.created, UTC).isoformat().replace("+00:00", "Z"),
    )


def _json(answer: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(answer), media_type="application/json")
