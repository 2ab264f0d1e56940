"""The output layers of checkpoints that classify texts or tokens, in the layout of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from fd_core.errors import ModelError
from fd_core.models.loading.config import ModelConfig
from fd_core.models.loading.files import read_json_object
from fd_core.models.loading.vector_settings import Classifier, Floats, dense_of, read_declared
from fd_core.models.opening import open_checkpoint
from fd_core.models.registry import CLASSIFICATION, architecture_of, family_of

_ACTIVATIONS: Final[dict[Any, Literal["softmax", "sigmoid", "none"]]] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
}
"""By `problem_type`; otherwise a single class has a sigmoid and several a softmax, as in vLLM."""
_NAMED: Final[dict[str, Literal["sigmoid", "none"]]] = {"Identity": "none", "Sigmoid": "sigmoid"}
"""By the class that sentence-transformers names for its cross-encoders."""


def read_classifier(path: Path | None) -> Classifier | None:
    """Read the classifier of a model's folder; None for other models. Raises `ModelError`."""
    file = None if path is None else path / "config.json"
    if path is None or file is None or not file.is_file():
        return None
    config = ModelConfig(read_json_object(file), origin=str(file))
    if not "".join(config.strings("architectures")[:1]).endswith(CLASSIFICATION):
        return None
    architecture = architecture_of(config)
    family = family_of(architecture)
    config = config.filled(family.defaults, family.renamed)
    outputs = family.outputs(config, architecture)
    if outputs is None:
        return None
    width, layers = config.count("hidden_size"), []
    with open_checkpoint(path) as checkpoint:
        present = set(checkpoint.names())

        def read(name: str) -> Floats | None:
            return checkpoint.read(name).to_float32() if name in present else None

        for layer in outputs.layers:
            form: dict[str, Any] = {"activation": layer.activation, "norm": layer.norm, "eps": layer.eps}
            layers.append(dense_of(read, layer.name, width, **form, origin=path))
            width = layers[-1].outs
    named = config.part("id2label")
    names = {} if named is None else named.values
    return Classifier(
        labels=tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(width)),
        layers=tuple(layers),
        activation=_activation(config, read_declared(path), width),
        pooling=outputs.pooling,
    )


def _activation(config: ModelConfig, declared: ModelConfig, labels: int) -> Literal["softmax", "sigmoid", "none"]:
    part = config.part("sentence_transformers") or ModelConfig({})
    old = config.values.get("sbert_ce_default_activation_function")
    stated = declared.values.get("activation_fn", part.values.get("activation_fn", old))
    if isinstance(stated, str):
        if (found := _NAMED.get(stated.rpartition(".")[2])) is None:
            hint = f"served: {', '.join(_NAMED)}"
            raise ModelError(f"{config.origin}: the activation {stated[:60]!r} of scores is not served", hint=hint)
        return found
    return _ACTIVATIONS.get(config.values.get("problem_type"), "sigmoid" if labels == 1 else "softmax")
