"""Python blocks of the documents import only names that exist."""

from __future__ import annotations

import ast
import importlib
import importlib.util
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from pathlib import Path

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
            has, packaged = names_of(str(node.module))
            paths = [f"{node.module}.{each.name}" for each in node.names if not has(each.name)]
            missing += [path for path in paths if not (packaged and importlib.util.find_spec(path))]
    return missing


def names_of(path: str) -> tuple[Callable[[str], bool], bool]:
    """Return whether a module has a name, and whether it is a package; read from its text if a framework is absent."""
    try:
        module = importlib.import_module(path)
    except ModuleNotFoundError as error:
        spec = importlib.util.find_spec(path)
        if error.name is None or error.name.startswith("fd_core") or spec is None or spec.origin is None:
            raise
        names = set(assigned(ast.parse(Path(spec.origin).read_text()).body))
        return names.__contains__, bool(spec.submodule_search_locations)
    return partial(hasattr, module), hasattr(module, "__path__")


def assigned(body: Iterable[ast.stmt]) -> Iterator[str]:
    """Yield the names that statements of a module define, also within `if` and `try`."""
    for each in body:
        if isinstance(each, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            yield each.name
        elif isinstance(each, ast.Import | ast.ImportFrom):
            yield from ((name.asname or name.name).partition(".")[0] for name in each.names)
        elif isinstance(each, ast.Assign | ast.AnnAssign):
            yield from (node.id for node in ast.walk(each) if isinstance(node, ast.Name))
        else:
            for inner in (getattr(each, "body", ()), getattr(each, "orelse", ())):
                yield from assigned(inner)


@pytest.mark.parametrize("block", BLOCKS, ids=str)
def test_python_block_imports_existing_names(block: Block) -> None:
    assert missing_imports(block.text) == []


def test_missing_import_is_found() -> None:
    assert missing_imports("from fd_core.kv.blocks import BlockPool, BlockPond") == ["fd_core.kv.blocks.BlockPond"]


def test_names_of_a_module_without_its_framework_are_read_from_its_text() -> None:
    text = (
        "import paddle\ntry:\n    from x import y as z\nexcept ImportError:\n    pass\ndef f(): ...\nA: int = 1\nB = 2"
    )
    assert set(assigned(ast.parse(text).body)) >= {"paddle", "z", "f", "A", "B"}
    has, _ = names_of("fd_core.ops.paddle.framework")
    assert has("paddle") and not has("pedal")
