"""The pages work as written: a reader executes each of their blocks, in order."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

from fd_core.errors import ModelError
from fd_core.models.catalog import resolve_model
from tests.documents.blocks import DOCUMENTS, ROOT, Block, blocks_of, name_of
from tests.documents.lent_servers import LentServers
from tests.documents.reader import Reader
from tests.models.test_smollm2 import network_is_there

DONE = ("sh", "bash", "console", "python")
"""Languages of blocks that the reader executes; test_blocks.py parses the others."""
REAL = "docs/serve/kv-cache-dtype.md"
"""Page whose settings need a real model: only `nox -s guides` follows it."""
STORES = "docs/serve/kv-stores.md"
"""Page whose blocks a separate test executes, store by store."""
LATER = ("docs/scale/parallelism.md", "examples/vendor-plugin/README.md")
"""Pages whose settings the null model does not support, and, the last one, a page whose commands are in
examples/README.md as well: only `nox -s guides` follows them."""
LONGER = (
    *("docs/scale/cluster.md", "docs/scale/data-parallel.md", "docs/scale/routers.md", "docs/serve/batches.md"),
    *("docs/serve/evaluation.md", "docs/serve/speculative-decoding.md", "docs/study/study-a-policy.md"),
    *("docs/study/traces.md", "examples/README.md", "plugins/storage_redis/README.md"),
    *("docs/operate/operations.md", "docs/operate/trouble.md"),
)
"""Pages that take seconds each: `nox -s guides` follows them with `null` as well, the default run the others."""
SHORTER: Mapping[str, str] = {
    "-m venv venv": "-m venv --without-pip venv",
    r"(fdcore conformance --scheduler \w+)$": r"\1 --quick -k signals",
    r"requests=200": "requests=20",
    r'LLM\("smollm2"\)': 'LLM("smollm2", backend="null")',
    r"^pytest\b": "pytest tests/test_policy.py",
}
"""Replacements of slow commands in the default run; `nox -s guides` runs the page as written, and
tests/examples/test_vendor_plugin.py runs the kit of that project."""

NULL: Mapping[str, str] = {"FD_BACKEND": "null"}

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(not all(map(shutil.which, ("bash", "curl"))), reason="bash and curl are not here"),
]


def todo(document: Path) -> list[Block]:
    """Return the blocks of a page that the reader executes."""
    return [each for each in blocks_of(document) if each.why is None and (each.file or each.language in DONE)]


PAGES = [each for each in DOCUMENTS if any(block.language in DONE for block in todo(each))]


@pytest.fixture(scope="module", autouse=True)
def smollm2() -> None:
    """Skip if the model is not in the cache and cannot be fetched."""
    try:
        resolve_model("smollm2")
    except ModelError as error:
        if network_is_there():
            raise
        pytest.skip(f"no network: {error}")


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Folder with the files of the repository that pages use."""
    shutil.copytree(ROOT / "examples", tmp_path / "examples")
    return tmp_path


@pytest.fixture(scope="module")
def lent(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LentServers]:
    """Servers with the `null` model, for the pages that start them with the same command."""
    servers = LentServers(tmp_path_factory.mktemp("lent"), NULL)
    yield servers
    servers.close()


@pytest.fixture
def null(folder: Path, lent: LentServers) -> Iterator[Reader]:
    """Reader with the `null` model, which answers at once and makes no sense."""
    yield from reads(Reader(folder, NULL, SHORTER, lent))


@pytest.fixture
def real(folder: Path) -> Iterator[Reader]:
    """Reader that executes pages exactly as written."""
    yield from reads(Reader(folder, {}))


def what_is_cached(document: Path, reader: Reader, store: str) -> tuple[list[str], str]:
    """Start a server with the store, run the script that prints the cached tokens, and run it again after a restart."""
    blocks = todo(document)
    start = next(each for each in blocks if f"--kv-store {store}" in each.text)
    script = next(each for each in blocks if "cached_tokens" in each.text)
    outputs = [reader.follow(each) for each in (start, script)]
    reader.restart(8000)
    return outputs, reader.follow(script)


def reads(reader: Reader) -> Iterator[Reader]:
    try:
        yield reader
    finally:
        reader.close()


def follow(reader: Reader, document: Path) -> None:
    if document.parent.parent == ROOT / "examples":
        reader.folder /= document.parent.relative_to(ROOT)  # the page of a project is read in its folder
    for block in todo(document):
        output = reader.follow(block)
        print(f"{block}\n{output}")
        if block.language == "python" and re.search(r"^print\(", block.text, re.MULTILINE):
            assert output.strip(), f"{block} prints nothing"


@pytest.mark.parametrize(
    "document",
    [
        pytest.param(each, marks=pytest.mark.guide if name_of(each) in LONGER else (), id=name_of(each))
        for each in PAGES
        if name_of(each) not in (REAL, *LATER, STORES)
    ],
)
def test_commands_and_scripts_of_a_page_work(document: Path, null: Reader) -> None:
    follow(null, document)


@pytest.mark.guide
@pytest.mark.parametrize("document", PAGES, ids=name_of)
def test_commands_and_scripts_of_a_page_work_with_its_model(document: Path, real: Reader) -> None:
    follow(real, document)


@pytest.mark.parametrize("store", ["disk", pytest.param("redis", marks=pytest.mark.guide)])
def test_prompt_is_loaded_from_the_store_after_a_restart(store: str, null: Reader) -> None:
    outputs, again = what_is_cached(ROOT / STORES, null, store)
    (prompt, nothing), (same, cached) = (list(map(int, each.split())) for each in (outputs[-1], again))
    assert (same, nothing) == (prompt, 0)
    assert prompt - 64 < cached < prompt


@pytest.mark.guide
@pytest.mark.parametrize("page", ["docs/quick-start.md", STORES])
def test_figures_of_a_page_about_the_store_match_its_script(page: str, real: Reader) -> None:
    outputs, again = what_is_cached(ROOT / page, real, "disk")
    for figures in (outputs[-1], again):
        assert f"`{figures.strip()}`" in (ROOT / page).read_text()
    assert outputs[-1] != again


@pytest.mark.guide
def test_answer_fits_the_schema_of_the_quick_start(real: Reader) -> None:
    blocks = todo(ROOT / "docs" / "quick-start.md")
    answer = json.loads(real.follow(next(each for each in blocks if "json_schema" in each.text)))
    assert set(answer) == {"city", "population"}
    assert isinstance(answer["population"], int)
