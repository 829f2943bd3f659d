"""What a file says of an adapter's rank and strength, as settings of AdapterConfig; each program says it elsewhere."""

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from trainer_core.adapter_parts import Parts, factor_shape, find_kronecker_factor
from trainer_core.config import MAX_RANK
from trainer_core.formats import PREFIXES, Kind
from trainer_core.headers import Header
from trainer_core.sources import SourceError, plain, read_json, shorten

MAX_CONFIG_BYTES = 1 << 20
# PEFT's options that change what the same weights mean.
ODD_OPTIONS = (
    "alpha_pattern",
    "rank_pattern",
    "modules_to_save",
    "fan_in_fan_out",
    "alora_invocation_tokens",
    "arrow_config",
)


def peft_settings(described: Path, kind: Kind, rank: int | None) -> dict[str, Any]:
    """From PEFT's config `described`, beside weights of a `kind` and `rank`. Raises SourceError where they disagree."""
    if not described.is_file():
        raise SourceError(
            f"{described} is missing, without which the alpha of the weights beside it, which have PEFT's names, is "
            "unknown. Give both together."
        )
    found = read_json(described, MAX_CONFIG_BYTES)
    theirs = {"LORA": "dora" if found.get("use_dora") else "lora", "LOKR": "lokr"}.get(str(found.get("peft_type")))
    if theirs is None:
        raise SourceError(
            f"{described.parent} holds a {found.get('peft_type')} adapter; this takes LoRA, DoRA and LoKr."
        )
    if theirs != kind:
        raise SourceError(f"{described} describes a {theirs} adapter, the tensors beside it are those of a {kind}.")
    _check_options(described.parent, found)
    r = _number(described, found, "r")
    if r < 1 or r != int(r) or rank not in (None, r):
        raise SourceError(f"{described}: r is {r}, the tensors beside it have rank {rank or 'of no matter'}.")
    settings = {"rank": int(r), "alpha": _number(described, found, "alpha" if kind == "lokr" else "lora_alpha")}
    if kind == "lokr":
        return settings | {key: found.get(key) for key in ("decompose_factor", "decompose_both")}
    return settings | {"rank_stabilized": bool(found.get("use_rslora"))}


def diffusers_settings(weights: Path, header: Header, kind: Kind, rank: int | None) -> dict[str, Any]:
    """From PEFT's options in the header, with PEFT's own defaults; a file without them plays at strength 1.

    Raises SourceError where they disagree with the tensors, of a `kind` and `rank`.
    """
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


def lokr_settings(header: Header, modules: Mapping[str, Parts], rank: int | None) -> dict[str, Any]:
    """What the shapes tell; and where all matrices are whole, a rank that leaves them so."""
    if rank is None:
        least = max(math.ceil(max(factor_shape(parts, "lokr_w2")) / 2) for parts in modules.values())
        named = _json_object(header.metadata.get("lokr_config", "{}")).get("linear_dim")
        rank = named if isinstance(named, int) and least <= named <= MAX_RANK else least
    both = any("lokr_w1_a" in parts for parts in modules.values())
    return {"rank": rank, "decompose_factor": find_kronecker_factor(modules), "decompose_both": both}


def _check_options(place: Path, options: Mapping[str, Any]) -> None:
    """Raise SourceError for PEFT's options with which the same weights mean something that Descant does not train."""
    odd = [key for key in ODD_OPTIONS if options.get(key)]
    odd += [
        key for key in ("init_lora_weights", "init_weights") if options.get(key, True) not in (True, False, "gaussian")
    ]
    odd += ["biases"] if options.get("bias", "none") != "none" else []
    if odd:
        raise SourceError(f"{place} holds an adapter with {shorten(odd)}, which Descant does not train.")


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
