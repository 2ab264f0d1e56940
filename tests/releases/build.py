"""Builds the distributions of this repository and tests them as a user would; `nox -s build` runs it.

python -m tests.releases.build [--dist FOLDER] [--quick]

Every wheel is installed into a separate environment in another folder, the core from its sdist into a second one.
There `fdcore` has to answer, a project outside is checked against the installed types, and models are served.
`--quick` ends after the archives were looked through.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
import venv
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import fd_core
from fd_core.config.paths import find_cache_dir
from tests.releases.archives import Distribution, distributions, faults, read_archive, tracked

ROOT = Path(__file__).parents[2]
START_SECONDS = 240


def main() -> None:
    """Build, check, install and serve; exit with the faults."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--dist", type=Path, default=ROOT / "dist")
    parser.add_argument("--quick", action="store_true")
    arguments = parser.parse_args()
    found = distributions(ROOT)
    archives = build(found, arguments.dist.resolve())
    wrong = check_archives(found, archives)
    if wrong:
        sys.exit("\n".join(wrong))
    if arguments.quick:
        return
    with tempfile.TemporaryDirectory(prefix="fd-release-") as folder:
        wheels = [path for path in archives if path.suffix == ".whl"]
        try_wheels(Path(folder, "wheels"), wheels)
        try_sdist(
            Path(folder, "sdist"),
            next(path for path in archives if path.name.startswith("fd_core-") and path not in wheels),
        )
    print(f"{len(archives)} archives of {len(found)} distributions, installed and served; they lie in {arguments.dist}")


def build(found: list[Distribution], dist: Path) -> list[Path]:
    """Build every sdist, and from each sdist its wheel; return the archives, which `twine` found well described."""
    shutil.rmtree(dist, ignore_errors=True)
    for each in found:
        run(sys.executable, "-m", "build", "--no-isolation", "--outdir", str(dist), str(each.folder))
    archives = sorted(dist.iterdir())
    run(sys.executable, "-m", "twine", "check", "--strict", *map(str, archives))
    return archives


def check_archives(found: list[Distribution], archives: list[Path]) -> list[str]:
    """Return the faults in the content of archives."""
    wrong = []
    for each in found:
        mine = [path for path in archives if path.name.startswith(f"{each.package}-")]
        if sorted(path.suffix for path in mine) != [".gz", ".whl"]:
            wrong.append(f"{each.name} has {[path.name for path in mine]} instead of a wheel and an sdist")
        for path in mine:
            wrong += faults(each.package, path.name, read_archive(path), tracked(each), str(ROOT))
    return wrong


def try_wheels(folder: Path, wheels: list[Path]) -> None:
    """Install all wheels and serve: the null backend, and smollm2 on the processor if it was fetched before."""
    smollm2 = any((find_cache_dir() / "models" / "smollm2").glob("*.gguf"))
    core = next(path for path in wheels if path.name.startswith("fd_core-"))
    # Install torch first and alone, so that no other package selects its build.
    stages = [[f"{core}[cpu]"]] if smollm2 else []
    home = Environment(folder, [*stages, [*map(str, wheels), "mypy>=1.13"]])
    home.introduce([path.name.split("-")[0] for path in wheels])
    home.check_types()
    home.serve("null", "--backend", "null")
    if smollm2:
        answer = home.serve("smollm2", "--backend", "cpu")
        if "Paris" not in answer:
            sys.exit(f"smollm2 was asked for the capital of France and answered {answer!r}")
    else:
        print("smollm2 is not in the cache folder: it was not served")


def try_sdist(folder: Path, sdist: Path) -> None:
    """Install the core from its sdist and serve the null backend."""
    home = Environment(folder, [[str(sdist)]])
    home.introduce(["fd_core"])
    home.serve("null", "--backend", "null")


class Environment:
    """Virtual environment in a folder, isolated from the checkout."""

    def __init__(self, folder: Path, stages: list[list[str]]) -> None:
        self.folder = folder
        venv.create(folder, with_pip=True)
        self.environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "FD_"))}
        self.environment |= {"FD_CACHE": str(find_cache_dir()), "VIRTUAL_ENV": str(folder)}
        for words in stages:
            self.run("python", "-m", "pip", "install", "--quiet", *words)

    def run(self, program: str, *words: str) -> str:
        """Run a program of the environment in its folder; return what it printed."""
        return run(str(self.folder / "bin" / program), *words, cwd=self.folder, env=self.environment)

    def introduce(self, packages: list[str]) -> None:
        """Check the version and the plugins that `fdcore` prints; all must be installed in the environment."""
        if self.run("fdcore", "--version").strip() != f"fdcore {fd_core.__version__}":
            sys.exit("`fdcore --version` prints another version than the checkout's")
        listed = self.run("fdcore", "plugins", "list")
        missing = [each for each in packages if each != "fd_core" and each.replace("_", "-") not in listed]
        if missing:
            sys.exit(f"`fdcore plugins list` leaves out {missing}:\n{listed}")
        self.run("fdcore", "plugins", "check")
        where = f"import importlib.util as find; print([find.find_spec(name).origin for name in {packages}])"
        homes = re.findall(r"'([^']+)'", self.run("python", "-c", where))
        if len(homes) != len(packages) or not all(Path(each).is_relative_to(self.folder) for each in homes):
            sys.exit(f"not all of {packages} are installed in the environment: {homes}")

    def check_types(self) -> None:
        """Check a project outside, strictly, against what is installed."""
        project = self.folder / "project"
        project.mkdir()
        shutil.copy(Path(__file__).with_name("outside.py"), project / "outside.py")
        self.run(
            "python", "-m", "mypy", "--strict", "--config-file=", "--python-version=3.11", str(project / "outside.py")
        )
        if checker := shutil.which("pyright"):
            python = str(self.folder / "bin" / "python")
            run(checker, "--pythonpath", python, str(project / "outside.py"), cwd=self.folder, env=self.environment)

    def serve(self, model: str, *flags: str) -> str:
        """Serve a model, send a request over HTTP, and end the server with Ctrl-C; return the answer's text."""
        port = free_port()
        with self.serving(model, *flags, "--port", str(port)):
            url = f"http://127.0.0.1:{port}/v1/completions"
            prompt = "The capital of France is" if model == "smollm2" else [1, 2, 3]
            answer = ask(url, {"model": model, "prompt": prompt, "max_tokens": 5, "temperature": 0})
        if answer["usage"]["completion_tokens"] < 1:
            sys.exit(f"{model} answered nothing: {answer}")
        print(f"{model} answered {answer['choices'][0]['text']!r}")
        return str(answer["choices"][0]["text"])

    @contextmanager
    def serving(self, *words: str) -> Iterator[None]:
        """Run `fdcore serve` until the block ends; it has to end in order."""
        log = self.folder / "serve.log"
        with log.open("w") as output:
            command = [str(self.folder / "bin" / "fdcore"), "serve", *words]
            started = subprocess.Popen(command, cwd=self.folder, env=self.environment, stdout=output, stderr=output)
        try:
            deadline = time.monotonic() + START_SECONDS
            while not ready(words[-1]):
                if started.poll() is not None or time.monotonic() > deadline:
                    sys.exit(f"`fdcore serve` did not start:\n{log.read_text()}")
                time.sleep(0.2)
            yield
            started.send_signal(signal.SIGINT)
            if started.wait(60) not in (0, 130) or "Traceback" in log.read_text():
                sys.exit(f"`fdcore serve` did not end in order:\n{log.read_text()}")
        finally:
            started.kill()
            started.wait(10)


def ready(port: str) -> bool:
    """Return whether a server of this machine takes requests."""
    try:
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/ready", timeout=5) as answer:
            return bool(answer.status == 200)
    except (urllib.error.URLError, OSError):
        return False


def ask(url: str, body: Mapping[str, Any]) -> Any:
    """Send JSON, return the JSON of the response."""
    request = urllib.request.Request(url, json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


def free_port() -> int:
    """Return a free port."""
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


def run(*command: str, cwd: Path = ROOT, env: Mapping[str, str] | None = None) -> str:
    """Run a command and return what it printed; show it and exit if it fails."""
    print(
        "$",
        " ".join(Path(command[0]).name if index == 0 else word for index, word in enumerate(command))[:160],
        flush=True,
    )
    done = subprocess.run(command, cwd=cwd, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    if done.returncode:
        sys.exit(f"{done.stdout}\nthis failed: {' '.join(command)}")
    return done.stdout


if __name__ == "__main__":
    main()
