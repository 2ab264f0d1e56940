"""Models with recurrent layers beyond the kit of families: sizes, refusals, adapters."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from fd_core.backends.contract import cache_shape
from fd_core.errors import ConfigError, ModelError
from fd_core.models.families.images.qwen3 import Qwen35Vl, Qwen35VlMoe
from fd_core.models.families.recurrent.lfm import Lfm2
from fd_core.models.families.recurrent.mamba import GraniteHybrid, NemotronH
from fd_core.models.families.recurrent.qwen import Qwen3Next
from fd_core.models.families.spec import require_division, state_sizes_of
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe, load_model, with_mtp_layer
from fd_core.ops.contract import KVShape
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import Parallel
from fd_core.testing.models.checkpoints import SIZES, write_config

NEXT = {**Qwen3Next.defaults, **SIZES, **Qwen3Next.cases["plain"], "architectures": list(Qwen3Next.architectures)}


def test_pack_without_recurrent_layers_is_refused_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_config(NEXT, tmp_path, seed=1)
    monkeypatch.setattr(NumpyOps, "recurs", False)
    with (
        pytest.raises(ConfigError, match=r"the numpy pack does not compute recurrent layers.*Qwen3NextForCausalLM"),
        open_checkpoint(tmp_path) as checkpoint,
    ):
        load_model(checkpoint, NumpyOps())


def test_published_sizes_need_the_documented_blocks() -> None:
    """2 heads of 256 elements in bfloat16, and 8 forced tokens, the default."""
    config = {**Qwen3Next.defaults, "hidden_size": 2048, "num_attention_heads": 16, "num_hidden_layers": 4}
    config |= {"vocab_size": 100, "max_position_embeddings": 100, "architectures": list(Qwen3Next.architectures)}
    spec = describe(ModelConfig(config))
    state, journal = state_sizes_of(spec.recurrent[0], Parallel())
    least = KVShape(1, 2, 256, 1, state=state, journal=journal).least_block_size(2, 8)
    assert -(-least // 32) * 32 == 1216
    assert len(spec.recurrent) == 3


def test_state_is_divided_by_ranks(tmp_path: Path) -> None:
    spec = describe(ModelConfig(NEXT))
    assert state_sizes_of(spec.recurrent[0], Parallel(1, 2)) == (1 + 3 * 40 + 2 * 8 * 12, 40 + 2 * 2)
    with pytest.raises(ConfigError, match="cannot divide 2 KV heads evenly among 4 ranks") as refused:
        require_division(describe(ModelConfig(NEXT | {"linear_num_key_heads": 4})), 4, 1)
    assert refused.value.hint == "use 2"
    with pytest.raises(ConfigError, match="cannot divide a recurrent layer evenly among 2 ranks"):
        require_division(describe(ModelConfig(NEXT | {"linear_num_key_heads": 1})), 2, 1)
    write_config(NEXT, tmp_path, seed=1)
    with open_checkpoint(tmp_path) as checkpoint:
        shape = cache_shape(load_model(checkpoint, NumpyOps()), 4, "auto")
    assert (shape.state, shape.journal) == state_sizes_of(spec.recurrent[0], Parallel())


def test_model_without_attention_is_refused(tmp_path: Path) -> None:
    config = {**Lfm2.defaults, **SIZES, "layer_types": ["conv"] * 3, "architectures": list(Lfm2.architectures)}
    write_config(config, tmp_path, seed=1)
    with pytest.raises(ModelError, match="without attention layers"), open_checkpoint(tmp_path) as checkpoint:
        load_model(checkpoint, NumpyOps())


def test_adapters_change_recurrent_inputs_but_not_gated_queries() -> None:
    names = {name.rpartition(".")[2] for name in describe(ModelConfig(NEXT)).adaptable()}
    assert names == {"in_proj_qkvz", "in_proj_ba", "out_proj", "o_proj"}


@pytest.mark.parametrize("family", [Qwen35Vl, Qwen35VlMoe])
def test_published_files_of_qwen3_5_are_read(family: type[Qwen35Vl], tmp_path: Path) -> None:
    """Experts [n, out, in] in one tensor, a text model inside of one with images, and a layer that drafts."""
    text = {**family.defaults, **SIZES, **family.cases["plain"]}
    outer = {name: text.pop(name) for name in ("image_token_id", "vision_config")}
    config = {**text, **outer, "architectures": list(family.architectures)}
    tensors = write_config(config, tmp_path, seed=1)
    spec = family().mtp(ModelConfig(config))
    assert spec is not None
    tensors |= {name: np.zeros(shape, np.float32) for name, shape in spec.tensors()}
    originals, stacks = dict(tensors), dict[str, list[list[np.ndarray]]]()
    for name in [name for name in tensors if ".experts." in name]:
        block, index, part = re.fullmatch(r"(.*\.experts)\.(\d+)\.(\w+)\.weight", name).groups()  # type: ignore[union-attr]
        stack = stacks.setdefault(f"{block}.{'down' if part == 'down_proj' else 'gate_up'}_proj", [])
        stack += [[] for _ in range(int(index) + 1 - len(stack))]
        stack[int(index)].append(tensors.pop(name))
    tensors |= {name: np.stack([np.concatenate(each) for each in stack]) for name, stack in stacks.items()}
    whole = {
        re.sub("^(model.)?(?=visual)", "model.", re.sub("^model.", "model.language_model.", name)): tensors[name]
        for name in tensors
    }
    save_file(whole, tmp_path / "model.safetensors")
    types = {"architectures": list(family.architectures), "model_type": family.model_type, **outer}
    (tmp_path / "config.json").write_text(json.dumps({**types, "text_config": text}))
    with open_checkpoint(tmp_path) as checkpoint:
        for name in originals:
            np.testing.assert_array_equal(checkpoint.read(name).to_float32(), originals[name])
        assert load_model(checkpoint, NumpyOps()).images is not None
        model = load_model(checkpoint, NumpyOps(), texts_only=True)
    assert with_mtp_layer(model, tmp_path).draft_head is not None


def test_published_config_of_nemotron_h_is_read(tmp_path: Path) -> None:
    """Config with a pattern of layers, names that begin with `backbone`, and an infinite number."""
    fields = {**NemotronH.defaults, **SIZES, **NemotronH.cases["plain"], "architectures": list(NemotronH.architectures)}
    tensors = write_config(fields, tmp_path, seed=1)
    with open_checkpoint(tmp_path) as checkpoint:
        expected = load_model(checkpoint, NumpyOps())
    del fields["layers_block_type"]
    published = json.dumps(fields | {"hybrid_override_pattern": "M-M*-", "time_step_limit": [0.0, float("inf")]})
    (tmp_path / "config.json").write_text(published)
    renamed = {name.replace("model.", "backbone.", 1): values for name, values in tensors.items()}
    save_file(renamed, tmp_path / "model.safetensors")
    with open_checkpoint(tmp_path) as checkpoint:
        assert load_model(checkpoint, NumpyOps()).spec == expected.spec
    assert [layer.feed_forward is None for layer in expected.spec.layers] == [False, True, False]


@pytest.mark.parametrize(
    ("family", "case", "fields", "message"),
    [
        (NemotronH, "plain", {"hybrid_override_pattern": "MX*"}, "layers of the kind X are not supported"),
        (NemotronH, "experts", {"moe_latent_size": 16}, "moe_latent_size is set, but experts of latent vectors"),
        (NemotronH, "plain", {"hybrid_override_pattern": "M--*"}, "a feed-forward layer must follow one of"),
        (NemotronH, "plain", {"mamba_hidden_act": "gelu"}, "no other mamba_hidden_act than silu"),
        (NemotronH, "plain", {"n_groups": 4}, "6 heads of a recurrent layer are not a multiple of 4 groups"),
        (GraniteHybrid, "dense", {"mamba_d_head": 15}, "8 heads of 15 elements are not 128 wide"),
        (GraniteHybrid, "dense", {"time_step_limit": [1, 0.5]}, "time_step_limit must be two increasing numbers"),
    ],
)
def test_layers_of_mamba_that_cannot_be_computed_are_refused(family, case, fields, message) -> None:  # type: ignore[no-untyped-def]
    config = {**family.defaults, **SIZES, **family.cases[case], "architectures": list(family.architectures)}
    with pytest.raises(ModelError, match=message):
        describe(ModelConfig(config | fields))
