"""Generate the Python code of the .proto files, beside them.

Both a script (`python protos/generate.py`) and hatchling's build hook. The code
is written by an old generator on purpose: it runs on every later protobuf.
"""

import os
import sys
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def generate(root: Path = ROOT) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their stubs next to every .proto below `root`."""
    from grpc_tools import protoc  # type: ignore[import-untyped]  # a build requirement only

    # protoc finds the mypy plugins beside this interpreter, also in an isolated build
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    files = [str(path.relative_to(root)) for path in sorted(root.rglob("*.proto"))]
    outputs = [f"--{name}={root}" for name in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")]
    if protoc.main(["protoc", f"-I{root}", *outputs, *files]) != 0:
        raise SystemExit("protoc failed")


class GenerateHook(BuildHookInterface[Any]):
    """Runs `generate` before a wheel, an sdist or an editable install is made."""

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root) / "protos")


if __name__ == "__main__":
    generate()
