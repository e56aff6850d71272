"""torchvision, imported only when something needs it, and where its compiled part does not load, too."""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []  # a Library undefines its operators when it is collected


def load() -> ModuleType:
    """torchvision, ready for use; ImportError if it is not installed.

    A torchvision built for CUDA beside a torch built for the CPU cannot load its own operators, and its import then
    fails for the two that it only declares. Models and datasets use neither, so a declaration is all they lack.
    """
    if "torchvision" not in sys.modules and not _extension_loads():
        _declare_operators()
    return importlib.import_module("torchvision")


def _extension_loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None:
        return True  # nothing to repair: the import itself says what is wrong
    for folder in spec.submodule_search_locations:
        for library in (*Path(folder).glob("_C*.so"), *Path(folder).glob("_C*.pyd")):
            try:
                torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]  # torch leaves it untyped
            except OSError:
                return False
            return True
    return False


def _declare_operators() -> None:
    library = torch.library.Library("torchvision", "FRAGMENT")  # type: ignore[no-untyped-call]  # as above
    for name in _OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + _SIGNATURE)  # type: ignore[no-untyped-call]  # as above
    _kept.append(library)
