"""Checks the English of the Python sources and of commit subjects; the lint session runs it.

python -m tests.english            # exit code 1 and a line for each fault
python -m tests.english --counts   # also occurrences per 10,000 words, by folder
"""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator, Mapping
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDERS = ("fd_core", "plugins", "tests", "benchmarks", "examples")
MAX_PER_10_000 = 1.0
MAX_TEST_NAME = 70
MAX_SUBJECT = 72
FIRST_COMMIT = "24ef10858822529ce165e24818139469ea8ed5e3"
"""Subjects of this commit and of all after it are checked."""

WORDS: Mapping[str, str] = {
    "says/said": r"says|said",
    "tells/told": r"tells|told",
    "comes/came": r"comes|came",
    "behind": r"behind",
    "beside": r"beside",
    "whoever/whatever": r"whoever|whatever",
    "nobody/somebody": r"nobody|somebody",
    "hears/heard": r"hears|heard",
    "of its own": r"of +its +own",
}
"""Words that a sentence of the field does not need; names are split at underscores before they are counted."""
PATTERNS = {name: re.compile(rf"(?<![a-z])(?:{words})(?![a-z])") for name, words in WORDS.items()}

OPENERS = frozenset(("What", "Whether", "Where", "How", "Who", "Which", "Whose"))
"""First words of a docstring that describes instead of naming: it opens with a noun phrase or an imperative."""
SUBJECT = re.compile(r"[a-z][a-z0-9_.-]*: [a-z0-9`].*[^.\s]")

EXCEPTIONS: Mapping[str, str] = {
    "tests/english.py": "lists the words themselves",
}
"""Files whose words are not counted, with the reason."""


def sources() -> dict[str, str]:
    """Return the text of each Python file of the project, by path."""
    paths = sorted(path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py"))
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


def occurrences(texts: Mapping[str, str]) -> tuple[int, Counter[str]]:
    """Return the number of words in `texts`, and the occurrences of each entry of `WORDS`."""
    found: Counter[str] = Counter()
    num_words = 0
    for text in texts.values():
        lower = text.lower()
        num_words += sum(1 for _ in re.finditer(r"[a-z]+", lower))
        for name, pattern in PATTERNS.items():
            found[name] += len(pattern.findall(lower))
    return num_words, found


def overused(texts: Mapping[str, str], folder: str) -> Iterator[str]:
    """Yield a line for each entry of `WORDS` that is too frequent in `texts`, the sources of `folder`."""
    num_words, found = occurrences(texts)
    for name, count in found.items():
        if count > max(1, MAX_PER_10_000 * num_words / 10_000):
            rate = count / num_words * 10_000
            yield f"{folder}: {name} occurs {count} times, {rate:.1f} per 10,000 words; at most {MAX_PER_10_000}"


def documented(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """Yield line and text of each docstring, those below attributes and constants included."""
    for node in ast.walk(tree):
        for statement in getattr(node, "body", ()) if isinstance(node, ast.stmt | ast.mod) else ():
            if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
                yield statement.lineno, str(statement.value.value)


def faults_in(path: str, text: str) -> Iterator[str]:
    """Yield a line for each docstring with a wrong first word and each test with too long a name in one file."""
    tree = ast.parse(text)
    for line, docstring in documented(tree):
        if (first := re.match(r"\W*(\w*)", docstring)) and first[1] in OPENERS:
            yield f"{path}:{line}: the docstring opens with {first[1]}; write a noun phrase or an imperative"
    for node in ast.walk(tree):
        name = node.name if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) else ""
        if name.startswith("test_") and len(name) > MAX_TEST_NAME:
            yield f"{path}:{node.lineno}: {name} has {len(name)} characters; at most {MAX_TEST_NAME}"


def wrong_subjects(subjects: Mapping[str, str]) -> Iterator[str]:
    """Yield a line for each commit subject, by hash, that is not `area: imperative subject` or too long."""
    for commit, subject in subjects.items():
        if len(subject) > MAX_SUBJECT:
            yield f"{commit:.10}: the subject has {len(subject)} characters; at most {MAX_SUBJECT}: {subject}"
        elif not SUBJECT.fullmatch(subject):
            yield f"{commit:.10}: expected `area: imperative subject`, got: {subject}"


def subjects() -> dict[str, str]:
    """Return the subjects of the commits from `FIRST_COMMIT` on, by hash: in a shallow clone, those that it holds.

    None outside a git checkout, and none of a history without that commit, such as a squashed one.
    """
    if not (ROOT / ".git").exists():
        return {}
    if _git("merge-base", "--is-ancestor", FIRST_COMMIT, "HEAD").returncode == 0:
        commits = f"{FIRST_COMMIT}^..HEAD"
    elif _git("rev-parse", "--is-shallow-repository").stdout.strip() == "true":
        commits = "HEAD"
    else:
        return {}
    return {line[:40]: line[41:] for line in _git("log", "--format=%H %s", commits).stdout.splitlines()}


def _git(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=False, capture_output=True, text=True)


def main(arguments: list[str]) -> int:
    """Print every fault; return 1 if there is one."""
    texts = sources()
    faults = [fault for path, text in texts.items() for fault in faults_in(path, text)]
    for folder in FOLDERS:
        counted = {
            path: text for path, text in texts.items() if path.startswith(f"{folder}/") and path not in EXCEPTIONS
        }
        faults += overused(counted, folder)
        if "--counts" in arguments:
            num_words, found = occurrences(counted)
            print(folder, {name: round(count / num_words * 10_000, 1) for name, count in found.items()})
    commits = subjects()
    faults += wrong_subjects(commits)
    print(*faults, f"{len(texts):,} files, {len(commits):,} commits, {len(faults)} faults", sep="\n")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
