"""The web application: its routes and what they share."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from trainer_core.run_dir import RunFolders
from webapp import actions, api, pages
from webapp.live import live
from webapp.security import SameOriginOnly
from webapp.series import series
from webapp.settings import Settings
from webapp.trainer_log import trainer_log


def make_app(settings: Settings) -> Starlette:
    """The application over the runs in `settings.home`."""
    app = Starlette(
        routes=[
            Route("/", pages.runs_page),
            Route("/runs/new", pages.new_run_page),
            Route("/runs/{run_id}", pages.run_page),
            Route("/runs", actions.start, methods=["POST"]),
            Route("/runs/{run_id}/stop", actions.stop, methods=["POST"]),
            Route("/runs/{run_id}/resume", actions.resume, methods=["POST"]),
            Route("/runs/{run_id}/delete", actions.delete, methods=["POST"]),
            Route("/runs/{run_id}/checkpoints/{name}/download", actions.download),
            Route("/runs/{run_id}/log", trainer_log),
            WebSocketRoute("/runs/{run_id}/live", live),
            Route("/api/runs", api.list_runs),
            Route("/api/runs", api.start, methods=["POST"]),
            Route("/api/adapters", api.adapter, methods=["POST"]),
            Route("/api/runs/{run_id}", api.show_run),
            Route("/api/runs/{run_id}/events", api.events),
            Route("/api/runs/{run_id}/series", series),
            Route("/api/runs/{run_id}/stop", api.stop, methods=["POST"]),
            Mount("/static", StaticFiles(directory=pages.ASSETS / "static", packages=[("uplot", "static")])),
        ],
        middleware=[Middleware(SameOriginOnly, host=settings.host)],
        exception_handlers={HTTPException: pages.error_response, Exception: pages.error_response},
    )
    app.state.runs = RunFolders(settings.home)
    app.state.watches = {}
    return app
