"""How much memory a training run takes at its peak, told beforehand from the model's shape and the longest sample.

Covers what grows with model, adapter, sample and batch, as PyTorch allocates it. Does not cover what the process itself
takes (some 500 MB of libraries, a CUDA context), nor gaps between blocks of memory. Light: no torch, so that the page
can tell it.

The coefficients are counts of tensors that autograd keeps for the way back, seen with
`torch.autograd.graph.saved_tensors_hooks` on diffusers' `AceStepTransformerBlock` with PEFT's layers; a test compares
them with what a real step allocates.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import lru_cache

from trainer_core.adapter_parts import parts_for
from trainer_core.config import AdapterConfig, Checkpointing, RunConfig
from trainer_core.model_shape import Shape, products
from trainer_core.naming import is_meant

FP32, HALF = 4, 2
"""Bytes of a number."""
BASE_BYTES = {"auto": FP32, "fp32": FP32, "bf16": HALF, "int8": 1, "nf4": 0.5}
"""Of a weight in a block; outside of the blocks a quantised base is in bf16. Scales are left out, a few hundredths."""
OPTIMIZER_BYTES = {"adamw": 8, "adafactor": 0, "prodigy": 16, "adamw8bit": 2}
"""Of state for each trained parameter: two moments; sums of rows and columns alone; two moments, the first weights and
a sum; two moments in 8 bits."""
# Layers of a block by where their input comes from.
FED_BY_CONDITION = ("cross_attn.to_k", "cross_attn.to_v")
FED_BY_KEPT = (*FED_BY_CONDITION, "self_attn.to_out.0", "cross_attn.to_out.0")
SAME_INPUT = {
    "self_attn.to_k": "self_attn.to_q",
    "self_attn.to_v": "self_attn.to_q",
    "mlp.up_proj": "mlp.gate_proj",
}
GAPS = 1.5
"""What an allocator that keeps freed memory may leave unused, beside what is in use: 1.3 was seen with glibc's where
nothing is computed again."""
MARGIN = 0.1
"""Share of the free memory that a run which fits leaves alone: for the gaps, and what else the machine does."""


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
        """Whether memory is to be spared though it takes time: as `full` asks for, or since GAPS would not fit."""
        return self.checkpointing == "full" or self.estimate.to_come * (1 + GAPS) > self.free

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


def estimate(
    shape: Shape, config: RunConfig, samples: Samples, precision: str, checkpointing: Checkpointing
) -> Estimate:
    """The memory of a run with `config` at its peak, computed in `precision`.

    A batch is taken to be of the longest sample.
    """
    item = FP32 if precision == "32-true" else HALF
    in_blocks = shape.num_hidden_layers * products(shape.block)
    outside_item = FP32 if BASE_BYTES[config.model.base_dtype] == FP32 else HALF
    batch = config.training.batch_size
    tokens = batch * -(-samples.frames // shape.patch_size)
    condition = batch * samples.condition_tokens

    settings = config.adapter.model_dump()
    adapted = _adapted(shape, config.adapter.targets)
    trained = sum(math.prod(part) for sides in adapted.values() for part in parts_for(sides, settings).values())

    kept = [
        _block_bytes(
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
