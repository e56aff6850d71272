"""All that daemons, flctl and ranks import sooner or later; imported once, by the process that they are forked from.

Importing must start no thread, since a fork has only the one that forks. tests/unit/test_forks.py watches that.
"""

import importlib
import os

from fedring import vision

MODULES = (
    "torch._dynamo",  # which optimizers import
    "torch.nn.parallel",
    "torch.utils.data",
    "matplotlib.pyplot",
    "fedring.client.group.data_parallel",
    "fedring.client.federation",
    "fedring.client.main",
    "fedring.client.group.pipeline",
    "fedring.client.trainer",
    "fedring.ctl.main",
    "fedring.ddp.hooks",
    "fedring.ddp.local_sgd",
    "fedring.pipeline.worker",
    "fedring.ring",
    "fedring.server.main",
    "fedring.vision",
    "pytest",
    "tests.forks",
)

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported
for name in MODULES:
    importlib.import_module(name)
vision.load()
