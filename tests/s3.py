"""An S3 server for tests: SeaweedFS, in one process."""

import os
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import obstore
from obstore.exceptions import BaseError
from obstore.store import S3Store

from tests.ports import free_port

KEYS = {"AWS_ACCESS_KEY_ID": "fedring", "AWS_SECRET_ACCESS_KEY": "fedring-secret", "AWS_REGION": "us-east-1"}
_PARTS = ("master", "volume", "filer", "s3", "webdav", "admin")
_ALONE = ("-s3.port.iceberg=0", "-s3.port.lance=0", "-master.telemetry=false")
"""What nobody asks for has fixed ports, which another run on this host may have, too; nobody is told about tests."""

_SECONDS = 120.0


class S3Server:
    """An S3 server with one bucket.

    Args:
        folder: Where it keeps its objects, and its log.
        bucket: The bucket's name.
        more: Further flags of the program.

    Attributes:
        env: The variables by which clients find it.
    """

    def __init__(self, folder: Path, bucket: str, *more: str) -> None:
        self._folder, self._bucket = folder, bucket
        ports = {part: free_port() for part in _PARTS}
        grpc = {f"{part}.port.grpc": free_port() for part in _PARTS if part != "webdav"}
        flags = [f"-{part}.port={port}" for part, port in ports.items()]
        flags += [f"-{key}={port}" for key, port in grpc.items()]
        places = [f"-dir={folder}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", f"-bucket={bucket}"]
        program = str(Path(sys.executable).with_name("weed"))
        self._command = [program, "mini", *places, *flags, *_ALONE, *more]
        self.env = {**KEYS, "AWS_ENDPOINT_URL": f"http://127.0.0.1:{ports['s3']}", "AWS_ALLOW_HTTP": "true"}

    def start(self) -> None:
        """Start it, and wait until it serves."""
        with (self._folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                self._command, env=os.environ | KEYS, stdout=log, stderr=log, cwd=self._folder
            )
        try:
            _wait(self._process, self.env, self._bucket, self._folder / "log")
        except TimeoutError:
            self.stop()
            raise

    def send(self, number: int) -> None:
        """Send it a signal."""
        self._process.send_signal(number)

    def stop(self) -> None:
        """Stop it; it keeps its objects."""
        self._process.terminate()
        self._process.wait()


@contextmanager
def s3_server(folder: Path, bucket: str, *more: str) -> Iterator[dict[str, str]]:
    """Run an S3 server with one bucket; provide the variables by which clients find it."""
    server = S3Server(folder, bucket, *more)
    server.start()
    try:
        yield server.env
    finally:
        server.stop()


def store_at(env: Mapping[str, str], bucket: str, **more: Any) -> S3Store:
    """Return a bucket of the server that these variables name."""
    return S3Store(
        bucket,
        endpoint=env["AWS_ENDPOINT_URL"],
        access_key_id=env["AWS_ACCESS_KEY_ID"],
        secret_access_key=env["AWS_SECRET_ACCESS_KEY"],
        region=env["AWS_REGION"],
        client_options={"allow_http": True},
        **more,
    )


def _wait(process: "subprocess.Popen[bytes]", env: dict[str, str], bucket: str, log: Path) -> None:
    """Wait until an object can be written."""
    pause, tries = threading.Event(), int(_SECONDS / 0.2)
    store = store_at(env, bucket, retry_config={"max_retries": 0})
    for _ in range(tries):
        if process.poll() is not None:
            break
        try:
            obstore.put(store, "probe", b"probe")
        except BaseError:
            pause.wait(0.2)
        else:
            return
    raise TimeoutError(f"the S3 server did not start: {log.read_text()[-2000:]}")
