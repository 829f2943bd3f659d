"""Which pages may talk to the server: those it served itself.

Covers: a web page elsewhere that posts to or opens a socket on this server (Origin, Sec-Fetch-Site), DNS rebinding
(Host), framing and injected script (headers). Does not cover: programs, which can claim any of these; `sign_in` asks
those from elsewhere for the key.
"""

import ipaddress
from urllib.parse import urlsplit

from starlette.datastructures import Headers, MutableHeaders
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webapp.settings import Settings

SAFE_METHODS = frozenset({"GET", "HEAD", "OPTIONS"})
RESPONSE_HEADERS = {
    "Content-Security-Policy": "default-src 'self'; object-src 'none'; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'self'",
    "Cross-Origin-Resource-Policy": "same-origin",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class SameOriginOnly:
    """ASGI middleware that refuses foreign Host, Origin and Sec-Fetch-Site, and sets RESPONSE_HEADERS."""

    def __init__(self, app: ASGIApp, settings: Settings) -> None:
        self._app = app
        self._settings = settings

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] not in ("http", "websocket"):
            await self._app(scope, receive, send)
            return
        if refusal := self._refusal(scope):
            if scope["type"] == "websocket":
                await receive()
                await send({"type": "websocket.close", "code": 1008, "reason": refusal[:120]})
            else:
                await JSONResponse({"error": refusal}, 403, RESPONSE_HEADERS)(scope, receive, send)
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
        if not self._is_own(host):
            return (
                f"Host {host!r} is not this server. Open it as {self._settings.address}; where it should have that "
                "name, start Descant with --allow-host."
            )
        if scope["type"] == "http" and scope["method"] in SAFE_METHODS:
            return None
        origin = headers.get("origin")
        if origin not in (None, f"http://{host}", f"https://{host}"):
            return f"This request comes from a page of {origin}, not from Descant's own."
        if headers.get("sec-fetch-site", "same-origin") not in ("same-origin", "none"):
            return "This request comes from another site's page, not from Descant's own."
        return None

    def _is_own(self, host: str) -> bool:
        """Whether a request for `host` may be meant for this server."""
        if set(host) & set("@/?#\\%"):  # which no host holds, but an address around it
            return False
        try:
            name = urlsplit(f"//{host}").hostname
            if name in self._settings.host_names:
                return True
            # Rebinding needs a name: who asks for a number has not been lied to by a name server.
            return not self._settings.is_loopback and ipaddress.ip_address(name or "") is not None
        except ValueError:
            return False
