import numpy as np
import pytest

from fd_core.models.families.spec import rope_spec, rope_tables
from fd_core.models.loading.config import ModelConfig
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.testing.models.checkpoints import CASES

LLAMA3_ROPE, YARN_ROPE = (CASES[case][1]["rope_parameters"] for case in ("llama-llama3-rope", "qwen3-yarn"))
LINEAR = {"rope_type": "linear", "rope_theta": 1000.0, "factor": 3.0}
SCALINGS = {
    "linear": LINEAR,
    "llama3": LLAMA3_ROPE,
    "yarn": YARN_ROPE,
    "yarn-attention-factor": YARN_ROPE | {"attention_factor": 0.7, "beta_fast": 16.0, "beta_slow": 2.0},
    "yarn-mscale": YARN_ROPE | {"mscale": 0.9, "mscale_all_dim": 0.5, "truncate": False},
    "partial": LINEAR | {"partial_rotary_factor": 0.5},
}


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_match_transformers(scaling):
    transformers = pytest.importorskip("transformers")
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    parameters = SCALINGS[scaling]
    config = transformers.LlamaConfig(
        hidden_size=256, num_attention_heads=4, head_dim=64, max_position_embeddings=512, rope_parameters=parameters
    )
    expected, amplitude = ROPE_INIT_FUNCTIONS[parameters["rope_type"]](config, "cpu")
    spec = rope_spec(
        ModelConfig({"rope_parameters": parameters, "max_position_embeddings": 512}), 64, theta=10000.0, rotary=1.0
    )
    np.testing.assert_allclose(spec.inverse_frequencies, expected.numpy(), rtol=1e-6)
    assert spec.amplitude == pytest.approx(amplitude)


def test_tables_cover_every_position():
    spec = rope_spec(ModelConfig({"rope_theta": 100.0}), 8, theta=10000.0)
    rope = rope_tables(spec, 5, NumpyOps())
    np.testing.assert_allclose(spec.inverse_frequencies, [1, 100**-0.25, 0.1, 100**-0.75])
    assert rope.cos.shape == rope.sin.shape == (5, 4)
    np.testing.assert_allclose(rope.cos[3], np.cos(3 * np.array(spec.inverse_frequencies)), rtol=1e-6)
    np.testing.assert_allclose(rope.sin[3], np.sin(3 * np.array(spec.inverse_frequencies)), rtol=1e-6)
