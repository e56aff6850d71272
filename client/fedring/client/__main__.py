"""fl-client, whose imports Ctrl-C may interrupt.

This module imports little, since what happens while it is imported is a traceback.
"""

from fedring.daemon.program import interruptible


def main() -> None:
    """Run the program fl-client."""
    with interruptible("fl-client"):
        from fedring.client.main import main as run

        run()


if __name__ == "__main__":
    main()
