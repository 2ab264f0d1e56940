"""Small random models of a family, written and computed by `transformers`, or by the family's own reference."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, Final

import numpy as np

from fd_core.models.families.contract import Family
from fd_core.models.families.image_processor import Pixels
from fd_core.testing.models.arrays import Floats, Values
from fd_core.testing.models.checkpoints import SIZES, write_config

Logits = Callable[..., Floats]
"""Returns the logits of each token, float32[tokens, V]; of a model without an output projection the states.

Takes the tokens, and the pixels uint8[h, w, 3] of each image, if there are any; and, of `transformers`, whether to move
each weight to a number beside it, which shows how much rounding changes.
"""
Classes = Callable[[Sequence[int]], tuple[Floats, Floats]]
"""Returns the last states of tokens, float32[tokens, H], and the logits of the classes of their text."""
_GENERATES: Final = "ForCausalLM"
_SEES: Final = "ForConditionalGeneration"
"""End of the names of models that take images and generate texts."""


def is_known(family: Family) -> bool:
    """Return True if `transformers` has the code of a family."""
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    return family.model_type in CONFIG_MAPPING


def config_of(family: Family, fields: Mapping[str, Any], without: str = "") -> Any:
    """Return the config of `transformers` with the kit's usual sizes, and rope bases that are not the default ones.

    Heads, if they have a size of their own, have another one than the hidden size yields. The field `without` has its
    default. A field `text_config` names another text model.
    """
    import transformers

    whole = _default_config(family.model_type)
    text = whole.get("text_config")
    usual = whole if text is None else text
    other: dict[str, Any] = {"head_dim": SIZES["head_dim"] * 3 // 2} if "head_dim" in usual else {}
    if (rope := usual.get("rope_parameters")) is not None:
        other["rope_parameters"] = _halved(rope)
    given = {name: value for name, value in {**SIZES, **other, **fields}.items() if name != without}
    if text is not None:
        outer = {name: given.pop(name) for name in given.keys() & whole.keys()}
        given = {**outer, "text_config": {"model_type": text["model_type"], **given, **outer.get("text_config", {})}}
    return transformers.AutoConfig.for_model(family.model_type, **given)


@cache
def _default_config(model_type: str) -> Mapping[str, Any]:
    import transformers

    found: dict[str, Any] = transformers.AutoConfig.for_model(model_type).to_dict()
    return found


def general_fields() -> set[str]:
    """Return the fields that the configs of all models have."""
    import transformers

    return set(transformers.PreTrainedConfig().to_dict())


def write_classifier(family: Family, fields: Mapping[str, Any], folder: Path, seed: int) -> Classes | None:
    """Write a model of the family with three classes, and return its reference; None if `transformers` has none."""
    import torch
    import transformers

    name = family.architectures[0].removesuffix(_GENERATES)
    kind = getattr(transformers, f"{name}ForSequenceClassification", None)
    if kind is None:
        return None
    config = config_of(family, fields)
    config.num_labels, config.pad_token_id = 3, 0
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = kind(config).eval()
        model.save_pretrained(folder)

    def classes(tokens: Sequence[int]) -> tuple[Floats, Floats]:
        with torch.no_grad():
            found = model(torch.tensor([list(tokens)]), output_hidden_states=True)
        return found.hidden_states[-1][0].numpy(), found.logits[0].numpy()

    return classes


def write_reference(family: Family, fields: Mapping[str, Any], folder: Path, seed: int) -> Logits | None:
    """Write the model with these fields of the config into `folder` as it would be published; return its reference.

    Names and fused or stacked tensors are those that `transformers` saves. None without a reference.
    """
    if not is_known(family):
        names = {"architectures": [family.architectures[0]], "model_type": family.model_type}
        write_config({**SIZES, **fields, **names}, folder, seed)
        return family.reference(folder)
    import PIL.Image
    import torch
    import transformers

    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        name = family.architectures[0]
        with_images, whole = name.endswith(_SEES), name.endswith((_GENERATES, _SEES))
        kind = transformers.AutoModelForCausalLM if whole else transformers.AutoModel
        kind = transformers.AutoModelForImageTextToText if with_images else kind
        model = kind.from_config(config_of(family, fields), attn_implementation="eager", dtype=torch.float32).eval()
    values = Values(seed=seed)
    for name, tensor in model.state_dict().items():
        if tensor.is_floating_point():
            tensor.copy_(torch.from_numpy(_weight(values, name, tuple(tensor.shape), tensor.numpy())))
    model.save_pretrained(folder)
    if type(model).config_class.model_type != family.model_type:  # the code of another model computes it
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | {"architectures": [family.architectures[0]]}))

    if family.processor_settings:
        (folder / "preprocessor_config.json").write_text(json.dumps(family.processor_settings))

    def logits(tokens: Sequence[int], images: Sequence[Pixels] = (), *, nudged: bool = False) -> Floats:
        if nudged:
            with _nudged(model):
                return logits(tokens, images)
        inputs = {}
        if images:
            processor = transformers.AutoImageProcessor.from_pretrained(folder, backend="pil")
            inputs = processor(images=[[*map(PIL.Image.fromarray, images)]], return_tensors="pt")
        ids = torch.tensor([list(tokens)])
        taken = inspect.signature(model.forward).parameters
        kinds = {}
        if images:
            config = model.config
            kinds = dict.fromkeys(("mm_token_type_ids", "token_type_ids"), (ids == config.image_token_id).int())
            around = (getattr(config, f"image_{each}token_id", -1) for each in ("", "start_", "end_"))
            kinds["moe_mm_token_type_ids"] = torch.isin(ids, torch.tensor([*around])).int()
        inputs = {name: value for name, value in {**inputs, **kinds}.items() if name in taken}
        with torch.no_grad():
            output = model(ids, **inputs)
        found: Floats = (output.logits if whole else output.last_hidden_state)[0].numpy()
        return found

    return logits


@contextmanager
def _nudged(model: Any) -> Iterator[None]:
    """Move each weight of a model to the next number above or below it."""
    import torch

    draws, weights = torch.Generator().manual_seed(0), [*model.parameters()]
    before = [each.detach().clone() for each in weights]
    try:
        with torch.no_grad():
            for each in weights:
                each.mul_(1 + torch.finfo(each.dtype).eps * (2 * torch.randint(0, 2, each.shape, generator=draws) - 1))
        yield
    finally:
        with torch.no_grad():
            for each, kept in zip(weights, before, strict=True):
                each.copy_(kept)


def _halved(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """Return rope parameters, of all layers or by type of layer, with half of each base."""
    return {
        name: _halved(value) if isinstance(value, Mapping) else value / 2 if name == "rope_theta" else value
        for name, value in parameters.items()
    }


def _weight(values: Values, name: str, shape: tuple[int, ...], initial: Floats) -> Floats:
    """Return weights whose logits vary between tokens, and norms and biases around their initial values, 1 or 0."""
    if len(shape) == 1:
        return np.clip(np.rint(initial), 0, 1) + values(*shape, scale=0.2)
    return values(*shape, scale=0.5 if "embed" in name else 0.25 if "lm_head" in name else shape[-1] ** -0.5)
