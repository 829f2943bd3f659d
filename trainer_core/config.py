"""What a run is told to do. Each setting is declared once, here: default, label, help, unit and bounds.

The form, the JSON API and their error messages are made from these fields; nothing repeats them.
"""

import json
from typing import Annotated, Any, Literal, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

from trainer_core import sources


class ConfigError(ValueError):
    """A run can't be started as asked. `fields` maps each dotted field name to what is wrong there."""

    def __init__(self, fields: dict[str, str]) -> None:
        self.fields = {name: sources.plain(message) for name, message in fields.items()}
        super().__init__("; ".join(f"{name}: {message}" for name, message in self.fields.items()))


class Section(BaseModel):
    """A group of fields; a field it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)


class ModelConfig(Section):
    """Base model"""

    source: Annotated[str, AfterValidator(sources.absolute_model)] = Field(
        "demo",
        title="Model",
        description="demo (a tiny model that comes with Descant), a folder as ACE-Step's downloader or diffusers "
        "leaves it, or a hub id such as owner/name.",
    )
    variant: Literal["auto", "base", "sft", "turbo"] = Field(
        "auto",
        title="Variant",
        description="Decides how timesteps are drawn and whether conditions are dropped. auto reads the model's "
        "own config.",
    )


class DatasetConfig(Section):
    """Data set"""

    source: Annotated[str, AfterValidator(sources.absolute_folder)] = Field(
        "demo",
        title="Data set",
        description="demo (eight short synthetic samples), or a folder of preprocessed .pt tensors made with the "
        "same model variant.",
    )


class AdapterConfig(Section):
    """Adapter"""

    rank: int = Field(
        16,
        ge=1,
        le=1024,
        title="Rank",
        description="Size of the adapter. Higher can learn more and weighs more.",
    )
    alpha: int = Field(32, ge=1, le=4096, title="Alpha", description="Strength. The adapter is scaled by alpha / rank.")
    dropout: float = Field(
        0.0, ge=0, le=0.9, title="Dropout", description="Share of adapter inputs zeroed while training."
    )


class TrainingConfig(Section):
    """Training"""

    epochs: int = Field(40, ge=1, le=1_000_000, title="Epochs", description="How often every sample is seen.")
    batch_size: int = Field(
        1,
        ge=1,
        le=1024,
        title="Batch size",
        description="Samples computed at once.",
        json_schema_extra={"unit": "samples"},
    )
    gradient_accumulation: int = Field(
        2,
        ge=1,
        le=4096,
        title="Gradient accumulation",
        description="Batches gathered into one step. The last step of an epoch takes what is left.",
        json_schema_extra={"unit": "batches"},
    )
    learning_rate: float = Field(
        3e-4, gt=0, le=1, title="Learning rate", description="The peak, reached after warm-up."
    )
    warmup_steps: int = Field(
        20,
        ge=0,
        le=1_000_000,
        title="Warm-up",
        description="Steps over which the rate rises to its peak; then it falls along a cosine to 1 %. "
        "In a run that is shorter, a tenth of its steps.",
        json_schema_extra={"unit": "steps"},
    )
    weight_decay: float = Field(
        0.01, ge=0, le=1, title="Weight decay", description="AdamW's pull of the adapter towards zero."
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=1e6, title="Gradient clipping", description="Longer gradients are cut to this norm."
    )
    save_every_epochs: int = Field(
        10,
        ge=1,
        le=1_000_000,
        title="Checkpoint every",
        description="One is also written at the end and when you stop.",
        json_schema_extra={"unit": "epochs"},
    )
    seed: int = Field(
        42,
        ge=0,
        le=2**32 - 1,
        title="Seed",
        description="The same seed gives the same run on the same machine.",
    )


class HardwareConfig(Section):
    """Hardware"""

    device: Literal["auto", "cuda", "mps", "xpu", "cpu"] = Field(
        "auto", title="Device", description="auto takes the graphics card where there is one."
    )
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = Field(
        "auto",
        title="Precision",
        description="auto is bf16-mixed on a graphics card and 32-true on the CPU. 16-mixed needs cuda.",
    )


class RunConfig(Section):
    """Run"""

    name: str = Field(
        "My adapter",
        min_length=1,
        max_length=80,
        title="Name",
        description="What the run is called in the list; up to 80 characters.",
    )
    model: ModelConfig = ModelConfig()
    dataset: DatasetConfig = DatasetConfig()
    adapter: AdapterConfig = AdapterConfig()
    training: TrainingConfig = TrainingConfig()
    hardware: HardwareConfig = HardwareConfig()


def fields() -> dict[str, FieldInfo]:
    """Every setting by its dotted name (`training.learning_rate`), in the order of the form."""
    found: dict[str, FieldInfo] = {}
    for name, info in RunConfig.model_fields.items():
        if isinstance(info.annotation, type) and issubclass(info.annotation, Section):
            found.update({f"{name}.{inner}": field for inner, field in info.annotation.model_fields.items()})
        else:
            found[name] = info
    return found


def choices(field: FieldInfo) -> tuple[str, ...]:
    """The allowed values of a field that offers a choice, else none."""
    return get_args(field.annotation) if get_origin(field.annotation) is Literal else ()


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number from 1 to 1024"."""
    if options := choices(field):
        return "one of " + ", ".join(options)
    if field.annotation is str:
        longest = next((rule.max_length for rule in field.metadata if isinstance(rule, MaxLen)), None)
        return f"1 to {longest} characters" if longest else "some text"
    words = "a whole number" if field.annotation is int else "a number"
    for rule in field.metadata:
        match rule:
            case Gt(gt=bound):
                words += f" above {bound:,.10g}, up"
            case Ge(ge=bound):
                words += f" from {bound:,.10g}"
            case Le(le=bound):
                words += f" to {bound:,.10g}"
    return words


def validate(data: dict[str, Any]) -> RunConfig:
    """The RunConfig that `data` asks for, its folders looked at too. Raises ConfigError with every problem at once."""
    try:
        json.dumps(data, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ConfigError({"config": "Some text holds half a character (a lone surrogate). Type it again."}) from error
    problems: dict[str, str] = {}
    try:
        config = RunConfig.model_validate(data)
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
    if problems:
        raise ConfigError(problems)
    return config


def _problems(error: ValidationError) -> dict[str, str]:
    known = fields()
    problems: dict[str, str] = {}
    for problem in error.errors():
        name = ".".join(str(part) for part in problem["loc"])
        if problem["type"] == "extra_forbidden":
            problems[name] = f"There is no such field. Fields are {', '.join(known)}."
        elif problem["type"] == "value_error":
            problems[name] = str(problem["ctx"]["error"])
        elif name in known:
            given = problem["input"]
            problems[name] = (
                f"{'Nothing' if given == '' else repr(given)} was given; this takes {allowed(known[name])}."
            )
        else:
            problems[name or "config"] = "This takes a group of fields (a JSON object)."
    return problems
