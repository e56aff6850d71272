"""Generate the Python code of the .proto files, beside them.

This is both a script (`python protos/generate.py`) and hatchling's build hook. An old
generator writes the code on purpose: its code runs on every later protobuf.

With --freeze, the script also writes the declarations to protocol.json. It refuses to do so
if something was removed or changed and PROTOCOL was not raised.
"""

import json
import os
import runpy
import sys
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface

ROOT = Path(__file__).parent


def generate(root: Path = ROOT) -> None:
    """Write *_pb2.py, *_pb2_grpc.py and their stubs next to every .proto below `root`."""
    # protoc finds the mypy plugins beside this interpreter, even in an isolated build.
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])
    _protoc(root, *(f"--{name}={root}" for name in ("python_out", "grpc_python_out", "mypy_out", "mypy_grpc_out")))


def freeze(root: Path = ROOT) -> None:
    """Write protocol.json in `root`.

    Raises:
        SystemExit: if the protocol cannot be frozen, with a text that says why.
    """
    import frozen  # beside this file, where a build does not look

    path = root / "protocol.json"
    protocol = runpy.run_path(str(root.parent / frozen.CONTRACT))["PROTOCOL"]
    before = json.loads(path.read_text(encoding="utf-8")) if path.exists() else None
    try:
        wire = frozen.freeze(before, frozen.describe(declared(root).file), protocol)
    except frozen.Refused as error:
        raise SystemExit(str(error)) from error
    path.write_text(json.dumps(wire, indent=2) + "\n", encoding="utf-8")


def declared(root: Path = ROOT) -> Any:
    """Return the FileDescriptorSet of every .proto below `root`."""
    from google.protobuf.descriptor_pb2 import FileDescriptorSet

    with TemporaryDirectory() as folder:
        written = Path(folder) / "descriptors"
        _protoc(root, f"--descriptor_set_out={written}")
        return FileDescriptorSet.FromString(written.read_bytes())


def _protoc(root: Path, *outputs: str) -> None:
    from grpc_tools import protoc  # type: ignore[import-untyped]  # a build requirement only

    files = [str(path.relative_to(root)) for path in sorted(root.rglob("*.proto"))]
    if protoc.main(["protoc", f"-I{root}", *outputs, *files]) != 0:
        raise SystemExit("protoc failed")


class GenerateHook(BuildHookInterface[Any]):
    """Runs `generate` before any build.

    That is of a wheel, an sdist or an editable install.
    """

    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        generate(Path(self.root) / "protos")


if __name__ == "__main__":
    if sys.argv[1:] not in ([], ["--freeze"]):
        raise SystemExit("usage: python protos/generate.py [--freeze]")
    generate()
    if sys.argv[1:]:
        freeze()
