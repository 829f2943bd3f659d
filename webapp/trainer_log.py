"""What the trainer printed, all of it: a page shows no more than its last lines."""

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
    paths = [path for path in (run.log.with_name(f"{run.log.name}.1"), run.log) if path.is_file()]
    if not paths:
        raise HTTPException(404, "This run has no log: its trainer has printed nothing yet.")

    def chunks() -> Iterator[bytes]:
        for path in paths:
            with suppress(FileNotFoundError), path.open("rb") as file:  # deleted with its run
                left = path.stat().st_size
                while data := file.read(min(CHUNK_BYTES, left)):
                    left -= len(data)
                    yield data

    headers = {"Content-Disposition": f"attachment; filename*=UTF-8''{quote(run.id)}.log"}
    return StreamingResponse(chunks(), media_type="text/plain", headers=headers)
