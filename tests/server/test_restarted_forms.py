"""An engine killed within a schema, or within a call after reasoning: the client sees one whole answer."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import jsonschema
import openai
import pytest

from fd_core.config import EngineConfig, SpeculativeConfig
from fd_core.engine.clients.client import EngineClient
from fd_core.engine.clients.launch import open_client
from fd_core.text.parsing.answer import Parsers
from fd_core.text.parsing.formats.json_calls import HermesTools
from fd_core.text.parsing.thinking import DeepSeekR1Reasoning
from fd_core.text.tokenizer import byte_tokenizer
from tests.engine.faults import Faults
from tests.server.fakes import LiveServer, live, samples
from tests.server.test_null_engine import wait_until_idle

pytestmark = pytest.mark.slow

CAT = {"type": "string", "enum": ["a little cat", "a little car", "a large dog"]}
SCHEMA = {
    "type": "object",
    "properties": {
        "name_of_the_owner": {"type": "string", "minLength": 12, "maxLength": 20},
        "animals": {"type": "array", "items": CAT, "minItems": 6, "maxItems": 6},
        "ages": {
            "type": "array",
            "items": {"type": "integer", "minimum": 0, "maximum": 99},
            "minItems": 8,
            "maxItems": 9,
        },
    },
    "required": ["name_of_the_owner", "animals", "ages"],
    "additionalProperties": False,
}
PARSERS = Parsers(HermesTools, DeepSeekR1Reasoning)
TURN = {"role": "user", "content": "hi"}
FORM = {"response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": SCHEMA, "strict": True}}}
TOOL = {"type": "function", "function": {"name": "keep_animals", "parameters": SCHEMA, "strict": True}}
CALL = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}
ASK = {"model": "null", "messages": [TURN], "max_tokens": 700, "temperature": 1.0, "seed": 5}
NGRAM = SpeculativeConfig(method="ngram", num_speculative_tokens=3)


async def engine(where: str, speculative: SpeculativeConfig | None = None) -> EngineClient:
    config = EngineConfig(
        model="null",
        backend="faulty",
        max_num_seqs=4,
        num_kv_blocks=300,
        block_size=16,
        max_model_len=4000,
        max_num_batched_tokens=64,
        pipeline_depth=2,
        speculative=speculative,
    )
    return await open_client(config, None, where=where)


async def answers(url: str, bodies: list[dict[str, Any]]) -> list[dict[str, str]]:
    """Return concurrent streams joined by content, reasoning, arguments and finish reason."""

    async def one(request: dict[str, Any]) -> dict[str, str]:
        joined = {"content": "", "reasoning": "", "arguments": "", "names": "", "end": "", "usage": "", "prompt": ""}
        async for chunk in await client.chat.completions.create(**request):
            if chunk.usage is not None:
                joined["usage"] += str(chunk.usage.completion_tokens)
                joined["prompt"] += str(chunk.usage.prompt_tokens)
            for choice in chunk.choices:
                joined["content"] += choice.delta.content or ""
                joined["reasoning"] += getattr(choice.delta, "reasoning_content", None) or ""
                for call in choice.delta.tool_calls or ():
                    joined["names"] += call.function.name or ""
                    joined["arguments"] += call.function.arguments or ""
                joined["end"] += choice.finish_reason or ""
        return joined

    async with openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client:
        return list(await asyncio.gather(*map(one, bodies)))


def requests(form: dict[str, Any], budget: int) -> list[dict[str, Any]]:
    more = {"stream": True, "stream_options": {"include_usage": True}, "extra_body": {"reasoning_max_tokens": budget}}
    return [ASK | form | more | {"seed": seed, "temperature": float(seed % 2)} for seed in range(6)]


def generated_by(make: Callable[[], Any], bodies: list[dict[str, Any]], deaths: int) -> list[dict[str, str]]:
    with live(make, parsers=PARSERS, tokenizer=byte_tokenizer()) as server:
        found = asyncio.run(answers(server.url, bodies))
        check_nothing_leaks(server, deaths)
    return found


def check_nothing_leaks(server: LiveServer, deaths: int) -> None:
    wait_until_idle(server)
    counts = samples(server)
    assert counts["fdcore_engine_epoch"] == 1 + deaths
    assert (counts["fdcore_requests_requeued_total"] > 0) is bool(deaths)


@pytest.mark.parametrize(
    ("form", "budget", "positions", "speculative"),
    [
        pytest.param(FORM, 8, (60, 60), None, id="schema-forced"),
        pytest.param(FORM, 8, (60, 60), NGRAM, id="schema-ngram", marks=pytest.mark.soak),
        pytest.param(CALL, 40, (20, 100), None, id="call after reasoning-forced", marks=pytest.mark.soak),
        pytest.param(CALL, 40, (20, 100), NGRAM, id="call after reasoning-ngram"),
    ],
)
@pytest.mark.law("1.1", "4")
def test_constrained_answer_survives_engine_kills(
    faults: Faults,
    form: dict[str, Any],
    budget: int,
    positions: tuple[int, int],
    speculative: SpeculativeConfig | None,
) -> None:
    """Killed twice: in the reasoning and after it, or twice within the JSON."""
    bodies = requests(form, budget)
    faults.arm()
    undisturbed = generated_by(lambda: engine("inproc"), bodies, deaths=0)
    for joined in undisturbed:
        text = joined["arguments"] if form is CALL else joined["content"]
        jsonschema.validate(json.loads(text), SCHEMA)
        assert (joined["names"], joined["end"]) == (("keep_animals", "tool_calls") if form is CALL else ("", "stop"))
        assert joined["reasoning"]
        assert int(joined["usage"]) > 120
    first, then = positions
    faults.arm("kill", "kill", position=int(undisturbed[0]["prompt"]) + first, every=then)
    assert generated_by(lambda: engine("process", speculative), bodies, deaths=2) == undisturbed
    assert faults.count == 2
