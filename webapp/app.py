"""The web application: its routes and what they share."""

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.routing import Mount, Route, WebSocketRoute
from starlette.staticfiles import StaticFiles

from trainer_core.run_folders import RunFolders
from webapp import actions, api, estimates, openapi, pages, sign_in
from webapp.api_key import ApiKey
from webapp.body_limit import BodyLimit
from webapp.dispatcher import dispatching
from webapp.live import live
from webapp.security import SameOriginOnly
from webapp.series import series
from webapp.settings import Settings
from webapp.sign_in import KeyRequired, Session
from webapp.trainer_log import trainer_log


def make_app(settings: Settings) -> Starlette:
    """The application over the runs in `settings.home`."""
    runs = RunFolders(settings.home)
    middleware = [Middleware(SameOriginOnly, settings=settings), Middleware(BodyLimit)]
    key = ApiKey(settings.api_key) if settings.api_key else None
    if key:
        secret = key.cookie_secret(settings.home)
        middleware += [Middleware(Session, secret=secret, port=settings.port), Middleware(KeyRequired, key=key)]
    app = Starlette(
        routes=[
            Route("/", pages.runs_page),
            Route("/runs/new", pages.new_run_page),
            Route("/runs/{run_id}", pages.run_page),
            Route("/runs", actions.start, methods=["POST"]),
            Route("/runs/{run_id}/stop", actions.stop, methods=["POST"]),
            Route("/runs/{run_id}/resume", actions.resume, methods=["POST"]),
            Route("/runs/{run_id}/kill", actions.kill, methods=["POST"]),
            Route("/runs/{run_id}/queue", actions.move, methods=["POST"]),
            Route("/runs/{run_id}/delete", actions.delete, methods=["POST"]),
            Route("/runs/{run_id}/checkpoints/{name}/download", actions.download),
            Route("/runs/{run_id}/log", trainer_log),
            WebSocketRoute("/runs/{run_id}/live", live),
            Route("/api/runs", api.list_runs),
            Route("/api/runs", api.start, methods=["POST"]),
            Route("/api/adapters", api.adapter, methods=["POST"]),
            Route("/api/estimate", estimates.estimate, methods=["POST"]),
            Route("/api/openapi.json", openapi.show),
            Route("/api/runs/{run_id}", api.show_run),
            Route("/api/runs/{run_id}/events", api.events),
            Route("/api/runs/{run_id}/series", series),
            Route("/api/runs/{run_id}/stop", api.stop, methods=["POST"]),
            Route("/api/runs/{run_id}/kill", api.kill, methods=["POST"]),
            Route("/api/runs/{run_id}/queue", api.move, methods=["POST"]),
            *(sign_in.ROUTES if key else []),
            Mount("/static", StaticFiles(directory=pages.ASSETS / "static", packages=[("uplot", "static")])),
        ],
        middleware=middleware,
        exception_handlers={HTTPException: pages.error_response, Exception: pages.error_response},
        lifespan=lambda app: dispatching(runs),
    )
    app.state.runs = runs
    app.state.roots = settings.roots
    app.state.api_key = key
    app.state.watches = {}
    return app
