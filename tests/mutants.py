"""Put faults into the source, one at a time, and check that the tests of the file named for each one notice it.

    python -m tests.mutants                  all of them, about a minute each
    python -m tests.mutants grace lock       some of them
    python -m tests.mutants --tree DIR       on another checkout, such as an older version, with that one's tests

The faults are in all parts of the source. Most of them concern tests that were merged or shortened, or whose programs
are forks now: those tests must still notice the faults. Each fault is put into a copy of the checkout, in which the
tests have passed. Exits with 1 if a fault is not noticed, or if its text is not in the source any more: then update
MUTANTS.
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.markup import escape
from rich.progress import track
from rich.table import Table

from tests.conftest import ROOT

_SOURCES = ("server", "client", "common", "protos")
_SECONDS = 1800  # the longest time of the tests of one mutant, or of all tests without a mutant


class Mutant(NamedTuple):
    """A fault: `old`, which must be in the file exactly once, becomes `new`."""

    path: str
    old: str
    new: str
    tests: str
    before: str = ""
    """The test file of older versions, if it has been merged into `tests` since."""

    def tests_in(self, tree: Path) -> str:
        """Return the file whose tests must notice the fault in that checkout."""
        return self.before if self.before and tree != ROOT else self.tests


MUTANTS = {
    # Merged tests: one fleet runs all jobs of the file.
    "learning rate": Mutant(
        "common/fedring/train/optimizers.py",
        "        lr=lr,\n        momentum=momentum,",
        "        lr=lr / 2,\n        momentum=momentum,",
        "tests/system/test_data_parallel.py",
    ),
    "hook by name": Mutant(
        "client/fedring/ddp/hooks/by_name.py",
        '"bf16": (_plain, plain(bf16_hook))',
        '"bf16": (_plain, plain(allreduce_hook))',
        "tests/system/test_data_parallel.py",
    ),
    "rank of a job": Mutant(
        "common/fedring/train/jobs/data_parallel_table.py",
        '"matrix_approximation_rank": self.rank,',
        '"matrix_approximation_rank": 4 * self.rank,',
        "tests/system/test_data_parallel.py",
    ),
    "tied weights": Mutant(
        "client/fedring/pipeline/cut.py",
        "            if other != number:\n",
        "            if other > number:\n",
        "tests/system/test_pipeline_mode.py",
    ),
    "pipeline metrics": Mutant(
        "client/fedring/client/pipeline_metrics.py",
        "before[0] + count",
        "count",
        "tests/system/test_pipeline_mode.py",
    ),
    "adam's state": Mutant(
        "common/fedring/train/optimizers.py",
        "betas=(momentum, beta2)",
        "betas=(0.0, beta2)",
        "tests/system/test_pipeline_mode.py",
    ),
    "packages": Mutant(
        "pyproject.toml",
        '    "zstandard>=0.23",\n',
        "",
        "tests/unit/project/test_layout.py",
        "tests/system/test_wheel.py",
    ),
    # Changed tests: they claim something over several seeds, or use a gate instead of a race.
    "dgc's residual": Mutant(
        "client/fedring/compress/dgc.py",
        "    return residual.add_(momentum)\n",
        "    return residual.copy_(grad)\n",
        "tests/system/test_dgc_ddp.py",
    ),
    "silent clients": Mutant(
        "server/fedring/server/config.py",
        "    lost_after_seconds: Seconds = Field(\n        5.0,",
        "    lost_after_seconds: Seconds = Field(\n        50.0,",
        "tests/fault/test_promises.py",
        "tests/fault/test_processes.py",
    ),
    "silent ranks": Mutant(
        "client/fedring/ring/options.py",
        "lost_after_seconds: float = Field(default=4.0,",
        "lost_after_seconds: float = Field(default=40.0,",
        "tests/fault/test_promises.py",
        "tests/fault/test_ring.py",
    ),
    # Tests whose programs are forks, and not started by a new interpreter any more.
    "lock": Mutant(
        "common/fedring/daemon/lock.py",
        "fcntl.LOCK_EX | fcntl.LOCK_NB",
        "fcntl.LOCK_SH | fcntl.LOCK_NB",
        "tests/fault/test_processes.py",
    ),
    "commit": Mutant(
        "server/fedring/server/state/sql/updates.py",
        "                sealed.add(connection, *new)\n",
        "                pass\n",
        "tests/fault/test_store_kill.py",
    ),
    "health before the stop": Mutant(
        "server/fedring/server/serving.py",
        "        await health.stop()\n",
        "",
        "tests/system/test_health.py",
    ),
    "exit code": Mutant(
        "client/fedring/client/main.py",
        "            return error.exit_code\n",
        "            return Exit.OK\n",
        "tests/unit/client/test_client_main.py",
    ),
    "newcomers": Mutant(
        "client/fedring/client/group/hooks.py",
        "        self.state.regroup(self.shared, steps=steps)\n",
        "",
        "tests/unit/workers/test_workers_data_parallel.py",
    ),
    "demo's table": Mutant(
        "client/fedring/ctl/local/trying.py",
        '        "sent/worker>",\n',
        '        "sent>",\n',
        "tests/system/test_data_parallel.py",
    ),
    "an example": Mutant(
        "docs/examples/own_loop.py",
        "samples=len(data.train)",
        "samples=1",
        "tests/system/test_examples.py",
    ),
    "aborted groups": Mutant(
        "client/fedring/ring/torch/member.py",
        'f"rank {self.ring.rank} has aborted the group"',
        '"a rank has aborted the group"',
        "tests/system/test_ring_failures.py",
    ),
    "lost connection": Mutant(
        "server/fedring/web/static/app.js",
        '    at("lost").hidden = false;\n',
        "",
        "tests/system/test_web_page.py",
    ),
    "spans": Mutant(
        "common/fedring/daemon/tracing.py",
        "_TEXTS.extract({KEY: parent})",
        "_TEXTS.extract({})",
        "tests/system/test_tracing.py",
    ),
    # Other tests.
    "shares": Mutant(
        "client/fedring/workers/shards.py",
        "start = taken + place.rank * each",
        "start = taken",
        "tests/unit/workers/test_workers_shards.py",
    ),
    "grace": Mutant(
        "server/fedring/server/round/machine.py",
        "now >= state.members[c].since + round_.rules.grace}",
        "now >= state.members[c].since}",
        "tests/unit/server/round/test_rounds.py",
    ),
    "same update": Mutant(
        "server/fedring/server/state/sql/updates.py",
        "Acceptance.ALREADY if names[key] == row.name else Acceptance.OTHER",
        "Acceptance.ALREADY",
        "tests/unit/server/state/test_store.py",
    ),
    "feedback": Mutant(
        "client/fedring/compress/feedback.py",
        "target = update if residual is None else update + residual",
        "target = update",
        "tests/property/test_compress_feedback.py",
    ),
    "partition": Mutant(
        "common/fedring/data/partition.py",
        "        left -= taken\n",
        "",
        "tests/property/test_data_partition.py",
    ),
    "page's headers": Mutant(
        "server/fedring/web/headers.py", '    "X-Frame-Options": "DENY",\n', "", "tests/system/test_web.py"
    ),
    "page's deadline": Mutant(
        "server/fedring/web/connections.py",
        "        super().connection_made(transport)\n        if self._admit():\n            self._expect_head()\n",
        "        super().connection_made(transport)\n        if self._admit():\n",
        "tests/unit/web/test_web_connections.py",
    ),
    "page's room": Mutant(
        "server/fedring/web/connections.py",
        "same <= most and ",
        "",
        "tests/system/test_web.py",
    ),
    "live sessions": Mutant(
        "server/fedring/server/sessions/sessions.py",
        "who.role is None and not compare_digest",
        "False and not compare_digest",
        "tests/unit/server/sessions/test_server_sessions.py",
    ),
    "proven clients": Mutant(
        "server/fedring/server/sessions/sessions.py",
        "older and who.role is None and ",
        "older and ",
        "tests/unit/server/sessions/test_server_sessions.py",
    ),
    "resume secret": Mutant(
        "client/fedring/client/session/connection.py",
        "resume_secret=self._resume.text,",
        'resume_secret="",',
        "tests/fault/test_takeover.py",
    ),
    "kept secret": Mutant(
        "client/fedring/client/session/resume_secret.py",
        "            new.replace(self._file)\n",
        "            pass\n",
        "tests/fault/test_takeover.py",
    ),
    "base of a spooled update": Mutant(
        "client/fedring/client/transfer/delivery.py",
        "(header.run_id, header.round, header.base_digest) == assignment.round_key",
        "(header.run_id, header.round) == assignment.round_key[:2]",
        "tests/fault/test_restored_clients.py",
    ),
    "held model": Mutant(
        "client/fedring/client/transfer/fetch.py",
        "if held and (held.digest, held.schema.hash) == (digest, schema.hash):",
        "if held and held.schema.hash == schema.hash:",
        "tests/fault/test_restored_clients.py",
    ),
    "sending given up": Mutant(
        "client/fedring/client/transfer/delivery.py",
        "isinstance(error, GivenUp) and error.reason in _MAY_BE_WANTED",
        "False",
        "tests/fault/test_restored_clients.py",
    ),
    "residual of before": Mutant(
        "client/fedring/client/answer.py",
        "line.run_id, schema, last, ",
        "line.run_id, schema, type(last)(), ",
        "tests/fault/test_restored_clients.py",
    ),
    "accepted unheard": Mutant(
        "client/fedring/client/transfer/delivery.py",
        "            self._accept(spooled, assignment)\n",
        "            self._spool.drop()\n",
        "tests/fault/test_error_feedback.py",
    ),
    "newest of the pruned": Mutant(
        "server/fedring/server/state/sql/updates.py",
        "for row in pruned if row.last_name\n",
        "for row in pruned if not row.last_name\n",
        "tests/fault/test_error_feedback.py",
    ),
    "epoch of an update": Mutant(
        "server/fedring/server/update/upload.py",
        "epoch=self._epoch)",
        "epoch=self._header.epoch)",
        "tests/fault/test_error_feedback.py",
    ),
    "expired sessions": Mutant(
        "server/fedring/server/service/sweep.py",
        "if now >= ends_at:",
        "if False:",
        "tests/system/test_security.py",
    ),
    "proof before sealing": Mutant(
        "server/fedring/server/aggregation/aggregate.py", "        check()\n", "", "tests/fault/test_damage.py"
    ),
    "proof of a download": Mutant(
        "server/fedring/server/service/downloads.py",
        "                    payload.download.check()",
        "                    pass",
        "tests/fault/test_damage.py",
    ),
    "proof of a download that has fallen behind": Mutant(
        "server/fedring/server/service/downloads.py",
        "if not payload.is_same(call, message):",
        "if False:",
        "tests/unit/server/model/test_model_streams.py",
    ),
    "chunks that wait": Mutant(
        "server/fedring/server/service/upload_calls.py",
        "            call.stack.callback(self._keep_waiting, call)\n",
        "",
        "tests/unit/server/update/test_server_uploads.py",
    ),
    "proof of what was read twice": Mutant(
        "server/fedring/server/state/checked.py",
        "                self._twice = True\n",
        "                pass\n",
        "tests/unit/server/state/test_server_checked.py",
    ),
    "old digests before a migration": Mutant(
        "server/fedring/server/state/sql/migrations/__init__.py",
        "if not layout.is_sound(row[ROW_DIGEST], row):",
        "if False:",
        "tests/fault/test_migrations.py",
    ),
    "digest of a row": Mutant(
        "server/fedring/server/state/sql/layout.py",
        "return digest == self.digest(stored)",
        "return bool(digest)",
        "tests/unit/server/state/test_store_sqlite.py",
    ),
    "type in the digest of a row": Mutant(
        "server/fedring/server/state/sql/layout.py",
        "figures.append(2 * len(part) + 1)",
        "figures.append(2 * len(part))",
        "tests/unit/server/state/test_store_sqlite.py",
    ),
    "row that is to be replaced": Mutant(
        "server/fedring/server/state/sql/sealed.py",
        """raise _damaged(type(row), values, "is missing")""",
        "pass",
        "tests/unit/server/state/test_store_sqlite.py",
    ),
    "rows of a backup": Mutant(
        "server/fedring/server/state/backup/contents.py",
        "            check_rows(reader)\n",
        "            pass\n",
        "tests/fault/test_backup.py",
    ),
    "state id": Mutant(
        "server/fedring/server/state/identity.py",
        "    if stored != beside and not (stored == draft and not beside):\n",
        "    if False:\n",
        "tests/fault/test_state.py",
    ),
    "lock of the folder": Mutant(
        "common/fedring/daemon/lock.py",
        "            for fd in self._fds:\n",
        "            for fd in self._fds[1:]:\n",
        "tests/fault/test_state.py",
    ),
    "time that is left": Mutant(
        "server/fedring/server/running/opening.py",
        "        rounds.begin(open_, Resumed(resumed, RECOVERY_SECONDS, elapsed))\n",
        "        rounds.begin(open_, Resumed(resumed, RECOVERY_SECONDS, 0.0))\n",
        "tests/fault/test_deadlines.py",
    ),
    "time without a disk": Mutant(
        "server/fedring/server/operator/readiness.py",
        "                give_time_back(rounds, storage.since)\n",
        "",
        "tests/fault/test_storage.py",
    ),
    "drain of a unit": Mutant(
        "deploy/systemd/fl-server.service", "TimeoutStopSec=30s", "TimeoutStopSec=10s", "tests/deploy/test_systemd.py"
    ),
    # What a server, a stranger or a disk may not do.
    "dither": Mutant(
        "client/fedring/client/secure/protection.py",
        "self._secret.derive(command, DITHER)",
        "bytes(32)",
        "tests/system/test_asked_twice.py",
    ),
    "simulated dither": Mutant(
        "client/fedring/simulation/worker.py",
        "client_secret(self._secret, name)",
        "bytes(32)",
        "tests/system/test_secure_simulation.py",
    ),
    "weights before rounding": Mutant(
        "common/fedring/secure/levels.py",
        "        if grid.weight != 1:\n            found *=",
        "        np.rint(found, out=found)\n        if grid.weight != 1:\n            found *=",
        "tests/unit/client/secure/test_knapsack.py",
    ),
    "asked twice": Mutant(
        "client/fedring/client/secure/released.py",
        "len(differing) < self._least:",
        "len(differing) < 1:",
        "tests/system/test_asked_twice.py",
    ),
    "failures that are told": Mutant(
        "client/fedring/client/task.py",
        "if self._started is None or not is_covered(self.command):",
        "if True:",
        "tests/unit/client/test_client_failures.py",
    ),
    "charge by name": Mutant(
        "client/fedring/client/policy/ledger.py",
        'self._charge(_name_of(command, f"{multiplier} {update}"), multiplier)',
        'self._charge(_name_of(command, f"{multiplier}"), multiplier)',
        "tests/unit/client/policy/test_client_charges.py",
    ),
    "wrong shares": Mutant(
        "server/fedring/server/running/opening.py",
        "return open_.kind.rules(replace(rules, left_out=open_.left_out, job_id=open_.row.job_id))",
        "return open_.kind.rules(rules)",
        "tests/fault/test_secure_liars.py",
    ),
    "digest of the account": Mutant(
        "common/fedring/daemon/durable.py",
        "if hashlib.sha256(text).hexdigest().encode() != digest:",
        "if len(digest) != 64:",
        "tests/unit/client/policy/test_client_charges.py",
    ),
    "copied folder": Mutant(
        "common/fedring/daemon/lock.py",
        "if known != client:",
        "if not known:",
        "tests/fault/test_client_disk.py",
    ),
    "upload taken for a flood": Mutant(
        "server/fedring/server/guard/callers.py",
        "(min(received, answered) > MOST_IDLE_BYTES",
        "(received > MOST_IDLE_BYTES",
        "tests/unit/server/guard/test_guard_entrance.py",
    ),
    "damaged log": Mutant(
        "server/fedring/server/state/wal.py",
        "if end and after_commit and (fits",
        "if end and not before and (fits",
        "tests/unit/server/state/test_lost_commits.py",
    ),
    "path below data_root": Mutant(
        "common/fedring/train/names/arguments.py",
        "if not path.is_relative_to(folder):",
        "if not path:",
        "tests/unit/train/test_arguments.py",
    ),
}


def main() -> int:
    """Try the mutants that the command line names; return 1 if the tests do not notice one of them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help=f"some of: {', '.join(MUTANTS)}")
    parser.add_argument("--tree", type=Path, default=ROOT, help="the checkout to try them on")
    args = parser.parse_args()
    args.tree = args.tree.resolve()
    if unknown := sorted({*args.names} - {*MUTANTS}):
        parser.error(f"there is no mutant {unknown[0]!r}; there are {', '.join(MUTANTS)}")
    names = args.names or list(MUTANTS)
    tests = {name: MUTANTS[name].tests_in(args.tree) for name in names}
    console, table, lived = Console(), Table("mutant", "tests", "noticed by", "seconds"), []
    with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
        if failed := run_tests(copy_of(args.tree, Path(folder) / "tree"), *sorted(set(tests.values()))):
            raise SystemExit(f"{failed} fails without any fault")
    for name in track(names, "Trying mutants", console=Console(stderr=True)):
        began = time.monotonic()
        with tempfile.TemporaryDirectory(prefix="mutant-") as folder:
            tree = copy_of(args.tree, Path(folder) / "tree")
            put_into(tree, MUTANTS[name])
            noticed = run_tests(tree, tests[name])
        if not noticed:
            lived.append(name)
        table.add_row(name, tests[name], escape(noticed) or "[bold]nothing", f"{time.monotonic() - began:.0f}")
        print(f"{name}: {noticed or 'NOT NOTICED'}", file=sys.stderr, flush=True)
    console.print(table)
    print(f"{len(lived)} not noticed: {', '.join(lived)}" if lived else f"all {len(names)} were noticed")
    return bool(lived)


def copy_of(tree: Path, target: Path) -> Path:
    """Copy the files that git tracks or would track, the generated code, and a link to the data beside the tree."""
    words = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(words, cwd=tree, capture_output=True, text=True, check=True).stdout.splitlines()
    made = [str(path.relative_to(tree)) for path in (tree / "protos").rglob("*_pb2*")]
    for name in [*listed, *made]:
        if (tree / name).is_file():
            (target / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(tree / name, target / name)
    subprocess.run(["git", "init", "--quiet"], cwd=target, check=True)
    if (tree.parent / "shared").is_dir():
        (target.parent / "shared").symlink_to(tree.parent / "shared")
    return target


def put_into(tree: Path, mutant: Mutant) -> None:
    """Put the fault into the tree; exit if its text is not there exactly once."""
    file = tree / mutant.path
    text = file.read_text()
    if text.count(mutant.old) != 1:
        raise SystemExit(f"{mutant.path} has {mutant.old!r} {text.count(mutant.old)} times instead of once")
    file.write_text(text.replace(mutant.old, mutant.new))


def run_tests(tree: Path, *tests: str) -> str:
    """Run the tests of these files until one fails, and return its name; empty if none does."""
    path = os.pathsep.join(str(tree / name) for name in _SOURCES)
    env = {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", *tests]
    done = subprocess.run(command, cwd=tree, env=env, capture_output=True, text=True, timeout=_SECONDS, check=False)
    if done.returncode == 0:
        return ""
    found = re.search(r"^(?:FAILED|ERROR) \S*?::(\S+)", done.stdout, re.MULTILINE)
    return found[1] if found else f"pytest, which ended with {done.returncode}"


if __name__ == "__main__":
    sys.exit(main())
