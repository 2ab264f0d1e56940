"""Runs `fdcore` with secrets from variables: `python -m fd_core.cli.serving.sealed serve ...`.

The content of a variable `FD_CONTENT_OF_X` becomes a file in memory, which only this process and its children can read,
and `FD_X` its path. So secrets are never in a command line or on a disk.
"""

from __future__ import annotations

import os

from fd_core.cluster.config import CONTENT


def unseal() -> None:
    """Replace variables that hold the content of a file by variables that name one."""
    for name in [name for name in os.environ if name.startswith(CONTENT)]:
        descriptor = os.memfd_create(name)
        os.fchmod(descriptor, 0o600)
        os.write(descriptor, f"{os.environ.pop(name)}\n".encode())
        os.environ[f"FD_{name.removeprefix(CONTENT)}"] = f"/proc/{os.getpid()}/fd/{descriptor}"


if __name__ == "__main__":
    from fd_core.cli.main import main

    unseal()
    main()
