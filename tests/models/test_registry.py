import json
import re
from dataclasses import replace

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

from fd_core.errors import ConfigError, ModelError
from fd_core.models.families.builtin.glm import Glm4Moe
from fd_core.models.families.builtin.llama import Llama4
from fd_core.models.families.installed import installed_families
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe, load_model, spec_of, spec_of_config
from fd_core.ops.contract import KVShape
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import SIZES, write_config
from tests.models.tiny import CASES


class CountingOps(NumpyOps):
    """Counts prepared tensors, to verify that checks precede preparation."""

    prepared = 0

    def prepare_vector(self, values):
        self.prepared += 1
        return super().prepare_vector(values)

    def prepare_embedding(self, weight):
        self.prepared += 1
        return super().prepare_embedding(weight)


@pytest.fixture
def folder(tiny, tmp_path):
    """Return a copy of the tiny Llama that a test may damage."""
    for file in tiny("llama").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    return tmp_path


def edit_config(folder, **changes):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def edit_tensors(folder, change):
    path = folder / "model.safetensors"
    tensors = {name: np.array(values) for name, values in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)


def load(folder, ops=None, max_positions=64, progress=None):
    with open_checkpoint(folder) as checkpoint:
        return load_model(checkpoint, ops or NumpyOps(), max_positions, progress)


def refusal(folder):
    ops = CountingOps()
    with pytest.raises(ModelError) as caught:
        load(folder, ops)
    assert ops.prepared == 0
    return str(caught.value)


def test_describes_what_was_loaded(tiny, folder):
    edit_config(folder, eos_token_id=2)
    model = load(folder)
    assert model.architecture == "LlamaForCausalLM"
    assert model.vocab_size == 160
    assert model.max_positions == 64
    assert model.eos_token_ids == (3, 5, 2)
    assert model.num_parameters == sum(parameter.numel() for parameter in tiny("llama").reference.parameters())
    assert model.kv_shape(8) == KVShape(num_layers=3, num_kv_heads=2, head_dim=16, block_size=8)


def test_tied_embeddings_count_once(tiny):
    model = load(tiny("gemma3").folder)
    assert model.num_parameters == sum(parameter.numel() for parameter in tiny("gemma3").reference.parameters())


def test_default_context_is_the_model_limit(tiny):
    assert load(tiny("llama").folder, max_positions=None).max_positions == 256


def test_context_above_model_limit_is_rejected(tiny):
    with pytest.raises(ConfigError, match="max_model_len=257 exceeds the model's context"):
        load(tiny("llama").folder, max_positions=257)


@pytest.mark.parametrize("case", CASES)
def test_progress_ends_at_100_percent(tiny, case):
    seen = []
    load(tiny(case).folder, progress=lambda done, total: seen.append((done, total)))
    assert [done for done, _ in seen] == sorted(done for done, _ in seen)
    assert {total for _, total in seen} == {seen[-1][0]}


def test_unknown_architecture_lists_known_ones(folder):
    edit_config(folder, architectures=["MambaForCausalLM"])
    message = refusal(folder)
    assert "unsupported architecture 'MambaForCausalLM'" in message
    assert all(name in message for name in installed_families().architectures)


def test_missing_tensor_is_named_with_shape(folder):
    edit_tensors(folder, lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.weight"))
    assert "'model.layers.1.mlp.up_proj.weight' of shape (96, 64) is missing" in refusal(folder)


def test_misshapen_tensor_is_named_with_both_shapes(folder):
    edit_config(folder, num_key_value_heads=4)
    message = refusal(folder)
    assert (
        "'model.layers.0.self_attn.k_proj.weight' has shape (32, 64), expected (64, 64) from the config, and 5"
        in message
    )


def test_unexpected_tensor_is_named(folder):
    edit_tensors(folder, lambda tensors: tensors.update(extra=np.zeros(3, np.float32)))
    assert "tensor 'extra' is not expected" in refusal(folder)


def test_irrelevant_tensors_are_ignored(folder):
    def edit(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.zeros(8, np.float32)
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, edit)
    model = load(folder)
    assert model.vocab_size == 160 and model.spec.head is None


@pytest.mark.parametrize("row", [0, 159])
def test_tied_model_computes_with_a_head_that_differs(folder, row, caplog):
    def edit(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
        tensors["lm_head.weight"][row, 3] += 1

    edit_config(folder, tie_word_embeddings=True)
    edit_tensors(folder, edit)
    assert load(folder).spec.head.name == "lm_head.weight"
    assert "tie_word_embeddings is true, but lm_head.weight differs" in caplog.text


def test_vocabulary_wider_than_tokenizer_is_accepted(folder):
    def pad(tensors):
        for name in ("model.embed_tokens.weight", "lm_head.weight"):
            tensors[name] = np.pad(tensors[name], ((0, 32), (0, 0)))

    edit_config(folder, vocab_size=192)
    edit_tensors(folder, pad)
    assert load(folder).vocab_size == 192


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"hidden_size": "64"}, "hidden_size must be a positive integer; found '64'"),
        ({"num_hidden_layers": None}, "num_hidden_layers must be a positive integer; it is missing"),
        ({"num_key_value_heads": 3}, "4 query heads are not a multiple of 3 key and value heads"),
        ({"hidden_act": "tanh"}, "hidden_act must be one of silu"),
        ({"hidden_act": "relu2"}, "a gated feed-forward block cannot use the activation relu2"),
        ({"rms_norm_eps": -1}, "rms_norm_eps must be a positive number"),
        ({"rope_parameters": {"rope_type": "spiral"}}, "rope type 'spiral' is not supported"),
        (
            {"rope_parameters": {"rope_type": "longrope", "long_factor": [1.0]}},
            "rope_parameters.long_factor must be a list of 8 numbers",
        ),
        (
            {"rope_parameters": {"rope_type": "linear"}},
            "rope_parameters.factor must be a positive number; it is missing",
        ),
        ({"architectures": []}, "the config has no architecture"),
    ],
)
def test_invalid_config_is_rejected_by_field(folder, changes, message):
    edit_config(folder, **changes)
    assert message in refusal(folder)


def test_more_experts_per_token_than_experts_are_rejected(tiny, tmp_path):
    for file in tiny("qwen3-moe").folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    edit_config(tmp_path, num_experts_per_tok=7)
    assert "each token uses 7 experts, but there are 6" in refusal(tmp_path)


@pytest.mark.parametrize("groups", [{"n_group": 5}, {"n_group": 12}, {"topk_group": 5}, {"num_experts_per_tok": 7}])
def test_groups_without_enough_experts_are_rejected(tmp_path, groups):
    """The case has 12 experts in 4 groups, of which each token uses 3 experts in 2 groups."""
    write_config({**SIZES, **Glm4Moe.cases["groups"], "architectures": ["Glm4MoeForCausalLM"]}, tmp_path, seed=5)
    edit_config(tmp_path, **groups)
    assert re.search(r"each token uses \d experts of \d groups, but 12 experts in \d+ groups", refusal(tmp_path))


def written_llama4(folder):
    config = {**SIZES, **Llama4.cases["plain"], "architectures": ["Llama4ForCausalLM"]}
    write_config(config, folder, seed=5)
    return config


def test_text_part_of_a_multimodal_model_is_served(tmp_path):
    config = written_llama4(tmp_path)
    expected = load(tmp_path)

    def wrap(tensors):
        for name in list(tensors):
            tensors[f"language_model.{name}"] = tensors.pop(name)
        tensors["vision_model.class_embedding"] = np.zeros(3, np.float32)

    edit_tensors(tmp_path, wrap)
    whole = {"architectures": ["Llama4ForConditionalGeneration"], "text_config": {**config, "architectures": None}}
    (tmp_path / "config.json").write_text(json.dumps(whole))
    model = load(tmp_path)
    assert replace(model.spec, architecture=expected.architecture) == expected.spec
    assert model.num_parameters == expected.num_parameters
    assert spec_of_config(tmp_path) == model.spec


def test_many_experts_in_one_tensor_are_described():
    config = {**SIZES, "architectures": ["Llama4ForCausalLM"], "num_local_experts": 128, "num_hidden_layers": 48}
    assert describe(ModelConfig(config), num_tensors=48 * 12).sizes()["experts"] == 128


@pytest.mark.parametrize(("ability", "words"), [("chunks", "attention within chunks"), ("any_experts", "sigmoid")])
def test_pack_that_lacks_an_operation_refuses_by_name(tmp_path, monkeypatch, ability, words):
    written_llama4(tmp_path)
    monkeypatch.setattr(NumpyOps, ability, False)
    with pytest.raises(ConfigError, match=f"the numpy pack does not compute .*{words}.*Llama4ForCausalLM"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("ability", "words"), [("sinks", "attention sinks"), ("biased_experts", "experts with biases")]
)
def test_pack_without_what_gpt_oss_needs_refuses_by_name(tmp_path, monkeypatch, ability, words):
    family = installed_families().architectures["GptOssForCausalLM"]
    config = {**SIZES, **family.cases["plain"], "architectures": ["GptOssForCausalLM"], "model_type": "gpt_oss"}
    write_config(config, tmp_path, 3)
    monkeypatch.setattr(NumpyOps, ability, False)
    with pytest.raises(ConfigError, match=f"the numpy pack does not compute {words}.*GptOssForCausalLM"):
        load(tmp_path)


OLDER_CONFIGS = {
    "llama-llama3-rope": {"rope_theta": 10000.0, "rope_scaling": "rope_parameters"},
    "llama-linear-rope": {"rope_theta": 10000.0, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "gemma3": {
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
        "rope_scaling": None,
        "layer_types": None,
        "sliding_window_pattern": 2,
    },
    "qwen2-window": {"rope_theta": 10000.0, "layer_types": None},
    "ernie-moe": {"rope_theta": 500000.0, "moe_layer_end_index": -1},
}


@pytest.mark.parametrize("case", OLDER_CONFIGS)
def test_configs_of_older_transformers_are_equivalent(tiny, tmp_path, case):
    for file in tiny(case).folder.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    tiny(case).reference.config.save_pretrained(tmp_path)
    with open_checkpoint(tmp_path) as checkpoint:
        expected = spec_of(checkpoint)
        parameters = dict(checkpoint.config["rope_parameters"])
    older = OLDER_CONFIGS[case]
    if older.get("rope_scaling") == "rope_parameters":
        parameters.pop("rope_theta")
        older = older | {"rope_scaling": parameters}
    edit_config(tmp_path, rope_parameters=None, **older)
    with open_checkpoint(tmp_path) as checkpoint:
        assert spec_of(checkpoint) == expected


def test_remote_code_is_rejected_unless_unneeded(folder, caplog):
    code = {"AutoModelForCausalLM": "modeling.Model"}
    edit_config(folder, auto_map=code)
    with caplog.at_level("WARNING"):
        assert spec_of(open_checkpoint(folder)).architecture == "LlamaForCausalLM"
    assert "auto_map" in caplog.text
    edit_config(folder, architectures=["FancyForCausalLM"])
    with pytest.raises(ModelError, match=r"FancyForCausalLM.*auto_map.*never run"):
        spec_of(open_checkpoint(folder))
