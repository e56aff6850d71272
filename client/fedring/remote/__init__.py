"""Calls, autograd and optimizers across the ranks of a process group.

    import torch
    from fedring import remote

    torch.distributed.init_process_group("fedring")
    with remote.serve(modules={"first": model}, trusted=["my_functions"]) as owners: ...

Every rank serves for as long as the block lasts, and any rank may call any other. Messages are operations of the ring's
engine (`fedring.ring.engine.group`), in a group of their own beside the process group's: a call is one operation that
carries the request and one that carries the reply. So identities, TLS, shared memory, the 5 s in which a lost peer is
noticed, and the error that then ends the generation on every rank are the ring's. torch's point-to-point operations
would not do: a receive that waits for any caller would run into the group's timeout.

`values` and `messages` turn values into bytes and check incoming ones; `contexts` holds graphs and gradients;
`stepping`, `holdings` and `service` answer requests at an owner; `agent` connects them with the ring; callers use
`owner`, `steps` and `optimizer`. The package may import `fedring.ring`, `fedring.rpc` and `fedring.train`. It knows
nothing of jobs, servers or pipelines, and nothing that a peer sends is ever run as code.
"""

import fedring.ring  # noqa: F401  # first: it prepares for grpc, which others import
from fedring.remote.agent import Agent
from fedring.remote.errors import BadMessage, CallRefused, RemoteError
from fedring.remote.optimizer import DistributedOptimizer, RemoteParameter, gradients, parameters
from fedring.remote.owner import Owner, Owners, Reference, serve
from fedring.remote.steps import Step, context

__all__ = [
    "Agent",
    "BadMessage",
    "CallRefused",
    "DistributedOptimizer",
    "Owner",
    "Owners",
    "Reference",
    "RemoteError",
    "RemoteParameter",
    "Step",
    "context",
    "gradients",
    "parameters",
    "serve",
]
