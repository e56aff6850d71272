"""Compressed gradients for data-parallel training, over any process group of torch.distributed.

Here live the contract of hook states (`state`), their meter (`profile`), the exchange of messages, deep gradient
compression (`dgc`), local SGD, evaluation by a group, statistics of steps, and in `hooks` all other hooks and the list
by name. What enters is a hook or an optimizer that exchanges gradients of DistributedDataParallel or of a plain loop.
Formulas belong into `fedring.compress`, formats of messages into `fedring.codec`; nothing here may know of jobs, rounds
or a particular backend. The package may import `fedring.codec`, `fedring.compress` and `fedring.train`. For example::

    state = DGCState(group, DGC(ratio=0.001), named_parameters=model.named_parameters(), optimizer=optimizer)
    ddp.register_comm_hook(state, dgc_hook)
    ...
    state.start_epoch(epoch)

Without DistributedDataParallel, `DGCStepper(state).exchange()` between backward and the optimizer's step does the same.
"""

from fedring.compress.dgc import DGC
from fedring.ddp.dgc import DGCState, dgc_hook
from fedring.ddp.evaluation import evaluate_together
from fedring.ddp.exchange import exchange
from fedring.ddp.profile import Profile
from fedring.ddp.sgd import DGCSGD, check_optimizer
from fedring.ddp.state import HookState
from fedring.ddp.step_log import StepLog
from fedring.ddp.stepper import DGCStepper

__all__ = [
    "DGC",
    "DGCSGD",
    "DGCState",
    "DGCStepper",
    "HookState",
    "Profile",
    "StepLog",
    "check_optimizer",
    "dgc_hook",
    "evaluate_together",
    "exchange",
]
