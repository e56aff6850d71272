"""The optimizer of a job whose hook is dgc.

The hook applies the momentum before it sends.
"""

import logging
from collections.abc import Callable, Iterable

from torch import Tensor
from torch.optim import Optimizer

from fedring.train.errors import SeamError

log = logging.getLogger(__name__)


def make_optimizer(
    factory: Callable[[Iterable[Tensor], float, float], Optimizer],
    parameters: Iterable[Tensor],
    lr: float,
    momentum: float,
    *,
    dgc_momentum: float,
) -> Optimizer:
    """Make the optimizer of a job, with momentum in one place only.

    It is the one that the job names, but without momentum if its hook has momentum.

    Args:
        factory: Makes the optimizer from parameters, learning rate and momentum.
        parameters: The parameters that are trained.
        lr: The job's learning rate.
        momentum: The job's momentum.
        dgc_momentum: The momentum of the hook; 0 for every other hook than dgc.

    Raises:
        SeamError: With the reason bad_optimizer, if the optimizer cannot be made, or bad_job, if it has momentum beside
            that of dgc.
    """
    parameters = list(parameters)
    optimizer = factory(parameters, lr, momentum)
    if not dgc_momentum or follows_dgc(optimizer):
        return optimizer
    # Made again, not changed: a user\'s optimizer may keep its momentum under any name.
    if momentum:
        log.info("dgc applies the momentum %g before it sends: the optimizer is made with momentum 0", dgc_momentum)
        try:
            optimizer = factory(parameters, lr, 0.0)
        except SeamError as error:
            hint = "With dgc, an optimizer is made with momentum 0; for Nesterov's momentum, use dgc(nesterov=true)."
            raise SeamError(error.reason, f"{error} {hint}") from error
    try:
        check_momentum(optimizer, dgc_momentum)
    except ValueError as error:
        raise SeamError("bad_job", f"The optimizer does not fit the hook: {error}") from error
    return optimizer


def follows_dgc(optimizer: Optimizer) -> bool:
    """Return whether the optimizer is made for DGC, as DGCSGD is.

    The momentum of such an optimizer acts on the weight decay only.
    """
    return getattr(optimizer, "follows_dgc", False) is True


def check_momentum(optimizer: Optimizer, dgc_momentum: float) -> None:
    """Check that momentum does not act twice.

    It may act in the compression or in the optimizer.

    Args:
        optimizer: The optimizer that follows.
        dgc_momentum: The momentum of the compression.

    Raises:
        ValueError: If both apply momentum to the gradients.
    """
    if not dgc_momentum or follows_dgc(optimizer):
        return
    for group in optimizer.param_groups:
        betas = group.get("betas") or (0,)  # the first one is Adam's momentum, the second one scales the step
        for name, value in (("momentum", group.get("momentum", 0)), ("betas", betas[0])):
            if value:
                raise ValueError(
                    f"{type(optimizer).__name__} has {name}={group[name]}, and DGC has momentum={dgc_momentum}: "
                    "momentum would act twice. Use DGCSGD, or SGD without momentum, or DGC(momentum=0)."
                )
