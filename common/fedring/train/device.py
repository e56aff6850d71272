"""The device to compute on, and the number of threads."""

import os

import torch

from fedring.train.errors import SeamError


def pick_device(name: str) -> torch.device:
    """Return the device called `name`.

    Args:
        name: "cpu", "cuda", "cuda:1", or "auto": the first GPU if there is one, and else the CPU.

    Raises:
        SeamError: With the reason no_device, if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    kind, colon, number = name.partition(":")
    if kind not in ("cpu", "cuda") or (colon and (kind == "cpu" or not number.isdecimal())):
        raise SeamError("no_device", f"There is no device {name!r}: use auto, cpu, cuda or cuda:NUMBER.")
    if kind == "cuda" and int(number or 0) >= torch.cuda.device_count():
        raise SeamError("no_device", f"There is no device {name}: {_reason()}; use auto or cpu.")
    return torch.device(name)


def threads_for(clients_on_host: int) -> int:
    """Return the number of threads for one client of several.

    It is its share of the host's usable cores, at least 1.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // max(1, clients_on_host))


def _reason() -> str:
    """Return why torch has no such GPU."""
    if torch.version.cuda is None and torch.version.hip is None:
        again = "pip install --force-reinstall torch, with the index that pytorch.org/get-started names for it"
        return f"this torch, {torch.__version__}, is built for processors alone ({again})"
    return f"torch finds {torch.cuda.device_count()} GPUs"
