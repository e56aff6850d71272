"""What is done to daemons, disks and lines: a harm registers itself in HARMS by its name.

A harm ends with everything running again. It draws from the case's generator only, so that a case can be repeated.
"""

import resource
import shutil
import signal
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from random import Random

from fedring.ctl.process import Process
from fedring.daemon.crash import DELIVERING, REGISTERED
from fedring.daemon.durable import delete
from fedring.daemon.exits import Exit
from fedring.server.state.backup.create import back_up
from fedring.server.state.backup.restore import restore
from tests.campaign.layer import FAILING, FULL
from tests.campaign.scene import Scene, pause, pause_at_random
from tests.damage import ask, flip
from tests.fault.faulty_fleet import wait_for
from tests.forks import is_stopped
from tests.kept import kept_residual
from tests.waiting import until

Harm = Callable[[Scene, Random], None]

HARMS: dict[str, Harm] = {}
"""Every harm by its name, in the order of this file."""

LONGEST_FREEZE = 2.0
_SHORT = 0.2


def harm(do: Harm) -> Harm:
    """Register a harm under the name of its function."""
    HARMS[do.__name__] = do
    return do


@harm
def kill_server(scene: Scene, rng: Random) -> None:
    """Kill the server, and at times once more while it starts."""
    scene.kill_daemon(scene.server)
    if rng.random() < 0.3:
        scene.server.start()
        pause_at_random(rng, _SHORT)
        scene.kill_daemon(scene.server)
    scene.start_server()


@harm
def kill_client(scene: Scene, rng: Random) -> None:
    """Kill a client; it comes back at once, or after a while."""
    client = rng.choice(scene.clients)
    scene.kill_daemon(client)
    if rng.random() < 0.3:
        pause_at_random(rng, 1.0)
    client.start()


@harm
def kill_client_unnoticed(scene: Scene, rng: Random) -> None:
    """Kill a client without a word to the server, for which its session goes on when the client returns."""
    index = rng.randrange(len(scene.clients))
    client, line = scene.clients[index], scene.lines[index]
    line.leave_half_open(True)
    scene.kill_daemon(client)
    until(lambda: line.open == 0)
    client.start()
    pause(3.0)  # what the server says to the dead connection must not end it before the client is back
    line.leave_half_open(False)


@harm
def kill_client_and_server(scene: Scene, rng: Random) -> None:
    """Kill a client and the server within the same moment, in either order."""
    both = [rng.choice(scene.clients), scene.server]
    rng.shuffle(both)
    scene.kill_daemon(both[0])
    pause_at_random(rng, 0.02)
    scene.kill_daemon(both[1])
    scene.start_server()
    next(each for each in both if each is not scene.server).start()


@harm
def kill_all(scene: Scene, rng: Random) -> None:
    """Kill everything, as a power cut of a whole site does, and start it again."""
    for daemon in rng.sample([scene.server, *scene.clients], 1 + len(scene.clients)):
        scene.kill_daemon(daemon)
    scene.start_server()
    for client in scene.clients:
        client.start()


@harm
def kill_all_clients(scene: Scene, rng: Random) -> None:
    """Kill all clients within the same moment: a group of workers goes on from its checkpoints."""
    for client in rng.sample(scene.clients, len(scene.clients)):
        scene.kill_daemon(client)
    for client in scene.clients:
        client.start()


@harm
def kill_server_after_a_while(scene: Scene, rng: Random) -> None:
    """Kill the server later than it notes how much time its round has left."""
    pause(rng.uniform(1.0, 3.5))
    scene.kill_daemon(scene.server)
    scene.start_server()


@harm
def crash_server(scene: Scene, rng: Random) -> None:
    """Let the server die at one of its crash points."""
    scene.crash_at(scene.server, rng.choice(sorted(REGISTERED)))


@harm
def crash_client(scene: Scene, rng: Random) -> None:
    """Let a client die at one of the crash points of its delivery."""
    scene.crash_at(rng.choice(scene.clients), rng.choice(sorted(DELIVERING)))


@harm
def crash_client_during_restart(scene: Scene, rng: Random) -> None:
    """Let a client die just after its update was accepted, and return only after a restart of the server."""
    client = rng.choice(scene.clients)
    scene.kill_daemon(client)
    client.env["FL_CRASH_AT"] = rng.choice(["client_accepted", "client_update_spooled"])
    client.start()
    del client.env["FL_CRASH_AT"]
    with suppress(TimeoutError):
        client.wait(4.0)
    scene.kill_daemon(client)
    scene.kill_daemon(scene.server)
    scene.start_server()
    pause_at_random(rng, 2.0)
    client.start()


@harm
def return_late(scene: Scene, rng: Random) -> None:
    """Let a client die when its update was accepted, and return after rounds without it and a restart."""
    client = rng.choice(scene.clients)
    scene.kill_daemon(client)
    client.env["FL_CRASH_AT"] = "client_accepted"
    client.start()
    del client.env["FL_CRASH_AT"]
    with suppress(TimeoutError):
        client.wait(4.0)
    scene.kill_daemon(client)

    _wait_for_rounds(scene)
    scene.kill_daemon(scene.server)
    scene.start_server()
    client.start()


@harm
def revert_client_late(scene: Scene, rng: Random) -> None:
    """Put a client's folder back, and return after rounds without it, and after a restart of the server.

    The server, which keeps few updates, has no row of the client's newest update any more.
    """
    index = rng.randrange(len(scene.clients))
    client, folder, copy = scene.clients[index], scene.folders[index], scene.directory / "older"

    def accepted() -> int:
        query = (
            "SELECT (SELECT count(*) FROM updates WHERE client_id = ?1) + coalesce(sum(pruned_updates), 0) FROM clients"
        )
        ((number,),) = ask(scene.state, f"{query} WHERE client_id = ?1", client.name)
        return int(str(number))

    scene.kill_daemon(client)
    if kept_residual(folder) is not None:
        shutil.copytree(folder, copy)
        pause(0.2)  # in which the server commits what the client has sent before
        before = accepted()
        client.start()
        for _ in range(60):
            pause(0.1)
            if accepted() > before + 1:  # so one of them at least is later than any that was on its way
                break
        scene.kill_daemon(client)
        if accepted() > before + 1:
            shutil.rmtree(folder)
            copy.rename(folder)
            scene.count("older folder", client.name)
            scene.must_drop.append(index)
            _wait_for_rounds(scene)
            scene.kill_daemon(scene.server)
            scene.start_server()
        else:
            shutil.rmtree(copy)
    client.start()


def _wait_for_rounds(scene: Scene) -> None:
    """Wait until some more rounds are published, or for ten seconds."""

    def published() -> int:
        ((number,),) = ask(scene.state, "SELECT count(*) FROM rounds WHERE model_version > 0")
        return int(str(number))

    before = published()
    for _ in range(100):
        pause(0.1)
        if published() > before + 2:
            break


@harm
def lose_update(scene: Scene, rng: Random) -> None:
    """Let a client lose its power while it sends: its spooled update, which is not synced, is gone afterwards."""
    index = rng.randrange(len(scene.clients))
    client, line = scene.clients[index], scene.lines[index]
    line.slow_down(Random(rng.random()))
    before = len(line.sent)
    for _ in range(40):
        pause(0.05)
        if len(line.sent) > before:
            break
    scene.kill_daemon(client)
    (scene.folders[index] / "update").unlink(missing_ok=True)
    line.speed_up()
    client.start()


@harm
def revert_client(scene: Scene, rng: Random) -> None:
    """Put a client's folder back to an older copy, or make that copy first."""
    index = rng.randrange(len(scene.clients))
    client, folder = scene.clients[index], scene.folders[index]
    copy = scene.directory / f"older-{client.name}"
    scene.kill_daemon(client)
    if copy.exists():
        shutil.rmtree(folder)
        copy.rename(folder)
        scene.count("older folder", client.name)
    elif kept_residual(folder) is not None:  # without one, nobody could say what the older folder has lost
        shutil.copytree(folder, copy)
    client.start()


@harm
def damage_update(scene: Scene, rng: Random) -> None:
    """Flip a bit of an accepted update whose round is open, because another client stands still."""
    client = rng.choice(scene.clients)
    client.send(signal.SIGSTOP)
    query = "SELECT blob FROM updates WHERE blob != '' AND round = (SELECT round FROM rounds WHERE ended_at IS NULL)"
    for _ in range(20):
        pause(0.05)
        if rows := ask(scene.state, query):
            path = scene.state / "blobs" / str(rng.choice(rows)[0])
            if path.exists():
                scene.originals.setdefault(path.name, path.read_bytes())
                flip(path, seed=rng.randrange(1 << 30))
                scene.count("flipped bit on the disk", "server")
            break
    client.send(signal.SIGCONT)


@harm
def freeze_server(scene: Scene, rng: Random) -> None:
    """Let the server stand still."""
    scene.freeze(scene.server, rng.uniform(0, LONGEST_FREEZE))


@harm
def freeze_client(scene: Scene, rng: Random) -> None:
    """Let a client stand still."""
    scene.freeze(rng.choice(scene.clients), rng.uniform(0, LONGEST_FREEZE))


@harm
def cut_line(scene: Scene, rng: Random) -> None:
    """Cut all connections of a client, some times in a row."""
    index = rng.randrange(len(scene.lines))
    for _ in range(rng.randrange(1, 4)):
        scene.lines[index].cut()
        scene.count("cut", f"the line of {scene.clients[index].name}")
        pause_at_random(rng, _SHORT)


@harm
def slow_line(scene: Scene, rng: Random) -> None:
    """Let a client's line be slow for a while."""
    index = rng.randrange(len(scene.lines))
    scene.lines[index].slow_down(Random(rng.random()))
    pause_at_random(rng, 1.0)
    scene.lines[index].speed_up()
    scene.count("delay", f"the line of {scene.clients[index].name}")


@harm
def damage_line(scene: Scene, rng: Random) -> None:
    """Flip a bit of an update or of a model on its way."""
    index, direction = rng.randrange(len(scene.lines)), rng.choice(["up", "down"])
    line = scene.lines[index]
    before = line.damaged
    line.damage(direction, Random(rng.random()))
    for _ in range(20):
        pause(0.1)
        if line.damaged > before:
            scene.count(f"flipped bit {direction}", f"the line of {scene.clients[index].name}")
            break
    line.speed_up()


@harm
def fail_disk(scene: Scene, rng: Random) -> None:
    """Let the server's writes fail beyond a size, as those of a failing disk, for a while."""
    limit = resource.RLIMIT_FSIZE
    with suppress(ProcessLookupError):
        resource.prlimit(scene.server.pid, limit, (rng.choice([0, 4096, 1 << 16]), resource.RLIM_INFINITY))
        pause_at_random(rng, 2.0)
        scene.count("failing disk", "server")
        if scene.server.running and rng.random() < 0.5:
            resource.prlimit(scene.server.pid, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    pause(0.2)
    if not scene.server.running or rng.random() < 0.5:  # it ends rather than trust a disk that has failed
        scene.kill_daemon(scene.server)
        scene.start_server()
    elif scene.server.running:
        resource.prlimit(scene.server.pid, limit, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


@harm
def fill_disk(scene: Scene, rng: Random) -> None:
    """Fill the server's disk for a while, if it has one of its own."""
    if scene.disk is None:
        return
    filler = scene.disk / "filler"
    with filler.open("wb", buffering=0) as file, suppress(OSError):
        while True:
            file.write(bytes(1 << 20))
    pause_at_random(rng, 2.0)
    if rng.random() < 0.3:
        scene.kill_daemon(scene.server)
    filler.unlink()
    scene.count("full disk", "server")
    if not scene.server.running:
        scene.start_server()


@harm
def jump_clock(scene: Scene, rng: Random) -> None:
    """Let the clock of a machine jump by hours, forth or back, and at times to the right time again."""
    daemon = scene.server if rng.random() < 0.5 else rng.choice(scene.clients)
    scene.jump(daemon, rng.choice([-1, 1]) * 3600 * rng.randint(1, 48))
    pause_at_random(rng, 1.0)
    if rng.random() < 0.3:
        scene.kill_daemon(daemon)
        scene.bring_back(daemon)
    if rng.random() < 0.5:
        scene.jump(daemon, 0)


@harm
def fail_syncs(scene: Scene, rng: Random) -> None:
    """Let the server's syncs fail for a while; at times its power fails then, too."""
    _fail_syncs(scene, rng, scene.server, scene.state, loses=rng.random() < 0.5)


@harm
def fail_client_syncs(scene: Scene, rng: Random) -> None:
    """Let a client's syncs fail for a while."""
    index = rng.randrange(len(scene.clients))
    _fail_syncs(scene, rng, scene.clients[index], scene.folders[index], loses=False)


@harm
def lose_client_syncs(scene: Scene, rng: Random) -> None:
    """Let a client's syncs fail for a while, and then its power: only for what a client keeps durably."""
    index = rng.randrange(len(scene.clients))
    _fail_syncs(scene, rng, scene.clients[index], scene.folders[index], loses=True)


def _fail_syncs(scene: Scene, rng: Random, daemon: Process, folder: Path, *, loses: bool) -> None:
    """Let all syncs of a daemon fail for a while.

    Args:
        scene: of the case.
        rng: its generator.
        daemon: the daemon.
        folder: of its state.
        loses: whether its power fails then: all that was written since the first sync that failed is gone.
    """
    if (page := scene.pages.get(daemon.name)) is None or not daemon.running:
        return
    copy, before = scene.directory / f"synced-{daemon.name}", page.failed
    daemon.send(signal.SIGSTOP)
    until(lambda: is_stopped(daemon.pid) or not daemon.running)
    page.fail(syncs=FAILING)
    shutil.copytree(folder, copy, symlinks=True)
    daemon.send(signal.SIGCONT)
    pause(rng.uniform(0.2, 2.0))
    scene.count("failing syncs", daemon.name)
    if loses:
        scene.kill_daemon(daemon)
        for path in folder.iterdir():
            delete(path)
        shutil.copytree(copy, folder, symlinks=True, dirs_exist_ok=True)
        scene.count("power loss after failing syncs", daemon.name)
    elif daemon is scene.server and page.failed > before:
        wait_for(scene, "the end of a server that could not sync", daemon.wait)
        scene.kill_daemon(daemon)  # it has ended: this notes since when
    page.fail()
    shutil.rmtree(copy)
    if not daemon.running:
        scene.bring_back(daemon)


@harm
def fail_client_disk(scene: Scene, rng: Random) -> None:
    """Let a client's disk be full for a while, or let all writes to it fail."""
    client = rng.choice(scene.clients)
    if (page := scene.pages.get(client.name)) is None:
        return
    error = rng.choice([FULL, FAILING])
    page.fail(writes=error)
    pause_at_random(rng, 2.0)
    scene.count("full disk" if error == FULL else "failing disk", client.name)
    if rng.random() < 0.3:
        scene.kill_daemon(client)
    page.fail()
    if not client.running:
        client.start()


@harm
def damage_client(scene: Scene, rng: Random) -> None:
    """Flip a bit in a file of a client that is down; if it refuses to start, it gets the file back."""
    index = rng.randrange(len(scene.clients))
    client = scene.clients[index]
    scene.kill_daemon(client)
    files = sorted(path for path in scene.folders[index].rglob("*") if path.is_file() and path.stat().st_size)
    kinds = sorted({path.name[:6] for path in files} - {"lock"})
    if kinds:
        kind = rng.choice(kinds)
        path = rng.choice([path for path in files if path.name.startswith(kind)])
        sound, seen = path.read_bytes(), client.log.stat().st_size
        flip(path, seed=rng.randrange(1 << 30))
        scene.damaged.add(index)
        scene.count("flipped bit on the disk", client.name)
        client.start()
        until(lambda: client.poll() is not None or b"in session" in client.log.read_bytes()[seen:])
        if client.running:
            return
        assert client.poll() == Exit.CONFIG, f"{client.name} ended with {client.poll()}, and not with a sentence"
        path.write_bytes(sound)
    client.start()


@harm
def save_state(scene: Scene, rng: Random) -> None:
    """Back the running server up, or copy the files of one that is down; `revert_state` needs it."""
    way, copy = rng.choice(["restored", "copied"]), scene.directory / f"copy-{len(scene.copies)}"
    if way == "restored":
        back_up(scene.state, copy)
    else:
        scene.kill_daemon(scene.server)
        shutil.copytree(scene.state, copy, symlinks=True)
        scene.start_server()
    scene.copies.append((way, copy))


@harm
def revert_state(scene: Scene, rng: Random) -> None:
    """Put the newest copy into the place of the server's state: `flctl restore`, or a copied folder."""
    if not scene.copies:
        return
    way, copy = scene.copies[-1]
    scene.kill_daemon(scene.server)
    lost = scene.directory / f"lost-{len(scene.lost)}"
    if way == "restored":
        replaced = restore(copy, scene.state, replace=True).replaced
        assert replaced is not None
        replaced.rename(lost)
    else:
        scene.state.rename(lost)
        shutil.copytree(copy, scene.state, symlinks=True)
    scene.lost.append(lost)
    scene.start_server()
    scene.count("restore" if way == "restored" else "copied folder", "server")
