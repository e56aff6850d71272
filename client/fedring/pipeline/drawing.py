"""Schedules for people: as text, and as a picture with the bubbles."""

from pathlib import Path

from fedring.schedules.schedule import Kind, Schedule
from fedring.schedules.simulation import Timeline

_COLOURS = {Kind.FORWARD: "#0072B2", Kind.BACKWARD: "#E69F00", Kind.UPDATE: "#24292F"}
_INK, _BUBBLE = "#24292F", "#ECEEF0"
_DPI = 160
_THIN = 0.02  # of the makespan: how wide an update that takes no time is drawn


def text(schedule: Schedule) -> str:
    """One line a worker: its actions in order, with the stage where there are several, and the weights' version."""
    several = schedule.stages > len(schedule.workers)
    lines = []
    for worker, actions in enumerate(schedule.workers):
        words = []
        for action in actions:
            stage = f"@{action.stage}" if several else ""
            word = f"U{stage}" if action.kind is Kind.UPDATE else f"{action}{stage}"
            words.append(f"{word}.v{action.version}" if schedule.name == "pipedream" else word)
        lines.append(f"worker {worker}: {' '.join(words)}")
    return "\n".join(lines)


def draw(timeline: Timeline, path: Path, *, title: str) -> None:
    """`path` is a PNG with one row a worker; what is left pale is the bubble."""
    from matplotlib.figure import Figure  # takes a second to import

    figure = Figure(figsize=(12, 1.2 + 0.55 * timeline.workers), layout="constrained")
    axes = figure.subplots()
    axes.barh(range(timeline.workers), timeline.makespan, 0.9, color=_BUBBLE)
    small = len(timeline.spans) / timeline.workers > 40
    for span in timeline.spans:
        width = max(span.end - span.start, _THIN if span.action.kind is Kind.UPDATE else 0.0)
        dim = 1.0 - 0.45 * ((span.action.stage // timeline.workers) % 2)  # a worker's stages by turns
        axes.barh(
            span.worker,
            width,
            0.82,
            span.start,
            color=_COLOURS[span.action.kind],
            alpha=dim,
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
