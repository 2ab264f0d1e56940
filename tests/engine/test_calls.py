"""Tool calls of a random model under a grammar at temperature 1: complete calls satisfy their schemas."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.structured.grammar import CallsConstraint, RequestedCall
from fd_core.testing.models.checkpoints import LONG_CASE, write_checkpoint
from fd_core.text.parsing.contract import ToolParser
from fd_core.text.parsing.formats.harmony import HarmonyTools
from fd_core.text.parsing.formats.pythonic import PythonicTools
from fd_core.text.parsing.formats.tagged import GlmTools, QwenCoderTools
from fd_core.types import RequestSpec, SamplingParams
from tests.engine.helpers import run
from tests.structured.test_calls import calls_of, tokenizer

END = 256
SHORT = {"type": "string", "maxLength": 6}
SCHEMAS: dict[str, dict[str, Any]] = {
    "weather": {
        "type": "object",
        "properties": {
            "city": SHORT,
            "days": {"type": "integer", "minimum": 1, "maximum": 14},
            "unit": {"enum": ["C", "F", None]},
            "exact": {"type": "boolean"},
            "tags": {"type": "array", "items": {"enum": ["a", "b"]}, "maxItems": 2},
        },
        "required": ["city", "unit"],
        "additionalProperties": False,
    },
    "now": {"type": "object", "properties": {}, "additionalProperties": False},
}


@pytest.mark.parametrize("parser", [PythonicTools, GlmTools, QwenCoderTools, HarmonyTools])
def test_tool_calls_of_random_model_satisfy_their_schemas(parser: type[ToolParser], tmp_path: Path) -> None:
    words = tokenizer(parser.markers)
    model = write_checkpoint(LONG_CASE, tmp_path)
    config_file = model / "config.json"
    config_file.write_text(json.dumps(json.loads(config_file.read_text()) | {"eos_token_id": END}))
    words.backend.save(str(model / "tokenizer.json"))
    calls = [RequestedCall(parser.form(name), schema, name) for name, schema in SCHEMAS.items()]  # type: ignore[arg-type]
    control = words.control_tokens
    forms = [
        CallsConstraint(calls=some, control_tokens=control, is_demanded=True, markers=parser.markers)
        for some in (calls, calls[:1])
    ]
    made = [form.grammar("tools") for form in forms]
    specs = [
        RequestSpec(
            request_id=str(seed),
            prompt=tuple(range(10, 14 + seed)),
            params=SamplingParams(max_tokens=300, temperature=1.0, seed=seed, grammar=made[seed % 2]),
            eos_token_ids=(END,),
        )
        for seed in range(6)
    ]
    config = EngineConfig(
        model=str(model), backend="reference", max_num_seqs=4, block_size=16, num_kv_blocks=200, max_model_len=512
    )
    engine = load_engine(config, model, progress=lambda *_: None)
    done = run(engine, specs)
    engine.close()
    for spec in specs:
        assert done.tokens[spec.request_id][-1] == END
        text = words.decode(done.tokens[spec.request_id][:-1], skip_special=False)
        reading = parser(SCHEMAS)
        [(name, arguments)] = calls_of([*reading.push(text), *reading.flush()])
        jsonschema.validate(json.loads(arguments), SCHEMAS[name])
        assert name == "weather" or int(spec.request_id) % 2 == 0
