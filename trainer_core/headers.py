"""What a safetensors file holds, read from its header. Not with the package, which would need numpy or torch for it."""

import json
import math
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from trainer_core.sources import SourceError, is_file

MAX_HEADER_BYTES = 4 << 20
"""Some ten times what the largest model or adapter needs: what is read here is held in memory."""
MAX_DIMENSIONS = 8
ITEM_BYTES = {
    "F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "F8_E5M2": 1,
    "I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1,
}  # fmt: skip

SCALARS = {"F64": "<d", "F32": "<f", "F16": "<e", "I64": "<q", "I32": "<i"}


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as a header has it; its bytes lie from `begin` to `end` behind the header."""

    dtype: str
    shape: list[int]
    begin: int
    end: int


@dataclass(frozen=True)
class Header:
    """The header of a file, whose first `size` bytes it is."""

    size: int
    metadata: dict[str, str]
    tensors: dict[str, TensorInfo]


def read_header(path: Path) -> Header:
    """What the file holds. Raises SourceError for what is no safetensors file, or not a whole one."""
    if not is_file(path):
        raise SourceError(f"{path} is not a file.")
    try:
        with path.open("rb") as file:
            length = int.from_bytes(file.read(8), "little")
            if length > MAX_HEADER_BYTES:
                raise ValueError(f"a header of {length} bytes")
            content = json.loads(file.read(length))
            metadata = {str(key): str(value) for key, value in content.pop("__metadata__", {}).items()}
            tensors = {name: _tensor(entry) for name, entry in content.items()}
            end = 0
            for tensor in sorted(tensors.values(), key=lambda tensor: (tensor.begin, tensor.end)):
                if tensor.begin != end:
                    raise ValueError("tensors overlap or leave gaps")
                end = tensor.end
            if path.stat().st_size != 8 + length + end:
                raise ValueError("it is cut off")
            return Header(8 + length, metadata, tensors)
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"{path} can't be read as safetensors: it is damaged or something else. Get it again."
        ) from error


def _tensor(entry: dict[str, object]) -> TensorInfo:
    """A tensor that has as many bytes as its shape says. Raises one of the errors that `read_header` knows."""
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or not isinstance(shape, list) or not isinstance(offsets, list):
        raise TypeError("a tensor is not described as one")
    if any(type(number) is not int or number < 0 for number in (*shape, *offsets)) or len(shape) > MAX_DIMENSIONS:
        raise ValueError("sizes are not whole numbers")
    begin, end = offsets
    if end - begin != math.prod(shape) * ITEM_BYTES[dtype]:
        raise ValueError("a tensor is not as large as it says")
    return TensorInfo(dtype, shape, begin, end)


def read_shapes(paths: Iterable[Path]) -> dict[str, list[int]]:
    """The tensors of safetensors files by name, with their shapes. Raises SourceError for what is no such file."""
    return {name: tensor.shape for path in paths for name, tensor in read_header(path).tensors.items()}


def read_scalar(path: Path, header: Header, name: str) -> float:
    """The one number in a tensor. Raises SourceError for anything else."""
    tensor = header.tensors[name]
    try:
        with path.open("rb") as file:
            file.seek(header.size + tensor.begin)
            raw = file.read(min(tensor.end - tensor.begin, 16))
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}.") from error
    if tensor.dtype == "BF16":  # the upper half of an fp32
        raw, form = b"\0\0" + raw, "<f"
    else:
        form = SCALARS.get(tensor.dtype, "")
    try:
        value = float(struct.unpack(form, raw)[0])
    except struct.error as error:
        raise SourceError(f"{path}: {name} is not one number ({tensor.dtype}, {tensor.shape}).") from error
    if not math.isfinite(value):
        raise SourceError(f"{path}: {name} is {value}.")
    return value
