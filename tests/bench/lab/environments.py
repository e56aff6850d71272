"""Environments of other systems, each made once in a cache folder, with the torch of this one."""

import os
import subprocess
import sys
import venv
from pathlib import Path

import torch

PFL = "pfl==0.6.0"
FLOWER = "flwr[simulation]==1.41.0"
NVFLARE = "nvflare==2.9.0"


def environment(requirement: str) -> str:
    """Return the interpreter of an environment with this package and torch.

    Args:
        requirement: Such as NAME==VERSION.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    torch_version = torch.__version__.partition("+")[0]
    name = requirement.replace("==", "-").replace("[", "-").replace("]", "")
    folder = cache / "fedring" / f"{name}-torch-{torch_version}"
    python = folder / "bin" / "python"
    if not (folder / "made").exists():
        print(f"making {folder}", file=sys.stderr)
        venv.create(folder, clear=True, with_pip=True)
        install = [str(python), "-m", "pip", "install", "--quiet", f"torch=={torch_version}", requirement]
        subprocess.run(install, check=True, stdout=sys.stderr)
        (folder / "made").touch()
    return str(python)
