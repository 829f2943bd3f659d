"""How much memory a training run takes at its peak, told beforehand from the model's shape and the longest sample.

Covers what grows with model, adapter, sample and batch, as PyTorch allocates it. Does not cover what the process itself
takes (some 500 MB of libraries, a CUDA context), nor gaps between blocks of memory. Light: no torch, so that the page
can tell it.

The coefficients are counts of tensors that autograd keeps for the way back, seen with
`torch.autograd.graph.saved_tensors_hooks` on diffusers' `AceStepTransformerBlock` with PEFT's layers; a test compares
them with what a real step allocates.
"""

import math
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import psutil
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from trainer_core.adapter_parts import parts_for
from trainer_core.config import AdapterConfig, Checkpointing, RunConfig
from trainer_core.naming import is_meant
from trainer_core.sources import SourceError

FP32, HALF = 4, 2
"""Bytes of a number."""
BASE_BYTES = {"auto": FP32, "fp32": FP32, "bf16": HALF, "int8": 1, "nf4": 0.5}
"""Of a weight in a block; outside of the blocks a quantised base is in bf16. Scales are left out, a few hundredths."""
OPTIMIZER_BYTES = {"adamw": 8, "adafactor": 0, "prodigy": 16, "adamw8bit": 2}
"""Of state for each trained parameter: two moments; sums of rows and columns alone; two moments, the first weights and
a sum; two moments in 8 bits."""
TIME_CHANNELS = 256
"""Of a time's sinusoids."""
# Layers of a block by where their input comes from.
FED_BY_CONDITION = ("cross_attn.to_k", "cross_attn.to_v")
FED_BY_KEPT = (*FED_BY_CONDITION, "self_attn.to_out.0", "cross_attn.to_out.0")
SAME_INPUT = {
    "self_attn.to_k": "self_attn.to_q",
    "self_attn.to_v": "self_attn.to_q",
    "mlp.up_proj": "mlp.gate_proj",
}
DATASET_SHARE = 0.25
"""Of the free main memory: what a data set may take of it. A larger one is mapped from its files."""
GAPS = 1.5
"""What an allocator that keeps freed memory leaves unused, beside what is in use: 1.3 was seen with glibc's."""
MARGIN = 0.1
"""Share of the free memory that `choose` leaves alone: for the gaps, and what else the machine does."""


class Shape(BaseModel):
    """What a model's config.json says of its size. Defaults are those of diffusers' `AceStepTransformer1DModel`."""

    model_config = ConfigDict(extra="ignore", frozen=True)

    hidden_size: int = Field(2048, ge=1, le=1 << 20)
    intermediate_size: int = Field(6144, ge=1, le=1 << 20)
    num_hidden_layers: int = Field(24, ge=1, le=512)
    num_attention_heads: int = Field(16, ge=1, le=1 << 16)
    num_key_value_heads: int = Field(8, ge=1, le=1 << 16)
    head_dim: int = Field(128, ge=1, le=1 << 16)
    in_channels: int = Field(192, ge=1, le=1 << 16)
    audio_acoustic_hidden_dim: int = Field(64, ge=1, le=1 << 16)
    patch_size: int = Field(2, ge=1, le=1 << 16)
    encoder_hidden_size: int | None = Field(None, ge=1, le=1 << 20)
    sliding_window: int = Field(128, ge=1, le=1 << 20)
    layer_types: tuple[str, ...] | None = None

    @property
    def queries(self) -> int:
        """How wide the queries of a token are, all heads together."""
        return self.num_attention_heads * self.head_dim

    @property
    def keys(self) -> int:
        """How wide its keys are, and its values."""
        return self.num_key_value_heads * self.head_dim

    def has_window(self, number: int) -> bool:
        """Whether block `number` sees no further than a window; where nothing is said, every other does."""
        kinds = self.layer_types or ()
        return kinds[number] == "sliding_attention" if number < len(kinds) else number % 2 == 0

    @property
    def block(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers of a block, by diffusers' names."""
        h, i, q, k = self.hidden_size, self.intermediate_size, self.queries, self.keys
        attention = {"to_q": (q, h), "to_k": (k, h), "to_v": (k, h), "to_out.0": (h, q)}
        return {
            **{f"{kind}.{name}": sides for kind in ("self_attn", "cross_attn") for name, sides in attention.items()},
            **{"mlp.gate_proj": (i, h), "mlp.up_proj": (i, h), "mlp.down_proj": (h, i)},
        }

    @property
    def outside(self) -> dict[str, tuple[int, int]]:
        """(out, in) of the linear layers outside of the blocks."""
        h = self.hidden_size
        embed = {"linear_1": (h, TIME_CHANNELS), "linear_2": (h, h), "time_proj": (6 * h, h)}
        return {
            **{f"{kind}.{name}": sides for kind in ("time_embed", "time_embed_r") for name, sides in embed.items()},
            "condition_embedder": (h, self.encoder_hidden_size or h),
        }

    @property
    def parameters(self) -> int:
        """Of the whole transformer, but for the few of norms and biases."""
        patches = (self.in_channels + self.audio_acoustic_hidden_dim) * self.hidden_size * self.patch_size
        return _products(self.outside) + patches + self.num_hidden_layers * _products(self.block)


def read_shape(config: Mapping[str, Any]) -> Shape:
    """The shape that a model's config describes. Raises SourceError for numbers no model has."""
    try:
        return Shape.model_validate(config)
    except ValidationError as error:
        places = ", ".join(str(problem["loc"][0]) for problem in error.errors())
        raise SourceError(f"The model's config.json has no sound {places}. Download the model again.") from error


@dataclass(frozen=True)
class Samples:
    """What a data set takes: its longest sample in frames and tokens of condition, and the bytes held in memory."""

    frames: int
    condition_tokens: int
    bytes: int


@dataclass(frozen=True)
class Estimate:
    """The bytes of a run at its peak, by what they are for."""

    weights: int
    """Of the frozen base model."""
    adapter: int
    """Its weights."""
    optimizer: int
    """The adapter's gradients and the optimizer's state."""
    activations: int
    """What is kept of the way forward for the way back, with that of the block that is computed again."""
    working: int
    """What one block takes while gradients go back through it."""
    dataset: int
    """In the machine's own memory, whatever the device."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self.parts.values())

    @property
    def parts(self) -> dict[str, int]:
        """Each by its name."""
        return {field.name: getattr(self, field.name) for field in fields(self)}

    @property
    def to_come(self) -> int:
        """What is not there yet when model, adapter and data set are loaded."""
        return self.optimizer + self.activations + self.working


def recomputed(choice: Checkpointing, layers: int) -> range:
    """The blocks that are computed again on the way back.

    Of every k blocks the first: the last block of all, which the way back begins with, gains nothing by it.
    """
    match choice:
        case "off" | "auto":
            return range(0)
        case "full":
            return range(layers)
    return range(0, layers, choice)


@dataclass(frozen=True)
class Plan:
    """What a run computes again, and the memory it takes so."""

    checkpointing: Checkpointing
    layers: int
    estimate: Estimate
    free: int
    """The bytes there were for what is still to come."""
    has_large_base: bool
    """Whether the base weights are in fp32."""

    @property
    def recomputed(self) -> range:
        """The numbers of the blocks."""
        return recomputed(self.checkpointing, self.layers)

    @property
    def description(self) -> str:
        """`off`, `full`, or how many blocks of how many."""
        count = len(self.recomputed)
        return {0: "off", self.layers: "full"}.get(count, f"{count} of {self.layers} blocks")

    @property
    def fits(self) -> bool:
        """Whether what is still to come leaves MARGIN of the free memory."""
        return self.estimate.to_come <= self.free * (1 - MARGIN)

    @property
    def is_tight(self) -> bool:
        """Whether memory is to be spared though it takes time: blocks are computed again, or GAPS would not fit."""
        return bool(self.recomputed) or self.estimate.to_come * (1 + GAPS) > self.free

    @property
    def shortage(self) -> str:
        """What is wrong where it doesn't fit, and what to do; else nothing."""
        if self.fits:
            return ""
        more = "" if self.checkpointing == "full" else "gradient checkpointing auto or full, "
        return (
            f"With gradient checkpointing {self.description} this run takes about {_in_words(self.estimate.to_come)} "
            f"more, and {_in_words(self.free)} are free: it may run out of memory. Try {more}shorter samples, a "
            f"smaller batch{', a lower rank, or base weights in bf16' if self.has_large_base else ', or a lower rank'}."
        )


def plan(shape: Shape, config: RunConfig, samples: Samples, precision: str, asked: Checkpointing, free: int) -> Plan:
    """What `asked` means with `free` bytes left for what is still to come.

    `auto` is the fewest blocks computed again that fit, and `full` where nothing does.
    """
    layers = shape.num_hidden_layers
    choices: list[Checkpointing] = ["off", *range(layers, 1, -1), "full"] if asked == "auto" else [asked]
    has_large_base = BASE_BYTES[config.model.base_dtype] == FP32
    plans = [
        Plan(choice, layers, estimate(shape, config, samples, precision, choice), free, has_large_base)
        for choice in choices
    ]
    return next((plan for plan in plans if plan.fits), plans[-1])


def _in_words(size: int) -> str:
    return f"{size / 1e9:.1f} GB" if size >= 1e9 else f"{size / 1e6:.1f} MB"


def holds(dataset_bytes: int) -> bool:
    """Whether a data set of this size is held in memory, by DATASET_SHARE; if not it stays in its files."""
    return dataset_bytes <= free_bytes() * DATASET_SHARE


def free_bytes() -> int:
    """What this machine's main memory can still take, or what the control group that Descant runs in lets it."""
    return min(psutil.virtual_memory().available, free_in_group(Path("/sys/fs/cgroup")))


def free_in_group(group: Path) -> int:
    """The rest of a control group's limit (cgroup v2, as containers have it); without a limit without end."""
    try:
        limit, used = (int((group / f"memory.{name}").read_text()) for name in ("max", "current"))
        stat = dict(line.split() for line in (group / "memory.stat").read_text().splitlines())
        return limit - used + int(stat["inactive_file"])  # which the system gives back when it is needed
    except (OSError, ValueError, KeyError):
        return sys.maxsize


def estimate(
    shape: Shape, config: RunConfig, samples: Samples, precision: str, checkpointing: Checkpointing
) -> Estimate:
    """The memory of a run with `config` at its peak, computed in `precision`.

    A batch is taken to be of the longest sample.
    """
    item = FP32 if precision == "32-true" else HALF
    in_blocks = shape.num_hidden_layers * _products(shape.block)
    outside_item = FP32 if BASE_BYTES[config.model.base_dtype] == FP32 else HALF
    batch = config.training.batch_size
    tokens = batch * -(-samples.frames // shape.patch_size)
    condition = batch * samples.condition_tokens

    settings = config.adapter.model_dump()
    adapted = _adapted(shape, config.adapter.targets)
    trained = sum(math.prod(part) for sides in adapted.values() for part in parts_for(sides, settings).values())

    # Autocast copies each weight, and the copy is kept for the way back.
    copies = _products(shape.block) * item if outside_item > item else 0
    kept = [
        copies
        + _block_bytes(
            shape, shape.has_window(number) and tokens > batch * (shape.sliding_window + 1), tokens, condition, item
        )
        + _adapter_bytes(
            {name: sides for name, sides in shape.block.items() if f"layers.{number}.{name}" in adapted},
            config.adapter,
            tokens,
            condition,
            item,
        )
        for number in range(shape.num_hidden_layers)
    ]
    return Estimate(
        weights=int(in_blocks * BASE_BYTES[config.model.base_dtype]) + (shape.parameters - in_blocks) * outside_item,
        adapter=trained * FP32,
        optimizer=trained * (FP32 + OPTIMIZER_BYTES[config.training.optimizer]),
        activations=_peak(kept, recomputed(checkpointing, shape.num_hidden_layers), tokens * shape.hidden_size * item),
        working=tokens * (3 * shape.hidden_size + 3 * shape.intermediate_size) * item,
        dataset=samples.bytes,
    )


@lru_cache(maxsize=8)
def _adapted(shape: Shape, targets: tuple[str, ...]) -> dict[str, tuple[int, int]]:
    """(out, in) of the layers that are adapted, by name."""
    numbers = range(shape.num_hidden_layers)
    inside = {f"layers.{number}.{name}": sides for number in numbers for name, sides in shape.block.items()}
    return {name: sides for name, sides in (inside | shape.outside).items() if is_meant(targets, name)}


def _products(sides: Mapping[str, tuple[int, int]]) -> int:
    return sum(out * inputs for out, inputs in sides.values())


def _peak(kept: Sequence[int], again: range, input_bytes: int) -> int:
    """The most that is held at once on the way back through blocks that keep `kept` bytes each.

    A block that is computed again holds nothing but its input until its turn comes; then the later ones are done.
    """
    most = held = 0
    for number, own in enumerate(kept):
        most = max(most, held + own)
        held += input_bytes if number in again else own
    return most


def _block_bytes(shape: Shape, is_banded: bool, tokens: int, condition: int, item: int) -> int:
    """What a block keeps besides what its adapter does; banded is its attention where it has a window that counts.

    Each of its norms keeps its input. An attention keeps queries, keys and values as it takes them, in a band each key
    and value for its own block of tokens and both neighbours, and what it gives. The MLP keeps its gate and what the
    gate is multiplied with. (`trainer_core.attention`, `lean_blocks`; diffusers' AceStepTransformerBlock.)
    """
    queries = shape.queries * 3 * item
    keys = shape.keys * (7 if is_banded else 3) * item
    return (
        tokens * (3 * shape.hidden_size * item + 2 * queries + keys + 2 * shape.intermediate_size * item)
        + condition * shape.keys * 3 * item
    )


def _adapter_bytes(
    adapted: Mapping[str, tuple[int, int]], adapter: AdapterConfig, tokens: int, condition: int, item: int
) -> int:
    """What the adapter's layers in one block keep beside it, as PEFT 0.19 computes them.

    Each keeps its input: in fp32 as it came, so that layers with the same input share it, else as a copy of its own;
    with dropout the input that is left and, on the CPU, the mask. A LoRA keeps what A gives, a DoRA also what the base
    and what B gives; with dropout it computes the base once more, under autocast with another copy of the weight. A
    LoKr keeps its weight change.
    """
    has_dropout = adapter.dropout > 0 and adapter.type != "lokr"
    inputs: dict[str, int] = {}
    kept = 0
    for name, (out, width) in adapted.items():
        rows = condition if name in FED_BY_CONDITION else tokens
        if has_dropout or item != FP32:
            kept += rows * width * (item + (FP32 if has_dropout else 0))
        elif name not in FED_BY_KEPT:
            inputs[SAME_INPUT.get(name, name)] = rows * width * item
        if adapter.type == "lokr":
            kept += out * width * item
        else:
            kept += rows * adapter.rank * item
        if adapter.type == "dora":
            kept += 2 * rows * out * item
            if has_dropout and item != FP32:
                kept += out * width * item
    return kept + sum(inputs.values())
