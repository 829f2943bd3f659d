"""Where a model and a data set come from: their files, found and checked without opening a tensor; and what such checks
share.

Light on purpose (no torch): the web page answers "no such folder" at the field, before a trainer is started.
What can only be seen inside the files (shapes, NaN, names of weights) is checked by `model` and `dataset`.
"""

import json
import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

DEMO = "demo"
DEMO_MODEL = Path(__file__).parent / "demo_model"
HUB_ID = re.compile(r"[\w-][\w.-]*/[\w-][\w.-]*")
PATH_SEPARATORS = re.compile(r"[\\/]")


class SourceError(ValueError):
    """A model, data set or adapter can't be used; the message says what was given and what to do."""


@dataclass(frozen=True)
class ModelFiles:
    """The files of one model, in either layout."""

    layout: Literal["original", "diffusers"]
    config: Path
    weights: tuple[Path, ...]
    condition_weights: tuple[Path, ...]
    """Files of the diffusers condition encoder (`null_condition_emb`); empty in the original layout."""


def is_hub_id(source: str) -> bool:
    """Whether `source` reads as `owner/name`, and nothing here is called `owner`."""
    return HUB_ID.fullmatch(source) is not None and not Path(source.split("/")[0]).is_dir()


def absolute_model(source: str) -> str:
    """`source` with a folder made absolute, so that a run means the same wherever it is started.

    Raises ValueError for what can be no path, as `absolute_folder` does.
    """
    return source if is_hub_id(source) else absolute_folder(source)


def absolute_folder(source: str) -> str:
    """`source` made absolute; `demo` stays. Raises ValueError for nothing, and as `absolute_path` does."""
    if not source:
        raise ValueError("Nothing was given; this takes the path of a folder, or demo.")
    return source if source == DEMO else absolute_path(source)


def absolute_path(source: str) -> str:
    """`source` made absolute, without quotes around it; nothing stays nothing. Raises ValueError for no path."""
    source = re.sub(r"""^(["'])(.+)\1$""", r"\2", source)  # as a file manager copies a path
    if "\0" in source:
        raise ValueError("The path holds a NUL character; give the path of a file or folder.")
    try:
        return str(Path(source).expanduser().absolute()) if source else source
    except RuntimeError as error:
        raise ValueError(f"{source} names a person this machine does not know; give the whole path.") from error


def check_model(source: str) -> None:
    """Raise SourceError if `source` plainly can't be a model. A hub id is looked up only by the trainer."""
    if not is_hub_id(source):
        find_model(DEMO_MODEL if source == DEMO else Path(source))


def check_dataset(source: str) -> None:
    """Raise SourceError if `source` plainly can't be a data set."""
    if source != DEMO:
        find_tensors(Path(source))


def find_model(folder: Path) -> ModelFiles:
    """The config and weight files in `folder`: ACE-Step's original layout, a diffusers pipeline or transformer.

    Raises SourceError naming what is missing.
    """
    names = _listing(folder, "a model folder")
    if "model_index.json" in names:
        transformer, condition = folder / "transformer", folder / "condition_encoder"
        _listing(transformer, "the pipeline's transformer folder")
        condition_weights = _weights(condition, "diffusion_pytorch_model") if condition.is_dir() else ()
        return ModelFiles(
            "diffusers",
            _config(transformer),
            _weights(transformer, "diffusion_pytorch_model"),
            condition_weights,
        )
    config = _config(folder)
    kind = read_json(config)
    if kind.get("_class_name") == "AceStepTransformer1DModel":
        return ModelFiles("diffusers", config, _weights(folder, "diffusion_pytorch_model"), ())
    if kind.get("model_type") == "acestep":
        return ModelFiles("original", config, _weights(folder, "model"), ())
    described = kind.get("_class_name") or kind.get("model_type") or "no known model"
    raise SourceError(f"{config} describes {described}, not an ACE-Step 1.5 model. Give the folder of one.")


def find_tensors(folder: Path) -> tuple[Path, ...]:
    """The sample files in `folder`, in the manifest's order or by name. Staging files (`*.tmp.pt`) are skipped.

    A manifest's paths may come from another machine: only their file names count.
    Raises SourceError naming what is missing.
    """
    names = _listing(folder, "a folder of preprocessed tensors (.pt)")
    found = sorted(
        name for name in names if name.endswith(".pt") and not name.endswith(".tmp.pt") and is_file(folder / name)
    )
    if not found:
        where = [child for child in sorted(names) if (folder / child).is_dir() and any((folder / child).glob("*.pt"))]
        hint = f" There are some in {folder / where[0]}: give that folder." if where else ""
        raise SourceError(f"{folder} holds no tensors: no file there ends in .pt.{hint}")
    if "manifest.json" not in names:
        return tuple(folder / name for name in found)

    present = set(found)
    listed = read_json(folder / "manifest.json").get("samples")
    if not isinstance(listed, list) or not all(isinstance(path, str) for path in listed) or not listed:
        raise SourceError(f'{folder / "manifest.json"} has no list of paths under "samples". Mend or remove it.')
    wanted = list(dict.fromkeys(PATH_SEPARATORS.split(path)[-1] for path in listed))
    missing = [name for name in wanted if name not in present]
    if missing:
        raise SourceError(
            f"{folder / 'manifest.json'} lists {len(wanted)} samples, {len(missing)} of them are not in the folder: "
            f"{shorten(missing)}. Copy them there, or remove the manifest to use the {len(found)} that are."
        )
    return tuple(folder / name for name in wanted)


def read_json(path: Path, most_bytes: int = 64 << 20) -> dict[str, Any]:
    """The JSON object in `path`. Raises SourceError for anything else, and what would take too much memory to read."""
    if not is_file(path):  # a pipe or a device would never end
        raise SourceError(f"{path} is not a file.")
    try:
        if path.stat().st_size > most_bytes:
            raise SourceError(f"{path} is larger than {most_bytes >> 20} MiB, which none of its kind is.")
        value = json.loads(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise SourceError(f"{path} can't be read: {error.strerror}.") from error
    except (ValueError, RecursionError) as error:
        raise SourceError(f"{path} is not valid JSON: {error}.") from error
    if not isinstance(value, dict):
        raise SourceError(f"{path} holds a JSON {type(value).__name__}, not an object.")
    return value


def shorten(names: Iterable[str], most: int = 5) -> str:
    """The first few of `names`, and how many more there are."""
    listed = list(names)
    more = f" and {len(listed) - most} more" if len(listed) > most else ""
    return ", ".join(listed[:most]) + more


def plain(text: str, most: int = 4096) -> str:
    """`text` fit to be written and shown: no half characters, as odd file names have them, and not without end."""
    text = text.encode("utf-8", "replace").decode()
    return text if len(text) <= most else f"{text[:most]}…"


def _listing(folder: Path, wanted: str) -> set[str]:
    try:
        names = {child.name for child in folder.iterdir()}
    except FileNotFoundError as error:
        raise SourceError(f"There is no folder {folder}. Give the path of {wanted}.") from error
    except NotADirectoryError as error:
        raise SourceError(f"{folder} is a file. Give the path of {wanted}.") from error
    except OSError as error:
        raise SourceError(f"{folder} can't be read: {error.strerror}. Check its permissions.") from error
    if not names:
        raise SourceError(f"{folder} is empty. Give the path of {wanted}.")
    return names


def is_file(path: Path) -> bool:
    """Whether there is a file, no pipe or device. Raises SourceError where that can't be seen."""
    try:
        return path.is_file()
    except OSError as error:
        raise SourceError(f"{path} can't be looked at: {error.strerror}. Check the permissions there.") from error


def _config(folder: Path) -> Path:
    config = folder / "config.json"
    if is_file(config):
        return config
    inside = sorted(child.parent.name for child in folder.glob("*/config.json"))
    hint = f" Its folders {shorten(inside)} have one: give one of those." if inside else ""
    raise SourceError(f"{folder} has no config.json, so it is not a model folder.{hint}")


def _weights(folder: Path, stem: str) -> tuple[Path, ...]:
    single, index = folder / f"{stem}.safetensors", folder / f"{stem}.safetensors.index.json"
    if is_file(single):
        return (single,)
    if not is_file(index):
        raise SourceError(
            f"{folder} has a config.json but no weights. Expected {single.name}, or {index.name} and its shards."
        )
    weight_map = read_json(index).get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise SourceError(f'{index} has no "weight_map". Download the model again.')
    shards = sorted({PATH_SEPARATORS.split(str(name))[-1] for name in weight_map.values()})
    missing = [name for name in shards if not is_file(folder / name)]
    if missing:
        raise SourceError(
            f"{index.name} names {len(shards)} shards, {len(missing)} of them are missing: {shorten(missing)}. "
            "Download the model again."
        )
    return tuple(folder / name for name in shards)
