import math

import pytest

from benchmarks.random_families import MODELS, config_of
from fd_core.models.loading.config import ModelConfig
from fd_core.models.registry import describe


@pytest.mark.parametrize("name", MODELS)
def test_models_have_the_size_of_the_comparison(name):
    values = sum(math.prod(shape) for _, shape in describe(ModelConfig(config_of(name))).tensors())
    assert 250e6 < values < 1e9
