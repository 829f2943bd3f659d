"""A checkpoint as a file for another program, made from its own files with numpy: no torch, no model.

What each program does with the tensors it reads decides what is written (each rule is tested as that program has it):
- PEFT and diffusers read rank and alpha beside the weights, so the weights are written as they are.
- ComfyUI multiplies a LoRA by `.alpha` / rank. A DoRA's `dora_scale` it divides by the norms of the base weights, not
  of the adapted ones as PEFT does, so the trainer computes it (`adapter.dora_scales`).
- LyCORIS and ComfyUI take a LoKr of two whole matrices at strength 1 whatever its alpha, and LyCORIS applies
  alpha / rank twice when it merges. The strength is therefore in the factors, and alpha is the rank.
Magnitudes and alphas stay fp32 in every precision: rounded to bf16, a magnitude would move whole rows of the base
weights by as much as training did.
Tensors are read, cast and written one by one: an adapter may have gigabytes, and the server makes several at once.
"""

import json
import shutil
import tempfile
import zipfile
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from trainer_core import adapter_files
from trainer_core.adapter_files import ADAPTER_FILES, DORA_SCALES, AdapterFile
from trainer_core.adapter_parts import strength_part
from trainer_core.config import MAX_ALPHA
from trainer_core.formats import (
    FORMATS,
    MAGNITUDE,
    PREFIXES,
    FormatName,
    Layout,
    Precision,
    refusal,
    scale,
    tensor_name,
)
from trainer_core.headers import read_shapes
from trainer_core.naming import diffusers_module
from trainer_core.run_folders import slug
from trainer_core.sources import SourceError, read_json

Array = numpy.ndarray[Any, Any]
DTYPES: dict[Precision, tuple[str, Any]] = {
    "bf16": ("BF16", bfloat16),
    "fp16": ("F16", numpy.float16),
    "fp32": ("F32", numpy.float32),
}
FP32_PARTS = ("alpha", MAGNITUDE)


def file_name(run: str, checkpoint: str, name: FormatName, precision: Precision) -> str:
    """What an export is called, after the name of its run."""
    return f"{slug(run) or 'adapter'}-{checkpoint}-{name}-{precision}{FORMATS[name].suffix}"


def export(checkpoint: Path, name: FormatName, precision: Precision, target: Path) -> int:
    """Write the adapter in the folder `checkpoint` to `target`, whole or not at all; how many tensors are in it.

    The same checkpoint always gives the same bytes, so that a download can be resumed.
    Raises SourceError for an adapter that the format or the precision can't hold, OSError when it can't be written.
    """
    adapter = adapter_files.read(checkpoint)
    if adapter.layout != "peft" or adapter.gains:
        raise SourceError(
            f"{checkpoint} is no checkpoint of Descant, nor a PEFT folder with a whole alpha from 1 to {MAX_ALPHA:,}."
        )
    if reason := refusal(name, adapter.kind):
        raise SourceError(reason)
    layout: Layout = "lycoris" if name == "comfyui" and adapter.kind == "lokr" else name
    shapes = {(module, part): shape for module, parts in adapter.modules.items() for part, shape in parts.items()}
    if name == "comfyui":
        shapes |= {(module, "alpha"): [] for module in adapter.modules}
        shapes |= {key: [shape[0], 1] for key, shape in shapes.items() if key[1] == MAGNITUDE}
    with tempfile.TemporaryDirectory(prefix=".descant-", dir=target.parent) as folder:
        weights, whole = Path(folder) / "weights", Path(folder) / "whole"
        try:
            with safe_open(adapter.weights, framework="numpy") as file:
                metadata = dict(file.metadata() or {}) | _metadata(adapter, layout)
                _write(weights, layout, shapes, metadata, precision, _reader(adapter, name, file))
        except SafetensorError as error:
            raise SourceError(f"{checkpoint} can't be read: {error}.") from error
        if name == "peft":
            _zip(whole, target.stem, adapter, weights, metadata)
        (whole if name == "peft" else weights).replace(target)
    return len(shapes)


def _metadata(adapter: AdapterFile, layout: Layout) -> dict[str, str]:
    """What the header says in a program's own words."""
    settings = adapter.settings
    if layout == "lycoris":  # what ACE-Step builds the modules with before it loads the file
        config = {
            "linear_dim": settings["rank"],
            "linear_alpha": settings["rank"],
            "factor": settings["decompose_factor"],
            "decompose_both": settings["decompose_both"],
            "target_modules": sorted({module.rpartition(".")[2] for module in adapter.modules}),
            "weight_decompose": False,
        }
        return {"algo": "lokr", "format": "lycoris", "lokr_config": json.dumps(config)}
    if layout == "diffusers":  # PEFT's options that matter, the few that every version of it has
        options = {
            "r": settings["rank"],
            "lora_alpha": settings["alpha"],
            "use_rslora": settings["rank_stabilized"],
            "target_modules": [diffusers_module(module) for module in sorted(adapter.modules)],
        }
        return {"lora_adapter_metadata": json.dumps({PREFIXES[layout] + key: value for key, value in options.items()})}
    return {}


def _reader(adapter: AdapterFile, name: FormatName, file: Any) -> Callable[[str, str], Array]:
    """A function that gives the tensor to write, in fp32, for a module and part."""
    keys = {named: key for key, named in adapter.names.items()}
    strength = scale(adapter.settings)
    alpha = adapter.settings["rank"] * (1 if adapter.kind == "lokr" else strength)
    scales = _dora_scales(adapter) if name == "comfyui" and adapter.kind == "dora" else {}

    def read(module: str, part: str) -> Array:
        if part == "alpha":
            return numpy.array(alpha, numpy.float32)
        if part == MAGNITUDE and scales:
            return scales[module][:, None]
        try:
            tensor: Array = file.get_tensor(keys[module, part]).astype(numpy.float32)
        except TypeError as error:  # an 8-bit float
            raise SourceError(f"{adapter.weights} can't be read: numpy does not know a type in it.") from error
        if name == "comfyui" and adapter.kind == "lokr" and part == strength_part(adapter.modules[module]):
            tensor *= numpy.float32(strength)
        return tensor

    return read


def _dora_scales(adapter: AdapterFile) -> dict[str, Array]:
    """A DoRA's magnitudes as ComfyUI takes them, by module. Raises SourceError where they are not whole."""
    path = adapter.weights.with_name(DORA_SCALES)
    if not path.is_file():
        raise SourceError(
            f"{path.parent} has no {DORA_SCALES}, which ComfyUI's file of a DoRA is made with; Descant's own "
            "checkpoints have it. Start a run from this adapter to get one."
        )
    if read_shapes([path]) != {module: parts["lora_B.weight"][:1] for module, parts in adapter.modules.items()}:
        raise SourceError(f"{path} is not that of the adapter beside it.")
    with safe_open(path, framework="numpy") as file:
        return {module: file.get_tensor(module) for module in adapter.modules}


def _write(
    target: Path,
    layout: Layout,
    shapes: dict[tuple[str, str], list[int]],
    metadata: dict[str, str],
    precision: Precision,
    read: Callable[[str, str], Array],
) -> None:
    """Write a safetensors file. Not with the package, which takes all tensors at once and shuffles the metadata."""
    dtypes = {key: DTYPES["fp32" if key[1] in FP32_PARTS else precision] for key in shapes}
    # Larger items first, so that each tensor begins at a multiple of its item's size.
    order = sorted(shapes, key=lambda key: (-numpy.dtype(dtypes[key][1]).itemsize, key))
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for key in order:
        code, dtype = dtypes[key]
        begin, end = end, end + int(numpy.prod(shapes[key], dtype=numpy.int64)) * numpy.dtype(dtype).itemsize
        header[tensor_name(layout, *key)] = {"dtype": code, "shape": shapes[key], "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            tensor = read(*key)
            if not numpy.isfinite(tensor).all():
                raise SourceError(f"{tensor_name(layout, *key)} holds NaN or infinite values.")
            with numpy.errstate(over="ignore"):
                cast = tensor.astype(dtypes[key][1])
            if not numpy.isfinite(cast.astype(numpy.float32)).all():
                raise SourceError(f"{precision} can't hold the values of {tensor_name(layout, *key)}. Choose bf16.")
            file.write(cast.tobytes())
    assert target.stat().st_size == 8 + len(text) + end


def _zip(target: Path, folder: str, adapter: AdapterFile, weights: Path, metadata: dict[str, str]) -> None:
    """Write a zip of one `folder` with the adapter, its `weights` and how to load it. Weights are stored: they don't
    compress."""
    # Of no use to a program that is given the base model, and in others' folders it may be a path.
    config = read_json(adapter.weights.with_name(ADAPTER_FILES[0])) | {"base_model_name_or_path": None}
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, content: IO[bytes]) -> None:
            entry = zipfile.ZipInfo(f"{folder}/{name}")
            entry.external_attr = 0o644 << 16
            with archive.open(entry, "w", force_zip64=True) as file:
                shutil.copyfileobj(content, file, 1 << 20)

        add("HOW-TO-LOAD.txt", BytesIO(_how_to_load(adapter, metadata, folder).encode()))
        add(ADAPTER_FILES[0], BytesIO(json.dumps(config, indent=2, sort_keys=True).encode()))
        with weights.open("rb") as content:
            add(ADAPTER_FILES[1], content)


def _how_to_load(adapter: AdapterFile, metadata: dict[str, str], folder: str) -> str:
    """The text that goes with a PEFT folder."""
    trained_on = " ".join(filter(None, (metadata.get("base_model"), metadata.get("variant"))))
    made = ", made with Descant" if "descant_version" in metadata else ""
    return f"""{metadata.get("name", folder)}: {adapter}{made}.
It goes with the ACE-Step 1.5 model that it was trained on{trained_on and f", {trained_on}"}.

In ACE-Step: unpack the zip, and on the page, under LoRA, give the path of the folder {folder}.

In Python, with ACE-Step's own model:

    from peft import PeftModel

    model.decoder = PeftModel.from_pretrained(model.decoder, "{folder}")
"""
