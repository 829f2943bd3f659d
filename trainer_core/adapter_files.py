"""Adapters as files: found, recognised and described by their headers, without torch.

Reads what Descant and ACE-Step's trainer leave (PEFT's folder), and the files of diffusers, ComfyUI, LyCORIS and
ai-toolkit. How strong a file plays is put in the words of PEFT, which trains it: rank and alpha; where these can't say
it, a factor by which the tensors are multiplied when they are loaded.
"""

import math
from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_core.adapter_parts import WHOLE, Parts, find_kind, find_rank
from trainer_core.adapter_settings import diffusers_settings, lokr_settings, peft_settings
from trainer_core.config import MAX_ALPHA
from trainer_core.formats import MAGNITUDE, Kind, Layout, parse_name, recognise, scale, tensor_name
from trainer_core.headers import read_header, read_scalar
from trainer_core.naming import targets_of
from trainer_core.sources import SourceError, plain, shorten

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DORA_SCALES = "dora_scale.safetensors"
"""A DoRA's magnitudes as ComfyUI takes them, by module; computed while the base model is there."""

MIN_STRENGTH = 1e-12


@dataclass(frozen=True)
class AdapterFile:
    """An adapter on disk."""

    weights: Path
    layout: Layout
    settings: dict[str, Any]
    """Those of AdapterConfig that a run needs to start from it: all but the dropout."""
    names: dict[str, tuple[str, str]]
    """ACE-Step's module and PEFT's part for each of the file's tensors but alphas."""
    modules: dict[str, Parts]
    """What it adapts, by ACE-Step's names."""
    gains: dict[str, float]
    """By module: what its tensors are multiplied by to play with `settings` as the file does; 1 where not named."""

    @property
    def kind(self) -> Kind:
        """LoRA, DoRA or LoKr."""
        kind: Kind = self.settings["type"]
        return kind

    @property
    def place(self) -> Path:
        """What a person calls it: PEFT's folder, or the file."""
        return self.weights.parent if self.layout == "peft" else self.weights

    def shapes(self) -> dict[str, list[int]]:
        """Of its tensors as PEFT has them, by module and part."""
        return {
            f"{module}.{part}": shape[:1] if part == MAGNITUDE else shape
            for module, parts in self.modules.items()
            for part, shape in parts.items()
        }

    def __str__(self) -> str:
        kind = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr"}[self.kind]
        format = {"peft": "PEFT", "comfyui": "ComfyUI", "lycoris": "LyCORIS"}.get(self.layout, self.layout)
        alpha = "its own strength" if self.gains else f"alpha {self.settings['alpha']}"
        return (
            f"{kind} of rank {self.settings['rank']}, {alpha}, on {len(self.modules)} modules "
            f"({shorten(targets_of(self.modules))}), in the format of {format}"
        )


def find(source: Path) -> Path:
    """The file with the weights of the adapter in `source`, a folder or that file itself.

    Raises SourceError naming what is missing.
    """
    try:
        if source.is_file():
            if source.suffix != ".safetensors":
                way = (
                    "Unpack it and give its folder, or upload it."
                    if source.suffix == ".zip"
                    else ("Pickled weights (.pt, .bin, .ckpt) are not read: they can run code.")
                )
                raise SourceError(f"{source} is not a .safetensors file. {way}")
            return source
        if not source.is_dir():
            raise SourceError(f"There is no file or folder {plain(str(source), 200)}.")
        for place in (source, source / "adapter"):  # ACE-Step's trainer leaves it in `adapter`
            if all((place / name).is_file() for name in ADAPTER_FILES):
                return place / ADAPTER_FILES[1]
        missing = [name for name in ADAPTER_FILES if not (source / name).is_file()]
        if len(missing) == 1:
            raise SourceError(f"{source} is not the whole folder of an adapter: it has no {missing[0]}.")
        found = sorted(source.glob("*.safetensors"))
    except OSError as error:
        raise SourceError(f"{plain(str(source), 200)} can't be looked at: {error.strerror}.") from error
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(
            f"{source} has {len(found)} .safetensors files ({shorten(path.name for path in found)}). Give one of them."
        )
    hint = " Give one of those in its folder checkpoints." if (source / "checkpoints").is_dir() else ""
    raise SourceError(
        f"{source} is not the folder of an adapter: it has no {' and '.join(ADAPTER_FILES)}, nor any .safetensors "
        f"file.{hint}"
    )


def read(source: Path) -> AdapterFile:
    """The adapter in `source`, a folder or a file. Raises SourceError for what is none, or none that Descant trains."""
    weights = find(source)
    header = read_header(weights)
    layout = recognise(header.tensors)
    if layout is None:
        raise SourceError(
            f"{weights} holds no adapter for ACE-Step 1.5 that Descant knows: 0 of its {len(header.tensors)} tensors "
            f"({plain(shorten(header.tensors), 200)}) are called as PEFT, diffusers, ComfyUI, LyCORIS or ai-toolkit do."
        )
    names: dict[str, tuple[str, str]] = {}
    modules: dict[str, dict[str, list[int]]] = defaultdict(dict)
    alphas: dict[str, float] = {}
    unknown = []
    for name, tensor in header.tensors.items():
        if not (parsed := parse_name(layout, name)):
            unknown.append(name)
            continue
        if not tensor.dtype.startswith(("F", "BF")) and parsed[1] != "alpha":
            raise SourceError(f"{weights} holds tensors that are no weights: {name} ({tensor.dtype}).")
        module, part = parsed
        if part == "alpha":
            alphas[module] = read_scalar(weights, header, name)
        elif part in modules[module]:
            raise SourceError(f"{weights} holds {module} {part} twice, by different names.")
        else:
            names[name] = parsed
            modules[module][part] = tensor.shape
    unknown += [
        tensor_name(layout, module, "alpha") for module in alphas if module not in modules or layout == "diffusers"
    ]
    if unknown:
        raise SourceError(
            f"{len(unknown)} of the {len(header.tensors)} tensors in {weights} belong to nothing that Descant trains: "
            f"{plain(shorten(unknown), 300)}."
        )
    try:
        kind, rank = find_kind(modules), find_rank(modules)
    except SourceError as error:
        raise SourceError(f"{weights} can't be used. {error}") from error
    settings: dict[str, Any] = {"type": kind, "rank": rank, "targets": tuple(sorted(modules))}
    if kind == "lokr":
        settings |= lokr_settings(header, modules, rank)
    else:
        settings["rank_stabilized"] = False
    if layout == "peft":
        settings |= peft_settings(weights.with_name(ADAPTER_FILES[0]), kind, rank)
    elif layout == "diffusers":
        settings |= diffusers_settings(weights, header, kind, rank)

    if "alpha" in settings:  # it was said in one place for all
        strengths = dict.fromkeys(modules, scale(settings))
    else:  # each module's tensor says it, and without one it plays at 1, as a LoKr of whole matrices always does
        strengths = {
            module: 1.0 if parts.keys() >= WHOLE else alphas.get(module, settings["rank"]) / settings["rank"]
            for module, parts in modules.items()
        }
        values = {alphas.get(module) for module in modules}
        settings["alpha"] = values.pop() if len(values) == 1 else None
    if settings["alpha"] not in range(1, MAX_ALPHA + 1):  # AdapterConfig can't say it: the gains have to
        settings["alpha"] = settings["rank"]
    settings["alpha"] = int(settings["alpha"])
    if min(map(abs, strengths.values())) < MIN_STRENGTH:
        raise SourceError(f"{weights} has alphas of 0 or next to it, with which it does nothing.")
    gains = {module: strength / scale(settings) for module, strength in strengths.items()}
    return AdapterFile(
        weights,
        layout,
        settings,
        names,
        dict(modules),
        {module: gain for module, gain in gains.items() if not math.isclose(gain, 1, rel_tol=1e-7)},
    )
