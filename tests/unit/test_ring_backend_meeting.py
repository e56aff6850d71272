"""Workers find each other through a store, and choose where to listen."""

import threading
import time
from datetime import timedelta

import pytest
from torch._C._distributed_c10d import HashStore, PrefixStore, TCPStore

from fedring.ring import PeerLost, RingOptions
from fedring.ring.torch.rendezvous import meet

SHORT, LONG = timedelta(milliseconds=300), timedelta(seconds=60)


def test_ranks_learn_each_others_addresses_and_one_generation() -> None:
    store = HashStore()
    worlds = {}

    def arrive(rank: int) -> None:
        worlds[rank] = meet(store, rank=rank, size=3, options=RingOptions(), timeout=LONG)

    threads = [threading.Thread(target=arrive, args=(rank,)) for rank in (2, 1, 0)]
    before = int(time.time())
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    addresses = [worlds[rank].endpoint.address for rank in range(3)]
    assert all(world.members == addresses for world in worlds.values())
    (generation,) = {world.endpoint.generation for world in worlds.values()}
    assert before <= generation <= time.time()
    for world in worlds.values():
        world.close()


@pytest.mark.parametrize(("rank", "missing"), [(0, 1), (1, 0)])
def test_a_rank_that_does_not_come_is_named(rank: int, missing: int) -> None:
    with pytest.raises(PeerLost, match=f"rank {missing} did not come") as caught:
        meet(HashStore(), rank=rank, size=2, options=RingOptions(), timeout=SHORT)
    assert caught.value.rank == missing


def test_workers_listen_on_the_interface_that_reaches_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    tcp = TCPStore("localhost", 0, 1, True, LONG, use_libuv=False)
    for store in (HashStore(), PrefixStore("a", PrefixStore("b", tcp))):
        world = meet(store, rank=0, size=1, options=RingOptions(), timeout=LONG)
        assert world.endpoint.address.startswith("127.0.0.1:")
        world.close()


def test_the_option_listen_goes_before_the_interface_of_the_store(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MASTER_ADDR", "127.0.0.1")
    monkeypatch.setenv("FEDRING_RING_LISTEN", "127.0.0.2:0")
    world = meet(HashStore(), rank=0, size=1, options=RingOptions(), timeout=LONG)
    assert world.endpoint.address.startswith("127.0.0.2:")
    world.close()
