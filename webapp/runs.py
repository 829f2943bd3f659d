"""The runs a request speaks of, and their plain-data form."""

from dataclasses import asdict
from typing import Any

from starlette.exceptions import HTTPException
from starlette.requests import HTTPConnection

from trainer_core.roots import Roots
from trainer_core.run_dir import RunDir, RunSummary
from trainer_core.run_folders import RunFolders


def folders(connection: HTTPConnection) -> RunFolders:
    """All runs of this server's home."""
    runs = connection.app.state.runs
    assert isinstance(runs, RunFolders)
    return runs


def roots(connection: HTTPConnection) -> Roots:
    """The folders that a request may name models, data sets and adapters in."""
    roots = connection.app.state.roots
    assert isinstance(roots, Roots)
    return roots


def requested(connection: HTTPConnection) -> RunDir:
    """The run named in the address. Raises a 404."""
    return named(connection, connection.path_params["run_id"])


def named(connection: HTTPConnection, run_id: str) -> RunDir:
    """The run with this id. Raises a 404."""
    if run := folders(connection).find(run_id):
        return run
    raise HTTPException(404, "There is no such run here. It may have been deleted.")


def as_data(summary: RunSummary) -> dict[str, Any]:
    """A summary as JSON shows it."""
    return asdict(summary)
