"""Everything that daemons, flctl and ranks import; the process from which they are forked imports it once.

The imports must not start threads, since a fork does not have them. tests/unit/project/test_forks.py checks that.
"""

import importlib
import os

from fedring import vision

MODULES = (
    "cryptography.hazmat.primitives.ciphers.aead",
    "dp_accounting",  # imports SciPy
    "hypothesis",
    "torch._dynamo",  # optimizers import it
    "torch.nn.parallel",
    "torch.utils.data",
    "matplotlib.pyplot",
    "fedring.client.group.data_parallel",
    "fedring.client.federation",
    "fedring.client.main",
    "fedring.client.group.pipeline",
    "fedring.client.training.trainer",
    "fedring.ctl.main",
    "fedring.ctl.admin.certs",
    "fedring.ctl.admin.doctor",
    "fedring.ctl.admin.state_backup",
    "fedring.ctl.local.trying",
    "fedring.ctl.local.simulate",
    "fedring.ctl.operate.job_control",
    "fedring.ctl.operate.watch",
    "fedring.ddp.hooks",
    "fedring.ddp.local_sgd",
    "fedring.pipeline.worker",
    "fedring.ring",
    "fedring.server.main",
    "fedring.server.model.making",
    "fedring.server.operator.job_checks",
    "fedring.server.serving",
    "fedring.server.startup_checks",
    "fedring.web.serve",
    "fedring.vision",
    "pytest",
    "stringprep",
    "tests.forks",
)

os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported
for name in MODULES:
    importlib.import_module(name)
vision.load()
