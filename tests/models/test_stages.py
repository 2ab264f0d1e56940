"""Models split by layers: stages run in sequence, each with only its own weights."""

import numpy as np
import pytest

from fd_core.errors import ConfigError
from fd_core.models.families.spec import stage_layers
from fd_core.models.loading.config import ModelConfig
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import describe, load_model, spec_of
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.parallel import Stage
from fd_core.ops.torch.ops import TorchOps
from fd_core.testing.models.checkpoints import SIZES, write_checkpoint
from tests.models.paged import PagedDriver

PROMPTS = [[3], list(range(7, 30)), [11, 5, 159, 5]]


def loaded(folder, ops, stage=None, before=None):
    if stage is not None:
        ops.cut(stage)
    with open_checkpoint(folder) as checkpoint:
        return PagedDriver(load_model(checkpoint, ops, 64), ops, PROMPTS, 64, stage_before=before)


def chained(folder, pack, count):
    """Return the driver of the last of several stages."""
    driver = None
    for index in range(count):
        driver = loaded(folder, pack(), Stage(index, count), driver)
    return driver


def test_bfloat16_crosses_stage_boundary_unchanged(tmp_path):
    folder = write_checkpoint("llama", tmp_path)
    whole = loaded(folder, TorchOps("bfloat16"))
    cut = chained(folder, lambda: TorchOps("bfloat16"), 2)
    for driver in (whole, cut):
        driver.generate(4)
    for mine, one in zip(cut.rows, whole.rows, strict=True):
        np.testing.assert_array_equal(np.stack(mine.logits), np.stack(one.logits))


@pytest.mark.parametrize("tied", [False, True])
def test_stage_reads_only_its_own_weights(tied, tmp_path):
    folder = write_checkpoint("llama", tmp_path, tie_word_embeddings=tied)
    read = []
    for index in range(3):
        ops = NumpyOps()
        ops.cut(Stage(index, 3))
        with open_checkpoint(folder) as checkpoint:
            names = []
            read.append(names)
            for method in ("read", "read_weight"):
                own = getattr(checkpoint, method)
                setattr(
                    checkpoint, method, lambda name, *more, own=own, names=names: names.append(name) or own(name, *more)
                )
            model = load_model(checkpoint, ops, 64)
        assert len(model.decoder.layers) == 1 and model.kv_shape(4).first_layer == index
    layers = [{name.split(".")[2] for name in names if "layers" in name} for names in read]
    assert layers == [{"0"}, {"1"}, {"2"}]
    head = "model.embed_tokens.weight" if tied else "lm_head.weight"
    assert "model.embed_tokens.weight" in read[0] and head not in read[1] and head in read[2]
    assert tied or head not in read[0]


@pytest.mark.parametrize(
    ("layers", "vocabulary", "count", "expected"),
    [
        (8, 16, 2, [4, 4]),
        (8, 1024, 2, [6, 2]),  # the output projection is as large as four layers
        (8, 4096, 3, [6, 1, 1]),  # and here larger than all layers: each stage has at least one
        (3, 16, 3, [1, 1, 1]),
    ],
)
def test_stages_have_balanced_weight_sizes(layers, vocabulary, count, expected, tmp_path):
    sizes = {"num_hidden_layers": layers, "vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 64}
    attention = {"num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 8}
    with open_checkpoint(write_checkpoint("llama", tmp_path, **sizes, **attention)) as checkpoint:
        spec = spec_of(checkpoint)
    shares = [stage_layers(spec, Stage(index, count)) for index in range(count)]
    assert [share.stop - share.start for share in shares] == expected
    assert [share.start for share in shares[1:]] == [share.stop for share in shares[:-1]]


def test_experts_in_one_tensor_count_once_for_stages(tmp_path):
    more = {"num_hidden_layers": 4, "moe_layers": [0], "num_local_experts": 16, "intermediate_size": 6}
    config = {**SIZES, "architectures": ["Llama4ForCausalLM"], "intermediate_size_mlp": 96, "vocab_size": 16, **more}
    spec = describe(ModelConfig(config))
    assert stage_layers(spec, Stage(0, 2)) == slice(0, 2)


def test_more_stages_than_layers_are_rejected(tmp_path):
    with pytest.raises(ConfigError, match="cannot divide 3 layers into 4 stages"):
        loaded(write_checkpoint("llama", tmp_path), NumpyOps(), Stage(0, 4))
