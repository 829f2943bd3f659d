"""What the pages' forms do: start, stop, resume and delete a run, download a checkpoint."""

import tempfile
from typing import Any, BinaryIO

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import RedirectResponse, Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from trainer_core import exports
from trainer_core.config import flatten
from trainer_core.config_checks import ConfigError, validate
from trainer_core.run_dir import ACTIVE, slug
from webapp import runs
from webapp.forms import from_form, to_values
from webapp.pages import form_page, resuming
from webapp.supervisor import RunActive, start_in_background

FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")


async def start(request: Request) -> Response:
    """Start the run the form describes; every problem goes back to the form, with all values kept."""
    if not request.headers.get("content-type", "").startswith(FORM_TYPES):
        raise HTTPException(415, "This address takes the form of the page. Send JSON to /api/runs.")
    async with request.form() as form:
        data = from_form(form.multi_items())
    values = {name: str(value) for name, value in flatten(data).items()}
    return await run_in_threadpool(_start, request, data, values)


def resume(request: Request) -> Response:
    """Continue a run as a new one, with its settings, from its newest checkpoint.

    What stands in the way, such as that all epochs are done, is shown in the form, filled in.
    """
    data = resuming(runs.requested(request))
    return _start(request, data, to_values(data))


def _start(request: Request, data: dict[str, Any], values: dict[str, str]) -> Response:
    """Start the run that `data` describes, or show the form with `values` and every problem."""
    try:
        config = validate(data)
    except ConfigError as error:
        return form_page(request, values, errors=error.fields, status=422)
    try:
        run = start_in_background(runs.folders(request), config)
    except RunActive as error:
        return form_page(request, values, error=str(error), status=409)
    except OSError as error:
        return form_page(request, values, error=f"The run folder can't be written: {error}.", status=507)
    return RedirectResponse(f"/runs/{run.id}", 303)


def stop(request: Request) -> Response:
    """Ask the trainer to save and stop."""
    run = runs.requested(request)
    run.request_stop()
    return RedirectResponse(f"/runs/{run.id}", 303)


def delete(request: Request) -> Response:
    """Delete a run that is not being trained."""
    run = runs.requested(request)
    if run.status() in ACTIVE:
        raise HTTPException(409, "This run is being trained. Stop it first, then delete it.")
    try:
        run.delete()
    except OSError as error:
        raise HTTPException(409, f"The run could not be deleted: {error}. Close what has its files open.") from error
    return RedirectResponse("/", 303)


def download(request: Request) -> Response:
    """A checkpoint as a file to use elsewhere."""
    run = runs.requested(request)
    checkpoint = run.find_checkpoint(request.path_params["name"])
    if not checkpoint:
        raise HTTPException(404, "There is no such checkpoint in this run.")
    asked = request.query_params.get("format", "peft")
    if asked != "peft":
        raise HTTPException(400, f"Format {asked!r} was asked for; this version writes peft.")
    name = f"{slug(run.summary().name) or 'adapter'}-{checkpoint.name}"
    file = tempfile.TemporaryFile()  # noqa: SIM115 (closed by FileOnce)
    try:
        size = exports.write_zip(checkpoint, name, file)
    except OSError as error:
        file.close()
        raise HTTPException(410, f"The checkpoint could not be packed: {error}.") from error
    headers = {"Content-Length": str(size), "Content-Disposition": f'attachment; filename="{name}.zip"'}
    return FileOnce(file, media_type="application/zip", headers=headers)


class FileOnce(StreamingResponse):
    """Sends an open file from its start and closes it, however the download ends."""

    def __init__(self, file: BinaryIO, media_type: str, headers: dict[str, str]) -> None:
        file.seek(0)
        super().__init__(iter(lambda: file.read(1 << 18), b""), media_type=media_type, headers=headers)
        self._file = file

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        with self._file:
            await super().__call__(scope, receive, send)
