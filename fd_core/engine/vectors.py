"""Embeddings of texts: the sampling that ends with the prompt, and conversion to the requested length and size."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final, cast

import numpy as np
import numpy.typing as npt

from fd_core.errors import BadRequest, ModelError
from fd_core.models.loading.vector_settings import Classifier, Dense, VectorSettings
from fd_core.ops.contract import Norm, PlainActivation
from fd_core.ops.numpy.ops import NumpyLinear, NumpyOps
from fd_core.text.tokenizer import Tokenizer
from fd_core.types import SamplingParams

_OPS: Final = NumpyOps()
INSTRUCTION: Final = "Given a web search query, retrieve relevant passages that answer the query"
"""Question that is put to a model that scores pairs, unless a request has another one."""
_BEFORE: Final = (
    "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
)
_AFTER: Final = "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
"""Suffix of the prompt that Qwen3-Reranker was trained on, after a pair."""
ONE_TOKEN = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
"""For a request that needs only the pooled states of its prompt: it ends with one token, which is dropped."""


def check_dimensions(dimensions: int | None, size: int) -> None:
    """Raise `BadRequest` unless vectors of `size` elements can be truncated to `dimensions`; None keeps all."""
    if dimensions is not None and not 1 <= dimensions <= size:
        raise BadRequest(
            f"dimensions is {dimensions}, but the model's vectors have {size} elements", field="dimensions"
        )


def prompt_of(settings: VectorSettings, name: str | None) -> str:
    """Return the text that a model wants before each text. Raises `BadRequest` for an unknown name."""
    if name is None:
        return settings.prompt
    if name not in settings.prompts:
        known = ", ".join(settings.prompts) or "no prompts"
        raise BadRequest(f"prompt_name is {name!r}; this model declares {known}", field="prompt_name")
    return settings.prompts[name]


def through(layers: Sequence[Dense], states: npt.NDArray[np.float32]) -> npt.NDArray[np.float32]:
    """Return the outputs float32[n, outs] of layers for states [n, H]."""
    for layer in layers:
        weight, bias, norm, norm_bias = (
            np.frombuffer(each, "<f4") for each in (layer.weight, layer.bias, layer.norm, layer.norm_bias)
        )
        linear = NumpyLinear(weight.reshape(layer.outs, -1), bias if len(bias) else None)
        states = _OPS.linear(states, linear)
        if layer.activation == "tanh":
            states = np.tanh(states)
        elif layer.activation != "identity":
            states = _OPS.activate(states, cast(PlainActivation, layer.activation))
        if len(norm):
            shift = norm_bias if len(norm_bias) else np.zeros_like(norm)
            states = _OPS.layer_norm(states, Norm(norm, layer.eps, shift))
    return states


def vector_of(pooled: bytes, settings: VectorSettings, dimensions: int | None = None) -> npt.NDArray[np.float32]:
    """Return a pooled vector as float32[dimensions], of length 1 if it was cut or the settings require it."""
    whole = through(settings.layers, np.frombuffer(pooled, "<f4")[None])[0].astype(np.float64)
    vector: npt.NDArray[np.float64] = whole[:dimensions]
    if settings.normalize or len(vector) < len(whole):
        vector = vector / max(float(np.linalg.norm(vector)), 1e-12)
    return vector.astype(np.float32)


def require_classifier(settings: VectorSettings, *, of_tokens: bool) -> Classifier:
    """Return the classifier of a model. Raises `BadRequest` if it has none for texts, or for tokens."""
    if settings.classifier is None:
        raise BadRequest("this checkpoint has no classification layer; use one that has", field="model")
    if (settings.classifier.pooling == "all") != of_tokens:
        kind, other = ("texts", "classify, /v1/classify") if of_tokens else ("tokens", "classify_tokens, /pooling")
        raise BadRequest(f"this checkpoint classifies {kind}; use {other}", field="model")
    return settings.classifier


def probabilities_of(pooled: bytes, classifier: Classifier) -> npt.NDArray[np.float32]:
    """Return the probability of each class from a pooled vector, or from that of each token: float32[n, labels]."""
    inputs = len(classifier.layers[0].weight) // classifier.layers[0].outs
    logits = through(classifier.layers, np.frombuffer(pooled, "<f4").reshape(-1, inputs // 4)).astype(np.float64)
    if classifier.activation == "sigmoid":
        logits = 1.0 / (1.0 + np.exp(-logits))
    elif classifier.activation == "softmax":
        logits = np.exp(logits - logits.max(axis=-1, keepdims=True))
        logits /= logits.sum(axis=-1, keepdims=True)
    found: npt.NDArray[np.float32] = logits.astype(np.float32)
    return found


def similarity(one: npt.NDArray[np.float32], other: npt.NDArray[np.float32]) -> float:
    """Return the cosine of two vectors; 0 if one of them is zero."""
    lengths = (max(float(np.linalg.norm(vector)), 1e-12) for vector in (one, other))
    return float((one / next(lengths)) @ (other / next(lengths)))


def judged_prompt(query: str, document: str, instruction: str) -> str:
    """Return the prompt that asks a model whether a document answers a query."""
    return f"{_BEFORE}<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}{_AFTER}"


def judging_tokens(tokenizer: Tokenizer, judge: tuple[str, str], vocab_size: int) -> tuple[int, ...]:
    """Return the ids of the tokens for no and yes. Raises `ModelError` for a tokenizer without them."""
    ids: list[int] = []
    for token in judge:
        found: int | None = tokenizer.backend.token_to_id(token)
        if found is None or found >= vocab_size:
            raise ModelError(f"the model's tokenizer has no token {token!r}", field="classifier_from_token")
        ids.append(found)
    return tuple(ids)


def probability_of_yes(pooled: bytes) -> float:
    """Return the probability of yes from the log-probabilities of no and yes."""
    no, yes = np.frombuffer(pooled, "<f4").astype(np.float64)
    return float(1.0 / (1.0 + np.exp(no - yes)))
