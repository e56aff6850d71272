"""Each benchmark with its smallest sizes: the fields of its JSON, its plot, and its tables."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any

import pytest

from fedring.control.failure import Failure
from fedring.ctl.local.presets import Dataset
from fedring.ctl.local.rank import Rank
from fedring.ctl.local.ranks import Host, run_ranks
from fedring.ctl.local.runner import present
from fedring.ctl.output import Output
from tests import forks
from tests.bench import ddp, hooks, pipeline
from tests.bench.lab import networks
from tests.processes import children_of

SHAPED = os.geteuid() == 0 and shutil.which("tc") is not None
PNG = b"\x89PNG"


@pytest.fixture
def forked_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make ranks forks: real interpreters import torch for seconds each."""

    def start(host: Host, command: Sequence[str], *, stdout: IO[bytes], stderr: IO[bytes]) -> forks.Fork:
        *_, program, number, task, settings, count, store = command
        assert (host.prefix, "rank import main" in program) == ((), True)
        env = {**os.environ, **host.env}
        arguments = [number, task, settings, count, store]
        return forks.Fork("tests.system.rank", arguments, stdout=stdout.fileno(), stderr=stderr.fileno(), env=env)

    monkeypatch.setattr(Host, "start", start)


def shown(results: dict[str, Any], folder: Path, capsys: pytest.CaptureFixture[str], module: Any) -> str:
    """Present the results as the benchmark does, check its files, and return what it prints."""
    path = folder / "results.json"
    present(results, path, Output.TABLE, plot=module.plot, print_results=module.print_tables)
    assert json.loads(path.read_text()) == json.loads(json.dumps(results))
    assert (folder / "results.png").read_bytes().startswith(PNG)
    return capsys.readouterr().out


def test_hooks_have_times_bytes_and_accuracies(
    forked_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = hooks.HookScale(turns=1, steps=2, training=8, seeds=2, batch_size=8)
    names = ["none", "powersgd(start_powerSGD_iter=6)"]
    results = hooks.measure(names, Dataset.DIGITS, None, scale=scale, rate="")
    assert results["network"] == {"rate": None, "limit": networks.UNSHAPED}
    none, powersgd = results["hooks"]
    assert [none["hook"], powersgd["hook"]] == names
    for row in results["hooks"]:
        assert row["step_seconds"] > 0
        assert row["ratio"] > 0
        assert len(row["accuracies"]) == 2
        assert 0 <= row["accuracy"] <= 1
    assert none["bytes_per_step"] > 19_240  # 4,810 values of 4 bytes, sent once by each of two ranks
    # Once it compresses it sends less than in the mean of a training whose first steps are dense.
    assert powersgd["bytes_per_step"] < powersgd["training_bytes_per_step"] < none["bytes_per_step"]
    table = shown(results, tmp_path, capsys, hooks)
    assert "powersgd from step 6" in table


def test_a_pipeline_has_split_sizes_accuracies_and_memory(
    forked_ranks: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    scale = pipeline.PipelineScale(
        model="fedring.train.models:digits_mlp", shape=(8, 1, 8, 8), splits=(4, 8), turns=1,
        memory_stages=2, memory_micro_batches=2, stages=(2,), samples=128, seeds=1,
    )  # fmt: skip
    results = pipeline.measure(scale, Dataset.DIGITS, None)
    ways = [(row["way"], row["split"]) for row in results["split_sizes"]["rows"]]
    assert ways == [("one device", 8), ("fedring", 4), ("torch", 4), ("fedring", 8)]
    found = results["summary"]
    assert found["gain"] == pytest.approx(found["one_device_seconds"] / found["pipelined_seconds"] - 1)
    assert found["overhead"] == pytest.approx(found["model_parallel_seconds"] / found["one_device_seconds"] - 1)
    assert [row["weights"] for row in results["weights"]] == list(pipeline.WEIGHTS)
    kept = {(row["schedule"], row["stage"]): row for row in results["memory"]}
    assert len(kept) == 2 * len(pipeline.MEMORY)
    assert kept["PipeDream, stashed", 0]["stashed"] > kept["1f1b", 0]["stashed"] == 0
    assert "PipeDream, vertical sync" in shown(results, tmp_path, capsys, pipeline)


@pytest.mark.soak
def test_ddp_has_every_figure_of_the_paper(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    scale = ddp.DdpScale(
        total=20_000, pieces=(1000, 20_000), model="fedring.train.models:digits_mlp", shape=(4, 1, 8, 8), repeats=1,
        buckets_mib=(1, 25), every=(1, 2), cycle=2, worlds=(1, 2), rates=("1gbit",),
        steps=64, seeds=2, sizes=(70_000, 200_000),
        small_model="fedring.train.models:digits_mlp", small_shape=(4, 1, 8, 8),
    )  # fmt: skip
    results = ddp.measure(scale)
    pairs = [(row["piece"], row["backend"]) for row in results["pieces"]["rows"]]
    assert pairs == [(1000, "gloo"), (1000, "fedring"), (20_000, "gloo"), (20_000, "fedring")]
    assert results["ready"]["parameters"][-1] == 4810
    assert results["ready"]["seconds"] == sorted(results["ready"]["seconds"])
    assert results["buckets"]["rows"][0]["backend"] == "noop"
    assert [row["every"] for row in results["no_sync"]["rows"]] == [1, 1, 2, 2]
    assert [row["every"] for row in results["accuracy"]] == [1, 2]
    assert all(len(row["accuracies"]) == 2 and row["accuracy"] > 0.3 for row in results["accuracy"])
    sizes = [(row["parameters"], row["backend"]) for row in results["sizes"]["rows"]]
    assert sizes == [(size, name) for size in (70_000, 200_000) for name in ("noop", "gloo", "fedring")]
    assert [(row["ranks"], row["backend"]) for row in results["scaling"][4:]] == [
        (2, name) for name in ("noop", "gloo", "fedring", "dgc")
    ]
    table = shown(results, tmp_path, capsys, ddp)
    assert "all-reduce every" in table
    assert ("1gbit" if SHAPED else "loopback without a limit") in table


def bench(name: str, *arguments: str) -> "subprocess.CompletedProcess[str]":
    return forks.run(f"tests.bench.{name}", *arguments, "--dataset", "digits", "--output", "json", timeout=240)


@pytest.mark.parametrize("name", ["agreement", "heart", "niid"])
def test_a_bench_beside_published_figures_says_whose_they_are(name: str) -> None:
    done = forks.run(f"tests.bench.{name}", "--help", timeout=240)
    assert done.returncode == 0, done.stderr
    assert "github.com/" in done.stdout
    assert "--out" in done.stdout


@pytest.mark.soak
def test_federated_shows_each_client(tmp_path: Path) -> None:
    done = bench("federated", "--encodings", "int8", "--rounds", "1", "--no-central", "--quick", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results == json.loads((tmp_path / "federated.json").read_text())
    assert (results["bench"], results["scale"], results["rounds"]) == ("federated", "chosen", 1)
    (row,) = results["encodings"]
    assert sorted(row["by_client"]) == ["client-0", "client-1"]
    assert sum(client["upload_bytes"] for client in row["by_client"].values()) == 2 * row["upload_bytes"]
    assert (results["seeds"], results["network"]["rate"], len(row["by_seed"])) == (1, None, 1)
    assert (tmp_path / "federated.png").read_bytes().startswith(PNG)


@pytest.mark.soak
@pytest.mark.skipif(not SHAPED, reason="network namespaces need root")
def test_a_bench_of_daemons_runs_behind_lines_with_several_seeds(tmp_path: Path) -> None:
    """Clients read 20 kB a round over 1 Mbit/s, of which the first 128 kB pass at once; workers use lines, too."""
    given = ["--rounds", "12", "--encodings", "fp32", "--no-central", "--subset", "0", "--seeds", "2"]
    done = bench("federated", *given, "--rate", "1mbit", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    assert results["network"] == {"rate": "1mbit", "limit": networks.LIMITED}
    (row,) = results["encodings"]
    assert len({one["model_sha256"] for one in row["by_seed"]}) == 2
    assert row["accuracy"] == pytest.approx(sum(one["accuracy"] for one in row["by_seed"]) / 2)
    for seed in range(2):
        rounds = json.loads((tmp_path / "fp32" / f"seed-{seed}" / "report.json").read_text())["rounds"]
        behind = sum(one["download_bytes"] for one in rounds) - (128 << 10)
        assert sum(one["seconds"] + one["evaluate_seconds"] for one in rounds) > 0.9 * 8 * behind / 1e6 > 0.9
    done = bench(
        "data_parallel", "--epochs", "1", "--hooks", "none", "--seeds", "1", "--rate", "10mbit", "--out", str(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout)["network"]["limit"] == networks.LIMITED


@pytest.mark.soak
def test_data_parallel_shows_the_longest_and_the_mean_wait_of_each_worker(tmp_path: Path) -> None:
    done = bench("data_parallel", "--epochs", "2", "--out", str(tmp_path))
    assert done.returncode == 0, done.stderr
    results = json.loads(done.stdout)
    for row in results["hooks"]:
        assert sorted(row["by_worker"]) == ["client-0", "client-1"]
        for worker in row["by_worker"].values():
            assert worker["wait_seconds_max"] >= worker["wait_seconds_mean"] > 0
    assert (tmp_path / "data-parallel.png").read_bytes().startswith(PNG)


def fail_on_rank_1(rank: Rank) -> None:
    """Fail on rank 1, while rank 0 waits for it."""
    if rank.number == 1:
        raise RuntimeError("the reason")
    time.sleep(600)  # is killed


def test_a_rank_that_fails_ends_the_others_and_says_why(forked_ranks: None) -> None:
    began = time.monotonic()
    with pytest.raises(Failure, match=r"(?s)worker 1 failed:.*RuntimeError: the reason"):
        run_ranks("tests.system.test_bench:fail_on_rank_1", {}, [Host()] * 2)
    assert time.monotonic() - began < 300


def test_without_the_right_to_make_namespaces_lines_have_no_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "")
    with networks.network(2, "100mbit") as net:
        assert net.facts() == {"rate": "100mbit", "limit": networks.UNSHAPED}
        assert [host.prefix for host in net.hosts] == [(), ()]


@pytest.mark.skipif(not SHAPED, reason="network namespaces need root")
def test_a_bench_that_is_terminated_leaves_no_namespace_and_no_rank(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "tests.bench.hooks", "--dataset", "digits", "--out", str(tmp_path)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as running:
        try:
            while len(children(running.pid)) < 2:
                assert running.poll() is None
                time.sleep(0.05)
            ranks = children(running.pid)
            assert f"fedring{running.pid}-1" in namespaces()
        finally:
            running.send_signal(signal.SIGTERM)
        assert running.wait(60) == 128 + signal.SIGTERM
    assert [name for name in namespaces() if name.startswith(f"fedring{running.pid}")] == []
    assert not any(Path(f"/proc/{rank}").exists() for rank in ranks)


def children(pid: int) -> list[int]:
    """Return the ranks that a process has started."""
    return [child for child in children_of(pid) if b"local.rank" in command_of(child)]


def command_of(pid: int) -> bytes:
    """Return the command line of a process; empty if it has ended meanwhile."""
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes()
    except (FileNotFoundError, ProcessLookupError):
        return b""


def namespaces() -> list[str]:
    listed = subprocess.run(["ip", "netns", "list"], capture_output=True, text=True, check=True).stdout
    return [line.split()[0] for line in listed.splitlines()]
