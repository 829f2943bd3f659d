"""How much a request may send: refused by its Content-Length, or where it has none, as soon as it has sent more."""

from starlette.datastructures import Headers
from starlette.exceptions import HTTPException
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from webapp.uploads import MAX_UPLOAD_BYTES

MAX_BODY_BYTES = 1 << 20
"""Of a form or settings, which have some kilobytes."""
UPLOAD_PATH = "/api/adapters"


class BodyLimit:
    """ASGI middleware that refuses larger bodies with a 413, before or while they are read."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Handle a request."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        is_upload = scope["path"] == UPLOAD_PATH and headers.get("content-type", "").startswith("multipart/form-data")
        most = MAX_UPLOAD_BYTES if is_upload else MAX_BODY_BYTES
        refusal = f"The request is larger than {most >> 20:,} MiB, which this address does not take."
        length = headers.get("content-length", "")
        if length.isdecimal() and int(length) > most:
            await JSONResponse({"error": refusal}, 413, {"Connection": "close"})(scope, receive, send)
            return
        size = 0

        async def receive_limited() -> Message:
            nonlocal size
            message = await receive()
            size += len(message.get("body", b""))
            if size > most:
                raise HTTPException(413, refusal, {"Connection": "close"})
            return message

        await self._app(scope, receive_limited, send)
