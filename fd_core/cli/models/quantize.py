"""`fdcore quantize`: write a quantized version of a model."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Final, Literal

import typer

from fd_core.cli.report import reports_errors

if TYPE_CHECKING:
    from fd_core.models.loading.checkpoint import Checkpoint


_TEMPLATES: Final = "additional_chat_templates"
_COPIED: Final = (
    *("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model"),
    *("vocab.json", "merges.txt", "generation_config.json", "chat_template.jinja", "chat_template.json"),
    *("LICENSE", "LICENSE.txt", "README.md"),
)


@reports_errors
def quantize(
    model: Annotated[
        str, typer.Argument(metavar="MODEL", help="smollm2, a folder, a .gguf file or a Hugging Face name.")
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="FOLDER", help="A folder that does not exist yet.")],
    form: Annotated[
        Literal["int8", "int4"],
        typer.Option("--format", help="int8 with a scale for each row, or int4 with one for each 32 values."),
    ] = "int8",
    revision: Annotated[str | None, typer.Option(help="Branch, tag or commit of a Hugging Face model.")] = None,
) -> None:
    """Write MODEL with quantized linear layers to FOLDER, in the form of compressed-tensors.

    Embeddings, norms, routers and the output projection stay as they are. The folder appears when it is complete.
    """
    from rich.console import Console

    from fd_core.cli.serving.startup import startup_bars
    from fd_core.models.catalog import resolve_model
    from fd_core.models.loading.checkpoint import open_checkpoint
    from fd_core.models.quantized_folder import write_quantized

    with startup_bars(Console(stderr=True)) as bars:
        found = resolve_model(model, revision=revision, progress=bars)
        with open_checkpoint(found.path) as checkpoint:
            others = files_beside(checkpoint)
            write_quantized(checkpoint, form, output, others, lambda done, total: bars("quantize", done, total))
    print(output)


def files_beside(checkpoint: Checkpoint) -> dict[str, bytes]:
    """Return the tokenizer and what else lies beside weights: copied from a folder, made from a GGUF file."""
    import json

    from fd_core.models.loading.files import read_limited
    from fd_core.text.tokenizer import load_tokenizer

    if checkpoint.path.is_dir():
        others = [f"{_TEMPLATES}/{path.name}" for path in sorted((checkpoint.path / _TEMPLATES).glob("*.jinja"))]
        return {name: read_limited(path) for name in (*_COPIED, *others) if (path := checkpoint.path / name).is_file()}
    tokenizer = load_tokenizer(checkpoint)
    default = {} if tokenizer.chat_template is None else {"default": tokenizer.chat_template}
    templates = [{"name": name, "template": text} for name, text in {**default, **tokenizer.named_templates}.items()]
    settings = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": tokenizer.bos_token,
        "eos_token": tokenizer.eos_token,
        "chat_template": templates if tokenizer.named_templates else tokenizer.chat_template,
    }
    return {
        "tokenizer.json": tokenizer.backend.to_str().encode(),
        "tokenizer_config.json": json.dumps(settings, indent=2).encode(),
        "generation_config.json": json.dumps({"eos_token_id": list(checkpoint.eos_token_ids)}).encode(),
    }
