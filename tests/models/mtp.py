"""Random models with a layer for multi-token prediction, and their drafts by `transformers`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
import torch
import transformers
from safetensors.numpy import save_file
from safetensors.torch import load_file
from torch.nn.functional import linear, rms_norm

from fd_core.models.families.builtin.ernie import Ernie, ErnieMoe
from fd_core.models.families.builtin.glm import Glm4Moe
from fd_core.models.families.contract import Family, ModelConfig
from fd_core.models.families.latent.deepseek import DeepSeekV3, Glm4MoeLite
from fd_core.models.families.recurrent.qwen import Qwen3Next, Qwen35
from fd_core.models.opening import open_checkpoint
from fd_core.testing.models.arrays import Values
from fd_core.testing.models.checkpoints import SIZES, write_config
from fd_core.testing.models.families.gguf_files import convert


@dataclass(frozen=True)
class Form:
    """Names in published checkpoints, and the config of a model of that layer alone."""

    family: type[Family]
    case: str
    layer: str
    embedding_norm: str
    hidden_norm: str
    inputs: str
    norm: str
    alone: Mapping[str, Any]
    normed: bool = True
    offset: float = 0.0
    alone_family: type[Family] | None = None


_AFTER: Final = "model.layers.3."
_DEEPSEEK: Final = {
    "layer": _AFTER,
    "embedding_norm": f"{_AFTER}enorm",
    "hidden_norm": f"{_AFTER}hnorm",
    "inputs": f"{_AFTER}eh_proj",
    "norm": f"{_AFTER}shared_head.norm",
}
_QWEN: Final = {
    "layer": "mtp.layers.0.",
    "embedding_norm": "mtp.pre_fc_norm_embedding",
    "hidden_norm": "mtp.pre_fc_norm_hidden",
    "inputs": "mtp.fc",
    "norm": "mtp.norm",
    "alone": {"layer_types": ["full_attention"]},
    "offset": 1.0,
}
_ERNIE: Final = {
    "layer": "model.mtp_block.0.",
    "embedding_norm": "model.mtp_emb_norm.0",
    "hidden_norm": "model.mtp_hidden_norm.0",
    "inputs": "model.mtp_linear_proj.0",
    "norm": "model.norm",
    "alone": {},
    "normed": False,
    "alone_family": Ernie,
}
FORMS: Final[dict[str, Form]] = {
    "deepseek": Form(DeepSeekV3, "experts", alone={"first_k_dense_replace": 0}, **_DEEPSEEK),  # type: ignore[arg-type]
    "glm": Form(Glm4Moe, "groups", alone={"first_k_dense_replace": 0}, **_DEEPSEEK),  # type: ignore[arg-type]
    "glm-lite": Form(Glm4MoeLite, "usual", alone={"mlp_layer_types": ["sparse"]}, **_DEEPSEEK),  # type: ignore[arg-type]
    "ernie": Form(ErnieMoe, "shared", **_ERNIE),  # type: ignore[arg-type]
    "qwen-next": Form(Qwen3Next, "plain", **_QWEN),  # type: ignore[arg-type]
    "qwen-3.5": Form(Qwen35, "plain", **_QWEN),  # type: ignore[arg-type]
}


def write_mtp_model(name: str, folder: Path, **changes: Any) -> Path:
    """Write a model into `folder/model`, which is returned, and one of its further layer into `folder/layer`."""
    form = FORMS[name]
    config = _config(form.family, form.family.cases[form.case] | changes)
    target, alone = folder / "model", folder / "layer"
    tensors, values = write_config(config, target, seed=4), Values(seed=5)
    spec = form.family().mtp(ModelConfig({**form.family.defaults, **config}))
    assert spec is not None
    own = {
        key: values(*shape, scale=0.2) + np.float32((len(shape) == 1) * (1 - form.offset))
        for key, shape in spec.tensors()
        if key not in tensors
    }
    save_file(tensors | own, target / "model.safetensors", metadata={"format": "pt"})
    family = form.alone_family or form.family
    whole = _config(family, {**config, **form.alone, "num_hidden_layers": 1})
    parts = {
        key.replace(form.layer, "model.layers.0."): each for key, each in own.items() if key.startswith(form.layer)
    }
    ends = {key: each for key, each in tensors.items() if not key.startswith("model.layers.")}
    alone.mkdir()
    (alone / "config.json").write_text(json.dumps(whole))
    save_file(parts | ends, alone / "model.safetensors", metadata={"format": "pt"})
    return target


def write_mtp_gguf(name: str, arch: str, folder: Path) -> tuple[Path, Path]:
    """Write a model as `write_mtp_model` does, and as llama.cpp converts it: the layer is one more block."""
    target, form = write_mtp_model(name, folder), FORMS[name]
    config = transformers.AutoConfig.from_pretrained(target).to_dict()
    layers = config["num_hidden_layers"]
    usual = {form.embedding_norm: "enorm", form.hidden_norm: "hnorm", form.inputs: "eh_proj"}
    usual |= {form.norm: "shared_head.norm", form.layer.rstrip("."): ""}

    def as_block(tensor: str) -> str:
        begin = next((each for each in usual if tensor.startswith(f"{each}.")), None)
        rest = "" if begin is None else tensor.removeprefix(begin)
        return tensor if begin is None else f"model.layers.{layers}.{usual[begin]}{rest}".replace("..", ".")

    file = folder / "model.gguf"
    with open_checkpoint(target) as checkpoint:
        checkpoint.rename(as_block)
        convert(checkpoint, arch, form.family.gguf[arch], config, file, predicting=1)
    return target, file


def _config(family: type[Family], fields: Mapping[str, Any]) -> dict[str, Any]:
    named = {"architectures": [family.architectures[0]], "model_type": family.model_type, "torch_dtype": "float32"}
    return {**SIZES, **fields, **named}


class Reference:
    """Drafts that `transformers` computes from the whole text, each anew."""

    def __init__(self, name: str, target: Path) -> None:
        self._form = FORMS[name]
        self._target, self._layer = (
            transformers.AutoModelForCausalLM.from_pretrained(
                folder, attn_implementation="eager", dtype=torch.float32
            ).eval()
            for folder in (target, target.parent / "layer")
        )
        self._weights = load_file(target / "model.safetensors")
        self._eps = self._target.config.rms_norm_eps

    def _states(self, model: Any, **given: Any) -> torch.Tensor:
        """Return the hidden states of all tokens before the final norm."""
        found: list[torch.Tensor] = []
        hook = model.model.norm.register_forward_pre_hook(lambda _, args: found.append(args[0]))
        model(use_cache=False, **given)
        hook.remove()
        return found[0][0]

    def _norm(self, x: torch.Tensor, name: str) -> torch.Tensor:
        return rms_norm(x, x.shape[-1:], self._weights[f"{name}.weight"] + self._form.offset, self._eps)

    @torch.no_grad()
    def drafts(self, text: Sequence[int], count: int) -> list[int]:
        form, weights, known, found = self._form, self._weights, [*text], list[int]()
        states = self._states(self._target, input_ids=torch.tensor([text[:-1]]))
        if form.normed:
            states = self._norm(states, "model.norm")
        for _ in range(count):
            embedded = self._norm(self._target.model.embed_tokens(torch.tensor(known[1:])), form.embedding_norm)
            joined = torch.cat([embedded, self._norm(states, form.hidden_norm)], 1)
            joined = linear(joined, weights[f"{form.inputs}.weight"], weights.get(f"{form.inputs}.bias"))
            last = self._states(self._layer, inputs_embeds=joined[None])[-1:]
            output = self._norm(last, form.norm)
            found.append(int(self._target.lm_head(output)[0].argmax()))
            known, states = [*known, found[-1]], torch.cat([states, output if form.normed else last])
        return found
