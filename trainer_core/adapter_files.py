"""Adapters as files: found, recognised and described by their headers, without torch.

Reads what Descant and ACE-Step's trainer leave (PEFT's folder), and the files of diffusers, ComfyUI, LyCORIS and
ai-toolkit. How strong a file plays is put in the words of PEFT, which trains it: rank and alpha; where these can't say
it, a factor by which the tensors are multiplied when they are loaded.
"""

import json
import math
import struct
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from trainer_core.adapter_parts import (
    WHOLE,
    Parts,
    factor_shape,
    find_kind,
    find_kronecker_factor,
    find_rank,
)
from trainer_core.config import MAX_ALPHA, MAX_RANK
from trainer_core.formats import MAGNITUDE, PREFIXES, Kind, Layout, parse_name, recognise, scale, tensor_name
from trainer_core.headers import Header, read_header
from trainer_core.naming import targets_of
from trainer_core.sources import SourceError, plain, read_json, shorten

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")
DORA_SCALES = "dora_scale.safetensors"
"""A DoRA's magnitudes as ComfyUI takes them, by module; computed while the base model is there."""

MAX_CONFIG_BYTES = 1 << 20
MIN_STRENGTH = 1e-12

# PEFT's options that change what the same weights mean.
ODD_OPTIONS = (
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "arrow_config",
)
SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


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
            alphas[module] = _scalar(weights, header, name)
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
        settings |= _lokr_settings(header, modules, rank)
    else:
        settings["rank_stabilized"] = False
    if layout == "peft":
        settings |= _peft_settings(weights, kind, rank)
    elif layout == "diffusers":
        settings |= _diffusers_settings(weights, header, kind, rank)

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


def _peft_settings(weights: Path, kind: Kind, rank: int | None) -> dict[str, Any]:
    """From the config beside the weights."""
    described = weights.with_name(ADAPTER_FILES[0])
    if not described.is_file():
        raise SourceError(
            f"{weights} has PEFT's names but no {ADAPTER_FILES[0]} beside it, without which its alpha is unknown. Give "
            "the folder that has both."
        )
    found = read_json(described, MAX_CONFIG_BYTES)
    theirs = {"LORA": "dora" if found.get("use_dora") else "lora", "LOKR": "lokr"}.get(str(found.get("peft_type")))
    if theirs is None:
        raise SourceError(f"{weights.parent} holds a {found.get('peft_type')} adapter; this takes LoRA, DoRA and LoKr.")
    if theirs != kind:
        raise SourceError(f"{described} describes a {theirs} adapter, the tensors beside it are those of a {kind}.")
    _check_options(weights.parent, found)
    r = _number(described, found, "r")
    if r < 1 or r != int(r) or rank not in (None, r):
        raise SourceError(f"{described}: r is {r}, the tensors beside it have rank {rank or 'of no matter'}.")
    settings = {"rank": int(r), "alpha": _number(described, found, "alpha" if kind == "lokr" else "lora_alpha")}
    if kind == "lokr":
        return settings | {key: found.get(key) for key in ("decompose_factor", "decompose_both")}
    return settings | {"rank_stabilized": bool(found.get("use_rslora"))}


def _check_options(place: Path, options: Mapping[str, Any]) -> None:
    """Raise SourceError for PEFT's options with which the same weights mean something that Descant does not train."""
    odd = [key for key in ODD_OPTIONS if options.get(key)]
    odd += [
        key for key in ("init_lora_weights", "init_weights") if options.get(key, True) not in (True, False, "gaussian")
    ]
    odd += ["biases"] if options.get("bias", "none") != "none" else []
    if odd:
        raise SourceError(f"{place} holds an adapter with {shorten(odd)}, which Descant does not train.")


def _diffusers_settings(weights: Path, header: Header, kind: Kind, rank: int | None) -> dict[str, Any]:
    """From PEFT's options in the header, with PEFT's own defaults; a file without them plays at strength 1."""
    text = header.metadata.get("lora_adapter_metadata")
    if kind == "lokr":
        raise SourceError(f"{weights} is a LoKr with diffusers' names, which AceStepPipeline does not load either.")
    if text is None:
        return {"alpha": rank}
    prefix = PREFIXES["diffusers"]
    options = {"r": 8, "lora_alpha": 8} | {
        key.removeprefix(prefix): value for key, value in _json_object(text).items() if key.startswith(prefix)
    }
    _check_options(weights, options)
    if options["r"] != rank or bool(options.get("use_dora")) != (kind == "dora"):
        raise SourceError(
            f"{weights} has tensors of a {kind} of rank {rank}, its header's lora_adapter_metadata speaks of another "
            f"(r {plain(repr(options['r']), 50)}, use_dora {plain(repr(options.get('use_dora', False)), 50)})."
        )
    return {"alpha": _number(weights, options, "lora_alpha"), "rank_stabilized": bool(options.get("use_rslora"))}


def _lokr_settings(header: Header, modules: Mapping[str, Parts], rank: int | None) -> dict[str, Any]:
    """What the shapes tell; and where all matrices are whole, a rank that leaves them so."""
    if rank is None:
        least = max(math.ceil(max(factor_shape(parts, "lokr_w2")) / 2) for parts in modules.values())
        named = _json_object(header.metadata.get("lokr_config", "{}")).get("linear_dim")
        rank = named if isinstance(named, int) and least <= named <= MAX_RANK else least
    both = any("lokr_w1_a" in parts for parts in modules.values())
    return {"rank": rank, "decompose_factor": find_kronecker_factor(modules), "decompose_both": both}


def _scalar(weights: Path, header: Header, name: str) -> float:
    """The one number in a tensor. Raises SourceError for anything else."""
    tensor = header.tensors[name]
    try:
        with weights.open("rb") as file:
            file.seek(header.size + tensor.begin)
            raw = file.read(min(tensor.end - tensor.begin, 16))
    except OSError as error:
        raise SourceError(f"{weights} can't be read: {error.strerror}.") from error
    if tensor.dtype == "BF16":  # the upper half of an fp32
        raw, form = b"\0\0" + raw, "<f"
    else:
        form = SCALARS.get(tensor.dtype, "")
    try:
        value = float(struct.unpack(form, raw)[0])
    except struct.error as error:
        raise SourceError(f"{weights}: {name} is not one number ({tensor.dtype}, {tensor.shape}).") from error
    if not math.isfinite(value):
        raise SourceError(f"{weights}: {name} is {value}.")
    return value


def _number(place: Path, values: Mapping[str, Any], key: str) -> float:
    """The number at `key`, finite also as a float. Raises SourceError for anything else."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < 1e30:
        raise SourceError(f"{place}: {key} is {plain(repr(value), 50)}, not a number that makes sense there.")
    return value


def _json_object(text: str) -> dict[str, Any]:
    """The JSON object in a header's text; an empty one for anything else."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
