"""The API's own description (OpenAPI 3.1), made from the models that it reads and writes."""

from dataclasses import dataclass
from functools import cache, reduce
from importlib import metadata
from operator import or_
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, JsonValue, StrictInt, TypeAdapter
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trainer_core.config import RunConfig
from trainer_core.events import Event
from trainer_core.run_dir import RunSummary
from webapp.series import DEFAULT_POINTS, LEAST_POINTS, MOST_POINTS

JSON, LINES, FORM = "application/json", "application/x-ndjson", "multipart/form-data"


class Model(BaseModel):
    """What an answer or a request holds, and nothing else."""

    model_config = ConfigDict(extra="forbid")


class Error(Model):
    """Every refusal."""

    error: str
    """What was wrong, and what to do."""
    fields: dict[str, str] = Field(default={}, description="What is wrong with each setting, by its dotted name.")
    active: str = Field(default="", description="The id of the run that is being trained.")


class Runs(Model):
    """All runs, newest first, and the ids of those that wait, the next one first."""

    runs: list[RunSummary]
    queue: list[str]


class Queue(Model):
    """The ids of the runs that wait, the next one first."""

    queue: list[str]


class Place(Model):
    """A place in the queue, from 1; beyond the end is the end."""

    position: StrictInt = Field(ge=1)


class Series(Model):
    """A run's history up to the event `seq`: what the page of a run begins with."""

    seq: int
    columns: dict[str, list[float | None]]
    """`step`, `loss`, `smoothed` and the other numbers of a step, each as long as the others."""
    average: tuple[float, float]
    """The smoothed loss as it goes on: its sum and the sum of its weights."""
    skips: list[int]
    validations: list[dict[str, float]]
    saved_steps: list[int]
    started: dict[str, JsonValue] | None
    phase: dict[str, JsonValue] | None
    finished: dict[str, JsonValue] | None
    first_time: float | None
    last_time: float | None
    feed: list[dict[str, JsonValue]]
    """The newest events that are no steps."""


class NewRun(Model):
    """The id of the run that was started or waits."""

    id: str


class AdapterPath(Model):
    """The path of an adapter's folder or file."""

    path: str = Field(min_length=1)


class AdapterUpload(Model):
    """One .safetensors file, one zip, or the two files of PEFT's folder."""

    files: list[Annotated[bytes, Field(json_schema_extra={"contentMediaType": "application/octet-stream"})]]


class Adapter(Model):
    """What is in an adapter: where it is, its settings as those of a run, and both in words."""

    path: str
    adapter: dict[str, JsonValue]
    description: str


class Estimate(Model):
    """The bytes of memory that a run takes at its peak."""

    total: int
    """As asked for; with gradient checkpointing auto as with off."""
    parts: dict[str, int]
    """What of it is for what."""
    totals: dict[str, int]
    """With gradient checkpointing off, of every second block, full, and as asked for."""
    precision: str
    """What it is computed for: auto is taken for what the device has, the device auto for the CPU."""
    free: int | None
    """What is free of main memory; null for a device with memory of its own, which the server doesn't look at."""


MODELS: dict[str, tuple[Any, Literal["validation", "serialization"]]] = {
    "RunConfig": (RunConfig, "validation"),
    "RunSummary": (RunSummary, "serialization"),
    "Event": (reduce(or_, Event.__subclasses__()), "serialization"),
    **{model.__name__: (model, "validation") for model in Model.__subclasses__()},
}
ERRORS = {
    400: "The request can't be read.",
    401: "Neither signed in nor sent with the key.",
    403: "Sent by another site's page, or meant for another host.",
    404: "There is no such run.",
    409: "Another run is being trained, or this one is in no state for it.",
    413: "The request is too large.",
    422: "Something in it can't be used; of settings, `fields` says what.",
    429: "Too many wrong keys came from this address.",
    507: "It can't be written to disk.",
}
EVERYWHERE = (401, 403, 413, 429)


@dataclass(frozen=True)
class Operation:
    """One method of one address. `answer` is a model's name, or another media type than JSON."""

    summary: str
    answer: str
    status: int = 200
    errors: tuple[int, ...] = ()
    query: tuple[dict[str, Any], ...] = ()
    body: tuple[tuple[str, str], ...] = ()
    """Media types and their models."""


AFTER = {
    "name": "after",
    "in": "query",
    "description": "The seq of the last event you have.",
    "schema": {"type": "integer", "minimum": 0, "maximum": 10**15 - 1, "default": 0},
}
POINTS = {
    "name": "points",
    "in": "query",
    "description": "How many steps to give at most; `seq` tells after which event the live stream goes on.",
    "schema": {"type": "integer", "minimum": LEAST_POINTS, "maximum": MOST_POINTS, "default": DEFAULT_POINTS},
}
WAIT = {
    "name": "queue",
    "in": "query",
    "description": "Whether the run waits for its turn, behind those that wait already.",
    "schema": {"type": "boolean", "default": False},
}
OPERATIONS: dict[tuple[str, str], Operation] = {
    ("GET", "/api/runs"): Operation("All runs", "Runs"),
    ("POST", "/api/runs"): Operation(
        "Start a run", "NewRun", 201, errors=(400, 409, 422, 507), query=(WAIT,), body=((JSON, "RunConfig"),)
    ),
    ("GET", "/api/runs/{run_id}"): Operation("One run", "RunSummary", errors=(404,)),
    ("GET", "/api/runs/{run_id}/events"): Operation(
        "Its events after one, an Event as JSON on each line", LINES, errors=(400, 404), query=(AFTER,)
    ),
    ("GET", "/api/runs/{run_id}/series"): Operation(
        "Its history as columns, thinned so that peaks and bad points stay",
        "Series",
        errors=(400, 404),
        query=(POINTS,),
    ),
    ("POST", "/api/runs/{run_id}/stop"): Operation(
        "Ask the trainer to save and stop, or take the run out of the queue", "RunSummary", errors=(404,)
    ),
    ("POST", "/api/runs/{run_id}/kill"): Operation(
        "End a trainer that does not end after a stop, or after its run", "RunSummary", errors=(404, 409)
    ),
    ("POST", "/api/runs/{run_id}/queue"): Operation(
        "Move a run that waits", "Queue", errors=(400, 404, 409, 422, 507), body=((JSON, "Place"),)
    ),
    ("POST", "/api/adapters"): Operation(
        "What is in an adapter; an upload is kept",
        "Adapter",
        errors=(400, 422, 507),
        body=((JSON, "AdapterPath"), (FORM, "AdapterUpload")),
    ),
    ("POST", "/api/estimate"): Operation(
        "How much memory a run takes", "Estimate", errors=(400, 422), body=((JSON, "RunConfig"),)
    ),
    ("GET", "/api/openapi.json"): Operation("This description", JSON),
}


def show(request: Request) -> Response:
    """The description of this server's API."""
    return JSONResponse(describe(needs_key=request.app.state.api_key is not None))


@cache
def describe(needs_key: bool) -> dict[str, Any]:
    """The document; `needs_key` tells whether the server asks for its key."""
    schemas, shared = TypeAdapter.json_schemas(
        [(name, mode, TypeAdapter(model)) for name, (model, mode) in MODELS.items()],
        ref_template="#/components/schemas/{model}",
    )
    # A model that another one holds stands among the shared ones, and is only named here.
    components: dict[str, Any] = {"schemas": {name: schema for (name, _), schema in schemas.items()} | shared["$defs"]}
    if needs_key:
        components["securitySchemes"] = {"key": {"type": "http", "scheme": "bearer"}}
    paths: dict[str, dict[str, Any]] = {}
    for (method, path), operation in OPERATIONS.items():
        paths.setdefault(path, {})[method.lower()] = _described(path, operation)
    return {
        "openapi": "3.1.0",
        "info": {
            "title": "Descant",
            "version": metadata.version("descant"),
            "description": "Beside these addresses, a websocket at /runs/{run_id}/live?after=SEQ sends "
            '{"events": [...]}, all events after one and then each as it happens; {"run": {...}} when the run changes; '
            '{"snapshot": {...}}, a Series, to whoever reads too slowly; and {} when nothing happens.',
        },
        "paths": paths,
        "components": components,
        "security": [{"key": []}] if needs_key else [],
    }


def _described(path: str, operation: Operation) -> dict[str, Any]:
    described: dict[str, Any] = {
        "summary": operation.summary,
        "responses": {
            str(operation.status): {"description": "Done.", "content": _content(operation.answer)},
            **{
                str(status): {"description": ERRORS[status], "content": _content("Error")}
                for status in sorted({*operation.errors, *EVERYWHERE})
            },
        },
    }
    parameters = [*operation.query]
    if "{run_id}" in path:
        parameters.append({"name": "run_id", "in": "path", "required": True, "schema": {"type": "string"}})
    if parameters:
        described["parameters"] = parameters
    if operation.body:
        content = {kind: _content(model)[JSON] for kind, model in operation.body}
        described["requestBody"] = {"required": True, "content": content}
    return described


def _content(answer: str) -> dict[str, Any]:
    if answer in MODELS:
        return {JSON: {"schema": {"$ref": f"#/components/schemas/{answer}"}}}
    return {answer: {"schema": {"type": "string"} if answer == LINES else {"type": "object"}}}
