"""Everything that daemons, flctl and ranks import; the process from which they are forked imports it once.

The imports must not start threads, since a fork does not have them. tests/unit/project/test_forks.py checks that.
A fork's end is its program's own: what the libraries of other programs tidy up at an exit would take it 0.1 seconds.
"""

import atexit
import gc
import importlib
import os
import weakref

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
    "fedring.client.restart",
    "fedring.client.startup_checks",
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
    "fedring.server.state.backup.restore",
    "fedring.server.state.shared.moving",
    "fedring.server.state.shared.opening",
    "fedring.server.state.shared.restoring",
    "fedring.train.models",
    "fedring.train.optimizers",
    "fedring.web.serve",
    "fedring.vision",
    "psycopg.types.hstore",
    "psycopg.types.multirange",
    "pytest",
    "sqlalchemy.dialects.postgresql.psycopg",
    "sqlalchemy.dialects.sqlite.pysqlite",
    "stringprep",
    "tests.forks",
    "typer.rich_utils",  # flctl's help and errors
)


def _forget_exits() -> None:
    """Let forks end without torch's report of compilations, and without taking its operators out one by one."""
    from torch._dynamo import utils

    atexit.unregister(utils.dump_compile_times)
    for finalizer in list(weakref.finalize._registry):  # type: ignore[attr-defined]  # typeshed does not know it
        finalizer.atexit = False


os.environ.setdefault("GRPC_VERBOSITY", "ERROR")  # before grpc is imported
gc.disable()  # nothing of this is garbage, and collections would take a fifth of the time
for name in MODULES:
    importlib.import_module(name)
vision.load()
gc.freeze()  # what is here stays: a collection in a fork would look at all of it, and copy its pages
gc.enable()
_forget_exits()
