"""What the pages' forms do: start, stop, resume and delete a run, download a checkpoint."""

import os
import re
import shutil
import tempfile
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import FileResponse, RedirectResponse, Response
from starlette.types import Receive, Scope, Send

from trainer_core.config import flatten
from trainer_core.config_checks import ConfigError, validate
from trainer_core.formats import FORMATS, PRECISIONS
from trainer_core.run_dir import ACTIVE
from trainer_core.sources import SourceError
from webapp import runs
from webapp.api import kill_trainer, move_in_queue, wants_queue
from webapp.forms import from_form, to_values, without_hidden
from webapp.pages import form_page, resuming
from webapp.supervisor import RunActive, enqueue, start_in_background, starting

FORM_TYPES = ("application/x-www-form-urlencoded", "multipart/form-data")


async def start(request: Request) -> Response:
    """Start the run the form describes; every problem goes back to the form, with all values kept."""
    if not request.headers.get("content-type", "").startswith(FORM_TYPES):
        raise HTTPException(415, "This address takes the form of the page. Send JSON to /api/runs.")
    async with request.form() as form:
        data = from_form(form.multi_items())
    token = str(data.pop("form_token", ""))
    values = {name: str(value) for name, value in flatten(data).items()}
    return await run_in_threadpool(_start, request, without_hidden(data), values, token)


def resume(request: Request) -> Response:
    """Continue a run as a new one, with its settings, from its newest checkpoint.

    What stands in the way, such as that all epochs are done, is shown in the form, filled in.
    """
    data = resuming(runs.requested(request))
    return _start(request, data, to_values(data))


def _start(request: Request, data: dict[str, Any], values: dict[str, str], token: str = "") -> Response:
    """Start or enqueue the run that `data` describes, or show the form with `values` and every problem."""
    begin = enqueue if wants_queue(request) else start_in_background
    try:
        config = validate(data, runs.roots(request))
    except ConfigError as error:
        return form_page(request, values, errors=error.fields, status=422)
    try:
        run = begin(runs.folders(request), config, token)
    except RunActive as error:
        return form_page(request, values, error=str(error), active=error.run, status=409)
    except OSError as error:
        return form_page(request, values, error=f"The run can't be started: {error}.", status=507)
    return RedirectResponse(f"/runs/{run.id}", 303)


def stop(request: Request) -> Response:
    """Ask the trainer to save and stop, or take the run out of the queue."""
    run = runs.requested(request)
    was_queued = run.is_queued()
    run.request_stop()
    return RedirectResponse("/" if was_queued else f"/runs/{run.id}", 303)


def kill(request: Request) -> Response:
    """End a trainer that doesn't stop."""
    run = runs.requested(request)
    kill_trainer(run)
    return RedirectResponse(f"/runs/{run.id}", 303)


async def move(request: Request) -> Response:
    """Give a waiting run another place in the queue: the form's `position`, from 1."""
    async with request.form() as form:
        position = str(form.get("position", ""))
    await run_in_threadpool(move_in_queue, request, int(position) if re.fullmatch(r"\d{1,9}", position) else position)
    return RedirectResponse("/", 303)


def delete(request: Request) -> Response:
    """Delete a run that is not being trained."""
    run = runs.requested(request)
    try:
        with starting(runs.folders(request)):  # or one that waits could be started this moment
            if run.status() in ACTIVE:
                raise HTTPException(409, "This run is being trained. Stop it first, then delete it.")
            if run.is_alive():
                raise HTTPException(409, "This run has ended, but its trainer is still leaving. Try again in a moment.")
            run.delete()
    except OSError as error:
        raise HTTPException(409, f"The run could not be deleted: {error}. Close what has its files open.") from error
    return RedirectResponse("/", 303)


def download(request: Request) -> Response:
    """A checkpoint as a file for another program: `format` and `precision` of the query, or the first of each.

    It is made anew at each request, for a range too: seconds for an adapter of a gigabyte, and no cache to keep.
    A server that is killed meanwhile leaves the file in the system's temporary folder.
    """
    # Here, since numpy's memory and start-up time are for those who download.
    from trainer_core import exports

    run = runs.requested(request)
    checkpoint = run.find_checkpoint(request.path_params["name"])
    if not checkpoint:
        raise HTTPException(404, "There is no such checkpoint in this run.")
    chosen = request.query_params.get("format", next(iter(FORMATS)))
    precision = request.query_params.get("precision", next(iter(PRECISIONS)))
    if chosen not in FORMATS:
        raise HTTPException(400, f"Format {chosen!r} was asked for; there are {', '.join(FORMATS)}.")
    if precision not in PRECISIONS:
        raise HTTPException(400, f"Precision {precision!r} was asked for; there are {', '.join(PRECISIONS)}.")
    name = exports.file_name(run.summary().name, checkpoint.name, chosen, precision)
    folder = None
    try:
        folder = Path(tempfile.mkdtemp(prefix="descant-"))
        exports.export(checkpoint, chosen, precision, folder / name)
        # A file made anew for the rest of a download is the same, and its ETag, which is made of this time, has to be.
        changed = checkpoint.stat().st_mtime
        os.utime(folder / name, (changed, changed))
        return MadeFile(folder / name)
    except BaseException as error:
        if folder:
            shutil.rmtree(folder, ignore_errors=True)
        if isinstance(error, SourceError):
            raise HTTPException(409, str(error)) from error
        if isinstance(error, OSError):
            raise HTTPException(507, f"The file could not be made: {error}.") from error
        raise


class MadeFile(FileResponse):
    """Sends a file, or the range of it that is asked for, and removes its folder, however the download ends."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, filename=path.name, stat_result=path.stat())

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            shutil.rmtree(Path(self.path).parent, ignore_errors=True)
