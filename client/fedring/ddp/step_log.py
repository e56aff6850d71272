"""Statistics of a hook's steps in the log, for scripts.

There is one line every so many steps.
"""

import logging

from fedring.ddp.profile import Profile
from fedring.ddp.state import HookState

log = logging.getLogger(__name__)


class StepLog:
    """Logs the mean waits, compression times and bytes of the newest steps.

    Args:
        state: The state of the hook.
        every: The steps of a window, at least 1.
    """

    def __init__(self, state: HookState, *, every: int = 50) -> None:
        if every < 1:
            raise ValueError(f"every must be at least 1, not {every}")
        self.state = state
        self.every = every
        self.steps = 0
        state.meter.end_window()  # of the steps before

    def step(self) -> Profile | None:
        """Note that a step counts; call this after the optimizer's step.

        Returns:
            The sums over a window, after its last step; None after other steps.
        """
        self.state.end_step()
        self.steps += 1
        if self.steps % self.every:
            return None
        window = self.state.meter.end_window()
        means = window.means()
        if means:
            log.info(
                "steps %d to %d, means: %.1f ms waiting (at most %.1f), %.1f ms compressing, %.1f ms decompressing, "
                "%.0f bytes of messages",
                self.steps - self.every + 1,
                self.steps,
                1e3 * means["wait_seconds"],
                1e3 * window.longest_wait_seconds,
                1e3 * means["compress_seconds"],
                1e3 * means["decompress_seconds"],
                means["bytes_sent"],
                extra={"step": self.steps, **means, "longest_wait_seconds": window.longest_wait_seconds},
            )
        return window
