"""Deep gradient compression for data-parallel training, over any process group of torch.distributed.

    state = DGCState(group, DGC(ratio=0.001), named_parameters=model.named_parameters(), optimizer=optimizer)
    ddp.register_comm_hook(state, dgc_hook)
    ...
    state.start_epoch(epoch)

Without DistributedDataParallel, `DGCStepper(state).exchange()` between backward and the optimizer's step does the same.
"""

from fedring.compress.dgc import DGC
from fedring.ddp.dgc import dgc_hook
from fedring.ddp.exchange import exchange
from fedring.ddp.profile import Profile
from fedring.ddp.sgd import DGCSGD, check_optimizer
from fedring.ddp.state import DGCState
from fedring.ddp.stepper import DGCStepper

__all__ = ["DGC", "DGCSGD", "DGCState", "DGCStepper", "Profile", "check_optimizer", "dgc_hook", "exchange"]
