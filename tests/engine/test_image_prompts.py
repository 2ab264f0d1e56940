"""Prompts with images: however they are scheduled, preempted, cached and stored, the text is the same."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any, Final

import msgspec
import numpy as np
import pytest

from fd_core.engine import computing
from fd_core.errors import ConfigError
from fd_core.models.families.image_processor import image_part
from fd_core.models.families.images.ernie import ErnieVl
from fd_core.models.families.images.gemma import Gemma3WithImages
from fd_core.models.families.images.idefics import Idefics3
from fd_core.models.families.images.qwen import Qwen25Vl
from fd_core.models.families.images.qwen3 import Qwen3Vl, Qwen35VlMoe
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.texts import Texts, run
from fd_core.text.tokenizer import byte_tokenizer
from fd_core.types import Pooling, RequestSpec, SamplingParams
from tests.engine.building.test_kv_transfer import Pair
from tests.engine.structured import structured_specs
from tests.engine.test_layer_groups import PACKS, engine_of, run_preempted, wait_until_stored
from tests.engine.ways import WAYS

PLACEHOLDER: Final = 7
TOKENS: Final = 16
"""Of a tile of 48 by 48 pixels, whose 64 patches are merged by four."""
BLOCK: Final = 8


def prompt_of(index: int, images: list[int], lead: int = 5, tail: int = 3, **fields: Any) -> RequestSpec:
    """Return a request whose prompt has images of the given kinds between its words."""
    words = np.random.default_rng(100 + lead).integers(10, 250, 100).tolist()
    prompt, parts = words[:lead], []
    for kind in images:
        pixels = np.random.default_rng(kind).integers(0, 256, (48, 48, 3), dtype=np.uint8)
        parts.append(msgspec.structs.replace(image_part(pixels, TOKENS, (4, 4)), start=len(prompt)))
        prompt += [PLACEHOLDER] * TOKENS + words[lead : lead + tail]
    params = SamplingParams(max_tokens=12, temperature=0.0, ignore_eos=True)
    if index > 2:
        params = msgspec.structs.replace(params, temperature=0.8, seed=index, repetition_penalty=1.2, top_p=0.9)
    return RequestSpec(
        request_id=f"r{index}", prompt=tuple(prompt), images=tuple(parts), **{"params": params, **fields}
    )


SPECS: Final = [
    prompt_of(0, [1]),
    prompt_of(1, [2], tail=1),
    prompt_of(2, [1, 2, 3]),
    prompt_of(3, [1, 3], lead=30),
    prompt_of(4, [], lead=40),
    prompt_of(5, [4, 4], lead=13),
]


@pytest.fixture(
    scope="module",
    params=[Idefics3, Qwen25Vl, Qwen3Vl, Qwen35VlMoe, Gemma3WithImages, ErnieVl],
    ids=lambda family: family.model_type,
)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    family = request.param
    folder = tmp_path_factory.mktemp("images") / family.model_type
    named = {"architectures": list(family.architectures), "torch_dtype": "float32", "vocab_size": 258}
    write_config({**family.defaults, **SIZES, **next(iter(family.cases.values())), **named}, folder, seed=4)
    return folder


def settings_of(**changes: Any) -> dict[str, Any]:
    return {"dtype": "float32", "block_size": BLOCK, "structured_output": False, **changes}


@cache
def golden(folder: Path) -> dict[str, list[int]]:
    """Return the texts of an engine that computes one request at a time, and nothing twice."""
    texts = {}
    for spec in SPECS:
        with engine_of(folder, **settings_of(enable_prefix_caching=False)) as engine:
            texts |= run(engine, [spec]).tokens
    return texts


def test_images_decide_the_text(model: Path) -> None:
    assert golden(model)["r0"] != golden(model)["r1"]


REFUSED: Final = {
    **{
        (family.model_type, "two stages"): "cannot be divided into stages"
        for family in (Qwen25Vl, Qwen3Vl, Qwen35VlMoe, Gemma3WithImages, ErnieVl)
    },
    ("gemma3", "small budget"): "computes in one step",
}
"""Models and settings that are refused."""


@pytest.mark.parametrize("way", [*(way for way in WAYS if way != "two ranks"), "budget"])
@pytest.mark.law("4")
@pytest.mark.in_turn(3)
def test_settings_do_not_change_texts(model: Path, way: str) -> None:
    settings = settings_of(**WAYS.get(way, {"max_num_batched_tokens": 70, "backend": "cpu"}))
    if (model.name, way) in REFUSED:
        with pytest.raises(ConfigError, match=REFUSED[model.name, way]), engine_of(model, **settings):
            pass
        if (model.name, way) == ("qwen2_5_vl", "two stages"):  # one is enough, as ranks take long to start
            with engine_of(model, **settings, language_model_only=True) as engine:
                assert run(engine, SPECS[4:5]).tokens["r4"] == golden(model)["r4"]
        return
    if model.name == Qwen35VlMoe.model_type and (settings["structured_output"] or "speculative" in settings):
        settings["block_size"] = 2 * BLOCK  # holds the states of its drafts
    with engine_of(model, **settings) as engine:
        for _ in range(2):  # from the cache of prefixes, too
            assert run(engine, SPECS).tokens == golden(model)
        assert (engine.stats().scheduler.blocks.used, engine.stats().scheduler.blocks.fenced) == (0, 0)
        engine.check_integrity()


@pytest.mark.parametrize("model", [Qwen25Vl, ErnieVl], ids=lambda family: family.model_type, indirect=True)
@pytest.mark.law("4")
def test_two_ranks_do_not_change_texts(model: Path) -> None:
    """Ranks take long to start: one model without experts, and one with two kinds of them."""
    test_settings_do_not_change_texts(model, "two ranks")


@pytest.mark.law("4")
def test_grammars_and_adopted_texts_go_on_after_images(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The request that goes on is one of an engine that died."""
    monkeypatch.setattr(computing, "_tokenizer", lambda _: byte_tokenizer())
    fields = {"prompt": SPECS[2].prompt, "images": SPECS[2].images}
    specs = [msgspec.structs.replace(spec, **fields) for spec in structured_specs(3, max_tokens=20)]
    settings = settings_of(structured_output=True, backend="cpu", max_num_batched_tokens=50, block_size=2 * BLOCK)
    with engine_of(model, **settings | {"max_num_seqs": 1}) as alone, engine_of(model, **settings) as engine:
        assert run(engine, specs).tokens == run(alone, specs).tokens
        text = golden(model)["r2"]
        left = msgspec.structs.replace(SPECS[2], delivered=tuple(text[:5]))
        assert run(engine, [left]).tokens["r2"] == text[5:]


@pytest.mark.law("5.2")
@pytest.mark.parametrize("saves", [True, False])
@pytest.mark.in_turn(4)
def test_preempted_images_go_on(model: Path, secrets: dict[str, str], tmp_path: Path, saves: bool) -> None:
    """Texts are long, so that running requests need more blocks than there are, however late some of them begin."""
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets} if saves else {}
    store = store or {"save_preempted_kv": False}
    params = SamplingParams(max_tokens=60, temperature=0.0, ignore_eos=True)
    specs = [msgspec.structs.replace(spec, params=params) for spec in SPECS]
    settings = settings_of(backend="cpu", max_model_len=90, max_num_batched_tokens=40, max_num_seqs=5)
    with engine_of(model, **settings) as engine:
        expected = run(engine, specs).tokens
    with engine_of(model, num_kv_blocks=17, **store, **settings) as engine:
        texts = run_preempted(engine, specs)
        assert engine.stats().scheduler.counters.preemptions
        assert engine.stats().scheduler.offload.loaded_tokens or not saves
        assert texts.tokens == expected
        engine.check_integrity()


@pytest.mark.law("5.2")
def test_stored_prefixes_name_their_images(model: Path, secrets: dict[str, str], tmp_path: Path) -> None:
    store = {"kv_store": f"disk:{tmp_path}/kv", "host_kv_memory": 0, **secrets}
    loaded = []
    for specs in (SPECS[:1], SPECS):
        with engine_of(model, **settings_of(backend="cpu"), **store) as engine:
            expected = {spec.request_id: golden(model)[spec.request_id] for spec in specs}
            assert run(engine, specs).tokens == expected
            wait_until_stored(engine)
            loaded.append(engine.stats().scheduler.offload.loaded_tokens)
    assert loaded[0] == 0


def test_prefix_hits_share_an_image_but_never_divide_it(model: Path) -> None:
    """The first block ends before the image, the second and third within it, the fourth after it."""

    def hits(spec: RequestSpec) -> int:
        before = engine.stats().scheduler.counters.prefix_hits
        run(engine, [spec])
        return engine.stats().scheduler.counters.prefix_hits - before

    with engine_of(model, **settings_of(backend="cpu")) as engine:
        assert hits(prompt_of(0, [1], lead=10, tail=10)) == 0
        assert hits(prompt_of(1, [1], lead=10, tail=10)) == 4 * BLOCK
        assert hits(prompt_of(2, [1], lead=10, tail=2)) == BLOCK
        assert hits(prompt_of(3, [2], lead=10, tail=10)) == BLOCK
        assert hits(prompt_of(4, [1], lead=10, tail=10, cache_salt="other")) == 0


@pytest.mark.law("6.2")
def test_pair_transfers_images(model: Path, secrets: dict[str, str]) -> None:
    """The decode worker preempts, and gets the same prompts again."""
    settings = settings_of(backend="cpu", max_model_len=90, max_num_batched_tokens=70)
    blocks = 16 if model.name == Qwen35VlMoe.model_type else 14
    with (
        engine_of(model, role="prefill", **secrets, **settings) as prefill,
        engine_of(model, role="decode", num_kv_blocks=blocks, **secrets, **settings) as decode,
    ):
        decode.probe().scheduler.probe().control.growth = lambda *_: 0  # type: ignore[attr-defined]  # admits what fits
        pair = Pair(prefill, decode)
        for _ in range(2):
            pair.run(*SPECS)
            assert pair.texts.tokens == golden(model)
            pair.texts = Texts()
        assert {*pair.outcomes.values()} == {"transferred"}
        assert decode.stats().scheduler.counters.preemptions


@pytest.mark.parametrize("pack", sorted({"cpu", "cpu+onnx", "cpu+paddle"} & {*PACKS}))
def test_every_pack_serves_the_texts_of_a_model_with_images(model: Path, pack: str) -> None:
    texts, expected = SPECS[4:5], {"r4": golden(model)["r4"]}
    settings = settings_of(**PACKS[pack], language_model_only=True)
    if pack == "cpu+onnx" and model.name == Qwen35VlMoe.model_type:
        with pytest.raises(ConfigError, match="does not compute recurrent layers"), engine_of(model, **settings):
            pass
        return
    if model.name == ErnieVl.model_type:  # random texts have tokens that its experts for images compute
        with engine_of(model, **settings_of(backend="reference", language_model_only=True)) as engine:
            expected = run(engine, texts).tokens
    with engine_of(model, **settings) as engine:
        assert run(engine, texts).tokens == expected
        assert "takes no images" in run(engine, SPECS[:1]).errors["r0"]
    if pack in ("cpu+onnx", "cpu+paddle"):
        with pytest.raises(ConfigError) as caught, engine_of(model, **settings | {"language_model_only": False}):
            pass
        assert "encoders of images" in caught.value.message
        assert "--language-model-only" in str(caught.value.hint)


def test_aborted_request_and_sleeping_engine_hold_no_images(model: Path) -> None:
    with engine_of(model, **settings_of(backend="cpu", max_num_batched_tokens=24)) as engine:
        runner = engine.probe().runner
        engine.submit(SPECS[2])
        engine.step()
        assert runner.images._pending
        engine.abort(["r2"])
        while engine.has_work:
            engine.step()
        assert not (runner.images._pending or runner.images._places or runner.images._whole)
        runner.release()
        assert "images" not in vars(runner)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"images": (msgspec.structs.replace(SPECS[0].images[0], start=40),)}, "an image is not where"),
        ({"images": SPECS[0].images * 2}, "an image is not where"),
        ({"images": (msgspec.structs.replace(SPECS[0].images[0], pixels=b""),)}, "or has other pixels"),
        ({"params": SamplingParams(prompt_logprobs=0)}, "prompt_logprobs is not available"),
        ({"pooling": Pooling("last"), "params": SamplingParams(max_tokens=1)}, "pooling is not available"),
    ],
)
def test_unusable_images_are_refused(model: Path, changes: dict[str, Any], message: str) -> None:
    with engine_of(model, **settings_of(backend="reference")) as engine:
        assert message in run(engine, [msgspec.structs.replace(SPECS[0], **changes)]).errors["r0"]
