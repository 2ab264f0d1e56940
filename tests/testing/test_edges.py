"""Cases at the edge of an operating envelope, and with the shapes of a model."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from fd_core.backends.cpu import ReferenceBackend
from fd_core.config.envelope import OperatingEnvelope
from fd_core.errors import ModelError
from fd_core.models.registry import spec_of_config
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.axes.covering import Case
from fd_core.testing.axes.layers import EDGES, LAYERS, check_layer
from fd_core.testing.axes.parts import Part, cases_of
from fd_core.testing.axes.steps import STEPS
from fd_core.testing.kit import plugin
from fd_core.testing.models.checkpoints import CASES, write_checkpoint
from tests.testing.test_wrong_kernels import PARTS

OF_OTHER_PARTS = {"max_drafts", "pipeline_depth", "vocab_size", "value_bytes"}


def sizes(limit: OperatingEnvelope) -> dict[str, set[int]]:
    part = LAYERS.within(limit)
    found: dict[str, set[int]] = {}
    for case in cases_of(part)[0]:
        for name, size in part.sizes(case.values).items():
            found.setdefault(name, set()).add(size)
    return found


def test_layers_test_every_limit_of_an_envelope_but_those_of_other_parts() -> None:
    assert {field.name for field in fields(OperatingEnvelope)} == {*EDGES} | OF_OTHER_PARTS


SMALL = {
    "max_num_seqs": 48,
    "max_num_batched_tokens": 100,
    "max_model_len": 1000,
    "block_size": 48,
    "max_loras": 4,
    "max_lora_rank": 12,
    "hidden": 64,
    "inner": 512,
    "head_dim": 64,
    "group": 4,
    "experts": 16,
    "top_k": 6,
}
LARGE = {
    "max_num_seqs": 700,
    "max_num_batched_tokens": 3000,
    "max_model_len": 100_000,
    "block_size": 256,
    "max_loras": 12,
    "max_lora_rank": 128,
    "hidden": 10_000,
    "inner": 20_000,
    "head_dim": 320,
    "group": 24,
    "experts": 160,
    "top_k": 32,
}


@pytest.mark.parametrize("limits", [SMALL, LARGE])
def test_cases_reach_the_edge_and_just_inside_and_nothing_beyond(limits: dict[str, int]) -> None:
    assert limits.keys() == EDGES.keys()
    tested = sizes(OperatingEnvelope(**limits))
    for name, limit in limits.items():
        assert max(tested[name]) == limit, name
        assert limit - EDGES[name].step in tested[name], name


@pytest.mark.parametrize("part", [*PARTS.values(), STEPS], ids=lambda part: part.name)
def test_every_part_has_cases_within_an_envelope(part: Part[Any]) -> None:
    envelope = OperatingEnvelope(**dict.fromkeys(part.edges, 512))
    cases = cases_of(part.within(envelope))[0]
    assert cases and not any(envelope.exceeded(part.sizes(case.values)) for case in cases)


def test_limits_hold_together_even_where_no_plain_value_is_left() -> None:
    limits = {"hidden": 32, "inner": 48, "head_dim": 8, "group": 1, "max_num_seqs": 4, "max_model_len": 16}
    found = sizes(OperatingEnvelope(**limits))
    assert {name: max(found[name]) for name in limits} == limits


def test_part_without_limits_is_unchanged() -> None:
    assert LAYERS.within(OperatingEnvelope()) is LAYERS
    assert LAYERS.within(OperatingEnvelope(vocab_size=7)) is LAYERS


def test_envelope_of_the_plugin_under_test_cuts_the_cases(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ReferenceBackend, "envelope", OperatingEnvelope(hidden=64, group=3))
    named = {"--fd-backend": ["reference:dtype=float32"], "--fd-scheduler": [], "--fd-postprocess": ["nosuch"]}
    config = SimpleNamespace(getoption=named.__getitem__)
    assert plugin._envelope(config) == OperatingEnvelope(hidden=64, group=3)  # type: ignore[arg-type]
    part = LAYERS.within(OperatingEnvelope(hidden=64))
    assert next(axis for axis in part.axes if axis.name == "hidden").values == (64, 38, 62)


class WrongAtSize(NumpyOps):
    """Computes rows of `width` elements wrongly."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.width = width

    def rms_norm(self, x, norm):  # type: ignore[no-untyped-def]
        result = super().rms_norm(x, norm)
        return result * 1.1 if x.shape[-1] == self.width else result


@pytest.mark.parametrize("width", [pytest.param(3000, marks=pytest.mark.soak), 2998])
def test_fault_at_a_declared_edge_is_found(width: int) -> None:
    def fails(case: Case) -> bool:
        try:
            check_layer(WrongAtSize(width), case)
        except AssertionError:
            return True
        return False

    cases = [case for case in cases_of(LAYERS.within(OperatingEnvelope(hidden=3000)))[0] if case.has(f"hidden={width}")]
    assert any(fails(case.values) for case in cases[:1])
    assert not any(case.has(f"hidden={width}") for case in cases_of(LAYERS)[0])


@pytest.mark.parametrize("name", CASES)
def test_shapes_of_a_model_become_cases_that_numpy_passes(name: str, tmp_path: Path) -> None:
    spec = spec_of_config(write_checkpoint(name, tmp_path))
    cases = LAYERS.cases_of(spec)
    kinds = {(layer.attention.window, type(layer.feed_forward)) for layer in spec.layers}
    assert len(cases) == 3 * len(kinds)
    for case in cases:
        assert LAYERS.sizes(case.values)["hidden"] == spec.sizes()["hidden"]
        assert LAYERS.case(case.text).values == case.values
    check_layer(NumpyOps(), cases[-1].values)


def config(folder: Path, **values: object) -> Path:
    (folder / "config.json").write_text(json.dumps({"architectures": ["Qwen3MoeForCausalLM"], **values}))
    return folder


def test_experts_of_a_large_model_are_reduced_and_widths_are_not(tmp_path: Path) -> None:
    sizes = {"hidden_size": 2048, "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8}
    heads = {"num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_hidden_layers": 48}
    more = {"vocab_size": 151_936, "intermediate_size": 6144, "max_position_embeddings": 40_960, "rms_norm_eps": 1e-6}
    spec = spec_of_config(config(tmp_path, **sizes, **heads, **more, hidden_act="silu"))
    cases = LAYERS.cases_of(spec)
    wanted = {"hidden": 2048, "inner": 768, "top_k": 8, "kv_heads": 4, "group": 8, "head_dim": 128, "experts": 32}
    assert {name: cases[0].values[name] for name in wanted} == wanted
    assert len(cases) == 3


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"architectures": ["Unknown"]}'])
def test_unusable_config_is_an_error_of_the_model(tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    with pytest.raises(ModelError, match=r"config\.json"):
        spec_of_config(tmp_path)
