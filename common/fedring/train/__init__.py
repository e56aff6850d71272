"""Training, as both daemons share it.

It covers jobs, models, the local epochs of one client, and evaluation. The package holds the schema of a job with its
tables, the code that a job names as "module:attribute", a model as flat vectors and as files, and training and
evaluation in one process. It may import `fedring.codec`, `fedring.daemon`, `fedring.data`, `fedring.privacy`,
`fedring.rpc`, `fedring.schedules`, `fedring.secure` and `fedring.vision`. Training in a group is in `fedring.workers`,
because only clients do it. gRPC and the server's own work have no place here. Modules that describe a job do not import
torch.
"""

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from fedring.train.errors import SeamError as SeamError
    from fedring.train.errors import TrainError as TrainError
    from fedring.train.errors import TrainingStopped as TrainingStopped
    from fedring.train.evaluation import Counts as Counts
    from fedring.train.evaluation import evaluate as evaluate
    from fedring.train.plan import Plan as Plan
    from fedring.train.plan import TrainResult as TrainResult
    from fedring.train.tensors.files import load_model as load_model
    from fedring.train.tensors.files import save_model as save_model

# Imported on first use, so that programs that only read jobs do not have to import torch.
_MODULES = {
    "SeamError": "errors",
    "TrainError": "errors",
    "TrainingStopped": "errors",
    "Counts": "evaluation",
    "evaluate": "evaluation",
    "load_model": "tensors.files",
    "save_model": "tensors.files",
    "Plan": "plan",
    "TrainResult": "plan",
}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
