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

from trainer_core import formats
from trainer_core.formats import LOKR_PARTS, Kind, Layout, parse_name, recognise
from trainer_core.naming import targets_of
from trainer_core.sources import Header, SourceError, plain, read_header, read_json, shorten

ADAPTER_FILES = ("adapter_config.json", "adapter_model.safetensors")

# PEFT's options that change what the same weights mean.
ODD_OPTIONS = (
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "arrow_config",
)
# The parts of one module, by kind; a LoKr has each factor whole or as a product of two.
LORA_PARTS = {"lora_A.weight", "lora_B.weight"}
DORA_PARTS = LORA_PARTS | {"lora_magnitude_vector"}
LOKR_FACTORS = (({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"}), ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"}))
WHOLE = {"lokr_w1", "lokr_w2"}
SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}
MAX_RANK, MAX_ALPHA = 1024, 4096  # as AdapterConfig has them
MAX_NUMBER = 1e9

Parts = Mapping[str, list[int]]
"""The shapes of one module's tensors, by PEFT's name of the part."""


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
    factors: dict[str, float]
    """By module: how many times stronger the file plays than its tensors with `settings`; without those as strong."""

    @property
    def kind(self) -> Kind:
        """LoRA, DoRA or LoKr."""
        kind: Kind = self.settings["type"]
        return kind

    @property
    def place(self) -> Path:
        """What a person calls it: PEFT's folder, or the file."""
        return self.weights.parent if self.layout == "peft" else self.weights

    def weight_shapes(self) -> dict[str, list[int]]:
        """[out, in] of the linear layers it was made for."""
        return {module: _weight_shape(parts) for module, parts in self.modules.items()}

    def __str__(self) -> str:
        kind = {"lora": "LoRA", "dora": "DoRA", "lokr": "LoKr"}[self.kind]
        format = {"peft": "PEFT", "comfyui": "ComfyUI", "lycoris": "LyCORIS"}.get(self.layout, self.layout)
        return (
            f"{kind} of rank {self.settings['rank']}, alpha {self.settings['alpha']}, on {len(self.modules)} modules "
            f"({shorten(self.settings['targets'])}), in the format of {format}"
        )


def find(source: Path) -> Path:
    """The file with the weights of the adapter in `source`, a folder or that file itself.

    Raises SourceError naming what is missing.
    """
    try:
        if source.is_file():
            if source.suffix != ".safetensors":
                raise SourceError(
                    f"{source} is not a .safetensors file. Pickled weights are not read: they can run code."
                )
            return source
        if not source.is_dir():
            raise SourceError(f"There is no file or folder {plain(str(source), 200)}.")
        for place in (source, source / "adapter"):  # ACE-Step's trainer leaves it in `adapter`
            if all((place / name).is_file() for name in ADAPTER_FILES):
                return place / ADAPTER_FILES[1]
        found = sorted(source.glob("*.safetensors"))
    except OSError as error:
        raise SourceError(f"{plain(str(source), 200)} can't be looked at: {error.strerror}.") from error
    if len(found) == 1:
        return found[0]
    if found:
        raise SourceError(
            f"{source} has {len(found)} .safetensors files ({shorten(path.name for path in found)}). Give one of them."
        )
    raise SourceError(
        f"{source} is not the folder of an adapter: it has no {' and '.join(ADAPTER_FILES)}, nor any .safetensors file."
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
        module, part = parsed
        if part == "alpha":
            alphas[module] = _scalar(weights, header, name)
        elif part in modules[module]:
            raise SourceError(f"{weights} holds {module} {part} twice, by different names.")
        else:
            names[name] = parsed
            modules[module][part] = tensor.shape
    if unknown:
        raise SourceError(
            f"{len(unknown)} of the {len(header.tensors)} tensors in {weights} belong to nothing that Descant trains: "
            f"{plain(shorten(unknown), 300)}."
        )
    kind = _kind(weights, modules)
    if layout == "peft":
        settings = _peft_settings(weights, kind, modules)
    elif layout == "diffusers":
        settings = _diffusers_settings(weights, header, _rank(weights, modules))
    elif kind == "lokr":
        settings = _lokr_settings(weights, header, modules)
    else:
        settings = {"rank": _rank(weights, modules), "rank_stabilized": False}
    settings = {"type": kind, "targets": targets_of(modules), "alpha": None, **settings}

    described = settings["alpha"] is not None  # in one place for all; else each module says it, or plays at 1
    strengths = {
        module: formats.scale(settings)
        if described
        else 1.0
        if parts.keys() >= WHOLE
        else alphas.get(module, settings["rank"]) / settings["rank"]
        for module, parts in modules.items()
    }
    if not described and len(set(alphas.values())) == 1 and alphas.keys() == modules.keys():
        settings["alpha"] = next(iter(alphas.values()))
    if settings["alpha"] in range(1, MAX_ALPHA + 1):
        settings["alpha"] = int(settings["alpha"])
    else:
        settings |= {"alpha": settings["rank"]} | ({"rank_stabilized": False} if kind != "lokr" else {})
    factors = {module: strength / formats.scale(settings) for module, strength in strengths.items()}
    return AdapterFile(
        weights,
        layout,
        settings,
        names,
        dict(modules),
        {module: factor for module, factor in factors.items() if not math.isclose(factor, 1, rel_tol=1e-7)},
    )


def _kind(weights: Path, modules: Mapping[str, Parts]) -> Kind:
    """What kind of adapter has these tensors. Raises SourceError unless every module is one of it, whole."""
    parts = {part for module in modules.values() for part in module}
    kind: Kind = "lokr" if parts & set(LOKR_PARTS) else "dora" if "lora_magnitude_vector" in parts else "lora"
    wanted = {
        "lora": (LORA_PARTS,),
        "dora": (DORA_PARTS,),
        "lokr": tuple(a | b for a in LOKR_FACTORS[0] for b in LOKR_FACTORS[1]),
    }
    odd = [module for module, own in modules.items() if set(own) not in wanted[kind] or not _fits_together(own)]
    if odd:
        raise SourceError(
            f"{weights} is no whole {kind} adapter: in {len(odd)} of its {len(modules)} modules some tensors are "
            f"missing, of odd shapes or of another kind of adapter ({shorten(odd)})."
        )
    return kind


def _fits_together(parts: Parts) -> bool:
    """Whether the parts are matrices that can be multiplied."""
    for first, second in (("lora_B.weight", "lora_A.weight"), ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b")):
        if first in parts and (
            len(parts[first]) != 2 or len(parts[second]) != 2 or parts[first][1] != parts[second][0]
        ):
            return False
    magnitude = parts.get("lora_magnitude_vector")
    if magnitude is not None and math.prod(magnitude) != parts["lora_B.weight"][0]:
        return False
    return all(len(parts[part]) == 2 for part in WHOLE & parts.keys()) and all(map(all, parts.values()))


def _weight_shape(parts: Parts) -> list[int]:
    if "lora_B.weight" in parts:
        return [parts["lora_B.weight"][0], parts["lora_A.weight"][1]]
    first, second = _whole(parts, "lokr_w1"), _whole(parts, "lokr_w2")
    return [first[0] * second[0], first[1] * second[1]]


def _rank(weights: Path, modules: Mapping[str, Parts]) -> int:
    """The rank of all modules; 0 where none has one. Raises SourceError where they differ."""
    ranks = {
        shape[1]
        for parts in modules.values()
        for part, shape in parts.items()
        if part in ("lora_B.weight", "lokr_w1_a", "lokr_w2_a")
    }
    if len(ranks) > 1:
        raise SourceError(
            f"{weights} has modules of ranks {shorten(map(str, sorted(ranks)))}; Descant trains one rank for all."
        )
    return ranks.pop() if ranks else 0


def _peft_settings(weights: Path, kind: Kind, modules: Mapping[str, Parts]) -> dict[str, Any]:
    described = weights.with_name(ADAPTER_FILES[0])
    if not described.is_file():
        raise SourceError(
            f"{weights} has PEFT's names but no {ADAPTER_FILES[0]} beside it, without which its alpha is unknown. Give "
            "the folder that has both."
        )
    found = read_json(described)
    theirs = {"LORA": "dora" if found.get("use_dora") else "lora", "LOKR": "lokr"}.get(str(found.get("peft_type")))
    if theirs is None:
        raise SourceError(f"{weights.parent} holds a {found.get('peft_type')} adapter; this takes LoRA, DoRA and LoKr.")
    if theirs != kind:
        raise SourceError(f"{described} describes a {theirs} adapter, the tensors beside it are those of a {kind}.")
    odd = [key for key in ODD_OPTIONS if found.get(key)]
    odd += [
        key for key in ("init_lora_weights", "init_weights") if found.get(key, True) not in (True, False, "gaussian")
    ]
    if odd or found.get("bias", "none") != "none":
        raise SourceError(
            f"{weights.parent} holds an adapter with {shorten(odd) or 'biases'}, which Descant does not train."
        )
    alpha = "alpha" if kind == "lokr" else "lora_alpha"
    settings = {"rank": _number(described, found, "r"), "alpha": _number(described, found, alpha)}
    if settings["rank"] != _rank(weights, modules) and not (
        kind == "lokr" and settings["rank"] in range(1, MAX_RANK + 1)
    ):
        raise SourceError(f"{described}: r is {found['r']}, the tensors beside it have rank {_rank(weights, modules)}.")
    if kind == "lokr":
        return settings | {key: found.get(key) for key in ("decompose_factor", "decompose_both")}
    return settings | {"rank_stabilized": bool(found.get("use_rslora"))}


def _diffusers_settings(weights: Path, header: Header, rank: int) -> dict[str, Any]:
    """From PEFT's options in the header; a file without them plays at strength 1, as diffusers has it."""
    found = _json_object(header.metadata.get("lora_adapter_metadata"))
    options = {key.removeprefix("transformer."): value for key, value in found.items()}
    if odd := [key for key in ODD_OPTIONS if options.get(key)]:
        raise SourceError(f"{weights} holds an adapter with {shorten(odd)}, which Descant does not train.")
    alpha = _number(weights, {"lora_alpha": rank} | options, "lora_alpha")
    return {"rank": rank, "alpha": alpha, "rank_stabilized": bool(options.get("use_rslora"))}


def _lokr_settings(weights: Path, header: Header, modules: Mapping[str, Parts]) -> dict[str, Any]:
    found = _json_object(header.metadata.get("lokr_config"))
    factor = found.get("factor")
    if not isinstance(factor, int) or factor in (0, 1):
        first = [size for parts in modules.values() for size in _whole(parts, "lokr_w1")]
        sides = [size for parts in modules.values() for size in _weight_shape(parts)]
        factor = -1 if first == list(map(_even_split, sides)) else max(first)
    rank = _rank(weights, modules)
    if not rank:  # any that leaves both matrices whole
        least = max(math.ceil(max(_whole(parts, "lokr_w2")) / 2) for parts in modules.values())
        named = found.get("linear_dim")
        rank = named if isinstance(named, int) and least <= named <= MAX_RANK else least
    both = any("lokr_w1_a" in parts for parts in modules.values())
    return {"rank": rank, "decompose_factor": factor, "decompose_both": both}


def _whole(parts: Parts, factor: str) -> list[int]:
    """The shape of one of a LoKr's two factors."""
    return parts.get(factor) or [parts[f"{factor}_a"][0], parts[f"{factor}_b"][1]]


def _even_split(size: int) -> int:
    """The smaller of the two factors of `size` that are closest to each other."""
    return max(divisor for divisor in range(1, math.isqrt(size) + 1) if size % divisor == 0)


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
    """The finite number at `key`. Raises SourceError for anything else."""
    value = values.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float) or not abs(value) < MAX_NUMBER:
        raise SourceError(f"{place}: {key} is {plain(repr(value), 50)}, not a number.")
    return value


def _json_object(text: str | None) -> dict[str, Any]:
    try:
        found = json.loads(text or "{}")
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
