"""Settings checked before anything is loaded: every problem at once, each at its field."""

import json
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer_core import adapter_files, naming, origin, sources
from trainer_core.config import RunConfig, allowed, fields
from trainer_core.matching import mismatch

# Optimizers that come in packages of their own.
OPTIONAL_PACKAGES = {"prodigy": "prodigyopt", "adamw8bit": "bitsandbytes"}


class ConfigError(ValueError):
    """A run can't be started as asked. `fields` maps each dotted field name to what is wrong there."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = {name: sources.plain(message) for name, message in fields.items()}
        super().__init__("; ".join(f"{name}: {message}" for name, message in self.fields.items()))


def validate(data: dict[str, Any]) -> RunConfig:
    """The RunConfig that `data` asks for, its folders looked at too. Raises ConfigError with every problem at once.

    Settings of the adapter that are left out are those of the adapter to start from, if there is one.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError({"config": "Some text holds half a character (a lone surrogate). Type it again."}) from error
    problems: dict[str, str] = {}
    config = None
    try:
        config = RunConfig.model_validate(_with_adapter_of_origin(data))
    except ValidationError as error:
        problems = _problems(error)
    for section, check in (("model", sources.check_model), ("dataset", sources.check_dataset)):
        given = data.get(section)
        source = given.get("source", sources.DEMO) if isinstance(given, dict) else sources.DEMO
        if isinstance(source, str) and not any(name in problems for name in (section, f"{section}.source")):
            try:
                check(RunConfig.model_fields[section].annotation(source=source).source)  # type: ignore[misc]
            except sources.SourceError as error:
                problems[f"{section}.source"] = str(error)
    if config:
        problems |= _contradictions(config)
    if problems or not config:
        raise ConfigError(problems)
    return config


def _with_adapter_of_origin(data: dict[str, Any]) -> dict[str, Any]:
    """`data` with the settings of the adapter to start from where it has none of its own."""
    source, given = data.get("start_from"), data.get("adapter", {})
    if not isinstance(source, str) or not source.strip() or not isinstance(given, dict):
        return data
    try:
        adapter = adapter_files.read(Path(sources.absolute_if_given(source.strip())))
    except ValueError:  # said at its field
        return data
    return data | {"adapter": adapter.settings | given}


def _contradictions(config: RunConfig) -> dict[str, str]:
    """What is wrong with fields that are each right by themselves."""
    problems = origin.check(config)
    field = "adapter.targets"
    try:
        weights = _model_weights(config.model.source)
        if weights and config.start_from and "start_from" not in problems:
            field = "start_from"
            _check_fit(config, weights)
        elif weights:
            _check_targets(config, weights)
    except sources.SourceError as error:
        problems[field] = str(error)
    package = OPTIONAL_PACKAGES.get(config.training.optimizer)
    if config.training.optimizer == "adamw8bit" and config.hardware.device not in ("auto", "cuda"):
        problems["training.optimizer"] = f"adamw8bit works on cuda only, not on {config.hardware.device}. Use adamw."
    elif package and not find_spec(package):
        problems["training.optimizer"] = (
            f"{config.training.optimizer} needs the package {package}, which is not installed. Install it with "
            f"{sys.executable} -m pip install {package}, or choose another optimizer."
        )
    if config.model.base_dtype == "bf16" and config.hardware.precision not in ("auto", "bf16-mixed"):
        problems["hardware.precision"] = (
            f"{config.hardware.precision} was given with base weights in bf16; they go with bf16-mixed, or auto."
        )
    return problems


def _model_weights(source: str) -> dict[str, list[int]] | None:
    """Shapes of the transformer's weights by diffusers' names, from its files; None where the trainer has to look."""
    if sources.is_hub_id(source):
        return None
    try:
        files = sources.find_model(sources.DEMO_MODEL if source == sources.DEMO else Path(source))
        shapes = sources.read_shapes(files.weights)
    except sources.SourceError:  # said at the model's own field, or by the trainer
        return None
    if files.layout == "original":
        shapes = {
            naming.to_diffusers(name.removeprefix(naming.DIT_PREFIX)): shape
            for name, shape in shapes.items()
            if name.startswith(naming.DIT_PREFIX)
        }
    return shapes


def _linear(weights: dict[str, list[int]]) -> dict[str, list[int]]:
    """[out, in] of the linear layers, by name in order."""
    shapes = {name.removesuffix(".weight"): shape for name, shape in weights.items() if name.endswith(".weight")}
    return {name: shapes[name] for name in sorted(shapes) if len(shapes[name]) == 2}


def _check_targets(config: RunConfig, weights: dict[str, list[int]]) -> None:
    """Raise SourceError if a target means none of the model's layers, or one that is not linear."""
    modules = {name.rsplit(".", count)[0] for name in weights for count in range(1, name.count(".") + 1)}
    naming.check_targets(config.adapter.targets, modules, _linear(weights))


def _check_fit(config: RunConfig, weights: dict[str, list[int]]) -> None:
    """Raise SourceError, with counts, unless the adapter to start from was made for the layers that are targets."""
    adapter = adapter_files.read(Path(config.start_from))
    found = adapter.weight_shapes()
    expected = {
        naming.to_original(f".{name}.").strip("."): shape
        for name, shape in _linear(weights).items()
        if naming.is_meant(config.adapter.targets, name)
    }
    if differences := mismatch(expected, found):
        raise sources.SourceError(
            f"{adapter.weights} was not made for these layers of this model: {differences}. Choose the model that it "
            "was trained on."
        )


def _problems(error: ValidationError) -> dict[str, str]:
    known = fields()
    problems: dict[str, str] = {}
    for problem in error.errors():
        path = [str(part) for part in problem["loc"]]
        # Behind a field's own name come a list's index, or the type that was tried.
        name = next((name for name in (".".join(path[:2]), path[0] if path else "") if name in known), ".".join(path))
        if problem["type"] == "extra_forbidden":
            problems[name] = f"There is no such field. Fields are {', '.join(known)}."
        elif problem["type"] == "value_error":
            problems[name] = str(problem["ctx"]["error"])
        elif name in known:
            given = problem["input"]
            said = "Nothing" if given in ("", (), []) else sources.plain(repr(given), 100)
            problems[name] = f"{said} was given; this takes {allowed(known[name])}."
        else:
            problems[name or "config"] = "This takes a group of fields (a JSON object)."
    return problems
