"""The same as the pages, as JSON. Every error is {"error": ..., "fields": {...}?}."""

from collections.abc import Callable, Iterator
from math import inf
from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.datastructures import UploadFile
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse

from trainer_core import adapter_files
from trainer_core.adapter_files import AdapterFile
from trainer_core.config_checks import ConfigError, validate
from trainer_core.event_reader import EventReader
from trainer_core.roots import Roots
from trainer_core.run_dir import RunDir
from trainer_core.sources import absolute_path, plain
from webapp import runs, supervisor
from webapp.run_queue import RunQueue
from webapp.supervisor import RunActive, enqueue, start_in_background
from webapp.uploads import keep


def list_runs(request: Request) -> Response:
    """All runs, newest first, and the ids of those that wait, the next one first."""
    folders = runs.folders(request)
    summaries = [runs.as_data(run.summary()) for run in folders]
    return JSONResponse({"runs": summaries, "queue": [run.id for run in RunQueue(folders).waiting()]})


async def start(request: Request) -> Response:
    """Start the RunConfig in the body, or with `queue=true` let it wait for its turn."""
    begin = enqueue if wants_queue(request) else start_in_background
    data = await json_object(request)
    try:
        config = await run_in_threadpool(validate, data, runs.roots(request))
    except ConfigError as error:
        return JSONResponse({"error": "The settings can't be used.", "fields": error.fields}, 422)
    try:
        run = await run_in_threadpool(begin, runs.folders(request), config)
    except RunActive as error:
        return JSONResponse({"error": str(error), "active": error.run.id}, 409)
    except OSError as error:
        raise HTTPException(507, f"The run can't be started: {error}.") from error
    return JSONResponse({"id": run.id}, 201)


def wants_queue(request: Request) -> bool:
    """Whether the address asks to put the run in the queue. Raises a 400."""
    asked = request.query_params.get("queue", "false")
    if asked not in ("true", "false"):
        raise HTTPException(400, f"queue={asked!r} was given; it takes true or false.")
    return asked == "true"


async def json_object(request: Request) -> dict[str, Any]:
    """The body. Raises a 400 or 422."""
    try:
        data = await request.json()
    except (ValueError, RecursionError) as error:
        raise HTTPException(400, f"The body is not valid JSON: {error}.") from error
    if not isinstance(data, dict):
        raise HTTPException(422, f"The body is a JSON {type(data).__name__}; send an object.")
    return data


def show_run(request: Request) -> Response:
    """One run."""
    return JSONResponse(runs.as_data(runs.requested(request).summary()))


def stop(request: Request) -> Response:
    """Ask the trainer to save and stop, or take the run out of the queue; answers with the run as it is then."""
    run = runs.requested(request)
    run.request_stop()
    return JSONResponse(runs.as_data(run.summary()))


def kill(request: Request) -> Response:
    """End a trainer that was asked to stop and doesn't; answers with the run as it is then."""
    run = runs.requested(request)
    kill_trainer(run)
    return JSONResponse(runs.as_data(run.summary()))


def kill_trainer(run: RunDir) -> None:
    """`supervisor.kill`. Raises a 409 where that is refused."""
    try:
        supervisor.kill(run)
    except supervisor.KillRefused as error:
        raise HTTPException(409, str(error)) from error


async def move(request: Request) -> Response:
    """Give a waiting run the `position` in the body; answers with the queue."""
    position = (await json_object(request)).get("position")
    return JSONResponse({"queue": await run_in_threadpool(move_in_queue, request, position)})


def move_in_queue(request: Request, position: object) -> list[str]:
    """Put the run of the address at `position` of the queue; the ids in their new order. Raises a 409 or 422."""
    folders, run = runs.folders(request), runs.requested(request)
    # JSON's 2.0 is a whole number too.
    if isinstance(position, bool) or not isinstance(position, int | float) or not 1 <= position < inf or position % 1:
        raise HTTPException(422, f"position is {position!r}; it takes a whole number from 1.")
    try:
        with supervisor.starting(folders):
            queue = RunQueue(folders)
            if not run.is_queued():
                raise HTTPException(409, "This run is not waiting in the queue; it may just have been started.")
            queue.move(run, int(position))
            return [waiting.id for waiting in queue.waiting()]
    except OSError as error:
        raise HTTPException(507, f"The queue can't be written: {error}.") from error


def events(request: Request) -> Response:
    """The events after `after`, one JSON line each."""
    reader = EventReader(runs.requested(request).events, after_parameter(request.query_params.get("after")))

    def lines() -> Iterator[str]:
        while read := reader.read():
            yield "".join(f"{line}\n" for line in read)

    return StreamingResponse(lines(), media_type="application/x-ndjson")


async def adapter(request: Request) -> Response:
    """What is in an adapter: one that is named by {"path": ...}, or uploaded as form files, which are then kept.

    Never a GET: on Windows to look at a path can sign in to another machine, and any web page can send one.
    """
    if not request.headers.get("content-type", "").startswith("multipart/form-data"):
        path = (await json_object(request)).get("path")
        if not isinstance(path, str) or not path.strip():
            raise HTTPException(422, f"path is {path!r}; it takes the path of an adapter's folder or file.")
        return await run_in_threadpool(_described, lambda: _named(path.strip(), runs.roots(request)))
    try:
        async with request.form(max_files=8, max_fields=8) as form:
            files = {file.filename or "": file.file for file in form.getlist("files") if isinstance(file, UploadFile)}
            return await run_in_threadpool(_described, lambda: keep(files, runs.folders(request).home))
    except OSError as error:
        raise HTTPException(507, f"The upload can't be kept: {error}.") from error


def _named(path: str, roots: Roots) -> AdapterFile:
    """The adapter at `path`. Raises ValueError for what is none, or outside of `roots`."""
    place = absolute_path(path)
    roots.check(place)
    return adapter_files.read(Path(place))


def _described(read: Callable[[], AdapterFile]) -> Response:
    """The adapter as JSON. Raises a 422 for what is none."""
    try:
        found = read()
    except ValueError as error:
        raise HTTPException(422, plain(str(error))) from error
    return JSONResponse({"path": str(found.place), "adapter": found.settings, "description": str(found)})


def after_parameter(value: str | None) -> int:
    """The `after` of an address. Raises a 400."""
    if value is None:
        return 0
    if not (value.isascii() and value.isdigit() and len(value) < 16):
        raise HTTPException(400, f"after={value!r} was given; it takes the seq of the last event you have, from 0.")
    return int(value)
