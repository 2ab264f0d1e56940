"""Runs torch's extension builder: `python -m fd_core.ops.native.compiler FOLDER FLAG ... -- SOURCE ...`.

A process of its own, started by `build`: the builder brings setuptools along, which insists on being imported before
anything else touches distutils. The last line printed is the path of the library.
"""

from __future__ import annotations

import importlib.util
import os
import shutil
import sys

__all__ = ["main"]


def main(folder: str, *arguments: str) -> int:
    """Compile into `folder` and print where the library is; the compiler's messages go to standard error."""
    _put_ninja_on_path()
    from torch.utils import cpp_extension

    split = arguments.index("--")
    try:
        built = cpp_extension.load(
            name="fd_native",
            sources=list(arguments[split + 1 :]),
            extra_cflags=list(arguments[:split]),
            extra_ldflags=["-pthread"],
            build_directory=folder,
            is_python_module=False,
        )
    except (RuntimeError, ImportError) as error:
        print(error, file=sys.stderr)
        return 1
    print(built or os.path.join(folder, "fd_native.so"))  # noqa: PTH118 - goes out as text
    return 0


def _put_ninja_on_path() -> None:
    """Let torch find the ninja of this environment, also where the environment was not activated."""
    if shutil.which("ninja") is None and importlib.util.find_spec("ninja") is not None:
        import ninja

        os.environ["PATH"] = os.pathsep.join((ninja.BIN_DIR, os.environ.get("PATH", "")))


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
