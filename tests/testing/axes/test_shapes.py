"""Shapes of published models lie within the values that the kit tests."""

from __future__ import annotations

import json

import pytest

from fd_core.errors import ModelError
from fd_core.models.families.installed import installed_families
from fd_core.models.loading.config import ModelConfig
from fd_core.models.registry import describe, text_part
from fd_core.testing.axes.latent import LATENT
from fd_core.testing.axes.layers import LAYERS
from fd_core.testing.axes.recurrent import RECURRENT

auto = pytest.importorskip("transformers.models.auto.modeling_auto")
PARTS = LAYERS, LATENT, RECURRENT
MODELS = {
    architecture: model_type
    for name, mapping in vars(auto).items()
    if name.endswith("_MAPPING_NAMES")
    for model_type, found in mapping.items()
    for architecture in ([found] if isinstance(found, str) else found)
}


def described():
    """Yield the models of transformers' default configs, which are those of published ones with few exceptions."""
    from transformers import CONFIG_MAPPING

    for name in {*installed_families().architectures} & {*MODELS}:
        text = CONFIG_MAPPING[MODELS[name]](architectures=[name]).to_json_string(use_diff=False)
        try:
            yield name, describe(ModelConfig(text_part(json.loads(text)), origin=name))
        except ModelError:  # some defaults contradict each other
            continue


def is_within(value, values):
    numbers = [each for each in values if isinstance(each, (int, float)) and not isinstance(each, bool)]
    if isinstance(value, (int, float)) and not isinstance(value, bool) and numbers:
        return min(numbers) <= value <= max(numbers)
    return value in values


@pytest.mark.slow
def test_shapes_of_all_families_lie_within_the_values_of_the_axes():
    models = dict(described())
    assert len(models) > 60
    beyond = {
        (part.name, axis.name, case.values[axis.name]): name
        for name, model in models.items()
        for part in PARTS
        for case in part.cases_of(model)
        for axis in part.axes
        if not is_within(
            case.values[axis.name],
            {*axis.values, *(each[axis.name] for other in part.axes for each in other.rare if axis.name in each)},
        )
    }
    assert beyond == {}
