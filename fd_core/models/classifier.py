"""The output layer of checkpoints that classify texts, in the layout of transformers."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Final, Literal

from fd_core.errors import ModelError
from fd_core.models.loading.config import Classifier, ModelConfig
from fd_core.models.loading.files import read_json_object
from fd_core.models.opening import open_checkpoint

CLASSIFICATION: Final = "ForSequenceClassification"
"""End of the architecture of such a checkpoint."""
_WEIGHT: Final = "score.weight"
_ACTIVATIONS: Final[dict[Any, Literal["softmax", "sigmoid", "none"]]] = {
    "regression": "none",
    "multi_label_classification": "sigmoid",
}
"""By `problem_type`; otherwise a single class has a sigmoid and several a softmax, as in vLLM."""


def read_classifier(path: Path | None) -> Classifier | None:
    """Read the classifier of a model's folder; None for other models. Raises `ModelError`."""
    file = None if path is None else path / "config.json"
    if path is None or file is None or not file.is_file():
        return None
    config = ModelConfig(read_json_object(file), origin=str(file))
    if not "".join(config.strings("architectures")[:1]).endswith(CLASSIFICATION):
        return None
    with open_checkpoint(path) as checkpoint:
        weight = checkpoint.read(_WEIGHT).to_float32()
    if weight.ndim != 2 or weight.shape[1] != (hidden := config.count("hidden_size")) or not len(weight):
        raise ModelError(f"{path}: tensor {_WEIGHT!r} has shape {weight.shape}, expected (labels, {hidden})")
    named = config.part("id2label")
    names = {} if named is None else named.values
    return Classifier(
        labels=tuple(str(names.get(str(index), f"LABEL_{index}")) for index in range(len(weight))),
        weight=weight.astype("<f4").tobytes(),
        activation=_ACTIVATIONS.get(config.values.get("problem_type"), "sigmoid" if len(weight) == 1 else "softmax"),
    )
