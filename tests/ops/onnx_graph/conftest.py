from importlib.util import find_spec

from tests.models.conftest import one_thread, tiny  # noqa: F401  # fixtures

collect_ignore_glob = [] if find_spec("onnx") and find_spec("onnxruntime") else ["test_*.py"]
"""`nox -s onnx` installs the required packages."""
