"""Signing in: nobody without the API key gets further than the page that asks for it.

A browser sends the key once and then has a signed cookie, which holds no secret; a program sends
`Authorization: Bearer KEY` each time. The cookie is SameSite=Lax: with Strict, a link to a run from a chat or a mail
would end on the sign-in page. Requests that change something are guarded by their Origin whatever the cookie.
"""

import re
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.middleware.sessions import SessionMiddleware
from starlette.requests import HTTPConnection, Request
from starlette.responses import JSONResponse, RedirectResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from webapp.api_key import ApiKey
from webapp.pages import templates

OPEN_PATHS = frozenset({"/sign-in", "/static/css/app.css", "/static/favicon.svg"})
MAX_AGE_SECONDS = 30 * 24 * 3600
# Not //host, nor what a browser makes of /\host or of a tab between the slashes.
LOCAL_PATH = re.compile(r"/(?![/\\])[^\\\x00-\x20\x7f]*")


class Session:
    """ASGI middleware: Starlette's session in a cookie, which is Secure where the request came over https."""

    def __init__(self, app: ASGIApp, secret: str, port: int) -> None:
        self._by_security = {
            secure: SessionMiddleware(
                app,
                secret,
                session_cookie=f"descant-{port}",  # browsers do not keep apart the cookies of two ports
                max_age=MAX_AGE_SECONDS,
                same_site="lax",
                https_only=secure,
            )
            for secure in (False, True)
        }

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        await self._by_security[scope.get("scheme") in ("https", "wss")](scope, receive, send)


class KeyRequired:
    """ASGI middleware that lets pass who is signed in or sends the key."""

    def __init__(self, app: ASGIApp, key: ApiKey) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        app = self._app
        if scope["type"] in ("http", "websocket") and (refusal := self._refusal(HTTPConnection(scope))):
            app = _refused_socket if scope["type"] == "websocket" else refusal
        await app(scope, receive, send)

    def _refusal(self, connection: HTTPConnection) -> Response | None:
        if connection.scope["path"] in OPEN_PATHS or connection.session.get("signed_in"):
            return None
        kind, _, given = connection.headers.get("authorization", "").partition(" ")
        try:
            if kind.lower() == "bearer" and self._key.is_known(given.strip().encode("latin-1"), _address(connection)):
                return None
        except HTTPException as error:
            return JSONResponse({"error": error.detail}, error.status_code, error.headers)
        if kind or connection.scope["path"].startswith("/api/"):
            said = "This server answers only browsers that are signed in and requests with Authorization: Bearer KEY."
            return JSONResponse({"error": said}, 401, {"WWW-Authenticate": "Bearer"})
        if connection.scope.get("method") != "GET":
            return RedirectResponse("/sign-in", 303)
        wanted = connection.scope["raw_path"].decode("latin-1")
        if query := connection.url.query:
            wanted += f"?{query}"
        return RedirectResponse(f"/sign-in?next={quote(wanted, safe='/')}", 303)


async def _refused_socket(scope: Scope, receive: Receive, send: Send) -> None:
    await receive()
    await send({"type": "websocket.close", "code": 1008})  # before it was accepted: a 403


def page(request: Request) -> Response:
    """The page that asks for the key."""
    wanted = _local_path(request.query_params.get("next"))
    if request.session.get("signed_in"):
        return RedirectResponse(wanted, 303)
    return templates.TemplateResponse(request, "sign_in.html", {"wanted": wanted})


async def sign_in(request: Request) -> Response:
    """Take the key and go on to the page that was wanted."""
    async with request.form(max_files=0, max_fields=3, max_part_size=4096) as form:
        given, wanted = str(form.get("key", "")).strip(), _local_path(form.get("next"))
    try:
        if request.app.state.api_key.is_known(given.encode(), _address(request)):
            request.session["signed_in"] = True
            return RedirectResponse(wanted, 303)
        error = HTTPException(401, "This is not the key.")
    except HTTPException as refusal:
        error = refusal
    shown = {"wanted": wanted, "error": error.detail}
    return templates.TemplateResponse(request, "sign_in.html", shown, error.status_code, error.headers)


def sign_out(request: Request) -> Response:
    """Forget the browser's cookie."""
    request.session.clear()
    return RedirectResponse("/sign-in", 303)


ROUTES = [
    Route("/sign-in", page),
    Route("/sign-in", sign_in, methods=["POST"]),
    Route("/sign-out", sign_out, methods=["POST"]),
]


def _local_path(wanted: object) -> str:
    """`wanted` if it is an address of this server, else that of the first page."""
    return wanted if isinstance(wanted, str) and LOCAL_PATH.fullmatch(wanted) else "/"


def _address(connection: HTTPConnection) -> str:
    return connection.client.host if connection.client else ""
