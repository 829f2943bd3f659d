"""What modules and weights are called, by ACE-Step and by diffusers, and what an adapter's targets mean by it."""

import re
from collections.abc import Collection

from trainer_core.sources import SourceError, shorten

# (ACE-Step's name, diffusers' name); everything else is called the same (formats.md, section 1).
RENAMED = (
    ("proj_in.1.", "proj_in_conv."),
    ("proj_out.1.", "proj_out_conv."),
    (".q_proj.", ".to_q."),
    (".k_proj.", ".to_k."),
    (".v_proj.", ".to_v."),
    (".o_proj.", ".to_out.0."),
    (".q_norm.", ".norm_q."),
    (".k_norm.", ".norm_k."),
)
DIT_PREFIX = "decoder."

ATTENTION = ("to_q", "to_k", "to_v", "to_out.0")
GROUPS = {
    "self_attention": tuple(f"self_attn.{name}" for name in ATTENTION),
    "cross_attention": tuple(f"cross_attn.{name}" for name in ATTENTION),
    "mlp": ("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj"),
}
"""Targets that stand for several modules, as diffusers names those."""


def to_diffusers(name: str) -> str:
    """ACE-Step's name of a weight (without `decoder.`) as diffusers calls it."""
    for original, diffusers in RENAMED:
        name = name.replace(original, diffusers)
    return name


def to_original(name: str) -> str:
    """The inverse of `to_diffusers`."""
    for original, diffusers in RENAMED:
        name = name.replace(diffusers, original)
    return name


def module_names(target: str) -> tuple[str, ...]:
    """What a target stands for: the ends of module names as diffusers has them. It may be one of GROUPS, or ACE-Step's
    or diffusers' own name of a module or its end."""
    return GROUPS.get(target, (to_diffusers(f".{target}.").strip("."),))


def check_targets(targets: Collection[str], modules: Collection[str], linear: Collection[str]) -> None:
    """Raise SourceError with what exists, if one of `targets` means no module, or one that is not `linear`.

    Names are diffusers'.
    """
    lost = []
    for target in targets:
        meant = {name for name in modules for end in module_names(target) if f".{name}".endswith(f".{end}")}
        if not meant or not meant <= set(linear):
            lost.append(target)
    if lost:
        blocks = [int(found[1]) for name in linear if (found := re.match(r"layers\.(\d+)\.", name))]
        kinds = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", to_original(f"{name}.")).strip(".") for name in linear)
        raise SourceError(
            f"No linear layer of this model is called {shorten(lost)}. Targets are {', '.join(GROUPS)}, and the layers "
            f"{', '.join(kinds)}; those of one block with its number, from layers.0 to layers.{max(blocks, default=0)}."
        )
