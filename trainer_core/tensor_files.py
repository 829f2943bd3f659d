"""Tensors from a safetensors file: those that are needed, finite, or a refusal with counts."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from trainer_core.matching import mismatch
from trainer_core.sources import SourceError, shorten


def read(path: Path, expected: Mapping[str, Sequence[int]]) -> dict[str, Tensor]:
    """The tensors in a safetensors file, if they are those of the shapes `expected` and finite; else SourceError."""
    found = load(path)
    check(path, expected, found)
    return found


def load(path: Path) -> dict[str, Tensor]:
    """All tensors of a safetensors file. Raises SourceError for what is none."""
    try:
        return load_file(path)
    except (SafetensorError, OSError) as error:
        raise SourceError(f"{path} can't be read as safetensors: {error}.") from error


def check(path: Path, expected: Mapping[str, Sequence[int]], found: Mapping[str, Tensor]) -> None:
    """Raise SourceError unless `found`, read from `path`, are tensors of the shapes `expected`, and finite."""
    if differences := mismatch(expected, {name: tensor.shape for name, tensor in found.items()}):
        raise SourceError(f"{path} does not hold the tensors that this run needs: {differences}.")
    # As fp32, in which they will be used; what counts in whole numbers stays.
    finite = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in found.items()}
    if bad := [name for name, tensor in finite.items() if not tensor.isfinite().all()]:
        raise SourceError(f"{path} holds NaN or infinite values in {len(bad)} tensors ({shorten(bad)}).")
