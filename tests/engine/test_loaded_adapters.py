"""LoRA adapters in an engine: the texts of merged weights in any batch, and no KV shared between adapters."""

from __future__ import annotations

import msgspec
import numpy as np
import pytest
from tokenizers import Tokenizer, decoders, models

from fd_core import LLM, SamplingParams
from fd_core.engine.building.builder import load_engine
from fd_core.errors import BadRequest, ConfigError, ModelError
from fd_core.testing.kit.target import Target
from fd_core.testing.models.adapters import merge_adapter, write_adapter
from fd_core.testing.models.checkpoints import write_checkpoint
from fd_core.testing.models.drafting import OracleDrafter, speculation
from fd_core.testing.models.stepper import parts_of
from fd_core.testing.models.texts import greedy, run
from fd_core.types import Pooling
from tests.engine.building.test_kv_transfer import Pair, secret

__all__ = ["secret"]

NAMES = (None, "one", "two")
LENGTH = 24


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("adapters")
    write_checkpoint("llama", folder / "llama")
    for seed, name in enumerate(("one", "two", "three"), 1):
        targets = ("q_proj", "v_proj", "down_proj") if name == "two" else ("q_proj", "k_proj", "o_proj", "gate_proj")
        adapter = write_adapter(folder / "llama", folder / name, seed=seed, rank=2 + seed, targets=targets)
        merge_adapter(folder / "llama", adapter, folder / f"{name}-merged")
    return folder


def make_engine(folder, *names, model="llama", **settings):
    modules = tuple(f"{name}={folder / name}" for name in names)
    settings = {"structured_output": False, "lora_modules": modules, "num_kv_blocks": 200} | settings
    config = Target("reference", "reference", {}, folder).config(**settings)
    return load_engine(config, folder / model, progress=lambda *_: None)


def digests(engine):
    return {None: "", **{info.name: info.digest for info in engine.info.adapters}}


def specs_for(of, **changes):
    """Two requests for the base model and for each adapter, all with the same two prompts, so only the adapter
    differs.
    """
    return [
        (name, greedy(f"{name}-{index}", [(7 * index + position) % 150 for position in range(20)], LENGTH, **changes))
        for name in of
        for index in range(2)
    ]


def adapted(engine, pairs):
    known = digests(engine)
    return [msgspec.structs.replace(spec, adapter=known[name]) for name, spec in pairs]


@pytest.fixture(scope="module")
def merged(folder):
    """Return the texts of the merged weights, each model run separately."""
    texts = {}
    for name in NAMES:
        engine = make_engine(folder, model="llama" if name is None else f"{name}-merged")
        texts |= run(engine, [spec for _, spec in specs_for([name])]).tokens
        engine.close()
    assert len({tuple(text) for text in texts.values()}) == len(texts), "the adapters change too little"
    return texts


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"max_num_seqs": 1},
        {"max_num_batched_tokens": 7},
        {"pipeline_depth": 3},
        {"enable_prefix_caching": False},
        {"block_size": 4},
    ],
    ids=lambda settings: ", ".join(f"{name}={value}" for name, value in settings.items()) or "plain",
)
@pytest.mark.law("4")
def test_adapter_texts_equal_merged_weights(folder, merged, settings):
    engine = make_engine(folder, "one", "two", **settings)
    assert run(engine, adapted(engine, specs_for(NAMES))).tokens == merged
    engine.close()


@pytest.mark.parametrize("keep", [True, False], ids=["kept", "recomputed"])
@pytest.mark.law("4")
def test_preempted_request_keeps_its_adapter(folder, merged, keep):
    engine = make_engine(folder, "one", "two", num_kv_blocks=16, block_size=8, save_preempted_kv=keep)
    parts_of(engine).control.growth = lambda *_: 0
    assert run(engine, adapted(engine, specs_for(NAMES))).tokens == merged
    assert engine.stats().scheduler.counters.preemptions > 0
    engine.close()


@pytest.mark.parametrize("wrong", [0.0, 0.5])
@pytest.mark.law("4")
def test_drafts_do_not_change_adapter_texts(folder, merged, wrong):
    engine = make_engine(folder, "one", "two", speculative=speculation(3), pipeline_depth=1)
    prompts = {spec.request_id: spec.prompt for _, spec in specs_for(NAMES)}
    engine.probe().runner.drafter = OracleDrafter(
        engine.info.max_num_seqs,
        [[*prompts[name], *text] for name, text in merged.items() if name[:4] == "None"],
        wrong,
        0,
    )
    assert run(engine, adapted(engine, specs_for(NAMES))).tokens == merged
    engine.close()


@pytest.mark.law("5.3")
def test_adapters_do_not_share_prefixes(folder, merged):
    """Requests run in sequence, so every prompt is cached for another adapter before its own turn."""
    engine = make_engine(folder, "one", "two", block_size=4)
    for name, spec in specs_for(NAMES):
        before = engine.stats().scheduler.counters.prefix_hits
        assert run(engine, adapted(engine, [(name, spec)])).tokens[spec.request_id] == merged[spec.request_id]
        assert engine.stats().scheduler.counters.prefix_hits == before
    (again,) = adapted(engine, specs_for(["two"]))[:1]
    assert run(engine, [again]).tokens["two-0"] == merged["two-0"]
    assert engine.stats().scheduler.counters.prefix_hits == before + 16
    engine.close()


def test_reused_adapter_name_does_not_share_prefixes(folder, merged):
    engine = make_engine(folder, "two", lora_folder=str(folder))
    (spec,) = adapted(engine, specs_for(["two"]))[:1]
    run(engine, [spec])
    engine.unload_adapter("two")
    info = engine.load_adapter("two", folder / "one")
    assert [known.digest for known in engine.info.adapters] == [info.digest]
    (spec,) = adapted(engine, specs_for(["two"]))[:1]
    assert run(engine, [spec]).tokens["two-0"] == merged["one-0"]
    engine.close()


def test_unloaded_adapter_finishes_its_running_requests(folder, merged):
    engine = make_engine(folder, "one", "two", lora_folder=str(folder), max_loras=2)
    specs = adapted(engine, specs_for(NAMES))
    digest = digests(engine)["one"]
    for spec in specs:
        engine.submit(spec)
    texts = {}
    for _ in range(3):
        for delta in engine.step():
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    engine.unload_adapter("one")
    with pytest.raises(BadRequest, match="still in use"):
        engine.load_adapter("three", folder / "three")
    (late,) = [spec for spec in specs if spec.request_id == "one-0"]
    (refusal,) = engine.submit(msgspec.structs.replace(late, request_id="late"))
    assert "not loaded" in (refusal.error or "")
    while engine.has_work:
        for delta in engine.step():
            texts.setdefault(delta.request_id, []).extend(delta.token_ids)
    assert texts == merged
    engine.step()
    assert digest not in {adapter.digest for adapter in engine._adapters.held}
    engine.load_adapter("three", folder / "three")
    engine.close()


@pytest.mark.parametrize(
    ("names", "outcome"), [(("two", "one"), "transferred"), (("two",), "refused"), ((), "refused")]
)
@pytest.mark.law("5.3", "6.3")
def test_prefill_worker_uses_the_adapter_or_rejects(folder, merged, secret, names, outcome):
    """Adapters are identified by digest, so their slots on the two workers may differ."""
    both = {"transfer_secret_file": secret, "lease_seconds": 5.0, "block_size": 4}
    prefill = make_engine(folder, *names, role="prefill", **both)
    decode = make_engine(folder, "one", "two", role="decode", **both)
    two = Pair(prefill, decode)
    # One prompt at a time: each is cached for another adapter before its own turn.
    for pair in specs_for(NAMES):
        two.run(*adapted(decode, [pair]))
    assert two.texts.tokens == merged
    assert (two.outcomes["one-0"], two.outcomes["None-0"]) == (outcome, "transferred")
    prefill.close()
    decode.close()


def test_offloaded_kv_is_keyed_by_adapter(folder, merged, tmp_path):
    settings = {"kv_store": f"disk:{tmp_path / 'store'}", "block_size": 4}
    for _ in range(2):
        engine = make_engine(folder, "one", "two", **settings)
        for pair in specs_for(NAMES):
            assert run(engine, adapted(engine, [pair])).tokens == {pair[1].request_id: merged[pair[1].request_id]}
        loaded = engine.stats().scheduler.offload.loads
        engine.close()
    assert loaded > 0


def test_embeddings_and_scores_use_the_adapter(folder):
    found = {}
    for model, name in (("llama", "one"), ("one-merged", None)):
        engine = make_engine(folder, *(["one"] if name else []), model=model)
        (spec,) = adapted(engine, [(name, greedy("x", range(9), 2, prompt_logprobs=1))])
        scores = run(engine, [spec]).prompt_scores["x"]
        pooled = run(
            engine, [msgspec.structs.replace(spec, params=SamplingParams(max_tokens=1), pooling=Pooling("last"))]
        )
        found[name] = ([score.top_ids for score in scores], pooled.vectors["x"])
        engine.close()
    assert found["one"][0] == found[None][0]
    np.testing.assert_allclose(*(np.frombuffer(vector, np.float32) for _, vector in found.values()), atol=1e-4)


def test_llm_selects_adapters_by_name(folder, merged):
    words = Tokenizer(models.WordLevel({str(token): token for token in range(160)}, "0"))
    words.decoder = decoders.ByteLevel()
    words.save(str(folder / "llama" / "tokenizer.json"))
    modules = {name: folder / name for name in ("one", "two")}
    llm = LLM(str(folder / "llama"), backend="reference", lora_modules=modules, num_kv_blocks=100)
    pairs = specs_for(NAMES)
    prompts, params = [spec.prompt for _, spec in pairs], pairs[0][1].params
    found = llm.generate(prompts, params, adapter=[name for name, _ in pairs])
    assert [each.token_ids for each in found] == list(merged.values())
    assert llm.generate(prompts[:1], params, adapter="two")[0].token_ids == merged["two-0"]
    with pytest.raises(BadRequest, match="unknown adapter 'three'; loaded: one, two"):
        llm.generate(prompts, params, adapter="three")
    with pytest.raises(BadRequest, match="6 prompts but 1 adapters"):
        llm.generate(prompts, params, adapter=["one"])
    vectors = llm.embed(prompts[:2], adapter=["one", None])
    np.testing.assert_allclose(vectors[1], llm.embed(prompts[1])[0], atol=1e-5)  # alone: other order of summation
    assert np.abs(vectors[0] - llm.embed(prompts[0])[0]).max() > 1e-3
    with pytest.raises(BadRequest, match="adapter 'three'"):
        llm.embed(prompts[:1], adapter="three")
    llm.close()


@pytest.mark.parametrize(
    ("modules", "words"),
    [
        (("one",), "NAME=FOLDER"),
        (('{"name": "a"}',), "path"),
        (('{"name": "a", "path": "x", "rank": 3}',), "rank"),
        (('{"name": "", "path": "x"}',), "NAME=FOLDER"),
        (("a=x", '{"name": "a", "path": "y"}'), "duplicate adapter name 'a'"),
        (("=x",), "NAME=FOLDER"),
        (("a=x", "a=y"), "duplicate adapter name 'a'"),
        (tuple(f"a{index}=x" for index in range(9)), "--max-loras"),
    ],
)
def test_invalid_adapter_settings_are_rejected(folder, modules, words):
    with pytest.raises(ConfigError) as caught:
        make_engine(folder, lora_modules=modules)
    assert words in f"{caught.value} {caught.value.hint}"


def test_vllm_adapter_syntax_is_accepted(folder):
    module = msgspec.json.encode({"name": "sql", "path": str(folder / "one"), "base_model_name": "x"}).decode()
    engine = make_engine(folder, lora_modules=(module,))
    (plain,) = make_engine(folder, "one").info.adapters
    assert [(info.name, info.digest) for info in engine.info.adapters] == [("sql", plain.digest)]
    engine.close()


def test_bad_adapter_fails_start_before_loading_model(folder, monkeypatch):
    monkeypatch.setattr("fd_core.backends.contract.Backend.load_model", lambda *_: pytest.fail("the model was read"))
    with pytest.raises(ModelError, match="adapter_config"):
        make_engine(folder, lora_modules=(f"a={folder / 'llama'}",))


def test_models_without_checkpoint_reject_adapters(folder):
    config = Target("null", "null", {}, folder).config(lora_modules=(f"a={folder / 'one'}",))
    with pytest.raises(ModelError, match="does not support adapters"):
        load_engine(config, None, progress=lambda *_: None)
