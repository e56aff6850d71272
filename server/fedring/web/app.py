"""The paths of the page, with their responses."""

import sysconfig
from collections.abc import Collection, Mapping
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from fedring.web.feed import Feed
from fedring.web.files import Files
from fedring.web.headers import Careful
from fedring.web.hosts import KnownHosts

STATIC = Path(__file__).with_name("static")
MAX_ID = 2**63 - 1


class Source(Protocol):
    """Where the page's facts come from; all can be written as JSON."""

    async def state(self) -> Mapping[str, Any]:
        """Return how things are now, in parts."""
        ...

    async def rounds(self, job_id: int, after: int, *, clients: bool = False) -> Mapping[str, Any]:
        """Return a job with its ended rounds above `after`.

        The job 0 is the newest. Parts of the rounds' clients are included on demand.
        """
        ...

    async def clients(self, search: str, skip: int) -> Mapping[str, Any]:
        """Return some of the clients that a search finds.

        The answer has their total, too.
        """
        ...

    async def events(self, after: int) -> Mapping[str, Any]:
        """Return the events after the event `after`; 0 = the newest ones."""
        ...


def make_app(source: Source, feed: Feed, *, names: Collection[str]) -> ASGIApp:
    """Make the page and its JSON, for browsers with known Host names.

    Browsers may call it by an IP address, "localhost" or one of `names`.
    """

    async def state(request: Request) -> Response:
        return JSONResponse(await source.state())

    async def rounds(request: Request) -> Response:
        clients = _number(request, "clients") > 0
        return JSONResponse(await source.rounds(_number(request, "job"), _number(request, "after"), clients=clients))

    async def clients(request: Request) -> Response:
        return JSONResponse(
            await source.clients(request.query_params.get("search", "")[:128], _number(request, "skip"))
        )

    async def events(request: Request) -> Response:
        return JSONResponse(await source.events(_number(request, "after")))

    async def health(request: Request) -> Response:
        return PlainTextResponse("ok\n")

    files = page_files()
    routes = [
        Route("/healthz", health),
        Route("/api/state", state),
        Route("/api/rounds", rounds),
        Route("/api/clients", clients),
        Route("/api/events", events),
        Route("/api/stream", feed),
        Route("/", files.page),
        Route("/index.html", files.page),
        Route("/{folder}/{name}", files.file),
    ]
    return Careful(KnownHosts(Starlette(routes=routes), names))


@cache
def page_files() -> Files:
    """Return the page's files, the same in the whole process."""
    return Files(STATIC, {"plotly.min.js": plotly_script()})


def plotly_script() -> Path:
    """Return the path of plotly.js in its Python package.

    The package is not imported, which would take long.
    """
    spec = find_spec("plotly")
    places = spec.submodule_search_locations if spec else None
    return Path(places[0] if places else sysconfig.get_path("purelib"), "package_data", "plotly.min.js")


def _number(request: Request, name: str) -> int:
    """Return a parameter as a number that the store accepts.

    0 if it is not given.
    """
    text = request.query_params.get(name, "0")
    if not (text.isascii() and text.isdigit() and len(text) < 20):
        raise HTTPException(400, f"{name} must be a number, 0 or above")
    return min(int(text), MAX_ID)
