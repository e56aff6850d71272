"""Drawings of schedules: as text, and as a picture with bubbles."""

from pathlib import Path

from fedring.schedules.schedule import Kind, Schedule
from fedring.schedules.simulation import Timeline

_COLOURS = {Kind.FORWARD: "#0072B2", Kind.BACKWARD: "#E69F00", Kind.UPDATE: "#24292F"}
_INK, _BUBBLE = "#24292F", "#ECEEF0"
_DPI = 160
_MIN_UPDATE_WIDTH = 0.02  # in units of time: the width of an update that takes no time


def text(schedule: Schedule) -> str:
    """Return a line for each worker: its actions in order.

    Actions show their stage if workers have several, and the version of their weights if the schedule is pipedream.
    Workers show their stage if stages have several workers.
    """
    several = schedule.stages > len(schedule.workers)
    lines = []
    for worker, actions in enumerate(schedule.workers):
        words = []
        for action in actions:
            stage = f"@{action.stage}" if several else ""
            word = f"U{stage}" if action.kind is Kind.UPDATE else f"{action}{stage}"
            words.append(f"{word}.v{action.version}" if schedule.name == "pipedream" else word)
        lines.append(f"worker {worker}{_place(schedule, worker)}: {' '.join(words)}")
    return "\n".join(lines)


def _place(schedule: Schedule, worker: int) -> str:
    """Return the text for a worker's stage and replica number.

    It is "" if no stage has replicas.
    """
    if not schedule.replicas:
        return ""
    (stage,) = schedule.stages_of(worker)
    return f" (stage {stage}, replica {schedule.owners(stage).index(worker)})"


def draw(timeline: Timeline, path: Path, *, title: str) -> None:
    """Write a PNG with one row for each worker.

    The bubble stays pale.

    Args:
        timeline: The times of all actions.
        path: The file to write.
        title: The picture's title.
    """
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(12, 1.2 + 0.55 * timeline.workers), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(timeline.workers), timeline.makespan, 0.9, color=_BUBBLE)
    small = len(timeline.spans) / timeline.workers > 40
    for span in timeline.spans:
        width = max(span.end - span.start, _MIN_UPDATE_WIDTH if span.action.kind is Kind.UPDATE else 0.0)
        alpha = 1.0 - 0.45 * ((span.action.stage // timeline.workers) % 2)  # every other stage of a worker is paler
        axes.barh(
            span.worker,
            width,
            0.82,
            span.start,
            color=_COLOURS[span.action.kind],
            alpha=alpha,
            edgecolor="white",
            linewidth=0.6,
        )
        if span.action.kind is not Kind.UPDATE and not small:
            middle = (span.start + span.end) / 2
            axes.text(middle, span.worker, str(span.action.micro_batch), ha="center", va="center", color="white")
    axes.set_yticks(range(timeline.workers), [f"worker {worker}" for worker in range(timeline.workers)])
    axes.invert_yaxis()
    axes.set_xlim(0, timeline.makespan * 1.002)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.tick_params(colors=_INK, labelsize=9, left=False)
    axes.set_title(f"{title}: bubble {100 * timeline.bubble:.1f} %", loc="left", fontsize=11, color=_INK)
    axes.set_xlabel("time: blue forward, orange backward, black update", color=_INK, fontsize=9)
    figure.savefig(path, dpi=_DPI)
