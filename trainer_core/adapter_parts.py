"""The tensors that an adapter has for one layer, its parts, by PEFT's names: what kind they are and what they fit."""

import math
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from trainer_core.formats import LOKR_PARTS, MAGNITUDE, Kind
from trainer_core.sources import SourceError, shorten

Parts = Mapping[str, list[int]]
"""The shape of each part of one layer."""

MAX_SIDE = 1 << 20
"""Of a matrix: no layer comes near it."""
# (left, right) of the products among them.
PRODUCTS = (("lora_B.weight", "lora_A.weight"), ("lokr_w1_a", "lokr_w1_b"), ("lokr_w2_a", "lokr_w2_b"))
WHOLE = {"lokr_w1", "lokr_w2"}
"""A LoKr's two factors, where neither is a product."""
LORA = {"lora_A.weight", "lora_B.weight"}
COMPLETE: dict[Kind, tuple[set[str], ...]] = {
    "lora": (LORA,),
    "dora": (LORA | {MAGNITUDE},),
    "lokr": tuple(
        first | second
        for first in ({"lokr_w1"}, {"lokr_w1_a", "lokr_w1_b"})
        for second in ({"lokr_w2"}, {"lokr_w2_a", "lokr_w2_b"})
    ),
}


def find_kind(layers: Mapping[str, Parts]) -> Kind:
    """The one kind of adapter that all layers have. Raises SourceError, with counts, unless each has it whole."""
    parts = {part for own in layers.values() for part in own}
    kind: Kind = "lokr" if parts & set(LOKR_PARTS) else "dora" if MAGNITUDE in parts else "lora"
    odd = [name for name, own in layers.items() if set(own) not in COMPLETE[kind] or not _fit_together(own)]
    if odd:
        raise SourceError(
            f"It is no whole {kind} adapter: in {len(odd)} of its {len(layers)} modules some tensors are missing, of "
            f"odd shapes or of another kind of adapter ({shorten(odd)})."
        )
    return kind


def find_rank(layers: Mapping[str, Parts]) -> int | None:
    """The rank that all layers have; None where all matrices are whole. Raises SourceError where ranks differ."""
    ranks = {own[left][1] for own in layers.values() for left, _ in PRODUCTS if left in own}
    if len(ranks) > 1:
        raise SourceError(
            f"It has modules of ranks {shorten(map(str, sorted(ranks)))}; Descant trains one rank for all."
        )
    return ranks.pop() if ranks else None


def parts_for(weight: Sequence[int], settings: Mapping[str, Any]) -> Parts:
    """The parts that PEFT makes for a linear layer of `weight` [out, in], with these settings of AdapterConfig."""
    (out, inputs), rank = weight, settings["rank"]
    if settings["type"] != "lokr":
        parts = {"lora_A.weight": [rank, inputs], "lora_B.weight": [out, rank]}
        return parts | ({MAGNITUDE: [out]} if settings["type"] == "dora" else {})
    first, second = zip(*(kronecker_split(side, settings["decompose_factor"]) for side in weight), strict=True)
    return {
        **_factor("lokr_w1", first, rank if settings["decompose_both"] and rank < max(first) / 2 else None),
        **_factor("lokr_w2", second, rank if rank < max(second) / 2 else None),
    }


def _factor(name: str, shape: Sequence[int], rank: int | None) -> dict[str, list[int]]:
    """One of a LoKr's factors, as a product of a rank or whole."""
    if rank is None:
        return {name: list(shape)}
    return {f"{name}_a": [shape[0], rank], f"{name}_b": [rank, shape[1]]}


def factor_shape(parts: Parts, factor: str) -> list[int]:
    """The shape of one of a LoKr's two factors, `lokr_w1` or `lokr_w2`, be it a product."""
    return parts.get(factor) or [parts[f"{factor}_a"][0], parts[f"{factor}_b"][1]]


def strength_part(parts: Iterable[str]) -> str:
    """The part of a layer that is multiplied to make the whole stronger."""
    return next(part for part in ("lora_B.weight", "lokr_w1", "lokr_w1_a") if part in parts)


def find_kronecker_factor(layers: Mapping[str, Parts]) -> int:
    """A `decompose_factor` that gives a LoKr's matrices these shapes; the nearest where there is none."""
    splits = {
        (first * second, first)
        for parts in layers.values()
        for first, second in zip(factor_shape(parts, "lokr_w1"), factor_shape(parts, "lokr_w2"), strict=True)
    }
    sizes = sorted({first for _, first in splits} - {1}, reverse=True)
    for factor in (-1, *sizes):
        if all(kronecker_split(side, factor)[0] == first for side, first in splits):
            return factor
    return max(sizes, default=-1)


def kronecker_split(side: int, factor: int) -> tuple[int, int]:
    """What PEFT splits a side of a LoKr's weight into (`factorization` in its tuners/lokr/layer.py).

    By `factor` if that divides it, else by the largest divisor up to it and to the root, which alone counts for -1.
    """
    if factor > 0 and side % factor == 0:
        return factor, side // factor
    most = math.isqrt(side) if factor < 0 else min(factor, math.isqrt(side))
    first = next(divisor for divisor in range(most, 0, -1) if side % divisor == 0)
    return first, side // first


def check_kronecker_factor(factor: int, sides: Iterable[int]) -> None:
    """Raise SourceError if the first of a LoKr's matrices would be larger than the second: LyCORIS, with which ACE-Step
    and others load the file, has them the other way round."""
    wrong = [side for side in sides if kronecker_split(side, factor)[0] ** 2 > side]
    if wrong:
        raise SourceError(
            f"A factor of {factor} was given and some of the layers to adapt have a side of {min(wrong)}: give at most "
            f"{math.isqrt(min(wrong))}, its root, or -1 for the most even split."
        )


def _fit_together(parts: Parts) -> bool:
    """Whether all are matrices, but for a DoRA's magnitudes, none is empty, and products can be multiplied."""
    return (
        all(len(shape) == 2 for part, shape in parts.items() if part != MAGNITUDE)
        and all(0 < size <= MAX_SIDE for shape in parts.values() for size in shape)
        and all(parts[left][1] == parts[right][0] for left, right in PRODUCTS if left in parts)
        # One for each output. LyCORIS can also have one for each input, [1, in], which PEFT does not know.
        and (MAGNITUDE not in parts or parts[MAGNITUDE] in (parts["lora_B.weight"][:1], [parts["lora_B.weight"][0], 1]))
    )
