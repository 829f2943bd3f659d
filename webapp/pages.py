"""The pages a person looks at."""

from pathlib import Path
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.templating import Jinja2Templates

from webapp import runs
from webapp.forms import form_sections, to_values

PACKAGE = Path(__file__).parent
# An installed package carries templates/ and static/ inside; in a checkout they stand beside it.
ASSETS = PACKAGE if (PACKAGE / "templates").is_dir() else PACKAGE.parent
templates = Jinja2Templates(ASSETS / "templates")


def runs_page(request: Request) -> Response:
    """All runs, newest first."""
    summaries = [run.summary() for run in runs.folders(request)]
    return templates.TemplateResponse(request, "runs.html", {"runs": summaries})


def new_run_page(request: Request) -> Response:
    """The form, with the defaults or with the settings of the run named by `from`."""
    settings: dict[str, Any] = {}
    if source := request.query_params.get("from"):
        if not (run := runs.folders(request).find(source)):
            raise HTTPException(404, "There is no such run to take settings from. It may have been deleted.")
        settings = run.settings()
    return form_page(request, to_values(settings), draft=source is None)


def form_page(
    request: Request,
    values: dict[str, str],
    errors: dict[str, str] | None = None,
    error: str | None = None,
    status: int = 200,
    draft: bool = False,
) -> Response:
    """The form with these values. Errors of no field of the form join the general one."""
    sections = form_sections(values, errors)
    shown = {field.name for section in sections for field in section.fields}
    others = [f"{name}: {message}" for name, message in (errors or {}).items() if name not in shown]
    active = runs.folders(request).active()
    context = {
        "sections": sections,
        "error": " ".join(filter(None, [error, *others])) or None,
        "active": active.summary() if active else None,
        "draft": draft,
    }
    return templates.TemplateResponse(request, "new_run.html", context, status_code=status)


def run_page(request: Request) -> Response:
    """One run, live."""
    run = runs.requested(request)
    context = {"run": run.summary(), "settings": form_sections(to_values(run.settings()))}
    return templates.TemplateResponse(request, "run.html", context)


async def error_response(request: Request, error: Exception) -> Response:
    """One error shape: JSON under /api, else a page."""
    status = error.status_code if isinstance(error, HTTPException) else 500
    message = error.detail if isinstance(error, HTTPException) else "Descant failed here; its terminal tells more."
    if message == "Not Found":
        message = "There is nothing at this address."
    if request.url.path.startswith("/api/"):
        return JSONResponse({"error": message}, status)
    return templates.TemplateResponse(request, "error.html", {"status": status, "message": message}, status_code=status)
