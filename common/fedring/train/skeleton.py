"""Models without values, whose parameters and buffers are on torch's device "meta" and take no memory.

Torch builds almost every model there. What is not in the state dict would be lost (buffers that are not persistent, and
tensors that are plain attributes), because nobody sends it. A model with such tensors is built whole, once, and only
then gives up the values of its state dict. It therefore needs the whole model's memory for a moment.
"""

import logging
from collections.abc import Callable, Iterator, Sequence
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedring.train.errors import SeamError
from fedring.train.seam import build_model
from fedring.train.state import tensors_of

log = logging.getLogger(__name__)


def build_skeleton(name: str, args: dict[str, Any], seed: int, trusted: Sequence[str]) -> nn.Module:
    """Build the model that a job names, without the values of its state dict.

    Args:
        name: A callable as "module:attribute" that returns a torch.nn.Module.
        args: Its keyword arguments.
        seed: As for build_model(); it matters only for tensors outside of the state dict.
        trusted: As for build_model().

    Returns:
        The model. All tensors of its state dict are on the device "meta"; others have their values.

    Raises:
        SeamError: As build_model() raises it.
    """
    try:
        with torch.device("meta"):
            model = build_model(name, args, seed, trusted)
        why = f"it keeps {lost} outside of its state dict" if (lost := _lost(model)) else ""
    except SeamError as error:
        if error.reason != "no_model":
            raise
        why = str(error)
    if not why:
        return model
    log.info("the model %s is built whole in memory once, because it cannot be built without values: %s", name, why)
    model = build_model(name, args, seed, trusted)
    stored = {id(tensor) for _, tensor in tensors_of(model)}
    replace_tensors(model, lambda tensor: tensor.to("meta") if id(tensor) in stored else tensor)
    return model


def replace_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a model; a tied tensor is changed once and stays tied.

    Args:
        model: The model, which is changed in place.
        change: Takes a parameter or a buffer, and returns what takes its place: another tensor of its shape and dtype,
            or the same one.
    """
    changed: dict[int, tuple[Tensor, Tensor]] = {}  # The old tensors are kept, so that no id is used twice.

    def changed_once(tensor: Tensor) -> Tensor:
        if id(tensor) not in changed:
            new = change(tensor)
            is_new_parameter = isinstance(tensor, nn.Parameter) and new is not tensor
            made = nn.Parameter(new.detach(), tensor.requires_grad) if is_new_parameter else new
            changed[id(tensor)] = tensor, made
        return changed[id(tensor)][1]

    for module in model.modules():
        own = chain(
            module.named_parameters(recurse=False, remove_duplicate=False),
            module.named_buffers(recurse=False, remove_duplicate=False),
        )
        for name, tensor in list(own):
            setattr(module, name, changed_once(tensor))


def _lost(model: nn.Module) -> str:
    """Return the name of a tensor that the state dict of a model on "meta" does not hold; empty if there is none."""
    stored = {id(tensor) for _, tensor in tensors_of(model)}
    for path, module in model.named_modules():
        for name, tensor in chain(module.named_buffers(recurse=False), _attributes(module)):
            if id(tensor) not in stored:
                return f"{path}.{name}".lstrip(".")
    return ""


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are plain attributes of a module, or lie in a list, a tuple or a dictionary there."""
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from ((name, one) for one in values if isinstance(one, Tensor))
