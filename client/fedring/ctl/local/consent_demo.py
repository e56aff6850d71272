"""flctl try consent: approvals, signatures and chained logs.

It runs on this machine, with the commands that people would type, which it prints.
"""

import json
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fedring.control.calls import ENDED, Control
from fedring.control.failure import Failure
from fedring.ctl.fleet import Fleet
from fedring.ctl.local.experiment import remove_earlier
from fedring.ctl.local.runner import ended_by_signals
from fedring.ctl.output import Output, print_json
from fedring.rpc.channel import open_sync_channel
from fedring.rpc.tls import Tls

SITES = ("north", "south")

JOB = """name = "study"
model = "fedring.train.models:digits_mlp"
data = "fedring.data:digits"
rounds = 3
epochs = 2
lr = 0.05
min_clients = 2
min_clients_to_aggregate = 2
barrier_timeout_seconds = 120
max_abandoned = 1
"""

_PERIOD = 0.1  # seconds between two looks at a job
_SECONDS = 120.0  # the longest wait for a command


@dataclass(slots=True)
class _Course:
    """The course of the demo, as it is told."""

    out: Path
    say: Callable[[str], None]
    env: Mapping[str, str]
    told: dict[str, Any] = field(default_factory=dict)  # the report

    def type(self, program: str, *words: str, fails: bool = False) -> str:
        """Run a command as people type it, and return its output.

        Args:
            program: flctl or fl-client.
            words: Its arguments.
            fails: Whether it must fail.

        Raises:
            Failure: It ends otherwise.
        """
        self.say(f"$ {program} {' '.join(words)}")
        module = {"flctl": "fedring.ctl", "fl-client": "fedring.client"}[program]
        done = subprocess.run(
            [sys.executable, "-m", module, *words],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            cwd=self.out,
            env=dict(self.env),
            timeout=_SECONDS,
            check=False,
        )
        if (done.returncode != 0) != fails:
            raise Failure(f"{program} {words[0]} ended with {done.returncode}: {done.stdout.strip()[-500:]}")
        return done.stdout

    def show(self, text: str, *, only: str = "") -> None:
        """Tell the lines of a command's output that hold a text."""
        for line in text.splitlines():
            if only in line and line.strip():
                self.say(f"    {line.strip()}")


def consent_demo(out: Path, output: Output, env: Mapping[str, str]) -> None:
    """Run the demo, and print its course.

    Args:
        out: Folder of the certificates, the report, logs and state.
        output: How the report is printed.
        env: The variables of the commands that it runs.

    Raises:
        Failure: Something has not gone as it must.
    """
    say: Callable[[str], None] = print if output is Output.TABLE else (lambda _text: None)
    remove_earlier(out)
    (out / "job.toml").write_text(JOB, encoding="utf-8")
    course = _Course(out, say, env)
    pki = _certificates(course)
    sites = [_site(name, pki) for name in SITES]
    fleet = Fleet(out, {"tls": _tls(pki, "server"), "audit_chain": True, "idle_heartbeat_seconds": 0.5}, sites)
    tls = Tls.model_validate(_tls(pki, "ann"))
    with ended_by_signals(), fleet, open_sync_channel(fleet.control, tls) as channel:
        names = {f"FLCTL_TLS_{key.upper()}": path for key, path in _tls(pki, "ann").items()}
        course.env = {**env, "FLCTL_SERVER": fleet.control, **names}
        with Control(fleet.control, channel=channel, tls=tls) as control:
            _unsigned(course)
            _approved(course, control)
            _changed(course, control)
    _verified(course)
    (out / "report.json").write_text(json.dumps(course.told, indent=2) + "\n", encoding="utf-8")
    if output is Output.JSON:
        print_json(course.told)


def _certificates(course: _Course) -> Path:
    pki = course.out / "pki"
    if not pki.exists():
        course.type("flctl", "certs", "init", "pki")
        course.type("flctl", "certs", "issue", "pki", "ann", "--role", "operator")
        for name in SITES:
            course.type("flctl", "certs", "issue", "pki", name)
    course.say("A server and two sites, north and south, have certificates. So has the operator, ann.")
    return pki.absolute()


def _site(name: str, pki: Path) -> dict[str, Any]:
    """Return the configuration of a site."""
    return {
        "client_id": name,
        "tls": _tls(pki, name),
        "approval": {"mode": "cards", "free": ["rounds"], "allowed_operators": ["ann"]},
        "audit": {"chain": True},
    }


def _tls(pki: Path, name: str) -> dict[str, str]:
    return {"ca": str(pki / "ca.crt"), "cert": str(pki / f"{name}.crt"), "key": str(pki / f"{name}.key")}


def _unsigned(course: _Course) -> None:
    course.say("\nThe sites follow only jobs that ann has signed. Somebody at the server starts one without:")
    told = course.type("flctl", "run", "job.toml", fails=True)
    course.show(next(line for line in told.splitlines() if "nobody has signed" in line))
    course.told["unsigned"] = "not_signed" if "nobody has signed" in told else told


def _approved(course: _Course, control: Control) -> None:
    course.say("\nann signs it. It waits, since nobody at the sites has approved it yet:")
    course.type("flctl", "run", "--sign", "--no-wait", "job.toml")
    job_id = control.jobs(limit=1)[0].job_id
    for number, name in enumerate(SITES):
        card = _waiting_card(course, number)
        course.type("fl-client", "cards", "approve", card, "--note", "vote-7", *_state(number))
        course.say(f"    {name} has approved the card {card}")
    _until(lambda: control.job(job_id).state in ENDED)
    ended = control.job(job_id)
    if ended.state != "completed":
        raise Failure(f"the job has {ended.state}: {ended.reason}")
    newest = next(model for model in control.models() if model.HasField("accuracy"))
    course.say(f"    {ended.rounds_done} rounds; accuracy {100 * newest.accuracy:.1f} %")
    course.told |= {"approved": list(SITES), "rounds": ended.rounds_done, "accuracy": newest.accuracy}


def _changed(course: _Course, control: Control) -> None:
    course.say("\nThe same job with another learning rate is another card, and waits:")
    course.type("flctl", "run", "--sign", "--no-wait", "job.toml", "lr=0.5")
    job_id = control.jobs(limit=1)[0].job_id
    card = _waiting_card(course, 0)
    shown = course.type("fl-client", "cards", "show", card, *_state(0))
    course.show(shown, only="->")
    course.told["changed"] = [line.strip() for line in shown.splitlines() if "->" in line]
    course.say("    north does not want that:")
    course.type("fl-client", "cards", "revoke", card, "--note", "too-fast", *_state(0))
    course.type("flctl", "stop", "--job", str(job_id))


def _verified(course: _Course) -> None:
    course.say("\nWhat was done is in the logs of both sides, each with digests of the other's:")
    logs = ("state/client-0/audit", "--against", "state/server/receipts")
    course.show(course.type("flctl", "audit", "verify", *logs), only="compared")
    copy = course.out / "rewritten"
    copy.mkdir(exist_ok=True)
    for file in (course.out / "state" / "client-0" / "audit").glob("*.jsonl"):
        text = file.read_text(encoding="utf-8")
        (copy / file.name).write_text(text.replace('"what":"trains"', '"what":"tested"', 1), encoding="utf-8")
    course.say("north says that it has only tested, in a copy of its log:")
    told = course.type("flctl", "audit", "verify", "rewritten", *logs[1:], fails=True)
    course.show(told)
    course.told["rewritten"] = told.strip()


def _state(number: int) -> tuple[str, str]:
    return "--state-dir", f"state/client-{number}"


def _waiting_card(course: _Course, number: int) -> str:
    """Return the beginning of a waiting card's name.

    A person at the site has to decide about it."""
    found: list[str] = []

    def waiting() -> bool:
        if (course.out / "state" / f"client-{number}" / "cards").is_dir():
            told = json.loads(_quietly(course, "fl-client", "cards", "list", "--json", *_state(number)))["cards"]
            found[:] = [each["id"][:12] for each in told if "has not approved" in each["why"]]
        return bool(found)

    _until(waiting)
    return found[0]


def _quietly(course: _Course, *words: str) -> str:
    """Run a command whose output is for this program."""
    return _Course(course.out, lambda text: None, course.env).type(*words)


def _until(condition: Callable[[], bool]) -> None:
    """Wait until a condition holds.

    Raises:
        Failure: It does not.
    """
    for _ in range(int(_SECONDS / _PERIOD)):
        if condition():
            return
        threading.Event().wait(_PERIOD)
    raise Failure(f"nothing has happened within {_SECONDS:g} s: see the logs")
