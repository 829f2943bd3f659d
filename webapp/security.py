"""Who may talk to the server: pages it served itself, and programs on this machine.

Covers: a web page elsewhere that posts to or opens a socket on localhost (Origin, Sec-Fetch-Site), DNS rebinding
(Host), framing and injected script (headers). Does not cover: other people's programs on the same machine.
"""

from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

LOOPBACK_NAMES = frozenset({"127.0.0.1", "localhost", "::1"})
SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'self'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class SameOriginOnly:
    """ASGI middleware that refuses foreign Host, Origin and Sec-Fetch-Site, and sets RESPONSE_HEADERS."""

    def __init__(self, app: ASGIApp, host: str) -> None:
        self._app = app
        self._hosts = LOOPBACK_NAMES | {host}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if refusal := self._refusal(scope):
            response = JSONResponse({"error": refusal}, 403)
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": refusal[:120]})
            else:
                await response(scope, receive, send)
            return

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                headers = MutableHeaders(scope=message)
                for name, value in RESPONSE_HEADERS.items():
                    headers.setdefault(name, value)
            await send(message)

        await self._app(scope, receive, send_with_headers)

    def _refusal(self, scope: Scope) -> str | None:
        headers = Headers(scope=scope)
        host = headers.get("host", "")
        if _name(f"//{host}") not in self._hosts:
            return f"Host {host!r} is not this server. Open it as http://127.0.0.1 with its port."
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            return f"This request comes from a page of {origin}, not from Descant's own."
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "This request comes from another site's page, not from Descant's own."
        return None


def _name(address: str) -> str | None:
    try:
        return urlsplit(address).hostname
    except ValueError:
        return None
