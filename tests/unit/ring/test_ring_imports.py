"""gRPC's own support for forks is off, whichever package of fedring imports grpc first."""

import json
import os
import subprocess
import sys

from tests.system.ring_scripts.ranks import PROGRAM_ENVIRONMENT

# Each package is imported until it asks for grpc, in one process, since torch takes seconds.
LOOK = """
import json, os, sys
from importlib import import_module

class AskedForGrpc(Exception): ...

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "grpc":
            raise AskedForGrpc(os.environ.get("GRPC_ENABLE_FORK_SUPPORT"))

sys.meta_path.insert(0, Finder())
found = {}
for name in sys.argv[1:]:
    os.environ.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    for known in [known for known in sys.modules if known.split(".")[0] == "fedring"]:
        del sys.modules[known]
    try:
        import_module(name)
        found[name] = "never"
    except AskedForGrpc as asked:
        found[name] = asked.args[0]
print(json.dumps(found))
"""
NAMES = [
    "fedring.remote",
    "fedring.remote.errors",
    "fedring.ring",
    "fedring.ring.errors",
    "fedring.rpc.errors",
    "fedring.control.failure",
    "fedring.client.session.retry",
]


def test_a_package_that_imports_grpc_switches_its_support_for_forks_off_before() -> None:
    environment = os.environ | PROGRAM_ENVIRONMENT
    environment.pop("GRPC_ENABLE_FORK_SUPPORT", None)
    ran = subprocess.run([sys.executable, "-c", LOOK, *NAMES], capture_output=True, env=environment, check=True)
    assert json.loads(ran.stdout) == dict.fromkeys(NAMES, "0")
