"""Tensors found in a file against those that are needed: all of them, by name and shape, or a refusal with counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer_core.sources import SourceError, shorten


def read(path: Path, expected: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The tensors in a safetensors file, if they are those of the shapes `expected` and finite; else SourceError."""
    try:
        found = load_file(path)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} can't be read as safetensors: {error}.") from error
    if differences := mismatch(expected, {name: tensor.shape for name, tensor in found.items()}):
        raise SourceError(f"{path} does not hold the tensors that this run needs: {differences}.")
    # As fp32, in which they will be used; what counts in whole numbers stays.
    finite = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    if bad := [name for name, tensor in finite.items() if not tensor.isfinite().all()]:
        raise SourceError(f"{path} holds NaN or infinite values in {len(bad)} tensors ({shorten(bad)}).")
    return found


def mismatch(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str | None:
    """How the shapes in `found` differ from those `expected`, in words with counts; None where they are the same."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    reshaped = [
        f"{name} is {list(found[name])}, should be {list(shape)}"
        for name, shape in expected.items()
        if name in found and list(found[name]) != list(shape)
    ]
    if not (missing or unexpected or reshaped):
        return None
    named = [
        f"{len(names)} {kind} ({shorten(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    return f"{len(expected) - len(missing) - len(reshaped)} of {len(expected)} match, {', '.join(named)}"
