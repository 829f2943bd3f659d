"""The API against its own description."""

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, settings
from pydantic import TypeAdapter
from schemathesis import Case
from schemathesis.checks import load_all_checks
from schemathesis.specs.openapi import checks
from starlette.routing import Route

from tests.conftest import FIXTURE, Server, make_run, read_events, started, step, writing
from trainer_core.config import RunConfig
from trainer_core.run_dir import RunDir
from webapp import openapi
from webapp.app import make_app
from webapp.settings import Settings


@pytest.fixture(scope="module")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Server, RunDir]]:
    """A server on which a run is being trained, so that every start is refused."""
    server = Server(tmp_path_factory.mktemp("busy") / "home")
    run = make_run(server.home)
    with writing(run) as writer:
        writer.write(started(device="auto"))  # or a start for another device would get through
        writer.write(step(1))
        yield server, run
    server.stop()


def test_every_route_of_the_api_is_described_and_no_other(tmp_path: Path) -> None:
    routes = {
        (method, route.path)
        for route in make_app(Settings(tmp_path)).routes
        if isinstance(route, Route) and route.path.startswith("/api/")
        for method in route.methods or ()
        if method != "HEAD"
    }
    document = openapi.describe(needs_key=False)
    assert {(method.upper(), path) for path, methods in document["paths"].items() for method in methods} == routes
    assert document["openapi"] == "3.1.0"


def test_settings_events_and_runs_are_described_by_the_models_themselves(busy: tuple[Server, RunDir]) -> None:
    server, run = busy
    document = server.http.get("/api/openapi.json").json()
    assert document == openapi.describe(needs_key=False)
    described = document["components"]["schemas"]
    assert set(described["RunConfig"]["properties"]) == set(RunConfig.model_fields)
    assert described["TrainingConfig"]["properties"]["epochs"]["maximum"] == 1_000_000
    event: TypeAdapter[Any] = TypeAdapter(openapi.MODELS["Event"][0])
    assert {event.validate_python(written).type for written in read_events(run)} == {"started", "step"}
    references = {part.split('"')[0] for part in json.dumps(document).split('"#/components/schemas/')[1:]}
    assert references <= set(described)
    assert document["security"] == []
    assert openapi.describe(needs_key=True)["security"] == [{"key": []}]


load_all_checks()
described = schemathesis.openapi.from_dict(openapi.describe(needs_key=False))
# Starlette's Allow has the methods of the first route of an address only.
NOT_CHECKED: list[Any] = [checks.allow_header_conformance]
# What fits the schema may still name a folder that isn't there; and settings take what forms send: "5" for 5, "on" for
# true, names apart by commas.
NOT_CHECKED_OF_BODIES: list[Any] = [*NOT_CHECKED, checks.positive_data_acceptance, checks.negative_data_rejection]


@described.parametrize()
@settings(max_examples=5, derandomize=True, deadline=None, database=None, suppress_health_check=list(HealthCheck))
def test_every_answer_to_any_request_is_as_described(case: Case[Any], busy: tuple[Server, RunDir]) -> None:
    server, run = busy
    if case.path_parameters and len(case.path_parameters.get("run_id", "")) > 3:
        case.path_parameters["run_id"] = run.id  # else hardly a request would name a run
    if (run.path / "stop").exists():
        (run.path / "stop").unlink()
    has_body = case.path in ("/api/runs", "/api/adapters", "/api/estimate") and case.method == "POST"
    case.call_and_validate(server.address, excluded_checks=NOT_CHECKED_OF_BODIES if has_body else NOT_CHECKED)
    for other in server.runs:
        if other.id != run.id:
            assert other.status() == "queued"
            other.delete()


def test_what_a_well_behaved_program_asks_is_answered_as_described(busy: tuple[Server, RunDir], tmp_path: Path) -> None:
    """The answers that fuzzing hardly reaches."""
    server, run = busy
    adapter = shutil.copytree(FIXTURE / "adapter", tmp_path / "adapter")
    shutil.copytree(FIXTURE / "adapter", run.checkpoints / "step-000006")
    (run.checkpoints / "step-000006" / "state.json").write_text('{"step": 6, "epoch": 2}')
    for method, path, body, status in (
        ("GET", "/api/runs", None, 200),
        ("GET", f"/api/runs/{run.id}", None, 200),
        ("GET", f"/api/runs/{run.id}/events?after=1", None, 200),
        ("GET", f"/api/runs/{run.id}/series?points=100", None, 200),
        ("POST", f"/api/runs/{run.id}/stop", None, 200),
        ("POST", "/api/adapters", {"path": str(adapter)}, 200),
        ("POST", "/api/estimate", {}, 200),
        ("POST", "/api/estimate", {"training": {"epochs": 0}}, 422),
        ("POST", "/api/runs", {}, 409),
        ("POST", "/api/runs?queue=true", {"name": "waits"}, 201),
        ("POST", f"/api/runs/{run.id}/queue", {"position": 1}, 409),
        ("POST", f"/api/runs/{run.id}/kill", None, 409),
        ("POST", "/api/runs", {"adapter": {"rank": 0}}, 422),
        ("GET", "/api/runs/none", None, 404),
    ):
        answer = server.http.request(method, path, json=body) if body is not None else server.http.request(method, path)
        assert answer.status_code == status, answer.text
        template = path.partition("?")[0].replace(run.id, "{run_id}").replace("/none", "/{run_id}")
        described[template][method].validate_response(answer)
