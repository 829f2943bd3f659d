"""What the trainer printed, all of it: a page shows no more than its last lines."""

import os
from collections.abc import Iterator
from contextlib import suppress
from urllib.parse import quote

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse

from webapp import runs

CHUNK_BYTES = 1 << 18


def trainer_log(request: Request) -> Response:
    """The log as a file to download, as long as it is now; an older part that was put aside comes first."""
    run = runs.requested(request)
    files = []
    for path in (run.log.with_name(f"{run.log.name}.1"), run.log):
        # All opened before the first byte is sent: the trainer may begin a new log meanwhile.
        with suppress(OSError):
            files.append(path.open("rb"))
    if not files:
        raise HTTPException(404, "This run has no log: its trainer has printed nothing yet.")

    sizes = [os.fstat(file.fileno()).st_size for file in files]

    def chunks() -> Iterator[bytes]:
        for file, left in zip(files, sizes, strict=True):
            with file:
                while data := file.read(min(CHUNK_BYTES, left)):
                    left -= len(data)
                    yield data

    headers = {
        "Content-Disposition": f"attachment; filename*=UTF-8''{quote(run.id)}.log",
        "Content-Length": str(sum(sizes)),
    }
    if request.method == "HEAD":
        for file in files:
            file.close()
        return Response(headers=headers, media_type="text/plain")
    return StreamingResponse(chunks(), media_type="text/plain", headers=headers)
