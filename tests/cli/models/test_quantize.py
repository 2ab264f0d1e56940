from __future__ import annotations

from pathlib import Path

from typer.testing import CliRunner

from fd_core.cli.app import app
from fd_core.models.opening import open_checkpoint
from fd_core.testing.models.checkpoints import ENGINE_CASE, write_checkpoint
from tests.models.loading.tiny_gguf import write_gguf

TOKENIZER = {
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "default",
    "tokenizer.ggml.tokens": ["t", "1", *(f"t{index}" for index in range(1, 47))],
    "tokenizer.ggml.merges": ["t 1"],
    "tokenizer.ggml.token_type": [1] * 47 + [3],
    "tokenizer.ggml.eos_token_id": 47,
    "tokenizer.chat_template.tool_use": "T",
}


def test_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path: Path) -> None:
    source, folder = write_gguf(tmp_path / "tiny.gguf", extra=TOKENIZER), tmp_path / "quantized"
    arguments = ["quantize", str(source), "-o", str(folder), "--format", "int4"]
    done = CliRunner().invoke(app, arguments)
    assert done.exit_code == 0, done.output
    with open_checkpoint(source) as before, open_checkpoint(folder) as after:
        assert after.stored_format("model.layers.0.mlp.up_proj.weight") == "int4"
        assert after.eos_token_ids == before.eos_token_ids == (47,)
        assert after.tokenizer.chat_template is None
        assert after.tokenizer.named_templates == before.tokenizer.named_templates == {"tool_use": "T"}
    again = CliRunner().invoke(app, arguments)
    assert again.exit_code == 2 and "exists already" in again.output


def test_folder_keeps_its_named_templates(tmp_path: Path) -> None:
    model = write_checkpoint(ENGINE_CASE, tmp_path / "model")
    (model / "additional_chat_templates").mkdir()
    (model / "additional_chat_templates" / "rag.jinja").write_text("R")
    (model / "tokenizer.json").write_text("{}")
    done = CliRunner().invoke(app, ["quantize", str(model), "-o", str(tmp_path / "quantized")])
    assert done.exit_code == 0, done.output
    assert open_checkpoint(tmp_path / "quantized").tokenizer.named_templates == {"rag": "R"}
