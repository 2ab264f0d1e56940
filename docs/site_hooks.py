"""Hooks of mkdocs: documents that live elsewhere in the repository, and pages made from the code, become pages."""

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
"""Documents outside `docs/`, by where the site has them."""
LINK = re.compile(r"(!?)\[((?:[^\[\]`]|`[^`]*`)*)\]\(([^)\s]+)\)")


def on_files(files: Files, config: Any) -> Files:
    """Add the documents that live elsewhere, the generated pages, and the cards that `nox -s conformance` left."""
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
    """Lead links between documents to the pages of the site; name files of the code, which the site does not have."""
    here = page.file.src_uri
    came_from = next((source for source, target in ELSEWHERE.items() if target == here), f"docs/{here}")

    def lead(link: re.Match[str]) -> str:
        image, text, target = link.groups()
        path, mark, anchor = target.partition("#")
        if "://" in target or target.startswith(("#", "mailto:")):
            return link[0]
        wanted = os.path.normpath(os.path.join(os.path.dirname(came_from), path))  # noqa: PTH118, PTH120 - not on this disk
        found = ELSEWHERE.get(wanted, wanted.removeprefix("docs/") if wanted.startswith("docs/") else None)
        if found is None or (files.get_file_from_path(found) is None and (ROOT / wanted).exists()):
            plain = text.strip("`")
            return link[0] if image else f"{text} (`{wanted}`)" if plain not in wanted else f"`{wanted}`"
        return f"{image}[{text}]({os.path.relpath(found, os.path.dirname(here) or '.')}{mark}{anchor})"  # noqa: PTH120

    fenced = re.split(r"(^```.*?^```$)", markdown, flags=re.DOTALL | re.MULTILINE)
    return "".join(part if part.startswith("```") else LINK.sub(lead, part) for part in fenced)
