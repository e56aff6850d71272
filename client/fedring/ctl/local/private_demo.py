"""flctl try private: secure aggregation with a client killed midway.

It runs on this machine. A first job has masks only, so that nothing else hides the updates. In a second one, the
clients also add noise. In the end, the state folder of the server is searched for updates.
"""

import json
import threading
from collections.abc import Callable
from dataclasses import asdict, dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedring.codec.source import HEADER
from fedring.control.calls import ENDED, Control
from fedring.control.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.experiment import remove_earlier
from fedring.ctl.local.private_evidence import Evidence, Stored, correlation, gather, stored_payloads
from fedring.ctl.local.recorded_training import RECORDS
from fedring.ctl.local.runner import ended_by_signals
from fedring.ctl.output import Output, percent, print_json, print_table
from fedring.secure.limits import MAX_GROUP, MIN_GROUP, threshold
from fedring.secure.masks import unpack, unwrap
from fedring.v1 import control_pb2 as pb

KILL_IN = 2
"""The round of the second job in which a client is killed; the next one shows that it is back."""

CLIENTS, ROUNDS = 5, 3
_PERIOD = 0.02  # seconds between two looks at the round

JOB: dict[str, Any] = {
    "name": "private demo",
    "start": "fresh",
    "model": "fedring.train.models:digits_mlp",
    "model_args": {"hidden": 128, "layers": 2},
    "data": "fedring.data:digits",
    "partition": "iid",
    "epochs": 40,
    "batch_size": 16,
    "lr": 0.05,
    "momentum": 0.0,
    "weights": "uniform",
    "evaluate": False,
    "evaluate_on_server": True,
    "barrier_timeout_seconds": 120,
    "secure_aggregation": {"levels": 31, "step": 0.25},
}
"""The first job, without what follows from the number of clients."""

NOISE: dict[str, Any] = {
    "name": "private demo with noise",
    "model_args": {"hidden": 32, "layers": 1},
    "secure_aggregation": {},
    "dp": {"noise_by": "clients", "adaptive": False, "noise_multiplier": 0.1, "clip": 2.0},
}
"""What the second job has instead. The fewer values a model has, the less the noise on all of them disturbs it."""


@dataclass(frozen=True, slots=True)
class PrivateDemoResult:
    """The outcome of the demo."""

    rounds: list[pb.Round]  # of both jobs, oldest first
    killed: str  # the client; empty if the round had ended before
    privacy: pb.Privacy | None  # None if the server cannot compute it
    sums: dict[str, float]  # by "JOB.ROUND": the correlation of the model's change with the mean of the true updates
    evidence: Evidence

    def report(self) -> dict[str, Any]:
        """Return the object that report.json holds."""
        spent = self.privacy if self.privacy and self.privacy.rounds else None
        return {
            "rounds": [
                {
                    "job": round_.job_id,
                    "round": round_.job_round,
                    "phase": round_.phase,
                    "reason": round_.reason,
                    "clients": round_.delivered,
                    "accuracy": round_.server_accuracy if round_.HasField("server_accuracy") else None,
                    "lost": {step: count for step, count in round_.secure.lost.items() if count},
                }
                for round_ in self.rounds
            ],
            "killed": self.killed,
            "epsilon": spent.epsilon if spent else None,
            "delta": spent.delta if spent else None,
            "sums": self.sums,
            "evidence": asdict(self.evidence),
        }


def private_demo(clients: int, rounds: int, out: Path, output: Output) -> None:
    """Run the demo, and print its course.

    Args:
        clients: How many clients to start.
        rounds: Rounds of the job.
        out: Folder of the report, logs and state.
        output: How the report is printed.

    Raises:
        Failure: The job did not complete, a daemon ended before it, or an update can be read from the state folder.
    """
    say: Callable[[str], None] = print if output is Output.TABLE else (lambda _text: None)
    outcome = _run(clients, rounds, out, say)
    report = outcome.report()
    (out / "report.json").write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")
    if output is Output.JSON:
        print_json(report)
    else:
        _tell(outcome, say)
    if outcome.evidence.readable:
        raise Failure(f"the server's state in {out / 'state' / 'server'} tells something of single updates")


def check_size(clients: int, rounds: int) -> str:
    """Return a sentence if the numbers are wrong; empty = good."""
    if not MIN_GROUP <= clients <= MAX_GROUP:
        return f"the job private needs {MIN_GROUP} to {MAX_GROUP} clients"
    return (
        ""
        if rounds > KILL_IN
        else f"the job private needs at least {KILL_IN + 1} rounds: a client is killed in round 2"
    )


def _run(clients: int, rounds: int, out: Path, say: Callable[[str], None]) -> PrivateDemoResult:
    remove_earlier(out)
    fewest = threshold(clients)
    job = JOB | {"rounds": rounds, "min_clients": clients, "min_clients_to_aggregate": fewest}
    recorded = {"trainer": "fedring.ctl.local.recorded_training:train"}
    fleet = Fleet(out, {"keep_update_rounds": 2 * rounds}, [recorded] * clients)
    for process in fleet.clients:
        process.env[RECORDS] = str(_records(out, process.name))
    say(f"A server and {clients} clients run. A sum needs {fewest} of them to the end: {clients - fewest} may be lost.")
    with ended_by_signals(), fleet, Control(fleet.control) as control:
        killed = ""
        for keys in (job | {"rounds": KILL_IN}, job | NOISE):
            say("In job 2, the clients also add noise." if "dp" in keys else "Job 1 has masks only.")
            job_id = control.start_job(keys).job_id
            killed = _follow(fleet, control, job_id, say, kill="dp" in keys)
            ended = control.job(job_id)
            if ended.state != "completed":
                why = f"the job {ended.state}: {ended.reason}; see the logs in {out / 'logs'}"
                raise fleet.failure() or Failure(why)
        known = sorted(control.rounds(limit=2 * rounds), key=lambda round_: round_.round)
        privacy = _spent(control)
    before, updates, trained = _recorded(out, clients)
    state = out / "state" / "server"
    masked = {row.round for row in known if row.job_id == known[0].job_id}
    stored = {key: as_read(payload) for key, payload in stored_payloads(state).items() if key[0] in masked}
    evidence = gather(state, stored, updates, trained, before[max(masked)])
    return PrivateDemoResult(known, killed, privacy, _sums(known, before, updates), evidence)


def as_read(payload: bytes) -> Stored:
    """Return a masked packet, read with its masks still on."""
    *_, bits, count = HEADER.unpack_from(payload)
    data = payload[HEADER.size :]
    return Stored(data, unwrap(unpack(data, count, bits), bits))


def _follow(fleet: Fleet, control: Control, job_id: int, say: Callable[[str], None], *, kill: bool) -> str:
    """Follow a job to its end, and perhaps kill a client.

    Returns:
        The name of the killed client; empty = none was killed.
    """
    victim, last, killed, back = len(fleet.clients) - 1, 0, "", True
    name = fleet.clients[victim].name
    while control.job(job_id).state not in ENDED:
        now = control.status().round
        if now.job_id != job_id:
            continue
        if now.job_round != last:
            last = now.job_round
            if not back:
                fleet.restart(victim)
                back = True
                say(f"{name} is started again, and takes part from now on.")
            say(f"Round {last}: the clients exchange signed keys and sealed shares while they train.")
        # After the sealed shares, and before the update: only then do others make up for a lost client.
        if now.job_round == KILL_IN and now.secure.step == "updates" and kill and not killed:
            fleet.kill(victim)
            killed, back = name, False
            say(f"All have sent their shares. {name} is killed now. The others hold the shares that make up for it.")
        elif killed and not back and now.phase in ("published", "abandoned"):
            fleet.restart(victim)
            back = True
            say(f"The round is {now.phase}. {name} is started again.")
        if back and (failure := fleet.failure()):
            raise failure
        threading.Event().wait(_PERIOD)
    return killed


def _spent(control: Control) -> pb.Privacy | None:
    try:
        return control.privacy()
    except Failure:  # the server lacks the package that computes epsilon
        return None


def _records(out: Path, client: str) -> Path:
    folder = out.absolute() / "records" / client
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("*.npz"):
        old.unlink()
    return folder


def _recorded(
    out: Path, clients: int
) -> tuple[dict[int, NDArray[np.float32]], dict[tuple[int, str], Any], dict[tuple[int, str], Any]]:
    """Return the recorded models, updates and trained parameters.

    The models are those that each round began with; the others are of each client.
    """
    before, updates, trained = {}, {}, {}
    for client in (f"client-{number}" for number in range(clients)):
        for path in (out / "records" / client).glob("[0-9]*.npz"):
            with np.load(path) as values:
                round_ = int(path.stem)
                before[round_] = values["before"]
                trained[round_, client] = values["after"]
                updates[round_, client] = values["after"] - values["before"]
    return before, updates, trained


def _sums(rounds: list[pb.Round], before: dict[int, Any], updates: dict[tuple[int, str], Any]) -> dict[str, float]:
    """Return the correlation of the model's changes with the true updates.

    It compares each change with the mean of the true updates, for each round but a job's last.
    """
    sums = {}
    for this, following in pairwise(rounds):
        if this.job_id != following.job_id:
            continue
        delivered = [client.client_id for client in this.clients if client.num_samples]
        true = [updates[this.round, client] for client in delivered if (this.round, client) in updates]
        if this.phase == "published" and true and {this.round, following.round} <= before.keys():
            sums[f"{this.job_id}.{this.job_round}"] = correlation(
                np.mean(true, 0), before[following.round] - before[this.round]
            )
    return sums


def _tell(outcome: PrivateDemoResult, say: Callable[[str], None]) -> None:
    rows = [
        (
            f"{row['job']}.{row['round']}",
            row["phase"],
            str(row["clients"]),
            percent(row["accuracy"]),
            _lost(row["lost"]),
        )
        for row in outcome.report()["rounds"]
    ]
    print_table("private demo", ("round>", "phase", "updates>", "accuracy>", "clients lost"), rows)
    for name, fit in outcome.sums.items():
        say(f"In round {name}, the model changed as the mean of the true updates would have: correlation {fit:.3f}.")
    spent, found = outcome.privacy, outcome.evidence
    if spent is None:
        say("The server cannot compute epsilon: pip install 'fedring[privacy]'.")
    elif spent.rounds:
        say(f"Privacy spent for whole clients in job 2: epsilon = {spent.epsilon:.3g}, for delta = {spent.delta:g}.")
        say("That promises little: noise that hides one of so few clients hides what all have learned.")
        say("With 1,000 clients, it need not.")
    say(f"The server's state folder holds {found.bytes:,} bytes, and in them {found.stored} masked updates.")
    say(f"Of {found.searched:,} passages of what the clients have learned, it holds {found.update_passages}.")
    say(f"(Of a published model, it holds {found.model_passages}: the search finds what is there.)")
    say(f"The bytes of the masked updates have {found.entropy:.3f} of 8 bits of entropy. If they are read as if they")
    say(f"had no masks, they correlate with the true ones by {found.correlation:.4f} (chance: {found.chance:.4f}).")
    if not found.readable:
        say("So nobody can read a client's update from it.")


def _lost(lost: dict[str, int]) -> str:
    return ", ".join(f"{count} in {step}" for step, count in lost.items()) or "none"
