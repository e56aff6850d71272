"""How a pipeline fails."""


class PipelineError(RuntimeError):
    """A stage cannot go on; what it did in this run is not to be relied on."""


class ScheduleError(ValueError):
    """This list of actions would deadlock, lose a gradient, or need more memory than it may."""


class CutError(ValueError):
    """The model cannot be cut in this way."""
