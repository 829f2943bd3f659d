"""Settings checked before anything is loaded: every problem at once, each at its field."""

import json
import re
import sys
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from trainer_core import adapter_files, naming, origin, sources
from trainer_core.adapter_files import AdapterFile
from trainer_core.adapter_parts import check_kronecker_factor, parts_for
from trainer_core.config import QUANTIZED, RunConfig, allowed, fields
from trainer_core.headers import read_shapes
from trainer_core.matching import mismatch
from trainer_core.roots import ANYWHERE, Roots

# Choices that need a package of their own, and the version they need.
ON_CUDA = ("adamw8bit", *QUANTIZED)
OPTIONAL_PACKAGES = {"prodigy": ("prodigyopt", (1, 1)), **dict.fromkeys(ON_CUDA, ("bitsandbytes", (0, 45)))}

PATH_FIELDS = {
    "model.source": sources.absolute_model,
    "dataset.source": sources.absolute_folder,
    "start_from": sources.absolute_path,
    "resume_from": sources.absolute_path,
}


class ConfigError(ValueError):
    """A run can't be started as asked. `fields` maps each dotted field name to what is wrong there."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = {name: sources.plain(message) for name, message in fields.items()}
        super().__init__("; ".join(f"{name}: {message}" for name, message in self.fields.items()))


def validate(data: dict[str, Any], roots: Roots = ANYWHERE) -> RunConfig:
    """The RunConfig that `data` asks for, its folders looked at too. Raises ConfigError with every problem at once.

    Settings of the adapter that are left out are those of the adapter to start from, if there is one. Of a folder
    outside of `roots` nothing is looked at, and of `data` then nothing but the fields by themselves.
    """
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError({"config": "Some text holds half a character (a lone surrogate). Type it again."}) from error
    if outside := _outside(data, roots):
        try:
            RunConfig.model_validate(data)
        except ValidationError as error:
            outside = _problems(error) | outside
        raise ConfigError(outside)
    problems: dict[str, str] = {}
    start = config = None
    try:
        start = _adapter_to_start_from(data)
    except ValueError as error:
        problems["start_from"] = str(error)
    given = data.get("adapter", {})
    read = {}
    if start and isinstance(given, dict):
        read = {key: value for key, value in start.settings.items() if key not in given}
    try:
        config = RunConfig.model_validate(data | {"adapter": read | given} if read else data)
    except ValidationError as error:
        problems |= _problems(error)
        unfit = [
            f"{name} of the adapter. {problems.pop(name)}"
            for name in [f"adapter.{key}" for key in read]
            if name in problems
        ]
        if unfit:
            problems["start_from"] = f"Descant does not train it: {' '.join(unfit)}"
    for section, check in (("model", sources.check_model), ("dataset", sources.check_dataset)):
        asked = data.get(section)
        source = asked.get("source", sources.DEMO) if isinstance(asked, dict) else sources.DEMO
        if isinstance(source, str) and not any(name in problems for name in (section, f"{section}.source")):
            try:
                check(RunConfig.model_fields[section].annotation(source=source).source)  # type: ignore[misc]
            except sources.SourceError as error:
                problems[f"{section}.source"] = str(error)
    if config:
        weights = _model_weights(config.model.source)
        if weights and start and "targets" in read:
            config = _with_short_targets(config, start, weights)
        problems = _contradictions(config, start, weights) | problems
    if problems or not config:
        raise ConfigError(problems)
    return config


def _outside(data: dict[str, Any], roots: Roots) -> dict[str, str]:
    """What is wrong with fields that name a file or folder outside of `roots`, by their names."""
    problems = {}
    for name, absolute in PATH_FIELDS.items():
        section, _, key = name.rpartition(".")
        group = data.get(section) if section else data
        given = group.get(key) if isinstance(group, dict) else None
        try:
            path = absolute(given.strip()) if isinstance(given, str) and given.strip() else ""
            if Path(path).is_absolute():  # else it is the demo or a hub id
                roots.check(path)
        except sources.SourceError as error:
            problems[name] = str(error)
        except ValueError:  # no path at all, which is said with the other fields
            continue
    return problems


def _adapter_to_start_from(data: dict[str, Any]) -> AdapterFile | None:
    """The adapter that `data` names, if it does. Raises ValueError for what is none."""
    source = data.get("start_from")
    if not isinstance(source, str) or not source.strip():
        return None
    return adapter_files.read(Path(sources.absolute_path(source.strip())))


def _with_short_targets(config: RunConfig, start: AdapterFile, weights: dict[str, list[int]]) -> RunConfig:
    """`config` with groups or ends of names for targets, where they mean the layers of `start` and no others."""
    short = naming.targets_of(start.modules)
    meant = {naming.original_module(name) for name in _linear(weights) if naming.is_meant(short, name)}
    if meant != set(start.modules):
        return config
    return config.model_copy(update={"adapter": config.adapter.model_copy(update={"targets": short})})


def _contradictions(
    config: RunConfig, start: AdapterFile | None, weights: dict[str, list[int]] | None
) -> dict[str, str]:
    """What is wrong with fields that are each right by themselves, with the origin, and with the model's `weights`."""
    problems = origin.check(config, start)
    if weights and start:
        problems |= _misfit(config, start, weights) or _wrong_targets(config, weights)
    elif weights and not config.start_from:
        problems |= _wrong_targets(config, weights)
    for name, given, instead in (
        ("training.optimizer", config.training.optimizer, "adamw"),
        ("model.base_dtype", config.model.base_dtype, "bf16"),
    ):
        if given in ON_CUDA and config.hardware.device not in ("auto", "cuda"):
            problems[name] = f"{given} works on cuda only, not on {config.hardware.device}. Use {instead}."
        elif given in OPTIONAL_PACKAGES and (lacking := _lacking(*OPTIONAL_PACKAGES[given])):
            problems[name] = f"{given} needs {lacking}, or choose {instead}."
    if config.model.base_dtype in QUANTIZED and config.adapter.type != "lora":
        problems["model.base_dtype"] = (
            f"{config.model.base_dtype} goes with a lora, not with a {config.adapter.type}. Use bf16, or a lora."
        )
    if config.model.base_dtype == "bf16" and config.hardware.precision == "16-mixed":
        problems["hardware.precision"] = (
            "16-mixed was given with base weights in bf16; they go with bf16-mixed, 32-true, or auto."
        )
    return problems


def _lacking(package: str, needed: tuple[int, int]) -> str:
    """What is missing of an optional package, and how to get it; nothing where it is there and new enough."""
    version = ".".join(map(str, needed))
    if not find_spec(package):
        found = "which is not installed"
    elif tuple(int(part) for part in re.findall(r"\d+", metadata.version(package))[:2]) < needed:
        found = f"and {metadata.version(package)} is installed"
    else:
        return ""
    return (
        f"the package {package} {version} or later, {found}. Install it with {sys.executable} -m pip install "
        f'"{package}>={version}"'
    )


def _model_weights(source: str) -> dict[str, list[int]] | None:
    """Shapes of the transformer's weights by diffusers' names, from its files; None where the trainer has to look."""
    if sources.is_hub_id(source):
        return None
    try:
        files = sources.find_model(sources.DEMO_MODEL if source == sources.DEMO else Path(source))
        shapes = read_shapes(files.weights)
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


def _wrong_targets(config: RunConfig, weights: dict[str, list[int]]) -> dict[str, str]:
    """What is wrong if a target means no layer of the model or one that is not linear, or a LoKr can't split one."""
    modules = {name.rsplit(".", count)[0] for name in weights for count in range(1, name.count(".") + 1)}
    linear = _linear(weights)
    try:
        naming.check_targets(config.adapter.targets, modules, linear)
    except sources.SourceError as error:
        return {"adapter.targets": str(error)}
    try:
        if config.adapter.type == "lokr":
            meant = [shape for name, shape in linear.items() if naming.is_meant(config.adapter.targets, name)]
            check_kronecker_factor(config.adapter.decompose_factor, (side for shape in meant for side in shape))
    except sources.SourceError as error:
        return {"adapter.decompose_factor": str(error)}
    return {}


def _misfit(config: RunConfig, start: AdapterFile, weights: dict[str, list[int]]) -> dict[str, str]:
    """What is wrong, with counts, unless the adapter to start from was made for the layers that are targets."""
    expected = {
        f"{naming.original_module(name)}.{part}": needed
        for name, shape in _linear(weights).items()
        if naming.is_meant(config.adapter.targets, name)
        for part, needed in parts_for(shape, start.settings).items()
    }
    if differences := mismatch(expected, start.shapes()):
        return {"start_from": f"It was made for another model, or for other targets: {differences}."}
    return {}


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
