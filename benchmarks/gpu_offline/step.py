"""Run steps of `gpu_session.py` on a machine without a network, from an unpacked archive of `bundle.py`.

    python benchmarks/gpu_offline/step.py environment hardware [--results FOLDER]

Installs the archive's wheels into a folder of their own on the first call, shows `fdcore env`, and runs the steps with
the Python that calls it, whose torch and Triton they use. Each step takes less than nine minutes and is useful alone;
without a name, all run in order. Exits with 1 if a step fails.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PIP = ("-m", "pip", "install", "-q", "--no-index", "--no-deps", "--no-compile", "--disable-pip-version-check")


def installed(wheels: Path, site: Path) -> Path:
    """Return the folder with the installed wheels; installs them unless the same ones are there."""
    names = "\n".join(sorted(f"{wheel.name} {wheel.stat().st_mtime_ns}" for wheel in wheels.glob("*.whl")))
    if not names:
        raise SystemExit(f"no wheels in {wheels}: unpack an archive of bundle.py here")
    done = site / "installed.txt"
    if not done.exists() or done.read_text(encoding="utf-8") != names:
        files = sorted(str(wheel) for wheel in wheels.glob("*.whl"))
        subprocess.run([sys.executable, *PIP, "--upgrade", "--target", str(site), *files], check=True)
        done.write_text(names, encoding="utf-8")
    return site


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("steps", nargs="*", metavar="STEP", help="a step of gpu_session.py; by default all")
    parser.add_argument("--results", type=Path, default=ROOT / "results", metavar="FOLDER")
    chosen = parser.parse_args(arguments)
    site = installed(ROOT / "wheels", ROOT / "site")
    paths = [str(site), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    if (ROOT / "cache").is_dir():
        environment["FD_CACHE"] = str(ROOT / "cache")
    subprocess.run([sys.executable, "-m", "fd_core", "env"], env=environment, check=False)
    only = ["--only", *chosen.steps] if chosen.steps else []
    command = [sys.executable, str(ROOT / "benchmarks" / "gpu_session.py"), "--results", str(chosen.results), *only]
    return subprocess.run(command, env=environment, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
