"""Rules for the source tree that no other tool checks."""

import ast
import importlib.metadata
import io
import random
import re
import subprocess
import sys
import tomllib
import zipfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from zlib import crc32

import numpy as np
import pytest
import torch
from google.protobuf.descriptor import FileDescriptor
from tests.conftest import SEED

from fedring.extras import PACKAGES
from fedring.rpc.chunks import CHUNK_BYTES, chunk_message
from fedring.v1 import control_pb2, federation_pb2

ROOT = Path(__file__).parents[3]
SOURCE_ROOTS = [ROOT / name for name in ("server", "client", "common", "protos")]
SOURCES = [path for root in SOURCE_ROOTS for path in sorted(root.rglob("*.py")) if "_pb2" not in path.name]
PROTOS = sorted((ROOT / "protos").rglob("*.proto"))
MAX_MESSAGE = 2 << 20
MOST_FUNCTIONS, MOST_MODULES = 20, 18
KNOWN_BY_USERS = {"RingProcessGroup", "HookState", "Control"}
MAX_LINES = 600  # 300 are usual, and one thought a file is the rule

FORBIDDEN = {
    "pickle": r"\bpickle\b(?!\.UnpicklingError)",
    "eval or exec": r"(?<![\w.])(eval|exec)\(",
    "yaml.load": r"\byaml\.(unsafe_|full_)?load\(",
    "allow_pickle": r"allow_pickle\s*=\s*True",
    "torch.load without weights_only": r"(?<!safetensors\.)\btorch\.load\((?![^\n]*weights_only=True)",
    "marshal or shelve": r"\bimport (marshal|shelve|dill|cloudpickle|joblib)\b",
}
ALLOWED = {("common/fedring/train/tensors/files.py", "pickle"): ["import pickle"]}
"""Lines that may stay. files.py needs only the exception class pickle.UnpicklingError, which torch.load raises."""


GONE = {
    *(
        "aifc",
        "asynchat",
        "asyncore",
        "audioop",
        "cgi",
        "cgitb",
        "chunk",
        "crypt",
        "distutils",
        "imghdr",
        "imp",
        "lib2to3",
    ),
    *("mailcap", "msilib", "nis", "nntplib", "ossaudiodev", "pipes", "smtpd", "sndhdr", "spwd", "sunau", "telnetlib"),
    *("uu", "xdrlib"),
}
"""Modules of Python 3.11 that 3.12 to 3.14 no longer have (their pages "What's New")."""


def test_no_module_is_imported_that_a_later_python_lacks() -> None:
    found = set()
    for path in SOURCES:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {(str(path), name.name.partition(".")[0]) for name in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add((str(path), str(node.module).partition(".")[0]))
    assert {(path, name) for path, name in found if name in GONE} == set()


def test_no_class_has_more_than_twenty_functions() -> None:
    """Those whose names users know, or torch's, may have more."""
    classes = [
        node
        for path in SOURCES
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.ClassDef)
    ]
    kinds = (ast.FunctionDef, ast.AsyncFunctionDef)
    large = {each.name for each in classes if sum(isinstance(part, kinds) for part in each.body) > MOST_FUNCTIONS}
    assert large == KNOWN_BY_USERS


def test_no_room_has_more_than_eighteen_modules() -> None:
    rooms = Counter(path.parent for path in SOURCES if not path.name.startswith("__"))
    assert {room: count for room, count in rooms.items() if count > MOST_MODULES} == {}


def test_no_source_root_has_an_init_file_in_the_shared_namespace() -> None:
    assert [root for root in SOURCE_ROOTS if not (root / "fedring").is_dir()] == []
    assert list(ROOT.glob("*/fedring/__init__.py")) == []


def test_every_package_has_a_py_typed_file() -> None:
    packages = {path.parent for root in SOURCE_ROOTS for path in (root / "fedring").glob("*/*.py")}
    assert sorted(package for package in packages if not (package / "py.typed").is_file()) == []


@pytest.mark.parametrize("name", FORBIDDEN)
def test_no_function_is_used_that_could_execute_received_data(name: str) -> None:
    found = []
    for path in SOURCES:
        allowed = ALLOWED.get((str(path.relative_to(ROOT)), name), [])
        for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), 1):
            if re.search(FORBIDDEN[name], line) and line.strip() not in allowed:
                found.append(f"{path.relative_to(ROOT)}:{number}: {line.strip()}")
    assert found == []


@pytest.mark.parametrize(
    ("name", "line"),
    [
        ("pickle", "import pickle"),
        ("pickle", "pickle.loads(data)"),
        ("eval or exec", "x = eval(text)"),
        ("torch.load without weights_only", "torch.load(path)"),
        ("torch.load without weights_only", "torch.load(path, weights_only=False)"),
        ("allow_pickle", "np.load(path, allow_pickle=True)"),
        ("yaml.load", "yaml.load(text)"),
    ],
)
def test_the_patterns_find_what_is_forbidden(name: str, line: str) -> None:
    assert re.search(FORBIDDEN[name], line)


def test_the_eval_mode_of_a_torch_model_is_not_forbidden() -> None:
    assert not re.search(FORBIDDEN["eval or exec"], "model.to(device).eval()")


def test_no_file_is_too_long() -> None:
    files = [*SOURCES, *(ROOT / "tests").rglob("*.py"), *PROTOS]
    lengths = {path: len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {str(path.relative_to(ROOT)): n for path, n in lengths.items() if n > MAX_LINES} == {}


def fields(text: str) -> Iterator[tuple[str, str, bool]]:
    """Yield for each field of each message: the message, the field, and whether a comment is above it or behind it."""
    message, commented = "", False
    for line in text.splitlines():
        code, slashes, _ = line.partition("//")
        code = code.strip()
        if opened := re.match(r"message (\w+) \{", code):
            message = opened[1]
            code = code[opened.end() :]
        if found := re.search(r"[\w.>]+ (\w+) = \d+;", code):
            yield message, found[1], commented or bool(slashes)
            commented = False
        elif slashes:
            commented = True
        elif not code.startswith("oneof"):
            commented = False


@pytest.mark.parametrize("path", PROTOS, ids=lambda path: path.stem)
def test_every_field_of_a_message_has_a_comment(path: Path) -> None:
    unexplained = [f"{message}.{name}" for message, name, commented in fields(path.read_text()) if not commented]
    assert unexplained == []


@pytest.mark.parametrize("file", [federation_pb2.DESCRIPTOR, control_pb2.DESCRIPTOR], ids=lambda file: file.name)
def test_the_search_for_fields_without_a_comment_sees_every_field(file: FileDescriptor) -> None:
    known = {(message.name, field.name) for message in file.message_types_by_name.values() for field in message.fields}
    text = (ROOT / "protos" / file.name).read_text()
    found = {(message, name) for message, name, _ in fields(re.sub(r"enum \w+ \{[^}]*\}", "", text))}
    assert found == known


def test_no_chunk_makes_a_message_longer_than_two_mebibytes() -> None:
    longest = chunk_message(2**62, bytes(CHUNK_BYTES))
    assert CHUNK_BYTES < len(longest) + 5 <= MAX_MESSAGE
    for kind in (federation_pb2.ModelBlob, federation_pb2.ClientUpdate):
        chunk = kind.FromString(longest).chunk
        assert (chunk.offset, len(chunk.data)) == (2**62, CHUNK_BYTES)


def test_every_kind_of_event_is_documented() -> None:
    server = "".join(path.read_text() for path in (ROOT / "server").rglob("*.py"))
    written = set(
        re.findall(r"""(?:journal\.write|\.tell|\.note|news\.append\()\(\s*(?:[\w.]+,\s*)?"(\w+)",""", server)
    )
    comment = re.search(
        r"message Event \{(.*?)string kind", (ROOT / "protos" / control_pb2.DESCRIPTOR.name).read_text(), re.S
    )
    assert comment is not None
    assert set(re.findall(r'"(\w+)"', comment[1])) == written


def tracked(*patterns: str) -> list[str]:
    """Return the files that git tracks and whose paths match one of the patterns."""
    if not (ROOT / ".git").exists():
        pytest.skip("this is not a git checkout")
    output = subprocess.run(["git", "ls-files", *patterns], cwd=ROOT, capture_output=True, text=True, check=True)
    return output.stdout.split()


def test_the_size_of_the_wheel_in_the_pages_is_the_one_that_it_has() -> None:
    with zipfile.ZipFile(io.BytesIO(), "w", zipfile.ZIP_DEFLATED) as archive:
        for name in ("server", "client", "common", "protos"):
            for path in (ROOT / name / "fedring").rglob("*"):
                if path.is_file() and "__pycache__" not in path.parts:
                    archive.write(path, path.relative_to(ROOT / name))
        size = sum(each.compress_size + 2 * len(each.filename) + 110 for each in archive.infolist())
    told = re.search(r"^\| the wheel \| ([0-9.]+) MB \|$", (ROOT / "docs" / "install.md").read_text(), re.MULTILINE)
    assert told
    assert float(told[1]) == pytest.approx(size / 1e6, rel=0.12)


def test_generated_code_is_not_committed() -> None:
    assert tracked("*_pb2*") == []


def test_every_package_that_is_imported_is_declared() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    declared = [
        *project["dependencies"],
        *(line for extra in (*PACKAGES, "tracing", "privacy") for line in extras[extra]),
    ]
    names = {_name_of(requirement) for requirement in declared}
    beside = {"secure_vectors", "vector_cases"}  # protos/vectors.py
    own = {"fedring", *beside, *sys.stdlib_module_names}
    owners = importlib.metadata.packages_distributions()
    for path in set(SOURCES) - {ROOT / "protos" / "generate.py"}:  # it runs only in a build
        for module in imported(ast.parse(path.read_text())) - own:
            packages = {_name_of(owner) for owner in owners.get(module, [])}
            assert packages & names, f"{path.relative_to(ROOT)} imports {module}"


def imported(tree: ast.Module) -> set[str]:
    """Return the top-level names of all modules that the code imports."""
    names: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            names.update(alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.add(node.module.partition(".")[0])
    return names


def _name_of(requirement: str) -> str:
    return re.split(r"[\[<>=!~ ]", requirement)[0].lower().replace("_", "-")


def test_every_dependency_is_pinned_to_a_version_and_to_no_index() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    lines = [line for line in (ROOT / "constraints.txt").read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[A-Za-z0-9._-]+==[0-9][A-Za-z0-9.]*", line) for line in lines), lines
    assert lines == sorted(lines, key=str.lower)
    pinned = {line.partition("==")[0].lower().replace("_", "-") for line in lines}
    wanted = [*project["project"]["dependencies"], *project["dependency-groups"]["dev"]]
    assert {_name_of(requirement) for requirement in wanted} - pinned == set()


def test_each_test_draws_the_same_random_numbers_each_time(request: pytest.FixtureRequest) -> None:
    seed = crc32(f"{SEED} {request.node.nodeid}".encode())
    assert random.random() == random.Random(seed).random()
    assert np.random.random() == np.random.RandomState(seed).random()
    assert torch.rand(1) == torch.rand(1, generator=torch.Generator().manual_seed(seed))
