"""Learning rates over a job: pure functions of how far it has come, whatever the number of workers."""

import math

from fedring.train.parallel import DataParallel


def lr_factor(table: DataParallel, done: float, total: float) -> float:
    """What the job's learning rate is multiplied by after `done` of its `total` epochs."""
    warmup = table.lr_warmup_epochs
    if done < warmup:
        return max(done / warmup, 1e-3)
    match table.lr_schedule:
        case "cosine":  # Loshchilov and Hutter 2017, eq. 5, without restarts
            share = (done - warmup) / max(total - warmup, 1e-9)
            return 0.5 * (1 + math.cos(math.pi * min(share, 1.0)))
        case "step":
            return table.lr_gamma ** math.floor(done / table.lr_step_epochs)
    return 1.0
