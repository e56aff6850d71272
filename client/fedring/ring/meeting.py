"""Workers find each other through torch's store: what stands behind env://, tcp:// and file://."""

import os
import socket
import time
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, Store, TCPStore
from torch.distributed import DistStoreError

from fedring.ring.endpoint import Endpoint
from fedring.ring.errors import PeerLost
from fedring.ring.options import RingOptions
from fedring.ring.world import World

_DISCARD = 9  # any port: nothing is sent


def meet(store: Store, *, rank: int, size: int, options: RingOptions, timeout: timedelta) -> World:
    """A world of `size` workers that use one store; PeerLost names a rank that does not come in time."""
    if rank == 0:
        store.set("generation", str(int(time.time())))  # rises, so that frames of an earlier run are told apart
    _wait(store, ["generation"], [0], timeout)
    endpoint = Endpoint(_listening(options, store), generation=int(store.get("generation")))
    try:
        store.set(f"address/{rank}", endpoint.address)
        ranks = list(range(size))
        keys = [f"address/{one}" for one in ranks]
        _wait(store, keys, ranks, timeout)
        return World(endpoint, [store.get(key).decode() for key in keys])
    except BaseException:
        endpoint.close()
        raise


def _wait(store: Store, keys: list[str], ranks: list[int], timeout: timedelta) -> None:
    """The keys are there; each is set by the rank of its place."""
    try:
        store.wait(keys, timeout)
    except DistStoreError as error:
        missing = [rank for key, rank in zip(keys, ranks, strict=True) if not store.check([key])]
        who = missing[0] if missing else 0
        raise PeerLost(f"rank {who} did not come within {timeout.total_seconds():g} s", rank=who) from error


def _listening(options: RingOptions, store: Store) -> RingOptions:
    """The options; if they do not say where to listen, on the interface from which the store is reached."""
    if "listen" in options.model_fields_set:
        return options
    host = _interface(_master(store))
    return options.model_copy(update={"listen": f"[{host}]:0" if ":" in host else f"{host}:0"})


def _master(store: Store) -> str:
    """The host that all workers reach; empty if nobody said."""
    while isinstance(store, PrefixStore):
        store = store.underlying_store
    if isinstance(store, TCPStore):
        return store.host
    return os.environ.get("MASTER_ADDR", "")


def _interface(host: str) -> str:
    """This machine's address on the way to `host`; loopback for a name that says nothing."""
    if not host:
        return "127.0.0.1"
    family, kind, protocol, _, address = socket.getaddrinfo(host, _DISCARD, type=socket.SOCK_DGRAM)[0]
    with socket.socket(family, kind, protocol) as probe:
        probe.connect(address)
        return str(probe.getsockname()[0])
