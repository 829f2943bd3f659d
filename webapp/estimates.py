"""How much memory a run would take, for the form and for programs, told before it is started."""

from pathlib import Path
from typing import Any

from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import Request
from starlette.responses import JSONResponse, Response

from trainer_core import free_memory, memory, model_shape, sample_shapes, sources
from trainer_core.config import Checkpointing, RunConfig, fields
from trainer_core.config_checks import ConfigError, validate
from webapp import runs
from webapp.api import json_object


async def estimate(request: Request) -> Response:
    """The memory that the RunConfig in the body asks for, as parts and in all, for several choices of checkpointing."""
    data = await json_object(request)
    try:
        config = await run_in_threadpool(validate, data, runs.roots(request))
        return JSONResponse(await run_in_threadpool(_estimate, config))
    except ConfigError as error:
        known = fields()
        wrong = [known[name].title or name for name in error.fields if name in known] or list(error.fields)
        message = f"The memory that it takes is told once these are right: {sources.shorten(wrong)}."
        return JSONResponse({"error": message, "fields": error.fields}, 422)


def _estimate(config: RunConfig) -> dict[str, Any]:
    """The answer. Raises ConfigError for a model whose size can't be read, a 422 for one not there yet or samples."""
    try:
        shape = model_shape.read_shape(sources.read_json(_model_config(config.model.source)))
    except sources.SourceError as error:
        raise ConfigError({"model.source": str(error)}) from error
    try:
        samples = sample_shapes.measure(config.dataset.source)
    except sources.SourceError as error:  # the folder is there; it may train even so, as files of old PyTorch do
        raise HTTPException(422, str(error)) from error
    asked = config.training.gradient_checkpointing
    precision = config.hardware.precision
    if precision == "auto":  # as the trainer chooses; without torch a card that `auto` would find isn't known
        on_card = config.hardware.device not in ("auto", "cpu")
        precision = "bf16-mixed" if on_card else "32-true"
    choices: list[Checkpointing] = ["off", *sorted({2, asked} - {"off", "auto", "full"}), "full"]
    estimates = {choice: memory.estimate(shape, config, samples, precision, choice) for choice in choices}
    own = estimates["off" if asked == "auto" else asked]
    return {
        "total": own.total,
        "parts": own.parts,
        "totals": {str(choice): estimate.total for choice, estimate in estimates.items()},
        "precision": precision,
        "free": None if config.hardware.device in ("cuda", "xpu") else free_memory.free_bytes(),
    }


def _model_config(source: str) -> Path:
    """The model's config.json. Raises SourceError for none, a 422 for that of a hub model not downloaded yet."""
    if not sources.is_hub_id(source):
        return sources.find_model(sources.DEMO_MODEL if source == sources.DEMO else Path(source)).config
    from huggingface_hub import try_to_load_from_cache  # here, since it takes a while to import
    from huggingface_hub.errors import HFValidationError

    try:
        for name in ("transformer/config.json", "config.json"):
            if isinstance(found := try_to_load_from_cache(source, name), str):
                return Path(found)
    except HFValidationError as error:
        raise sources.SourceError(f"{source} can't be the id of a hub repository. Check it.") from error
    message = f"{source} is not on this machine yet. The memory that it takes is known once it is downloaded."
    raise HTTPException(422, message)
