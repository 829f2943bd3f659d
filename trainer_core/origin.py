"""Where a run begins, if not at nothing: a checkpoint it resumes exactly, or an adapter it starts from.

Light: what files and settings tell is checked before a trainer is started. Names and shapes of tensors are matched
when the trainer loads them.
"""

from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError, model_validator

from trainer_core.adapter_files import ADAPTER_FILES, AdapterFile
from trainer_core.config import RunConfig, as_text, flatten
from trainer_core.sources import SourceError, plain, read_json, shorten

STATE_FILES = ("state.safetensors", "state.json")
# What may differ between a run and the run that continues it: places, which fingerprints make up for, and what
# changes no update or only its rounding. The number of epochs changes the schedule, which is planned again.
MAY_DIFFER = (
    "name",
    "start_from",
    "resume_from",
    "model.source",
    "model.base_dtype",
    "dataset.source",
    "training.epochs",
    "training.save_every_epochs",
    "training.max_consecutive_skips",
    "training.gradient_checkpointing",
    "hardware.compile",
    "hardware.device",
    "hardware.precision",
)


Count = Annotated[StrictInt, Field(ge=0)]
Positive = Annotated[StrictInt, Field(ge=1)]


class OptimizerState(BaseModel):
    """An optimizer's state but for its tensors, which are in state.safetensors as `<parameter>/<key>`."""

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    counters: dict[str, int | float]
    """What all parameters share and updates change, as Prodigy's estimate of the rate."""
    numbers: dict[str, dict[str, int | float]]
    """By parameter, as the adapter's file names it."""
    shapes: dict[str, list[int]]
    """Of the tensors, by name, to know a file that was changed."""


class TrainingState(BaseModel):
    """state.json: with the tensors beside it everything an exact resume needs.

    No generator's state is kept: all that is drawn derives from the seed and the place in the run
    (`objective.seed_of`).
    """

    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)

    version: Literal[1] = 1
    """To be raised when a state of before can't be read any more, so that the refusal says why."""
    step: Positive
    epoch: Positive
    """The epoch that was begun last."""
    position: Count
    """How many of its samples are done, in windows that were whole."""
    samples: Positive
    """How many samples an epoch has."""
    loss_sum: float
    """Over the samples of this epoch's updates."""
    loss_samples: Count
    updates: Count
    skipped: Count
    consecutive_skips: Count
    validation_loss: float | None
    device: str
    precision: str
    base_model: str
    """`LoadedModel.fingerprint`."""
    dataset: str
    """Fingerprint of the samples."""
    optimizer: OptimizerState
    scaler: dict[str, Any] | None
    """State of the fp16 loss scaler."""
    config: RunConfig

    @model_validator(mode="after")
    def _check_place(self) -> "TrainingState":
        training = self.config.training
        window = training.batch_size * training.gradient_accumulation
        if self.position > self.samples or (self.position % window and self.position != self.samples):
            raise ValueError(f"position {self.position} is not between two windows of {window} samples")
        if self.step > self.epoch * self.samples:
            raise ValueError(f"step {self.step} can not be reached in {self.epoch} epochs of {self.samples} samples")
        return self

    @property
    def epochs_done(self) -> int:
        """Whole epochs."""
        return self.epoch if self.position == self.samples else self.epoch - 1


def read_state(checkpoint: Path) -> TrainingState:
    """The state of a checkpoint that can be resumed. Raises SourceError naming what is missing or damaged."""
    missing = [name for name in (*ADAPTER_FILES, *STATE_FILES) if not (_folder(checkpoint) / name).is_file()]
    if missing:
        raise SourceError(
            f"{checkpoint} has no {shorten(missing)}, so it can't be resumed exactly. If it holds an adapter, give the "
            "folder under Start from: a new run then begins with its weights."
        )
    content = read_json(checkpoint / "state.json")
    version = TrainingState.model_fields["version"].default
    if content.get("version") != version:
        raise SourceError(
            f"{checkpoint / 'state.json'} is of version {plain(repr(content.get('version')), 20)}, this Descant "
            f"resumes version {version}. Give the folder under Start from to begin a new run with its weights."
        )
    try:
        return TrainingState.model_validate(content)
    except ValidationError as error:
        places = [".".join(map(str, problem["loc"])) or problem["msg"] for problem in error.errors()]
        raise SourceError(
            f"{checkpoint / 'state.json'} is not the sound state of a run: {plain(shorten(places), 300)}. Give the "
            "folder under Start from to begin a new run with its weights."
        ) from error


def check(config: RunConfig, start: AdapterFile | None) -> dict[str, str]:
    """What is wrong with the origin `config` names, by field; `start` is the adapter to start from, if it has one."""
    if config.resume_from and config.start_from:
        return {"resume_from": "Start from is filled in too; a run can have one of them."}
    if start:
        return _check_adapter(config, start)
    if not config.resume_from:
        return {}
    try:
        return _check_resume(config, read_state(Path(config.resume_from)))
    except SourceError as error:
        return {"resume_from": str(error)}


def _check_resume(config: RunConfig, state: TrainingState) -> dict[str, str]:
    if state.epochs_done >= config.training.epochs:
        return {
            "training.epochs": f"{config.training.epochs} was given and the checkpoint has done {state.epochs_done}: "
            f"nothing is left to do. Give more than {state.epochs_done} to train on."
        }
    before, now = flatten(state.config.model_dump()), flatten(config.model_dump())
    return {
        name: f"{as_text(now[name])} was given, the run to resume has {as_text(before[name])}. Resuming exactly needs "
        "the same; to train on with other settings give the checkpoint under Start from."
        for name in before
        if name not in MAY_DIFFER and before[name] != now[name]
    }


def _check_adapter(config: RunConfig, adapter: AdapterFile) -> dict[str, str]:
    ours = config.adapter.model_dump()
    return {
        f"adapter.{key}": f"{as_text(ours[key])} was given, the adapter to start from has {as_text(value)}: "
        f"set {as_text(value)}, or leave it out."
        for key, value in adapter.settings.items()
        if ours[key] != value and key != "targets"  # which can be said in many ways: the tensors decide
    }


def _folder(path: Path) -> Path:
    try:
        if path.is_dir():
            return path
    except OSError as error:
        raise SourceError(f"{plain(str(path), 200)} can't be looked at: {error.strerror}.") from error
    raise SourceError(f"There is no folder {path}.")
