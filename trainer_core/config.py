"""What a run is told to do. Each setting is declared once, here: default, label, help, unit and bounds.

The form, the JSON API and their error messages are made from these fields; nothing repeats them.
"""

import re
from collections.abc import Mapping
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from annotated_types import Ge, Gt, Le, MaxLen
from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    JsonValue,
    ValidationInfo,
    field_validator,
)
from pydantic.fields import FieldInfo
from pydantic_core import PydanticCustomError

from trainer_core import sources
from trainer_core.formats import Kind


class Section(BaseModel):
    """A group of fields; a field it does not know is an error."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False, str_strip_whitespace=True)

    @field_validator("*", mode="before")
    @classmethod
    def _tidy(cls, value: object, info: ValidationInfo) -> object:
        """Strip text also where a choice is meant, and take no true for a 1."""
        if isinstance(value, bool) and info.field_name and is_number(cls.model_fields[info.field_name]):
            raise PydanticCustomError("not_a_number", "not a number")
        return value.strip() if isinstance(value, str) else value


def _words(given: object) -> object:
    """Names as a form sends them, apart by commas or spaces, as a list."""
    return [word for word in re.split(r"[,\s]+", given) if word] if isinstance(given, str) else given


def _factor(given: int) -> int:
    if given in (0, 1):
        raise ValueError(f"{given} is no factor to split by; give 2 or more, or -1 for the most even split.")
    return given


Name = Annotated[str, Field(min_length=1, max_length=200)]
Checkpointing = Annotated[int, Ge(2), Le(512)] | Literal["off", "auto", "full"]
"""Which blocks are computed again on the way back: none, as few as fit, all, or every so many."""
MAX_RANK, MAX_ALPHA = 1024, 4096
BaseDtype = Literal["auto", "fp32", "bf16", "int8", "nf4"]
QUANTIZED = ("int8", "nf4")
"""What of it is made by the package bitsandbytes, on cuda."""

# Fields that mean something only beside these values of other fields; the form hides them otherwise.
FRESH: dict[str, JsonValue] = {"start_from": [""]}
LORA_KINDS: dict[str, JsonValue] = FRESH | {"adapter.type": ["lora", "dora"]}
LOKR: dict[str, JsonValue] = FRESH | {"adapter.type": ["lokr"]}


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
    base_dtype: BaseDtype = Field(
        "auto",
        title="Base weights",
        description="How the frozen base model is held. auto is fp32. bf16 takes half the memory; bf16-mixed computes "
        "with weights rounded so anyway. int8 (8 bits) takes under a third and nf4 (4 bits, as in QLoRA) under a "
        "fifth; both round more, go with a lora, and need cuda and the package bitsandbytes.",
    )


class DatasetConfig(Section):
    """Data set"""

    source: Annotated[str, AfterValidator(sources.absolute_folder)] = Field(
        "demo",
        title="Data set",
        description="demo (eight short synthetic samples), or a folder of preprocessed .pt tensors made with the "
        "same model variant.",
    )
    validation_fraction: float = Field(
        0.0,
        ge=0,
        le=0.5,
        title="Validation share",
        description="Share of the samples kept out of training. After each epoch their loss is measured, always with "
        "the same noise and timesteps, and the checkpoint with the lowest is marked. 0 measures none.",
    )


class AdapterConfig(Section):
    """Adapter"""

    type: Kind = Field(
        "lora",
        title="Type",
        description="lora is the most widely supported. dora also learns each output's magnitude: slower, often "
        "closer. lokr is a Kronecker product: small files; it wants a learning rate some ten times as high.",
        json_schema_extra={"only": FRESH},
    )
    rank: int = Field(
        16,
        ge=1,
        le=MAX_RANK,
        title="Rank",
        description="Size of the adapter. Higher can learn more and weighs more.",
        json_schema_extra={"only": FRESH},
    )
    alpha: int = Field(
        32,
        ge=1,
        le=MAX_ALPHA,
        title="Alpha",
        description="Strength. The adapter is scaled by alpha / rank.",
        json_schema_extra={"only": FRESH},
    )
    rank_stabilized: bool = Field(
        False,
        title="Rank-stabilised scaling",
        description="Scale by alpha / √rank instead of alpha / rank, so that high ranks learn as fast as low ones.",
        json_schema_extra={"only": LORA_KINDS},
    )
    decompose_factor: Annotated[int, AfterValidator(_factor)] = Field(
        8,
        ge=-1,
        le=4096,
        title="Kronecker factor",
        description="Each weight change is a Kronecker product of a matrix of about this size and a larger one, which "
        "has the rank. Smaller gives larger files. -1 splits most evenly; then high ranks have no effect.",
        json_schema_extra={"only": LOKR},
    )
    decompose_both: bool = Field(
        False,
        title="Rank in both matrices",
        description="Give the smaller Kronecker matrix the rank too, where it is larger than that.",
        json_schema_extra={"only": LOKR},
    )
    dropout: float = Field(
        0.0,
        ge=0,
        le=0.9,
        title="Dropout",
        description="Share of adapter inputs zeroed while training; with lokr, of the rows of its weight change.",
    )
    targets: Annotated[tuple[Name, ...], BeforeValidator(_words), Field(min_length=1, max_length=1000)] = Field(
        ("self_attention", "cross_attention"),
        title="Targets",
        description="What is adapted: self_attention, cross_attention, mlp, and names of modules as ACE-Step calls "
        "them, such as layers.0.mlp.up_proj or q_proj for all of that name.",
        json_schema_extra={"only": FRESH},
    )


class TrainingConfig(Section):
    """Training"""

    epochs: int = Field(40, ge=1, le=1_000_000, title="Epochs", description="How often every sample is seen, in all.")
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
    optimizer: Literal["adamw", "adafactor", "prodigy", "adamw8bit"] = Field(
        "adamw",
        title="Optimizer",
        description="adamw suits most. adafactor keeps less state. prodigy (package prodigyopt) finds its own rate in "
        "some hundred steps: set the learning rate to 1, the schedule to constant and warm-up to 0. adamw8bit (package "
        "bitsandbytes, cuda only) keeps its state in 8 bits.",
    )
    learning_rate: float = Field(
        3e-4, gt=0, le=1, title="Learning rate", description="The peak, reached after warm-up."
    )
    scheduler: Literal["cosine", "cosine_with_restarts", "linear", "constant"] = Field(
        "cosine",
        title="Schedule",
        description="How the learning rate goes on after warm-up: down to 1 % of the peak at the last step, along a "
        "cosine, along several, along a line; or not at all.",
    )
    scheduler_cycles: int = Field(
        3,
        ge=1,
        le=1000,
        title="Cosines",
        description="How many, each starting at the peak.",
        json_schema_extra={"only": {"training.scheduler": ["cosine_with_restarts"]}},
    )
    warmup_steps: int = Field(
        20,
        ge=0,
        le=1_000_000,
        title="Warm-up",
        description="Steps over which the rate rises to its peak. In a run that is shorter, a tenth of its steps.",
        json_schema_extra={"unit": "steps"},
    )
    weight_decay: float = Field(
        0.01,
        ge=0,
        le=1,
        title="Weight decay",
        description="The optimizer's pull of the adapter towards zero. A DoRA's magnitudes are spared.",
    )
    max_grad_norm: float = Field(
        1.0, gt=0, le=1e6, title="Gradient clipping", description="Longer gradients are cut to this norm."
    )
    max_consecutive_skips: int = Field(
        25,
        ge=1,
        le=1_000_000,
        title="Skips before giving up",
        description="Steps with non-finite gradients are skipped; this many in a row end the run.",
        json_schema_extra={"unit": "steps"},
    )
    gradient_checkpointing: Checkpointing = Field(
        "auto",
        title="Gradient checkpointing",
        description="Compute blocks again on the way back instead of keeping what they computed: less memory, the same "
        "gradients. full is all blocks and the least memory, for a third more time, on a CPU up to two thirds; a "
        "number k every k-th; auto as few as the memory allows.",
    )
    timestep_sampling: Literal["auto", "logit_normal", "turbo_steps"] = Field(
        "auto",
        title="Timesteps",
        description="logit_normal draws as base and sft models were trained, with the model's own mu and sigma; "
        "turbo_steps draws one of the eight times a turbo model knows. auto follows the variant.",
    )
    condition_dropout: Annotated[float, Ge(0), Le(1)] | Literal["auto"] = Field(
        "auto",
        title="Condition dropout",
        description="Share of samples trained without their text, so that guidance works. auto is 0.15 for base and "
        "sft, 0 for turbo.",
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

    @field_validator("gradient_checkpointing", mode="before")
    @classmethod
    def _as_a_choice(cls, given: object) -> object:
        """What was a switch once, in the config.json of older runs."""
        return {"True": "full", "on": "full", "False": "off"}.get(str(given), given)


class HardwareConfig(Section):
    """Hardware"""

    device: Literal["auto", "cuda", "mps", "xpu", "cpu"] = Field(
        "auto", title="Device", description="auto takes the graphics card where there is one."
    )
    precision: Literal["auto", "32-true", "bf16-mixed", "16-mixed"] = Field(
        "auto",
        title="Precision",
        description="auto is bf16-mixed on a graphics card and 32-true on the CPU. Few processors are fast at "
        "bf16-mixed. 16-mixed needs cuda.",
    )
    compile: bool = Field(
        False,
        title="Compile",
        description="Compile the model's blocks by torch.compile before the first step, which takes a minute or more: "
        "the same training. On two CPU cores steps of a 60-second clip took a tenth less, those of 240 seconds as "
        "long, with a quarter less memory. Where it can't be done the run goes on without.",
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
    start_from: Annotated[str, AfterValidator(sources.absolute_path)] = Field(
        "",
        title="Start from",
        description="Empty, or an adapter whose weights to begin with: a folder or file of Descant, ACE-Step, PEFT, "
        "diffusers, ComfyUI, LyCORIS or ai-toolkit; or upload a .safetensors file, a zip of PEFT's folder or its two "
        "files. Type, rank, alpha and targets are read from it; the steps count from 1.",
        json_schema_extra={"section": "Origin", "kind": "adapter"},
    )
    resume_from: Annotated[str, AfterValidator(sources.absolute_path)] = Field(
        "",
        title="Resume from",
        description="Empty, or the folder of a checkpoint of Descant to continue as if it had never stopped, with the "
        "same settings and maybe more epochs.",
        json_schema_extra={"section": "Origin"},
    )
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
    """The allowed values of a field that offers a choice, or its words beside a number, else none."""
    if field.annotation is bool:
        return ("off", "on")
    parts = (field.annotation, *get_args(field.annotation))
    return get_args(next((part for part in parts if get_origin(part) is Literal), None))


def is_number(field: FieldInfo) -> bool:
    """Whether the field takes a number, be it beside words such as auto."""
    return field.annotation in (int, float) or get_origin(field.annotation) is Union


def allowed(field: FieldInfo) -> str:
    """What a field takes, in words: "a whole number from 1 to 1024"."""
    options = choices(field)
    if get_origin(field.annotation) is Union:  # words, or a number of one's own
        number = allowed(FieldInfo.from_annotation(get_args(field.annotation)[0]))
        return f"{options[0]} or {number}" if len(options) == 1 else f"one of {', '.join(options)}, or {number}"
    if options:
        return "one of " + ", ".join(options)
    if get_origin(field.annotation) is tuple:
        return "names, apart by commas"
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


def flatten(config: Mapping[str, Any]) -> dict[str, Any]:
    """A config's nested dict under dotted names."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        if isinstance(value, Mapping):
            flat.update({f"{name}.{inner}": item for inner, item in value.items()})
        else:
            flat[name] = value
    return flat


def as_text(value: Any) -> str:
    """A setting as it stands in the form."""
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, list | tuple):
        return ", ".join(map(str, value))
    return str(value).removesuffix(".0") if isinstance(value, float) else str(value)
