"""A config with odd values is served or rejected with an explanation, whatever its family reads."""

from __future__ import annotations

import random
from typing import Any

import pytest

from fd_core.errors import ConfigError, ModelError
from fd_core.models.families.contract import Family, ModelConfig, Traits
from fd_core.models.families.installed import installed_families
from fd_core.models.registry import describe
from fd_core.testing.models.checkpoints import SIZES

FAMILIES = sorted(
    {type(family) for family in installed_families().architectures.values()}, key=lambda each: each.__name__
)
NUMBERS = (0, -1, 1, 3, 1.5, 2**31, 10**30, 1e308, 1e-308, float("nan"), float("inf"), True)
ROPES = (
    {},
    {"rope_type": "longrope", "short_factor": [0] * 8, "long_factor": [1] * 8},
    {"rope_type": "yarn", "factor": -1},
    {"rope_type": "dynamic", "alpha": 1e300},
    {"full_attention": {}},
)
ODD: tuple[Any, ...] = (None, *NUMBERS, "", "silu", [], [1], [None], [["a"]], ["sliding_attention"] * 3, *ROPES)


class Reads(dict[str, Any]):
    """A config that records the fields that are read."""

    def __init__(self, values: dict[str, Any]) -> None:
        super().__init__(values)
        self.fields: set[str] = set()

    def get(self, key: str, default: Any = None) -> Any:
        self.fields.add(key)
        return super().get(key, default)


@pytest.mark.parametrize("family", FAMILIES, ids=lambda each: each.__name__)
def test_odd_values_are_explained(family: type[Family]) -> None:
    refused = 0
    for case, changes in family.cases.items():
        seed = f"{family.__name__} {case}"
        rng = random.Random(seed)
        sizes = {family.renamed.get(name, name): size for name, size in SIZES.items()}
        usual = Reads({**family.defaults, **sizes, **changes, "architectures": list(family.architectures)})
        describe(ModelConfig(usual))
        for number in range(120):
            config = dict(usual)
            for field in rng.sample(sorted(usual.fields - {"architectures"}), rng.choice((1, 1, 2, 3))):
                config[field] = rng.choice(ODD)
            try:
                dict(describe(ModelConfig(config), num_tensors=200).tensors())
            except (ConfigError, ModelError):
                refused += 1
            except Exception as error:
                raise AssertionError(f"seed {seed!r}, config {number}: {config}") from error
    assert refused


def test_context_without_room_for_an_output_is_rejected() -> None:
    config = {**SIZES, "architectures": ["LlamaForCausalLM"]}
    assert describe(ModelConfig({**config, "max_position_embeddings": 2})).max_positions == 2
    with pytest.raises(ModelError, match="max_position_embeddings must exceed 1; it is 1"):
        describe(ModelConfig({**config, "max_position_embeddings": 1}))


def test_family_that_fails_is_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(self: Family, config: ModelConfig) -> Traits:
        raise KeyError("rotary")

    family = FAMILIES[0]
    monkeypatch.setattr(family, "traits", fails)
    with pytest.raises(ModelError, match="cannot be used: KeyError: 'rotary'"):
        describe(ModelConfig({"architectures": list(family.architectures)}))


def test_null_of_a_switch_is_false_as_in_transformers():
    assert ModelConfig({}).flag("norm_topk_prob", True)
    assert not ModelConfig({"norm_topk_prob": None}).flag("norm_topk_prob", True)
