"""The page's files, compressed once, with names that change with their contents.

A browser keeps a file for a year, since another content has another address. Only the page itself, which names the
files, is asked for again, and then mostly answered with 304.
"""

import gzip
import mimetypes
from collections.abc import Callable, Mapping
from functools import cached_property
from pathlib import Path

import zstandard
from blake3 import blake3
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response

_ZSTD_LEVEL = 18  # of plotly's 4.8 MB it leaves 1.18 MB, in one to two seconds; gzip leaves 1.47 MB
_GZIP_LEVEL = 9
_FOREVER = "public, max-age=31536000, immutable"
_PLACE = b"FILES/"  # in the page, for the folder of the files it names
_LEAST = 512  # bytes; smaller files are not compressed


class File:
    """One file, with compressed forms that are made once."""

    def __init__(self, name: str, data: bytes) -> None:
        self.data = data
        self.digest = blake3(data).hexdigest()
        kind = mimetypes.guess_type(name)[0] or "application/octet-stream"
        self.type = f"{kind}; charset=utf-8" if kind.startswith("text/") else kind

    @cached_property
    def zstd(self) -> bytes:
        """The content as zstd, in a window for every browser."""
        most = zstandard.ZstdCompressionParameters.from_level(_ZSTD_LEVEL, source_size=len(self.data), window_log=23)
        return zstandard.ZstdCompressor(compression_params=most).compress(self.data)

    @cached_property
    def gzip(self) -> bytes:
        """The content as gzip, the same bytes each time."""
        return gzip.compress(self.data, _GZIP_LEVEL, mtime=0)


class Files:
    """The page and its files.

    Args:
        folder: Where they are.
        others: Further files by name, such as libraries.
    """

    def __init__(self, folder: Path, others: Mapping[str, Path]) -> None:
        paths = {path.name: path for path in sorted(folder.iterdir())} | dict(others)
        self._files = {name: File(name, path.read_bytes()) for name, path in paths.items()}
        page = self._files.pop("index.html").data
        # One folder for all, since they import each other by relative names.
        self.folder = blake3("".join(file.digest for file in self._files.values()).encode()).hexdigest()[:16]
        self._page = File("index.html", page.replace(_PLACE, f"{self.folder}/".encode()))

    async def page(self, request: Request) -> Response:
        """Answer with the page."""
        return await _answer(request, self._page, "no-cache")

    async def file(self, request: Request) -> Response:
        """Answer with a file, or with 404."""
        name = request.path_params["name"]
        if request.path_params["folder"] != self.folder or name not in self._files:
            raise HTTPException(404)
        return await _answer(request, self._files[name], _FOREVER)


async def _answer(request: Request, file: File, cache: str) -> Response:
    encoding = _encoding(request.headers.get("accept-encoding", "")) if len(file.data) >= _LEAST else ""
    tag = f'"{file.digest[:32]}{encoding and "-"}{encoding}"'
    headers = {"ETag": tag, "Cache-Control": cache, "Vary": "Accept-Encoding"}
    known = [each.strip().removeprefix("W/") for each in request.headers.get("if-none-match", "").split(",")]
    if tag in known:
        return Response(status_code=304, headers=headers)
    forms: Mapping[str, Callable[[], bytes]] = {"zstd": lambda: file.zstd, "gzip": lambda: file.gzip}
    # The first of a large file takes a second; the others find it made.
    data = await run_in_threadpool(forms[encoding]) if encoding else file.data
    if encoding:
        headers["Content-Encoding"] = encoding
    return Response(data, media_type=file.type, headers=headers)


def _encoding(accepted: str) -> str:
    """Return the best encoding that a browser accepts, or "" for none."""
    names = dict[str, str]()
    for each in accepted.lower().split(","):
        name, _, quality = each.partition(";")
        names[name.strip()] = quality.replace(" ", "")
    refused = ("q=0", "q=0.0", "q=0.00", "q=0.000")
    return next((name for name in ("zstd", "gzip") if name in names and names[name] not in refused), "")
