"""flctl, whose imports Ctrl-C may interrupt.

This module imports little, since what happens while it is imported is a traceback.
"""

import sys

from fedring.daemon.program import interruptible


def main() -> int:
    """Run the program flctl, and return its exit code."""
    with interruptible("flctl"):
        from fedring.ctl.main import main as run

        return run()


if __name__ == "__main__":
    sys.exit(main())
