"""Training samples from preprocessed tensors as ACE-Step writes them, every one checked before training starts."""

import re
import struct
import zipfile
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any, get_args

import torch
from torch import Tensor

from trainer_core import demo, free_memory, sources
from trainer_core.memory import Samples
from trainer_core.model import Variant
from trainer_core.sample_shapes import MAX_SAMPLE_BYTES
from trainer_core.sources import DEMO, SourceError

LATENT_CHANNELS = 64
CONTEXT_CHANNELS = 128


@dataclass(frozen=True)
class Sample:
    """One piece of music, in the dtype of its file, on the CPU."""

    name: str
    target_latents: Tensor
    """[T, 64], about 25 frames a second."""
    context_latents: Tensor
    """[T, 128]: source latents, then the chunk mask."""
    encoder_hidden_states: Tensor
    """[L, D], the condition without its padding."""
    is_mapped: bool = False
    """Whether the tensors are views of the file."""

    @property
    def tensors(self) -> dict[str, Tensor]:
        """All of them by the file's names."""
        return {
            "target_latents": self.target_latents,
            "context_latents": self.context_latents,
            "encoder_hidden_states": self.encoder_hidden_states,
        }

    @property
    def shape(self) -> tuple[int, int]:
        """(T, L); samples of one shape can be computed as one batch without padding."""
        return self.target_latents.shape[0], self.encoder_hidden_states.shape[0]


def load(source: str) -> list[Sample]:
    """All samples of `demo` or of a folder: held in memory, or where they are too many mapped from their files.

    Mapped files may be deleted or replaced while a run trains, but not be written over in place. Raises SourceError
    that names every file that can't be used, and why.
    """
    if source == DEMO:
        return [to_sample(name, tensors) for name, tensors in demo.samples()]
    paths = sources.find_tensors(Path(source))
    is_held = free_memory.holds(sum(path.stat().st_size for path in paths))
    loaded, problems = [], []
    for path in paths:
        try:
            is_mapped = not is_held and zipfile.is_zipfile(path)  # PyTorch wrote no zips before its version 1.6
            loaded.append(to_sample(path.name, read_tensors(path, is_mapped), is_mapped))
        except SourceError as error:
            problems.append(f"{path.name}: {error}")
    if problems:
        raise SourceError(
            f"{len(problems)} of {len(paths)} samples in {source} can't be used. {' '.join(problems[:10])}"
            f"{f' And {len(problems) - 10} more.' if len(problems) > 10 else ''} Make them again or move them away."
        )
    return loaded


def sizes(samples: list[Sample]) -> Samples:
    """What they take in memory, and what the longest asks for."""
    frames, condition_tokens = (max(sample.shape[side] for sample in samples) for side in (0, 1))
    held = sum(tensor.nbytes for sample in samples if not sample.is_mapped for tensor in sample.tensors.values())
    return Samples(frames, condition_tokens, held)


def check_variant(source: str, variant: str) -> None:
    """Raise SourceError if the folder's `preprocess_meta.json` names another model variant than `variant`.

    Conditions made by one variant's encoder mean nothing to another. A name that says none of the three is let pass.
    """
    path = Path(source) / "preprocess_meta.json"
    if source == DEMO or not path.exists():
        return
    recorded = str(sources.read_json(path).get("model_variant", ""))
    named = [known for known in get_args(Variant) if known in re.split(r"[^a-z]+", recorded.lower())]
    if named and variant not in named:
        raise SourceError(
            f"{path} says these samples were made with the {sources.plain(recorded, 100)} model, this model is "
            f"{variant}. Use the model they were made with, or make them again with this one."
        )


def read_tensors(path: Path, is_mapped: bool = False) -> dict[str, Any]:
    """The dictionary in a `.pt` file. Nothing but tensors and plain values is ever unpickled.

    With `is_mapped` its tensors are views of the file.
    """
    try:
        _check_size(path)
        content = torch.load(path, map_location="cpu", weights_only=True, mmap=is_mapped)
    except UnpicklingError as error:
        raise SourceError(
            "it is not a file of tensors and plain values alone; such a file could run code, so it was not opened."
        ) from error
    except OSError as error:
        raise SourceError(f"it can't be read: {error.strerror}.") from error
    except SourceError:
        raise
    except Exception as error:  # damaged bytes make torch.load raise nearly anything
        raise SourceError("it is cut short or not a tensor file.") from error
    if not isinstance(content, dict):
        raise SourceError(f"it holds a {type(content).__name__}, not a dictionary of tensors.")
    return content


def _check_size(path: Path) -> None:
    """Raise SourceError for a file that takes more memory to read than a sample can need."""
    size = path.stat().st_size
    if size > MAX_SAMPLE_BYTES:
        raise SourceError(f"it has {size >> 20:,} MiB; a sample has no more than {MAX_SAMPLE_BYTES >> 20}.")
    try:
        with zipfile.ZipFile(path) as archive:
            claimed = sum(entry.file_size for entry in archive.infolist())
    except (zipfile.BadZipFile, ValueError, NotImplementedError, struct.error):  # none, or damaged: PyTorch tells
        return
    if claimed > size:
        raise SourceError(f"its parts unpack to {claimed:,} bytes from {size:,}; PyTorch never compresses them.")


def check_width(samples: list[Sample], condition_width: int) -> None:
    """Raise SourceError unless every condition is as wide as the model takes, `condition_width`."""
    others = {
        s.name: s.encoder_hidden_states.shape[1] for s in samples if s.encoder_hidden_states.shape[1] != condition_width
    }
    if others:
        name, width = next(iter(others.items()))
        raise SourceError(
            f"{len(others)} of {len(samples)} samples do not fit this model: the condition in {name} is {width} wide, "
            f"the model takes {condition_width}. Use the model the data set was made with, or make the data set again."
        )


def to_sample(name: str, tensors: dict[str, Any], is_mapped: bool = False) -> Sample:
    """A checked sample. Condition tokens that the mask marks as padding are removed: inference has none.

    Its tensors are copies, with `is_mapped` views where they can be.
    """
    latents = _tensor(tensors, "target_latents", (None, LATENT_CHANNELS))
    context = _tensor(tensors, "context_latents", (latents.shape[0], CONTEXT_CHANNELS))
    condition = _tensor(tensors, "encoder_hidden_states", (None, None))
    is_token = _tensor(tensors, "encoder_attention_mask", (condition.shape[0],), any_dtype=True) != 0
    count = int(is_token.sum())
    # Padding comes last as a rule, and then a view says the same.
    condition = condition[:count] if is_token[:count].all() else condition[is_token]
    if not latents.shape[0] or not condition.shape[0]:
        raise SourceError("it is empty: it has no frames or no condition tokens.")
    for key, tensor in (
        ("target_latents", latents),
        ("context_latents", context),
        ("encoder_hidden_states", condition),
    ):
        if not tensor.float().isfinite().all():  # as fp32, in which it will be used
            raise SourceError(f"{key} holds NaN or infinite values.")
    if is_mapped:
        return Sample(name, latents, context, condition, is_mapped)
    # A slice would keep the whole storage it was cut from alive.
    return Sample(name, latents.clone(), context.clone(), condition.clone())


def _tensor(tensors: dict[str, Any], key: str, shape: tuple[int | None, ...], any_dtype: bool = False) -> Tensor:
    tensor = tensors.get(key)
    if tensor is None:
        raise SourceError(f'it has no "{key}"; it has {sources.shorten(str(key) for key in tensors) or "nothing"}.')
    # Its shape and strides may repeat a few bytes without end.
    if isinstance(tensor, Tensor) and tensor.numel() * tensor.element_size() > MAX_SAMPLE_BYTES:
        raise SourceError(f"{key} is {list(tensor.shape)}, larger than {MAX_SAMPLE_BYTES >> 20} MiB.")
    if (
        not isinstance(tensor, Tensor)
        or (tensor.layout, tensor.device.type) != (torch.strided, "cpu")
        or not (any_dtype or tensor.is_floating_point())
    ):
        raise SourceError(f"{key} is not a tensor of floating-point numbers.")
    if len(tensor.shape) != len(shape) or any(
        want not in (None, size) for want, size in zip(shape, tensor.shape, strict=True)
    ):
        wanted = ", ".join("any" if size is None else str(size) for size in shape)
        raise SourceError(f"{key} is {list(tensor.shape)}, should be [{wanted}].")
    return tensor
