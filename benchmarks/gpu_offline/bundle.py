"""Write the archive that a machine with an NVIDIA GPU and without a network needs to run the steps of `step.py`.

    python benchmarks/gpu_offline/bundle.py FILE.tar [--present FILE] [--model] [--piece-mib 60]

There: `cat FILE.tar.* | tar x`, and `python benchmarks/gpu_offline/step.py NAME`.

The archive contains wheels of the core, of gpu_cuda and of their dependencies, at this environment's versions and for
the target's tags, and the benchmarks and tests that the steps run. `--present` names a file with the packages that the
target has, in the format of `pip freeze` or of `pip list`; by default torch, Triton and NumPy with what they need.
`--model` adds SmolLM2, which the step `http` needs, and `--piece-mib` splits the archive for transfers of limited size.
Needs a network.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
OURS = {"fd-core": ROOT, "fd-gpu-cuda": ROOT / "plugins" / "gpu_cuda"}
"""Distributions that are built here, with their folders."""
ROOTS = ("fd-core[conformance]", "fd-gpu-cuda[test]")
CARRIED = ("benchmarks", "plugins/gpu_cuda/tests", "plugins/gpu_cuda/pyproject.toml", "pyproject.toml")
"""Paths of this repository that the steps read."""
USUAL = dict.fromkeys(("torch", "triton", "numpy", "pip", "setuptools"), "")
OLDEST_GLIBC, MANYLINUX = 17, re.compile(r"manylinux_2_(\d+)_(\w+)")


def packages_in(text: str) -> dict[str, str]:
    """Return the versions of a `pip freeze` or `pip list` by canonical name, "" for a line without one."""
    lines = (re.match(r"([A-Za-z0-9][A-Za-z0-9._-]*)(?:(?:==|\s+)(\d\S*))?\s*$", line) for line in text.splitlines())
    return {canonicalize_name(found[1]): found[2] or "" for found in lines if found}


def needed(roots: Sequence[str], present: Mapping[str, str], environment: dict[str, str]) -> dict[str, str]:
    """Return the versions of all packages that the roots need and that are not present, by name.

    A present version that a requirement excludes does not count. Versions are those installed here.

    Raises `SystemExit` with a package that is not installed.
    """
    found: dict[str, str] = {}
    seen: set[tuple[str, str]] = set()
    left = [Requirement(each) for each in roots]
    while left:
        each = left.pop()
        name = canonicalize_name(each.name)
        if name in present and (not present[name] or each.specifier.contains(present[name], prereleases=True)):
            continue
        try:
            installed = distribution(name)
        except PackageNotFoundError:
            raise SystemExit(f"{name} is not installed here, so its version is unknown: pip install {each}") from None
        found[name] = installed.version
        for extra in ("", *sorted(each.extras)):
            if (name, extra) not in seen:
                seen.add((name, extra))
                left += _dependencies(installed.requires or (), extra, environment)
    return dict(sorted(found.items()))


def _dependencies(requires: Sequence[str], extra: str, environment: dict[str, str]) -> Iterator[Requirement]:
    for line in requires:
        each = Requirement(line)
        given = environment | {"extra": extra}
        applies = each.marker is None or each.marker.evaluate(given)
        if applies and (not extra or (each.marker is not None and "extra" in str(each.marker))):
            yield each


def platforms(newest: str) -> list[str]:
    """Return the tags of wheels that run where `newest` does, for pip, which matches each one exactly."""
    found = MANYLINUX.fullmatch(newest)
    if found is None:
        return [newest]
    machine = found[2]
    older = [f"manylinux_2_{minor}_{machine}" for minor in range(int(found[1]), OLDEST_GLIBC - 1, -1)]
    return [*older, f"manylinux2014_{machine}", f"manylinux2010_{machine}", f"manylinux1_{machine}"]


def download(versions: dict[str, str], folder: Path, python: str, platform: str) -> None:
    """Fetch or build the wheels."""
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "-q"]
    for name in versions.keys() & OURS.keys():
        subprocess.run([*pip, "wheel", "--no-deps", "-w", str(folder), str(OURS[name])], check=True)
    tags = [word for tag in platforms(platform) for word in ("--platform", tag)]
    fetch = [*pip, "download", "--no-deps", "--only-binary=:all:", "--implementation", "cp", "--python-version", python]
    pins = [f"{name}=={version}" for name, version in versions.items() if name not in OURS]
    subprocess.run([*fetch, *tags, "-d", str(folder), *pins], check=True)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("file", type=Path, help="archive to write")
    parser.add_argument("--python", default="3.12", help="Python of the target")
    parser.add_argument("--platform", default="manylinux_2_34_x86_64", help="newest wheel tag that the target accepts")
    parser.add_argument("--model", action="store_true", help="add SmolLM2")
    parser.add_argument("--piece-mib", type=int, default=0, metavar="MIB", help="split the archive")
    parser.add_argument("--present", type=Path, metavar="FILE", help="packages that the target has")
    chosen = parser.parse_args(arguments)
    present = packages_in(chosen.present.read_text(encoding="utf-8")) if chosen.present else USUAL
    target = {"python_version": chosen.python, "python_full_version": f"{chosen.python}.0"}
    target |= {"sys_platform": "linux", "platform_system": "Linux", "os_name": "posix"}
    target |= {"platform_machine": chosen.platform.rpartition("_2_")[2].partition("_")[2] or "x86_64"}
    target |= {"implementation_name": "cpython", "platform_python_implementation": "CPython"}
    versions = needed(ROOTS, present, target)
    with tempfile.TemporaryDirectory() as place:
        wheels = Path(place) / "wheels"
        wheels.mkdir()
        download(versions, wheels, chosen.python, chosen.platform)
        with tarfile.open(chosen.file, "w") as archive:
            archive.add(wheels, "wheels")
            tracked = ["git", "-C", str(ROOT), "ls-files", "-z", "--cached", "--others", "--exclude-standard", *CARRIED]
            listed = subprocess.run(tracked, check=True, capture_output=True, text=True)
            for path in filter(None, listed.stdout.split("\0")):
                archive.add(ROOT / path, path)
            if chosen.model:
                from fd_core.models.catalog import resolve_model

                model = resolve_model("smollm2").path
                archive.add(model, f"cache/models/smollm2/{model.name}")
    print(f"{chosen.file}: {len(versions)} wheels, {chosen.file.stat().st_size / 1e6:.0f} MB")
    if chosen.piece_mib:
        split(chosen.file, chosen.piece_mib << 20)


def split(file: Path, size: int) -> None:
    """Replace a file by pieces FILE.00, FILE.01 and so on of at most `size` bytes."""
    with file.open("rb") as whole:
        for index, piece in enumerate(iter(lambda: whole.read(size), b"")):
            file.with_name(f"{file.name}.{index:02}").write_bytes(piece)
    file.unlink()


if __name__ == "__main__":
    main()
