"""A program whose main thread waits while the system gives SIGTERM to another of its threads.

python -m tests.waits_for_signal event|future|task
"""

import signal
import sys
import tempfile
import threading
from concurrent.futures import Future

from fedring.client import connect
from fedring.daemon.signals import result_of, wait

SECONDS_TO_BEGIN = 0.2  # to wait; a signal that comes before is handled in any case


def take_the_signal() -> None:
    """Give SIGTERM to this thread."""
    signal.pthread_kill(threading.get_ident(), signal.SIGTERM)


def main() -> None:
    event, future = threading.Event(), Future[int]()
    sender = threading.Timer(SECONDS_TO_BEGIN, take_the_signal)
    match sys.argv[1]:
        case "event":
            signal.signal(signal.SIGTERM, lambda *_: event.set())
            sender.start()
            wait(event)
        case "future":
            signal.signal(signal.SIGTERM, lambda *_: future.set_result(1))
            sender.start()
            result_of(future)
        case "task":
            with tempfile.TemporaryDirectory() as folder:
                nobody = "127.0.0.1:1"
                with connect(server=nobody, client_id="c", state_dir=folder, insecure=True) as federation:
                    sender.start()
                    for _ in federation:
                        pass


if __name__ == "__main__":
    main()
