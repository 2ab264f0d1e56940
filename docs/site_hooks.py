"""MkDocs hooks: add documents from outside `docs/` and pages generated from the code."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).parents[1]
ELSEWHERE = {
    "README.md": "index.md",
    "examples/README.md": "examples/index.md",
    "CHANGELOG.md": "about/changelog.md",
    "CONTRIBUTING.md": "about/contributing.md",
    "SECURITY.md": "about/reporting.md",
    "CODE_OF_CONDUCT.md": "about/conduct.md",
    "benchmarks/NOTES.md": "understand/benchmark-notes.md",
    **{
        path.relative_to(ROOT).as_posix(): f"extend/plugins/{path.parent.name}.md"
        for path in sorted(ROOT.glob("plugins/*/README.md"))
    },
    **{
        path.relative_to(ROOT).as_posix(): f"understand/results/{path.name}"
        for path in sorted(ROOT.glob("benchmarks/results/*.md"))
    },
}
"""Source path of each document outside `docs/`, mapped to its path in the site."""
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents of `ELSEWHERE`, the generated pages, and the report cards of `nox -s conformance`."""
    sys.path.insert(0, str(ROOT))
    from tests.reference import GENERATED  # needs the repository on the path

    for page, make in GENERATED.items():
        files.append(File.generated(config, page, content=make()))
    for cards in sorted(ROOT.glob("build/conformance/*.html")):
        files.append(File.generated(config, f"extend/{cards.name}", content=cards.read_text(encoding="utf-8")))
    for source, page in ELSEWHERE.items():
        if (ROOT / source).is_file():
            files.append(File.generated(config, page, content=(ROOT / source).read_text(encoding="utf-8")))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Rewrite links between documents to pages of the site, and links to source files to plain text."""
    here = page.file.src_uri
    source_path = next((source for source, target in ELSEWHERE.items() if target == here), f"docs/{here}")

    def rewrite(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        resolved = os.path.normpath(os.path.join(os.path.dirname(source_path), path))  # noqa: PTH118, PTH120 - not a path on disk
        found = ELSEWHERE.get(resolved, resolved.removeprefix("docs/") if resolved.startswith("docs/") else None)
        if found is None or (files.get_file_from_path(found) is None and (ROOT / resolved).exists()):
            plain = text.strip("`")
            return link[0] if image else f"{text} (`{resolved}`)" if plain not in resolved else f"`{resolved}`"
        return f"{image}[{text}]({os.path.relpath(found, os.path.dirname(here) or '.')}{mark}{anchor})"  # noqa: PTH120

    fenced = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(rewrite, part) for part in fenced)
