"""Processors of images beyond the kit of families: names of states, limits, refusals."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fd_core.errors import BadRequest, ConfigError, ModelError
from fd_core.models.families.contract import Family
from fd_core.models.families.image_processor import ImageProcessor
from fd_core.models.families.images.ernie import ErnieVl
from fd_core.models.families.images.gemma import Gemma3WithImages
from fd_core.models.families.images.idefics import Idefics3
from fd_core.models.families.images.llava import LlavaNext, LlavaOnevision
from fd_core.models.families.images.paddle import PaddleOcrVl
from fd_core.models.families.images.qwen import Qwen2Vl
from fd_core.models.families.images.qwen3 import Qwen3Vl
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.safetensors_files import text_name
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import SIZES, write_config

FAMILIES = pytest.mark.parametrize(
    "family",
    [ErnieVl, Gemma3WithImages, Idefics3, LlavaNext, LlavaOnevision, Qwen2Vl, PaddleOcrVl],
    ids=lambda family: family.model_type,
)


def processor(family: type[Family], **changes: Any) -> ImageProcessor:
    config = ModelConfig({**family.defaults, **SIZES, **next(iter(family.cases.values()))})
    return family().image_processor(config, ModelConfig({**family.processor_settings, **changes}))


def image(height: int, width: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8)


@FAMILIES
def test_digest_names_pixels_and_settings(family: type[Family]) -> None:
    """A store may outlive a change of the settings that normalize pixels."""
    one = processor(family).process(image(48, 48)).parts
    assert one == processor(family).process(image(48, 48)).parts
    other = processor(family, image_mean=[0.1, 0.2, 0.3]).process(image(48, 48)).parts
    assert [part.pixels for part in one] == [part.pixels for part in other]
    assert not {part.digest for part in one} & {part.digest for part in other}


@FAMILIES
def test_parts_have_tokens_and_their_pixels(family: type[Family]) -> None:
    made = processor(family)
    for height, width in ((1, 1), (1, 199), (500, 30), (700, 700)):
        for part in made.process(image(height, width)).parts:
            assert part.num_tokens > 0
            assert 3 * part.size[0] * part.size[1] == len(part.pixels)


def test_long_image_is_refused_by_qwen() -> None:
    with pytest.raises(BadRequest, match="1 by 201 pixels is more than 200 times"):
        processor(Qwen2Vl).process(image(1, 201))


@pytest.mark.parametrize("family", [Qwen2Vl, ErnieVl])
def test_thin_image_is_enlarged_as_by_transformers(family: type[Family]) -> None:
    """Its shorter side would round to no token, so it counts as too small."""
    assert processor(family).process(image(1, 199)).parts[0].size == (12, 348)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        *((Idefics3, each) for each in ({"do_resize": False}, {"max_image_size": {"longest_edge": 50}}, {"size": 3})),
        *((Gemma3WithImages, each) for each in ({"do_resize": False}, {"do_pan_and_scan": True}, {"size": None})),
        (LlavaNext, {"crop_size": {"height": 24, "width": 48}}),
        (LlavaNext, {"size": {"shortest_edge": 24}}),
        (LlavaOnevision, {"do_normalize": False}),
        (LlavaOnevision, {"do_center_crop": True}),
        (LlavaOnevision, {"image_mean": None}),
        (LlavaOnevision, {"size": {"height": 48, "width": 96}}),
        (LlavaOnevision, {"image_grid_pinpoints": [[48, 48]]}),
        (LlavaOnevision, {"image_grid_pinpoints": [[48, 50]]}),
    ],
)
def test_settings_of_tiles_that_cannot_be_used_are_refused(family: type[Family], changes: dict[str, Any]) -> None:
    with pytest.raises(ModelError):
        processor(family, **changes)


def test_packs_that_queue_steps_refuse_experts_for_images(tmp_path: Path) -> None:
    named = {"architectures": list(ErnieVl.architectures), "model_type": ErnieVl.model_type}
    write_config({**ErnieVl.defaults, **SIZES, **ErnieVl.cases["plain"], **named}, tmp_path, seed=1)
    ops = NumpyOps()
    ops.queues = True
    with (
        open_checkpoint(tmp_path) as checkpoint,
        pytest.raises(ConfigError, match="numpy pack does not compute experts for images"),
    ):
        load_model(checkpoint, ops)


def test_llava_next_reads_llama_and_mistral() -> None:
    config = {**SIZES, **LlavaNext.cases["mistral"]}
    assert LlavaNext().traits(ModelConfig(config)).window(0) == 7
    assert LlavaNext().traits(ModelConfig({**config, "text_config": {}})).window(0) is None
    with pytest.raises(ModelError, match="must be llama or mistral, got 'qwen2'"):
        LlavaNext().traits(ModelConfig({**config, "text_config": {"model_type": "qwen2"}}))
    full = ModelConfig({**LlavaNext.defaults, **config, "vision_feature_select_strategy": "full"})
    with pytest.raises(ModelError, match="vision_feature_select_strategy must be default"):
        LlavaNext().image_processor(full, ModelConfig({}))


@pytest.mark.parametrize(
    ("field", "value"), [("vision_feature_layer", -4), ("vision_feature_layer", [1]), ("vision_aspect_ratio", "pad")]
)
def test_llava_config_that_cannot_be_used_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match=field):
        LlavaOnevision().images(
            ModelConfig({**SIZES, **LlavaOnevision.defaults, **LlavaOnevision.cases["plain"], field: value})
        )


def test_tiles_of_llava_are_for_a_single_image() -> None:
    """As in `transformers`: one of several images is one square."""
    made = processor(LlavaOnevision)
    (alone,), (among,) = made.process(image(90, 90)).parts, made.process_among(image(90, 90)).parts
    assert (alone.size, among.size) == ((5 * 48, 48), (48, 48))
    assert (alone.num_tokens, among.num_tokens) == (16 + 8 * 8 + 8, 16 + 1)


def test_prompt_has_a_placeholder_for_each_image() -> None:
    made = processor(Qwen2Vl)
    processed = [made.process(image(24, 24))]
    assert made.expand(f"a{made.placeholder}b", processed) == f"a{processed[0].text}b"
    for text in ("ab", made.placeholder * 2):
        with pytest.raises(BadRequest, match="times for 1 images"):
            made.expand(text, processed)
    count = processed[0].parts[0].num_tokens
    (placed,) = made.place([1, *[made.token_id] * count, 2], processed)
    assert (placed.start, placed.end) == (1, 1 + count)
    with pytest.raises(BadRequest, match=f"expected {count}"):
        made.place([made.token_id] * (count + 1), processed)
    with pytest.raises(BadRequest, match="divides an image"):
        made.place([made.token_id, 1, *[made.token_id] * (count - 1)], processed)


def test_family_without_a_processor_is_named() -> None:
    class WithoutProcessor(Idefics3):
        image_processor = Family.image_processor

    with pytest.raises(ModelError, match="the model family WithoutProcessor has no processor of images"):
        processor(WithoutProcessor)


@pytest.mark.parametrize(
    ("family", "vision", "message"),
    [
        (Qwen3Vl, {"deepstack_visual_indexes": [1, 0]}, "must be ascending layers before the last one"),
        (Qwen3Vl, {"deepstack_visual_indexes": [2]}, "must be ascending layers before the last one"),
        (Qwen3Vl, {"num_position_embeddings": 24}, "num_position_embeddings=24 must be a square"),
        (Qwen3Vl, {"depth": 9, "deepstack_visual_indexes": [0, 1, 2, 3]}, "must have a layer for each"),
        (PaddleOcrVl, {"num_attention_heads": 8}, "48 elements in 8 heads cannot turn by row and column"),
        (ErnieVl, {"in_channels": 1}, "in_channels must be 3"),
        (ErnieVl, {"temporal_merge_size": 3}, "temporal_merge_size 2"),
    ],
)
def test_encoder_that_cannot_be_computed_is_refused(family: type[Family], vision: dict[str, Any], message: str) -> None:
    given = family.cases["plain"]
    config = {**SIZES, **given, "vision_config": {**given["vision_config"], **vision}}
    with pytest.raises(ModelError, match=message):
        family().images(ModelConfig(config))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("im_patch_id", 100_295),
        ("mlp_layer_types", ["dense"]),
        ("mlp_layer_types", ["dense", "sparse", "none"]),
        ("moe_intermediate_size", [32]),
        ("rope_parameters", {"mrope_section": [4, 2, 2]}),
        ("rope_parameters", {"mrope_section": [3, 3, 3]}),
    ],
)
def test_ernie_config_that_cannot_be_used_is_refused(field: str, value: object) -> None:
    with pytest.raises(ModelError, match="mrope_section" if field == "rope_parameters" else field):
        ErnieVl().traits(ModelConfig({**SIZES, **ErnieVl.defaults, **ErnieVl.cases["plain"], field: value}))


@pytest.mark.parametrize(
    ("stored", "name"),
    [
        ("model.vision_model.ln.weight", "vision_model.ln.weight"),
        ("model.vision_model.embeddings.patch_embedding.bias", "model.vision_model.embeddings.patch_embedding.bias"),
        ("model.resampler_model.mlp.bias", "resampler_model.mlp.bias"),
        ("vision_tower.vision_model.post_layernorm.bias", "vision_tower.post_layernorm.bias"),
        ("model.vision_tower.post_layernorm.bias", "vision_tower.post_layernorm.bias"),
        ("model.multi_modal_projector.linear_1.bias", "multi_modal_projector.linear_1.bias"),
        ("model.image_newline", "image_newline"),
        ("model.language_model.norm.weight", "model.norm.weight"),
        ("language_model.model.norm.weight", "model.norm.weight"),
    ],
)
def test_names_of_all_versions_of_transformers_are_read(stored: str, name: str) -> None:
    assert text_name(stored) == name
