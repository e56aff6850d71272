"""Sentences on the progress that only some kinds of rounds have."""

from collections import Counter
from collections.abc import Sequence
from math import ceil

from fedring.ctl.output import duration, percent
from fedring.daemon.wording import counted, listed
from fedring.v1 import control_pb2 as pb

_LAST = 10  # buffers
_BAR = 30  # letters of the longest bar


def progress_of(round_: pb.Round) -> dict[str, str]:
    """Return sentences on the progress of an open round, by its kind."""
    rows: dict[str, str] = {}
    if round_.HasField("secure"):
        rows["secure"] = _steps_sentence(round_.secure)
    if round_.HasField("asynchronous"):
        rows["buffer"] = buffer_sentence(round_.asynchronous)
    return rows


def outcome_of(round_: pb.Round) -> list[str]:
    """Return lines on the outcome of a round by its kind."""
    lines: list[str] = []
    if round_.HasField("secure"):
        lines.append(f"secure aggregation: {_steps_sentence(round_.secure)}")
        if took := [f"{step} {duration(seconds)}" for step, seconds in round_.secure.seconds.items()]:
            lines.append(f"time of its steps: {', '.join(took)}")
    if round_.HasField("asynchronous"):
        lines.append(f"buffer: {buffer_sentence(round_.asynchronous)}")
    return lines


def buffer_sentence(buffer: pb.AsynchronousProgress) -> str:
    """Return the state of a buffer, and the ages of its updates."""
    ages = Counter(buffer.staleness.values())
    text = f"{len(buffer.staleness)} of {counted(buffer.buffer, 'update')}"
    if ages:
        shown = ", ".join(f"{ages[age]} of age {age}" for age in sorted(ages))
        text += f" ({shown}, in versions)"
    return f"{text}; {buffer.at_work} of {counted(buffer.concurrency, 'client')} at work"


def histogram(rounds: Sequence[pb.Round]) -> list[str]:
    """Draw the ages of updates in the newest buffers, line by line.

    Args:
        rounds: Newest first.
    """
    last = _last_buffers(rounds)
    ages = Counter(age for each in last for age in each.staleness.values())
    most = max(ages.values(), default=1)
    lines = [f"{age:4d} {'█' * ceil(_BAR * ages[age] / most):{_BAR}} {ages[age]}" for age in sorted(ages)]
    return [f"updates of the last {counted(len(last), 'buffer')} by age, in versions:", *lines] if lines else []


def shares(rounds: Sequence[pb.Round]) -> str:
    """Return each client's share of the newest buffers, or "".

    Args:
        rounds: Newest first.
    """
    last = _last_buffers(rounds)
    counts = Counter(client for each in last for client in each.staleness)
    if not counts:
        return ""
    ranked = sorted(counts.items(), key=lambda item: (-item[1], item[0]))  # a map of the wire has no order
    parts = [f"{client} {percent(count / counts.total())}" for client, count in ranked]
    return f"shares of the last {counted(len(last), 'buffer')}: {listed(parts)}"


def _steps_sentence(steps: pb.SecureProgress) -> str:
    """Return the progress or outcome of a round's secure aggregation."""
    lost = ", ".join(f"{count} in {step}" for step, count in steps.lost.items() if count)
    parts = [counted(steps.groups, "group")] if steps.groups else []
    if steps.step != "done":
        parts.append(f"{steps.step}: {steps.answered} of {counted(steps.asked, 'client')} have answered")
    return ", ".join([*parts, f"lost {lost}" if lost else "no client lost"])


def _last_buffers(rounds: Sequence[pb.Round]) -> list[pb.AsynchronousProgress]:
    """Return the newest buffers that have made versions."""
    return [each.asynchronous for each in rounds if each.HasField("asynchronous") and each.model_version][:_LAST]
