"""Token ids without an embedding row are rejected from every source without side effects."""

from __future__ import annotations

import json
import logging
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.config import EngineConfig
from fd_core.engine.building.builder import load_engine
from fd_core.engine.core import Engine
from fd_core.engine.llm import LLM
from fd_core.errors import BadRequest
from fd_core.testing.models.checkpoints import ENGINE_CASE, write_checkpoint
from fd_core.text.tokenizer import byte_tokenizer
from fd_core.types import FinishReason, Pooling, PrefillJob, Reasoning, RequestSpec, SamplingParams

ROWS = 257
PAD = ROWS
"""Id of `[PAD]`, which the tokenizer has and the model lacks."""
BAD_IDS = [PAD, -1, 2**31, 2**31 - 1, 2**40, 2**70, -(2**63)]
GREEDY = SamplingParams(max_tokens=3, temperature=0.0, ignore_eos=True)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a model whose tokenizer was extended, as fine-tunes do, without resizing its embedding."""
    model = write_checkpoint(ENGINE_CASE, tmp_path_factory.mktemp("model"), vocab_size=ROWS)
    byte_tokenizer().backend.save(str(model / "tokenizer.json"))
    (model / "tokenizer_config.json").write_text(json.dumps({"pad_token": "[PAD]", "eos_token": "<|end|>"}))
    return model


@pytest.fixture(scope="module")
def llm(folder: Path) -> Iterator[LLM]:
    made = LLM(str(folder), backend="cpu", num_kv_blocks=40)
    yield made
    made.close()


def refused(prompts: Any, llm: LLM, params: SamplingParams = GREEDY) -> str:
    with pytest.raises(BadRequest) as raised:
        llm.generate(prompts, params)
    assert isinstance(raised.value, ValueError)
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 3, "the next call works"
    return str(raised.value)


@pytest.mark.parametrize("call", [LLM.generate, LLM.embed], ids=["generate", "embed"])
def test_text_with_missing_rows_lists_all_tokens(call: Any, llm: LLM) -> None:
    with pytest.raises(BadRequest, match=rf"token id {PAD} \('\[PAD\]'\) is out of range; .* {ROWS} ids"):
        call(llm, ["fine", "a [PAD] b"])
    assert len(llm.generate("hello", GREEDY)[0].token_ids) == 3


@pytest.mark.parametrize("wrong", [*BAD_IDS, True, 1.0, 1.5, float("nan"), None, "a", np.float32(2), [3]], ids=str)
def test_prompt_token_ids_are_checked(wrong: Any, llm: LLM) -> None:
    assert "prompt" in refused([[5, wrong], [6]], llm)


def test_numpy_integers_are_valid_token_ids(llm: LLM) -> None:
    [plain] = llm.generate([[5, 6, 0]], GREEDY)
    [given] = llm.generate([np.array([5, 6, 0], np.int64)], GREEDY)
    assert given.token_ids == plain.token_ids


@pytest.mark.parametrize("wrong", [*BAD_IDS, True, 1.5], ids=str)
@pytest.mark.parametrize(
    "field", ["stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_token_ids", "reasoning"]
)
def test_sampling_token_ids_are_checked(field: str, wrong: Any, llm: LLM) -> None:
    value: Any = (3, wrong)
    if field == "logit_bias":
        value = {3: 1.0, wrong: 1.0}
    elif field == "bad_words_token_ids":
        value = ((3, wrong),)
    elif field == "reasoning":
        value = Reasoning(end=(wrong,))
    refused("x", llm, SamplingParams(max_tokens=3, **{field: value}))


def test_loading_warns_about_tokens_without_rows(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        LLM(str(folder), backend="reference", num_kv_blocks=40).close()
    assert f"'[PAD]' = {PAD}" in caplog.text and f"it has {ROWS}" in caplog.text


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[Engine]:
    config = EngineConfig(model=str(folder), backend="cpu", num_kv_blocks=40)
    made = load_engine(config, folder, progress=lambda *_: None)
    yield made
    made.close()


@pytest.mark.parametrize("wrong", [*BAD_IDS, True, 1.5], ids=str)
@pytest.mark.parametrize(
    "field", ["prompt", "delivered", "pooling", "stop_token_ids", "logit_bias", "allowed_token_ids"]
)
def test_engine_rechecks_token_ids(field: str, wrong: Any, engine: Engine) -> None:
    spec: dict[str, Any] = {"request_id": "a", "prompt": (5, 6), "params": GREEDY}
    if field == "pooling":
        spec["pooling"] = Pooling("tokens", (wrong,))
    elif field in ("prompt", "delivered"):
        spec[field] = (wrong,)
    else:
        spec["params"] = SamplingParams(**{field: {wrong: 1.0} if field == "logit_bias" else (wrong,)})
    [delta] = engine.submit(RequestSpec(**spec))
    assert delta.finish_reason is FinishReason.ERROR and f"the vocabulary has {ROWS} ids" in (delta.error or "")
    assert not engine.has_work


@pytest.mark.parametrize("wrong", [PAD, -1])
def test_prefill_job_with_invalid_token_id_is_cancelled(
    wrong: int, engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    given_up: list[Any] = []
    monkeypatch.setattr(engine._outside, "perform", given_up.extend)
    engine._begin_job(PrefillJob(tokens=np.array([5, wrong], "<i4").tobytes(), lease="0" * 32))
    [effect] = given_up
    assert effect.refused and str(wrong) in effect.reason
    assert not engine.has_work
