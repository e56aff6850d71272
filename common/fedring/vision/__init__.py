"""The deferred import of torchvision.

It happens when something needs it, and works even if torchvision's compiled part does not load. Models and data sets of
torchvision enter through this package alone. It may import no other package of fedring.
"""

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType

import torch

_OPERATORS = ("nms", "qnms")
_SIGNATURE = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"
_kept: list[torch.library.Library] = []  # a Library undefines its operators when it is garbage-collected


def load() -> ModuleType:
    """Import torchvision and return it.

    A torchvision that was built for CUDA cannot load its own operators beside a torch that was built for the CPU. Its
    import then fails because two operators are not declared. Models and data sets use neither of them, so it is enough
    to declare them here.

    Raises:
        ImportError: If torchvision is not installed.
    """
    if "torchvision" not in sys.modules and not _extension_loads():
        _declare_operators()
    return importlib.import_module("torchvision")


def _extension_loads() -> bool:
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.submodule_search_locations is None:
        return True  # there is nothing to repair, and the import itself says what is wrong
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
