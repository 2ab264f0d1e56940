"""Export of a quantized model to a compressed-tensors folder, which appears when it is complete."""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import numpy.typing as npt

from fd_core.errors import ConfigError, ModelError
from fd_core.models.build import ProgressSink, check_tensors
from fd_core.models.families.spec import DecoderSpec, MoeSpec
from fd_core.models.loading.checkpoint import Checkpoint
from fd_core.models.loading.safetensors_files import DTYPE_BYTES
from fd_core.models.quantization import INT4_GROUP, bfloat16_bits, quantized
from fd_core.models.registry import spec_of
from fd_core.ops.weights import PackedTensor

_Header = dict[str, tuple[str, list[int]]]
"""Name to type and shape, in the order of the file."""


def write_quantized(
    checkpoint: Checkpoint, form: str, folder: Path, others: Mapping[str, bytes], progress: ProgressSink
) -> None:
    """Quantize the linear layers of a checkpoint to `int8` or `int4` and write the model to a new folder.

    `bfloat16` rounds every tensor instead, so that a quantized model becomes an ordinary one.

    `others` are further files by name, in addition to the weights and config.json. The folder is renamed into place
    when everything is on disk. Raises `ModelError` for an incomplete checkpoint, `ConfigError` if the folder is not
    writable.
    """
    spec = spec_of(checkpoint)
    check_tensors(spec, checkpoint)
    files = {**others, "config.json": _config(checkpoint, spec, form)}
    with new_folder(folder, files, field="--output") as partial, (partial / "model.safetensors").open("xb") as file:
        _write_weights(checkpoint, spec, form, file=file, progress=progress)
        file.flush()
        os.fsync(file.fileno())


@contextlib.contextmanager
def new_folder(folder: Path, files: Mapping[str, bytes], field: str) -> Iterator[Path]:
    """Yield a temporary folder with `files` by name, and rename it to `folder` at the end of the block.

    Raises `ConfigError` for `field` if the folder exists or is not writable.
    """
    if folder.exists():
        raise ConfigError(f"{folder} exists already", field=field, hint="use a new folder")
    try:
        partial = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", suffix=".partial", dir=folder.parent))
    except OSError as error:
        raise ConfigError(f"cannot write to {folder.parent}: {error.strerror}", field=field) from error
    try:
        for name, content in files.items():
            (partial / name).parent.mkdir(exist_ok=True)
            (partial / name).write_bytes(content)
        yield partial
        partial.chmod(0o755)
        partial.rename(folder)
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error.strerror or error}", field=field) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _config(checkpoint: Checkpoint, spec: DecoderSpec, form: str) -> bytes:
    weights: dict[str, Any] = {"num_bits": 8, "type": "int", "symmetric": True, "strategy": "channel", "dynamic": False}
    inputs: dict[str, Any] | None = {**weights, "strategy": "token", "dynamic": True}
    if form == "int4":
        weights |= {"num_bits": 4, "strategy": "group", "group_size": INT4_GROUP}
        inputs = None
    routers = [
        layer.feed_forward.router.name.removesuffix(".weight")
        for layer in spec.layers
        if isinstance(layer.feed_forward, MoeSpec)
    ]
    quantization = {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized" if form == "int4" else "int-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights, "input_activations": inputs}},
        "ignore": ["lm_head", *routers],
        "kv_cache_scheme": None,
    }
    config = {"torch_dtype": "bfloat16", **checkpoint.config, "quantization_config": quantization}
    config.pop("compression_config", None)
    if form == "bfloat16":
        config["torch_dtype"] = form
        del config["quantization_config"]
    return json.dumps(config, indent=2).encode()


def _write_weights(
    checkpoint: Checkpoint, spec: DecoderSpec, form: str, file: BinaryIO, progress: ProgressSink
) -> None:
    """Write the header, whose sizes are known before quantization, then one tensor after the other."""
    shapes = dict(spec.tensors())
    linears = {f"{name}.weight" for linear in spec.linears() for name in linear.names}
    if form == "bfloat16":
        linears = {*shapes}
    header: _Header = {}
    for name, shape in shapes.items():
        header |= _described(checkpoint, name, shape, form=form if name in linears else None)
    entries, end = {}, 0
    for name, (dtype, dims) in header.items():
        begin, end = end, end + math.prod(dims) * DTYPE_BYTES[dtype]
        entries[name] = {"dtype": dtype, "shape": dims, "data_offsets": [begin, end]}
    text = json.dumps({"__metadata__": {"format": "pt"}, **entries}).encode()
    text += b" " * (-len(text) % 8)
    file.write(len(text).to_bytes(8, "little") + text)
    done, total, whole = 0, sum(map(math.prod, shapes.values())), checkpoint.total_bytes
    for name, shape in shapes.items():
        for array in _arrays(checkpoint, name, form if name in linears else None):
            file.write(np.ascontiguousarray(array).data)
        done += math.prod(shape)
        progress(whole * done // total, whole)


def _described(checkpoint: Checkpoint, name: str, shape: tuple[int, ...], form: str | None) -> _Header:
    """Return the tensors of a quantized weight, in the order of `_arrays`."""
    if form is None:
        return {name: (checkpoint.read(name).dtype, list(shape))}
    if form == "bfloat16":
        return {name: ("BF16", list(shape))}
    out, width = shape
    module = name.removesuffix(".weight")
    if form == "int8":
        return {name: ("I8", [out, width]), f"{module}.weight_scale": ("F32", [out, 1])}
    if width % INT4_GROUP:
        raise ModelError(
            f"{checkpoint.path}: tensor {name!r} has rows of {width}, not a multiple of {INT4_GROUP}",
            field="--format",
            hint="use --format int8",
        )
    return {
        f"{module}.weight_packed": ("I32", [out, width // 8]),
        f"{module}.weight_scale": ("BF16", [out, width // INT4_GROUP]),
        f"{module}.weight_shape": ("I64", [2]),
    }


def _arrays(checkpoint: Checkpoint, name: str, form: str | None) -> tuple[npt.NDArray[Any], ...]:
    if form is None:
        return (checkpoint.read(name).data,)
    if form == "bfloat16":
        return (bfloat16_bits(checkpoint.read(name)),)
    packed: PackedTensor = quantized(checkpoint, name, form)
    if form == "int8":
        return packed.values, packed.scales
    unsigned = (packed.values + np.int8(8)).view(np.uint8)
    words = unsigned[:, 0::2] | (unsigned[:, 1::2] << 4)
    scales = (packed.scales.view(np.uint32) >> 16).astype(np.uint16)  # they are bfloat16 already
    return words, scales, np.array(packed.shape, np.int64)
