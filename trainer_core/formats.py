"""The files that hold an adapter elsewhere: what each program calls its tensors, and what it can hold.

Light: the pages offer the formats by it. `exports` writes them, `adapter_files` reads them.
"""

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from trainer_core.naming import diffusers_module, from_flat, original_module

Kind = Literal["lora", "dora", "lokr"]
FormatName = Literal["peft", "diffusers", "comfyui"]
Precision = Literal["bf16", "fp16", "fp32"]
Layout = Literal["peft", "diffusers", "comfyui", "lycoris", "ai-toolkit"]

PRECISIONS: dict[Precision, str] = {
    "bf16": "bf16, half size",
    "fp16": "fp16, half size",
    "fp32": "fp32, exact",
}


@dataclass(frozen=True)
class Format:
    """A kind of download."""

    title: str
    suffix: str


FORMATS: dict[FormatName, Format] = {
    "peft": Format("ACE-Step / PEFT", ".zip"),
    "diffusers": Format("diffusers", ".safetensors"),
    "comfyui": Format("ComfyUI", ".safetensors"),
}


def describe(name: FormatName, kind: Kind) -> str:
    """What the download is for an adapter of this kind, and what loads it."""
    if name == "peft":
        return "A zip of the folder that ACE-Step's page and PEFT load."
    if name == "diffusers":
        return "One file for AceStepPipeline of diffusers 0.40 or later."
    if kind == "lokr":
        return "One file for ComfyUI 0.16 or later; ACE-Step loads it too."
    return "One file for ComfyUI 0.14.1 or later."


def refusal(name: FormatName, kind: Kind) -> str | None:
    """Why the format can't hold an adapter of this kind; None where it can."""
    if name == "diffusers" and kind == "dora":
        return (
            "diffusers can't load a DoRA: it drops the magnitudes, and no plain LoRA equals what is left out. Choose "
            "another format."
        )
    if name == "diffusers" and kind == "lokr":
        return "AceStepPipeline of diffusers loads LoRA only, no LoKr. Choose another format."
    return None


MAGNITUDE = "lora_magnitude_vector"
# Prefix of each layout's tensor names. PEFT's comes last: ComfyUI's is the same, its parts differ.
PREFIXES: dict[Layout, str] = {
    "lycoris": "lycoris_",
    "diffusers": "transformer.",
    "ai-toolkit": "diffusion_model.decoder.",
    "comfyui": "base_model.model.",
    "peft": "base_model.model.",
}
# What ComfyUI and LyCORIS call the parts of a LoRA or DoRA; a LoKr's are called the same everywhere.
COMFYUI_PARTS = {
    "lora_A.weight": "lora_down.weight",
    "lora_B.weight": "lora_up.weight",
    MAGNITUDE: "dora_scale",
}
LOKR_PARTS = ("lokr_w1", "lokr_w1_a", "lokr_w1_b", "lokr_w2", "lokr_w2_a", "lokr_w2_b")
PARTS = {ours: ours for ours in (*COMFYUI_PARTS, *LOKR_PARTS, "alpha")} | {
    theirs: ours for ours, theirs in COMFYUI_PARTS.items()
}
"""Every part by each of its names, as PEFT calls it. `alpha` is no part of PEFT's."""
_NAME = re.compile(rf"(?P<module>[a-z0-9_.]{{1,200}}?)\.(?P<part>{'|'.join(map(re.escape, PARTS))})")


# What a DoRA's magnitudes are called where their meaning is known. Under LyCORIS' names it is not: it has its own rule,
# and ComfyUI plays the same file by another.
MAGNITUDES: dict[Layout, str] = {
    "peft": MAGNITUDE,
    "diffusers": MAGNITUDE,
    "comfyui": COMFYUI_PARTS[MAGNITUDE],
    "ai-toolkit": COMFYUI_PARTS[MAGNITUDE],
}


def tensor_name(layout: Layout, module: str, part: str) -> str:
    """What `layout` calls a part, by PEFT's name, of ACE-Step's module `module`."""
    if layout == "lycoris":
        module = module.replace(".", "_")
    elif layout == "diffusers":
        module = diffusers_module(module)
    if layout in ("comfyui", "lycoris"):
        part = COMFYUI_PARTS.get(part, part)
    return f"{PREFIXES[layout]}{module}.{part}"


def parse_name(layout: Layout, name: str) -> tuple[str, str] | None:
    """The inverse of `tensor_name`: ACE-Step's module and PEFT's part, or None for a tensor of anything else."""
    found = _NAME.fullmatch(name.removeprefix(PREFIXES[layout]))
    if not found or not name.startswith(PREFIXES[layout]):
        return None
    part = PARTS[found["part"]]
    if part == MAGNITUDE and found["part"] != MAGNITUDES.get(layout):
        return None
    module: str | None = found["module"]
    if layout == "lycoris":
        module = from_flat(found["module"])
    elif layout == "diffusers":
        module = original_module(found["module"])
    return (module, part) if module else None


def recognise(names: Iterable[str]) -> Layout | None:
    """The layout of a file with these tensors; None where it is none of them."""
    known = list(names)
    for layout, prefix in PREFIXES.items():
        mine = [name for name in known if name.startswith(prefix)]
        if mine and (layout != "comfyui" or any(name.endswith((".alpha", *COMFYUI_PARTS.values())) for name in mine)):
            return layout
    return None


def scale(settings: Mapping[str, Any]) -> float:
    """How many times as strong as its tensors PEFT plays an adapter of these settings of AdapterConfig."""
    rank: int = settings["rank"]
    alpha: float = settings["alpha"]
    return alpha / (rank**0.5 if settings.get("rank_stabilized") else rank)
