"""What flctl profile concludes from its measurements."""

from typing import Any

import pytest

from fedring.ctl.local.profile import judge
from fedring.ctl.main import main


def measured(**milliseconds: float) -> list[dict[str, Any]]:
    """Return rows of hooks whose steps take these times, except for one turn in which the machine was busy."""
    return [
        {"hook": hook, "step_seconds": [one / 1000, one / 1000, 9.0], "bytes_per_step": 100}
        for hook, one in milliseconds.items()
    ]


def test_communication_is_the_bottleneck_from_a_tenth_of_a_step() -> None:
    verdict = judge(measured(noop=91, none=100), 64)["verdict"]
    assert "communication is not the bottleneck" in verdict
    verdict = judge(measured(noop=90, none=100.1), 64)["verdict"]
    assert "communication is not the bottleneck" not in verdict


def test_the_verdict_names_the_hook_that_saves_most_of_a_step() -> None:
    verdict = judge(measured(noop=50, fp16=80, none=100, dgc=60), 64)["verdict"]
    assert "With none communication is 50.00 % of a step: dgc saves 40.00 %" in verdict
    assert "still 16.67 %" in verdict
    assert "what is left is below 10 %" in judge(measured(noop=50, none=100, dgc=51), 64)["verdict"]
    assert "no other hook is faster" in judge(measured(noop=50, none=100, dgc=110), 64)["verdict"]


def test_each_hook_has_the_share_of_its_communication() -> None:
    result = judge(measured(noop=50, none=100, dgc=49), 64)
    none, dgc = result["results"]
    assert none["communication_seconds"] == pytest.approx(0.05)
    assert none["communication_share"] == pytest.approx(0.5)
    assert none["samples_per_second"] == pytest.approx(640)
    assert (dgc["communication_seconds"], dgc["communication_share"]) == (0, 0)


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--hooks", "none,none"], "each once"),
        (["--hooks", "zip"], "there is no hook 'zip'"),
        (["--backend", "nccl"], "fedring or gloo"),
        (["--dataset", "mnist"], "--data-root"),
    ],
)
def test_options_that_cannot_be_profiled_are_refused(
    arguments: list[str], text: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["profile", "--dataset", "digits", *arguments]) == 2
    assert text in capsys.readouterr().err
