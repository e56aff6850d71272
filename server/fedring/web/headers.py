"""Headers that limit a browser to the page's own files.

They also tell the browser to reveal the page to nobody.
"""

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import PlainTextResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

POLICY = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "img-src 'self' blob:",  # plotly makes the picture for a PNG file from a blob of the page's own
        "connect-src 'self'",
        "base-uri 'none'",
        "form-action 'none'",
        "frame-ancestors 'none'",
    )
)

_HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Careful:
    """Limits `app` to GET from its own site, with safe headers.

    Scripts of other sites get no answer. The headers above are on all responses.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        async def careful(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in _HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await (_refusal(scope) or self._app)(scope, receive, careful)


def _refusal(scope: Scope) -> ASGIApp | None:
    if scope["method"] != "GET":
        return PlainTextResponse("this page can only be read", 405, {"Allow": "GET"})
    headers = Headers(scope=scope)
    # A link from another site may lead here. A script of another site may not even open a stream.
    foreign = headers.get("sec-fetch-site") in ("cross-site", "same-site")
    if foreign and headers.get("sec-fetch-mode") != "navigate":
        return PlainTextResponse("this page is for nobody's scripts but its own", 403)
    return None
