"""Build the sites of several versions beside each other, with a menu of versions on each page.

    python docs/site/versions.py OUT REF [REF ...]

Each REF is a tag, a branch or a commit with a `docs/site`, and gets the folder OUT/REF. OUT/index.html leads to the
first one, so name the newest version first. The pages are those of the commit; the tools are those of this environment.
"""

import io
import os
import subprocess
import sys
import tarfile
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent.parent
LINK = "{0}/index.html"
FIRST = f'<!doctype html><meta http-equiv="refresh" content="0; url={LINK}"><a href="{LINK}">fedring {{0}}</a>\n'


def main(out: Path, refs: list[str]) -> None:
    """Build one site for each commit, and a first page that leads to the first one."""
    for ref in refs:
        packed = subprocess.run(["git", "archive", ref], cwd=ROOT, stdout=subprocess.PIPE, check=True).stdout
        with tempfile.TemporaryDirectory() as folder:
            with tarfile.open(fileobj=io.BytesIO(packed)) as archive:
                archive.extractall(folder, filter="data")
            environment = os.environ | {"SITE_VERSION": ref, "SITE_VERSIONS": " ".join(refs)}
            options = ["--quiet", "--fail-on-warning", "--keep-going", "--conf-dir", "docs/site", "--builder", "html"]
            command = [
                sys.executable,
                "-m",
                "sphinx",
                *options,
                "-d",
                f"{folder}/.doctrees",
                ".",
                str(out.absolute() / ref),
            ]
            subprocess.run(command, cwd=folder, env=environment, check=True)
    (out / "index.html").write_text(FIRST.format(refs[0]), encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) < 3:
        sys.exit(__doc__)
    main(Path(sys.argv[1]), sys.argv[2:])
