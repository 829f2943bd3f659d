"""What modules and weights are called, by ACE-Step and by diffusers, and what an adapter's targets mean by it."""

import re
from collections.abc import Collection, Iterable
from functools import lru_cache

from trainer_core.sources import SourceError, shorten

# (ACE-Step's name, diffusers' name); everything else is called the same (diffusers' AceStepTransformer1DModel).
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

# ACE-Step's linear layers outside its blocks.
SINGLE = (
    "condition_embedder",
    *(
        f"{embed}.{layer}"
        for embed in ("time_embed", "time_embed_r")
        for layer in ("linear_1", "linear_2", "time_proj")
    ),
)


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


def diffusers_module(name: str) -> str:
    """ACE-Step's name of a module (without `decoder.`) as diffusers calls it."""
    return to_diffusers(f".{name}.").strip(".")


def original_module(name: str) -> str:
    """The inverse of `diffusers_module`."""
    return to_original(f".{name}.").strip(".")


def module_names(target: str) -> tuple[str, ...]:
    """What a target stands for: the ends of module names as diffusers has them. It may be one of GROUPS, or ACE-Step's
    or diffusers' own name of a module or its end."""
    return GROUPS.get(target, (diffusers_module(target),))


def is_meant(targets: Iterable[str], name: str) -> bool:
    """Whether one of `targets` means the module that diffusers calls `name`."""
    return f".{name}".endswith(_ends(tuple(targets)))


@lru_cache(maxsize=64)  # asked for each of a model's thousands of layers
def _ends(targets: tuple[str, ...]) -> tuple[str, ...]:
    return tuple({f".{end}" for target in targets for end in module_names(target)})


def check_targets(targets: Collection[str], modules: Collection[str], linear: Collection[str]) -> None:
    """Raise SourceError with what exists, if one of `targets` means no module, or one that is not `linear`.

    Names are diffusers'.
    """
    lost = []
    for target in targets:
        meant = {name for name in modules if is_meant([target], name)}
        if not meant or not meant <= set(linear):
            lost.append(target)
    if lost:
        blocks = [int(found[1]) for name in linear if (found := re.match(r"layers\.(\d+)\.", name))]
        kinds = dict.fromkeys(re.sub(r"^layers\.\d+\.", "", original_module(name)) for name in linear)
        raise SourceError(
            f"No linear layer of this model is called {shorten(lost)}. Targets are {', '.join(GROUPS)}, and the layers "
            f"{', '.join(kinds)}; those of one block with its number, from layers.0 to layers.{max(blocks, default=0)}."
        )


def from_flat(flat: str) -> str | None:
    """ACE-Step's linear layer whose name with every dot made an underscore, as LyCORIS has it, is `flat`."""
    block = re.fullmatch(r"layers_(\d{1,4})_(\w+)", flat)
    inside = [original_module(name) for group in GROUPS.values() for name in group]
    known = {name.replace(".", "_"): name for name in (inside if block else SINGLE)}
    found = known.get(block[2] if block else flat)
    return f"layers.{block[1]}.{found}" if block and found else found


def targets_of(modules: Collection[str]) -> tuple[str, ...]:
    """The fewest targets that mean the layers `modules`, by ACE-Step's names, in a model that has no further blocks."""
    blocks: dict[str, set[int]] = {}
    others = []
    for name in modules:
        if found := re.fullmatch(r"layers\.(\d{1,4})\.(.+)", name):
            blocks.setdefault(found[2], set()).add(int(found[1]))
        else:
            others.append(name)
    count = max((max(numbers) for numbers in blocks.values()), default=-1) + 1
    if any(len(numbers) < count for numbers in blocks.values()):
        return tuple(sorted(modules))
    ends = set(blocks)
    targets: list[str] = []
    for group, names in GROUPS.items():
        inside = {original_module(name) for name in names}
        if inside <= ends:
            targets.append(group)
            ends -= inside
    return (*targets, *sorted(ends), *sorted(others))
