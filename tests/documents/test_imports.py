"""Python blocks of the documents import only names that exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util

import pytest

from tests.documents.blocks import DOCUMENTS, Block, blocks_of

BLOCKS = [
    block
    for document in DOCUMENTS
    for block in blocks_of(document)
    if block.language == "python" and "from fd_core" in block.text
]


def missing_imports(source: str) -> list[str]:
    """Return the names that `source` imports from modules of fd_core without them."""
    missing = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "fd_core":
            module = importlib.import_module(str(node.module))
            paths = [f"{node.module}.{each.name}" for each in node.names if not hasattr(module, each.name)]
            packaged = hasattr(module, "__path__")
            missing += [path for path in paths if not (packaged and importlib.util.find_spec(path))]
    return missing


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_block_imports_existing_names(block: Block) -> None:
    assert missing_imports(block.text) == []


def test_missing_import_is_found() -> None:
    assert missing_imports("from fd_core.kv.blocks import BlockPool, BlockPond") == ["fd_core.kv.blocks.BlockPond"]
