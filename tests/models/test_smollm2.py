"""A real model from a real GGUF file: packs compared with each other and with transformers."""

import socket

import numpy as np
import pytest
import torch
import transformers

from fd_core.errors import ModelError
from fd_core.models.catalog import resolve_model
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import load_model
from fd_core.ops.numpy.ops import NumpyOps
from fd_core.ops.torch.ops import TorchOps
from tests.models.paged import PagedDriver

GENERATED = 5


def network_is_there() -> bool:
    """Return True if a default route exists; nothing is sent."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))
        except OSError:
            return False
    return True


@pytest.fixture(scope="module")
def checkpoint():
    try:
        path = resolve_model("smollm2").path
    except ModelError as error:
        if network_is_there():
            raise
        pytest.skip(f"no network: {error}")
    with open_checkpoint(path) as opened:
        yield opened


@pytest.fixture(scope="module")
def prompts(checkpoint):
    rng = np.random.default_rng(3)
    return [rng.integers(0, 49152, length).tolist() for length in (21, 6)]


def run(checkpoint, ops, prompts):
    driver = PagedDriver(load_model(checkpoint, ops, 64), ops, prompts, 64)
    driver.generate(GENERATED, chunk=16)
    return driver.rows


@pytest.fixture(scope="module")
def torch_rows(checkpoint, prompts):
    return run(checkpoint, TorchOps(), prompts)


def test_description(checkpoint):
    model = load_model(checkpoint, TorchOps("bfloat16"), 64)
    assert model.num_parameters == 134_515_008
    assert model.eos_token_ids == (2,)


@pytest.mark.soak  # tiny models compare the packs in the default run
def test_numpy_and_torch_agree(checkpoint, prompts, torch_rows):
    for ours, theirs in zip(run(checkpoint, NumpyOps(), prompts), torch_rows, strict=True):
        assert ours.tokens == theirs.tokens
        np.testing.assert_allclose(np.stack(ours.logits), np.stack(theirs.logits), rtol=0, atol=3e-4)


def test_equals_transformers(checkpoint, torch_rows):
    config = transformers.LlamaConfig(**checkpoint.config, attn_implementation="eager")
    with torch.device("meta"):
        reference = transformers.LlamaForCausalLM(config)
    weights = {name: torch.from_numpy(np.array(checkpoint.read(name).to_float32())) for name in checkpoint.names()}
    reference.to_empty(device="cpu")
    reference.model.rotary_emb = type(reference.model.rotary_emb)(config=config)
    reference.load_state_dict(weights, strict=False)
    reference.tie_weights()
    reference.eval()
    for row in torch_rows:
        with torch.no_grad():
            expected = reference(torch.tensor([row.tokens[:-1]])).logits[0].numpy()
        np.testing.assert_allclose(np.stack(row.logits), expected, rtol=0, atol=3e-4)
        assert row.generated == expected[row.prompt_len - 1 :].argmax(axis=1).tolist()
