"""Build a release: the wheel, the sdist, their SBOM and their checksums.

    make release                  into dist/
    python deploy/release.py --draft    also with changes that are not committed, or a version that is not final

Everything is built twice, in folders, time zones and with masks of files that differ, and must have the same bytes.
The time in the archives is that of the last commit. The SBOM (CycloneDX 1.6) lists the files of the wheel with their
SHA-256, the requirements of the wheel, and the versions with which it was tested.
"""

import argparse
import hashlib
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from datetime import UTC, datetime
from email.parser import BytesParser
from pathlib import Path
from tempfile import TemporaryDirectory
from uuid import NAMESPACE_URL, uuid5
from zipfile import ZipFile

from cyclonedx.model import HashAlgorithm, HashType, Property
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentScope, ComponentType
from cyclonedx.model.license import DisjunctiveLicense
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).resolve().parent.parent
_WAYS: Sequence[Mapping[str, str]] = ({"TZ": "UTC", "umask": "022"}, {"TZ": "Asia/Tokyo", "umask": "077"})


class NoRelease(Exception):
    """The release cannot be built; the text says why."""


def main() -> int:
    """Build the release that the command line describes; return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=ROOT / "dist", help="folder of the files (default: dist)")
    parser.add_argument("--draft", action="store_true", help="build it whatever its version and the checkout are")
    args = parser.parse_args()
    try:
        if not args.draft:
            check(version_of(ROOT), (ROOT / "CHANGELOG.md").read_text(), _git("status", "--porcelain"))
        for name in release(args.out, ROOT):
            print(args.out / name)
    except NoRelease as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    return 0


def version_of(checkout: Path) -> str:
    """Return the version in pyproject.toml."""
    return str(tomllib.loads((checkout / "pyproject.toml").read_text())["project"]["version"])


def check(version: str, changelog: str, changes: str) -> None:
    """Check that a version can be released.

    Args:
        version: of pyproject.toml.
        changelog: the text of CHANGELOG.md.
        changes: what `git status --porcelain` prints.

    Raises:
        NoRelease: if it cannot.
    """
    if changes.strip():
        raise NoRelease(f"commit these changes first, or give --draft:\n{changes.rstrip()}")
    if not re.fullmatch(r"\d+\.\d+\.\d+", version):
        raise NoRelease(f"{version} in pyproject.toml is not final: drop what follows the third number")
    if not re.search(rf"^## {re.escape(version)}\b", changelog, re.MULTILINE):
        raise NoRelease(f"CHANGELOG.md has no heading `## {version}`: give the text under Unreleased this one")
    unreleased = re.search(r"^## Unreleased$(.*?)^## ", changelog, re.MULTILINE | re.DOTALL)
    if unreleased and re.search(r"^[^#\s]", unreleased[1], re.MULTILINE):
        raise NoRelease(
            f"CHANGELOG.md has changes under Unreleased, which {version} would bring without a word: give them the "
            "heading of the next version, and pyproject.toml that version"
        )


def release(out: Path, checkout: Path) -> list[str]:
    """Build all files of a release into a folder, and return their names.

    Raises:
        NoRelease: if two builds differ.
    """
    out.mkdir(parents=True, exist_ok=True)
    time = _git("log", "-1", "--format=%ct", cwd=checkout).strip()
    with TemporaryDirectory() as scratch:
        folders = [Path(scratch, str(number)) for number in range(len(_WAYS))]
        for folder, way in zip(folders, _WAYS, strict=True):
            build(checkout, folder, time, way)
        first, *others = ({path.name: path.read_bytes() for path in folder.glob("fedring-*")} for folder in folders)
        for other in others:
            if differing := sorted(name for name in first | other if first.get(name) != other.get(name)):
                raise NoRelease(f"two builds of {', '.join(differing)} differ")
    files = dict(first)
    (wheel,) = (name for name in files if name.endswith(".whl"))
    for name, data in files.items():
        (out / name).write_bytes(data)
    constraints = (checkout / "constraints.txt").read_text()
    sbom = f"{wheel.removesuffix('-py3-none-any.whl')}.cdx.json"
    files[sbom] = sbom_of(out / wheel, constraints, datetime.fromtimestamp(int(time), UTC)).encode()
    (out / sbom).write_bytes(files[sbom])
    sums = "".join(f"{hashlib.sha256(data).hexdigest()}  {name}\n" for name, data in sorted(files.items()))
    (out / "SHA256SUMS").write_text(sums)
    return [*sorted(files), "SHA256SUMS"]


def build(checkout: Path, folder: Path, time: str, way: Mapping[str, str]) -> None:
    """Build wheel and sdist of a clone of the checkout's last commit into a folder."""
    folder.mkdir()
    source = folder / "source"
    _git("clone", "--quiet", str(checkout), str(source), cwd=folder)
    env = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    env |= {"SOURCE_DATE_EPOCH": time, "TZ": way["TZ"]}
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), str(source)]
    done = subprocess.run(command, env=env, capture_output=True, text=True, check=False, umask=int(way["umask"], 8))
    if done.returncode:
        raise NoRelease(f"the build failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")


def sbom_of(wheel: Path, constraints: str, time: datetime) -> str:
    """Return the SBOM of a wheel, the same for the same arguments.

    Args:
        wheel: the file.
        constraints: the text of constraints.txt.
        time: of the release.
    """
    tested = dict(line.split("==") for line in constraints.splitlines() if "==" in line and not line.startswith("#"))
    tested = {_plain(name): version for name, version in tested.items()}
    with ZipFile(wheel) as archive:
        (metadata_file,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        metadata = BytesParser().parsebytes(archive.read(metadata_file))
        inside = [_file(name, archive.read(name)) for name in sorted(archive.namelist())]
    digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
    product = Component(
        name="fedring",
        version=metadata["Version"],
        type=ComponentType.APPLICATION,
        bom_ref="fedring",
        purl=PackageURL("pypi", None, "fedring", metadata["Version"]),
        licenses=[DisjunctiveLicense(id=metadata["License-Expression"])],
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=digest)],
    )
    required = list(_requirements(metadata.get_all("Requires-Dist") or [], tested))
    bom = Bom(components=[*inside, *required], serial_number=uuid5(NAMESPACE_URL, f"sha256:{digest}"))
    bom.metadata.timestamp = time
    bom.metadata.component = product
    bom.register_dependency(product, required)
    return str(JsonV1Dot6(bom).output_as_string(indent=2)) + "\n"


def _file(name: str, data: bytes) -> Component:
    digest = HashType(alg=HashAlgorithm.SHA_256, content=hashlib.sha256(data).hexdigest())
    return Component(name=name, type=ComponentType.FILE, bom_ref=f"file:{name}", hashes=[digest])


def _requirements(lines: Sequence[str], tested: Mapping[str, str]) -> Iterator[Component]:
    """Yield a component for each requirement; those of extras are optional."""
    for line in sorted(set(lines)):
        requirement, _, marker = line.partition(";")
        match = re.match(r"[\w.-]+", requirement)
        if match is None or match[0] == "fedring":  # an extra that is made of others
            continue
        version = tested.get(_plain(match[0]))
        yield Component(
            name=match[0],
            version=version,
            type=ComponentType.LIBRARY,
            bom_ref=f"requires:{line}",
            purl=PackageURL("pypi", None, _plain(match[0]), version),
            scope=ComponentScope.OPTIONAL if "extra ==" in marker else ComponentScope.REQUIRED,
            properties=[Property(name="fedring:requirement", value=line)],
        )


def _plain(name: str) -> str:
    """Return the name of a package as an index compares it (PEP 503)."""
    return re.sub(r"[-_.]+", "-", name).lower()


def _git(*arguments: str, cwd: Path = ROOT) -> str:
    return subprocess.run(["git", *arguments], cwd=cwd, capture_output=True, text=True, check=True).stdout


if __name__ == "__main__":
    sys.exit(main())
