"""Models without values, on torch's device "meta".

Their parameters and buffers take no memory. Torch builds almost every model there. Tensors outside of the state dict
would be lost (buffers that are not persistent, and tensors that are plain attributes), because nobody sends them. A
model with such tensors is built whole, once, and only then gives up the values of its state dict. It therefore needs
the whole model's memory for a moment.
"""

import copy
import hashlib
import logging
from collections.abc import Callable, Iterator
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from fedring.job_code import job_code
from fedring.train.errors import SeamError
from fedring.train.names.offered import Offered
from fedring.train.names.seam import build_model
from fedring.train.tensors.state import tensors_of

log = logging.getLogger(__name__)


def build_skeleton(name: str, args: dict[str, Any], seed: int, offered: Offered) -> nn.Module:
    """Build a job's model without the values of its state dict.

    Args:
        name: A callable as "module:attribute" that returns a torch.nn.Module.
        args: Its keyword arguments.
        seed: As for build_model(); it matters only for tensors outside of the state dict.
        offered: The names that jobs may use here.

    Returns:
        The model. All tensors of its state dict are on the device "meta"; others have their values.

    Raises:
        SeamError: As build_model() raises it.
    """
    try:
        with torch.device("meta"):
            model = build_model(name, args, seed, offered)
        if not (lost := _lost(model)):
            return model
        # The model on "meta" is given up: nobody would send these values.
        why = f"it keeps {lost} outside of its state dict"
    except SeamError as error:
        if error.reason != "no_model":
            raise
        why = str(error)
    log.info("the model %s is built whole in memory once, because it cannot be built without values: %s", name, why)
    model = build_model(name, args, seed, offered)
    stored = {id(tensor) for _, tensor in tensors_of(model)}
    replace_tensors(model, lambda tensor: tensor.to("meta") if id(tensor) in stored else tensor)
    return model


def replace_tensors(model: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
    """Replace all parameters and buffers of a model.

    A tied tensor is changed once and stays tied.

    Args:
        model: The model, which is changed in place.
        change: Takes a parameter or a buffer, and returns its replacement: another tensor of its shape and dtype, or
            the same one.
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


def initialize(model: nn.Module, seed: int, role: str) -> Iterator[tuple[str, Tensor]]:
    """Give values to a skeleton's modules, one after the other.

    They come from the modules' `reset_parameters()`, as in FSDP. Each module has random numbers of its own, which the
    seed and its name determine. So the values are not those that build_model() gives with this seed. Later changes of
    the layers by the model's own code are not repeated.

    Args:
        model: The model without values, which stays as it is.
        seed: The seed of all random numbers.
        role: "parameter" or "buffer": only these are yielded, and modules without them are skipped.

    Yields:
        The tensors of the state dict by name, in the order of the schema. A module's memory is free once its last
        tensor was used.

    Raises:
        SeamError: With the reason no_reset, if a module has tensors and no `reset_parameters()`.
    """
    names = {id(tensor): name for name, tensor in tensors_of(model)}
    for path, module in model.named_modules():
        own = {
            key: names.pop(id(t), "") for key, t in _own(module) if isinstance(t, nn.Parameter) is (role == "parameter")
        }
        if not any(own.values()):
            continue
        # A copy is filled and yielded, so that only one module's values are in memory at a time.
        made = copy.deepcopy(module)
        for key, tensor in list(_own(made)):
            if tensor.is_meta:
                empty = torch.empty(tensor.shape, dtype=tensor.dtype)
                setattr(
                    made, key, nn.Parameter(empty, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else empty
                )
        with torch.random.fork_rng(devices=[]):
            torch.default_generator.manual_seed(_seed_of(seed, path))
            _reset(made, path)
        yield from ((own[key], tensor) for key, tensor in _own(made) if own.get(key))


def check_can_initialize(model: nn.Module) -> None:
    """Check that initialize() can give values to a model.

    Raises:
        SeamError: With the reason no_reset, if a module has tensors and no `reset_parameters()`.
    """
    for path, module in model.named_modules():
        if any(True for _ in _own(module)) and not callable(getattr(module, "reset_parameters", None)):
            raise SeamError(
                "no_reset",
                f"The {type(module).__name__} {path or 'model'} has no reset_parameters(): use pipeline.first_model = "
                '"whole".',
            )


def _lost(model: nn.Module) -> str:
    """Return a tensor's name outside of the state dict, or "".

    Such a tensor of a model on "meta" would be lost.
    """
    stored = {id(tensor) for _, tensor in tensors_of(model)}
    for path, module in model.named_modules():
        for name, tensor in chain(module.named_buffers(recurse=False), _attributes(module)):
            if id(tensor) not in stored:
                return f"{path}.{name}".lstrip(".")
    return ""


def _own(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield a module's parameters and buffers, without its children's."""
    yield from module.named_parameters(recurse=False)
    yield from module.named_buffers(recurse=False)


def _reset(module: nn.Module, path: str) -> None:
    try:
        with job_code():
            module.reset_parameters()  # type: ignore[operator]  # check_can_initialize() has looked for it
    except Exception as error:  # the user's code may raise anything
        text = f"reset_parameters() of {path or 'the model'} raised {type(error).__name__}: {error}"
        raise SeamError("no_model", text) from error


def _seed_of(seed: int, path: str) -> int:
    return int.from_bytes(hashlib.sha256(f"{seed}:{path}".encode()).digest()[:8], "little") >> 1


def _attributes(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that are plain attributes of a module.

    They may lie in a list, a tuple or a dictionary there.
    """
    for name, value in vars(module).items():
        if name in ("_parameters", "_buffers"):
            continue
        values = value.values() if isinstance(value, dict) else value if isinstance(value, list | tuple) else [value]
        yield from ((name, one) for one in values if isinstance(one, Tensor))
