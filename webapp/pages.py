"""The pages a person looks at."""

import re
import secrets
from pathlib import Path
from typing import Any, cast

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.templating import Jinja2Templates

from trainer_core.formats import FORMATS, PRECISIONS, Kind, describe, refusal
from trainer_core.run_dir import ACTIVE, RunDir, RunSummary
from webapp import runs
from webapp.forms import form_sections, to_values
from webapp.run_queue import RunQueue
from webapp.security import RESPONSE_HEADERS

PACKAGE = Path(__file__).parent
# An installed package carries templates/ and static/ inside; in a checkout they stand beside it.
ASSETS = PACKAGE if (PACKAGE / "templates").is_dir() else PACKAGE.parent
templates = Jinja2Templates(ASSETS / "templates")


def runs_page(request: Request) -> Response:
    """Those that wait, the next one first, then all others, newest first."""
    folders = runs.folders(request)
    queue = [run.id for run in RunQueue(folders).waiting()]
    summaries = {run.id: run.summary() for run in folders}
    waiting = [summaries.pop(run_id) for run_id in queue if run_id in summaries]
    return templates.TemplateResponse(request, "runs.html", {"queue": waiting, "runs": list(summaries.values())})


def new_run_page(request: Request) -> Response:
    """The form: with the defaults, the settings of the run `from`, or those that continue the run `resume`."""
    query = request.query_params
    if source := query.get("resume"):
        return form_page(request, to_values(resuming(runs.named(request, source), query.get("checkpoint"))))
    if source := query.get("from"):
        settings = runs.named(request, source).settings()
        settings.pop("resume_from", None)
        return form_page(request, to_values(settings))
    return form_page(request, to_values({}), draft=True)


def resuming(run: RunDir, name: str | None = None) -> dict[str, Any]:
    """The settings that continue `run` from its checkpoint `name`, or its newest. Raises a 404 or 409."""
    checkpoint = name or next((saved.name for saved in reversed(run.list_checkpoints()) if saved.resumable), None)
    if checkpoint is None and run.summary().resume_from:
        return run.settings()  # it ended before a checkpoint of its own, so its parent's is taken up again
    if checkpoint is None:
        raise HTTPException(409, "This run has no checkpoint to continue from. Start a new run with its settings.")
    if not (folder := run.find_checkpoint(checkpoint)):
        raise HTTPException(404, "There is no such checkpoint in this run.")
    settings = run.settings()
    # The run's name with the place, so that a family of runs can be told apart in the list.
    name = re.sub(r" \(from step \d+\)$", "", str(settings.get("name", run.id)))
    place = f" (from step {int(folder.name.removeprefix('step-'))})"
    return settings | {"name": name[: 80 - len(place)] + place, "resume_from": str(folder), "start_from": ""}


def form_page(
    request: Request,
    values: dict[str, str],
    errors: dict[str, str] | None = None,
    error: str | None = None,
    active: RunDir | None = None,
    status: int = 200,
    draft: bool = False,
) -> Response:
    """The form with these values. Errors of no field of the form join the general one.

    `active` is the run that stands in the way; by default one that is being trained, if there is one.
    """
    sections = form_sections(values, errors)
    shown = {field.name for section in sections for field in section.fields}
    others = [f"{name}: {message}" for name, message in (errors or {}).items() if name not in shown]
    if active is None:
        active = next((run for run in runs.folders(request).active() if run.status() in ACTIVE), None)
    context = {
        "sections": sections,
        "error": " ".join(filter(None, [error, *others])) or None,
        "active": active.summary() if active else None,
        "resumed": parent_run(request, values.get("resume_from", "")),
        "resumed_checkpoint": Path(values.get("resume_from", "")).name,
        "draft": draft,
        "form_token": secrets.token_urlsafe(16),
    }
    return templates.TemplateResponse(request, "new_run.html", context, status_code=status)


def run_page(request: Request) -> Response:
    """One run, live."""
    run = runs.requested(request)
    summary = run.summary()
    settings = run.settings()
    origin = summary.resume_from or summary.start_from or ""
    kind = cast(Kind, to_values(settings)["adapter.type"])
    context = {
        "run": summary,
        "settings": form_sections(to_values(settings)),
        "formats": {
            name: {"title": format.title, "help": describe(name, kind), "refusal": refusal(name, kind)}
            for name, format in FORMATS.items()
        },
        "precisions": PRECISIONS,
        "origin": {"exact": bool(summary.resume_from), "checkpoint": Path(origin).name, "path": origin}
        if origin
        else None,
        "parent": parent_run(request, origin),
    }
    return templates.TemplateResponse(request, "run.html", context)


def parent_run(request: Request, checkpoint: str) -> RunSummary | None:
    """The run of this home that `checkpoint`, a folder, belongs to."""
    path = Path(checkpoint)
    run = runs.folders(request).find(path.parent.parent.name)
    return run.summary() if run and run.checkpoints == path.parent else None


async def error_response(request: Request, error: Exception) -> Response:
    """One error shape: JSON under /api, else a page."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else "Descant failed here; its terminal tells more."
    # A failure is answered outside of the middleware that sets these.
    headers = error.headers if isinstance(error, HTTPException) else RESPONSE_HEADERS
    if message == "Not Found":
        message = "There is nothing at this address."
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": message}, status, headers)
    return templates.TemplateResponse(request, "error.html", {"status": status, "message": message}, status, headers)
