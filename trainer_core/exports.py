"""A checkpoint as a file for another program, made from its two adapter files with numpy: no torch, no model.

What each program does with the tensors it reads decides what is written (each rule is tested as that program has it):
- PEFT and diffusers read rank and alpha beside the weights, so the weights are written as they are.
- ComfyUI multiplies a LoRA by `.alpha` / rank. A DoRA's `dora_scale` it divides by the norms of the base weights, not
  of the adapted ones as PEFT does, so the trainer computes it (`checkpoint.dora_scales`).
- LyCORIS and ComfyUI take a LoKr of two whole matrices at strength 1 whatever its alpha, and LyCORIS applies
  alpha / rank twice when it merges. The strength is therefore in the factors, and alpha is the rank.
Magnitudes and alphas stay fp32 in every precision: rounded to bf16, a magnitude would move whole rows of the base
weights by as much as training did.
"""

import json
import shutil
import zipfile
from io import BytesIO
from pathlib import Path
from typing import IO, Any

import numpy
from ml_dtypes import bfloat16
from safetensors import SafetensorError, safe_open

from trainer_core import adapter_files, formats
from trainer_core.adapter_files import ADAPTER_FILES, AdapterFile
from trainer_core.formats import FORMATS, FormatName, Layout, Precision, refusal, tensor_name
from trainer_core.naming import to_diffusers
from trainer_core.origin import DORA_SCALES
from trainer_core.run_dir import slug
from trainer_core.sources import SourceError, read_shapes, shorten

Array = numpy.ndarray[Any, Any]
DTYPES: dict[Precision, Any] = {"bf16": bfloat16, "fp16": numpy.float16, "fp32": numpy.float32}
DTYPE_NAMES = {"bfloat16": "BF16", "float16": "F16", "float32": "F32"}
FP32_PARTS = ("alpha", "lora_magnitude_vector")
# Of a file in a zip: the same checkpoint always gives the same bytes, so that a download can be resumed.
ZIP_DATE = (1980, 1, 1, 0, 0, 0)


def file_name(run: str, checkpoint: str, name: FormatName, precision: Precision) -> str:
    """What an export is called, after the name of its run."""
    return f"{slug(run) or 'adapter'}-{checkpoint}-{name}-{precision}{FORMATS[name].suffix}"


def export(checkpoint: Path, name: FormatName, precision: Precision, target: Path) -> int:
    """Write the adapter in the folder `checkpoint` to `target`; how many tensors are in it.

    Raises SourceError for an adapter that the format or the precision can't hold, OSError when it can't be written.
    """
    adapter = adapter_files.read(checkpoint)
    if adapter.layout != "peft" or adapter.factors:
        raise SourceError(f"{checkpoint} is no checkpoint of Descant: its adapter is not as PEFT trains one.")
    if reason := refusal(name, adapter.kind):
        raise SourceError(reason)
    try:
        with safe_open(adapter.weights, framework="numpy") as file:
            metadata = dict(file.metadata() or {})
            parts = {named: file.get_tensor(key).astype(numpy.float32) for key, named in adapter.names.items()}
    except (SafetensorError, KeyError, TypeError) as error:
        raise SourceError(f"{adapter.weights} can't be read as fp32 tensors: {error}.") from error
    layout: Layout = "lycoris" if name == "comfyui" and adapter.kind == "lokr" else name
    if name == "comfyui":
        _for_comfyui(adapter, parts)
    if layout == "lycoris":
        metadata |= {"algo": "lokr", "format": "lycoris", "lokr_config": json.dumps(_lokr_config(adapter))}
    elif layout == "diffusers":
        metadata["lora_adapter_metadata"] = json.dumps(_diffusers_metadata(adapter), sort_keys=True)
    tensors = {
        tensor_name(layout, module, part): tensor if part in FP32_PARTS else _cast(tensor, precision)
        for (module, part), tensor in parts.items()
    }
    if bad := [key for key, tensor in tensors.items() if not numpy.isfinite(tensor.astype(numpy.float32)).all()]:
        raise SourceError(f"{precision} can't hold {len(bad)} of {len(tensors)} tensors ({shorten(bad)}). Choose bf16.")

    partial = target.with_name(f"{target.name}.partial")
    try:
        _write(tensors, metadata, partial)
        if name == "peft":
            _zip(adapter, partial, how_to_load(adapter, metadata, target.stem), target)
        else:
            partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)
    return len(tensors)


def _for_comfyui(adapter: AdapterFile, parts: dict[tuple[str, str], Array]) -> None:
    """Make the adapter's tensors those that ComfyUI and LyCORIS give the same strength."""
    strength = formats.scale(adapter.settings)
    for module in adapter.modules:
        alpha = adapter.settings["rank"] * (1 if adapter.kind == "lokr" else strength)
        parts[module, "alpha"] = numpy.array(alpha, numpy.float32)
        if adapter.kind == "lokr":
            first = "lokr_w1" if (module, "lokr_w1") in parts else "lokr_w1_a"
            parts[module, first] = parts[module, first] * numpy.float32(strength)
    if adapter.kind == "dora":
        path = adapter.weights.with_name(DORA_SCALES)
        if not path.is_file():
            raise SourceError(
                f"{path.parent} has no {DORA_SCALES}, which ComfyUI's file of a DoRA is made with. Checkpoints have "
                "it that this version of Descant writes; continue the run from this one to get such a checkpoint."
            )
        with safe_open(path, framework="numpy") as file:
            for module in adapter.modules:
                parts[module, "lora_magnitude_vector"] = file.get_tensor(module)[:, None]


def _lokr_config(adapter: AdapterFile) -> dict[str, Any]:
    """What ACE-Step builds the modules with before it loads the file."""
    settings = adapter.settings
    return {
        "linear_dim": settings["rank"],
        "linear_alpha": settings["rank"],
        "factor": settings["decompose_factor"],
        "decompose_both": settings["decompose_both"],
        "target_modules": sorted({module.rpartition(".")[2] for module in adapter.modules}),
        **dict.fromkeys(
            (
                "use_tucker",
                "use_scalar",
                "weight_decompose",
                "full_matrix",
                "bypass_mode",
                "rs_lora",
                "unbalanced_factorization",
            ),
            False,
        ),
    }


def _diffusers_metadata(adapter: AdapterFile) -> dict[str, Any]:
    """PEFT's options that matter, the few that every version of it has, as diffusers keeps them in a file's header."""
    options = {
        "r": adapter.settings["rank"],
        "lora_alpha": adapter.settings["alpha"],
        "use_rslora": adapter.settings["rank_stabilized"],
        "target_modules": [to_diffusers(f".{module}.").strip(".") for module in adapter.modules],
    }
    return {f"transformer.{key}": value for key, value in options.items()}


def _cast(tensor: Array, precision: Precision) -> Array:
    with numpy.errstate(over="ignore"):  # looked for afterwards
        return tensor.astype(DTYPES[precision])


def _write(tensors: dict[str, Array], metadata: dict[str, str], target: Path) -> None:
    """Write a safetensors file, and read back from its header that all is there.

    Not with the package's own function: it shuffles the metadata at every call, and a download can only be resumed
    with the same bytes.
    """
    order = sorted(tensors, key=lambda key: (-tensors[key].itemsize, key))  # so that each begins at a multiple of it
    header: dict[str, Any] = {"__metadata__": dict(sorted(metadata.items()))}
    end = 0
    for key in order:
        begin, end = end, end + tensors[key].nbytes
        dtype = DTYPE_NAMES[tensors[key].dtype.name]
        header[key] = {"dtype": dtype, "shape": list(tensors[key].shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    with target.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for key in order:
            file.write(tensors[key].astype(tensors[key].dtype.newbyteorder("<"), copy=False).tobytes())
    if read_shapes([target]) != {key: list(tensor.shape) for key, tensor in tensors.items()}:
        raise OSError(f"{target} does not hold the {len(tensors)} tensors that were written to it")


def _zip(adapter: AdapterFile, weights: Path, text: str, target: Path) -> None:
    """Write a zip of one folder, called as it is, with the adapter, its `weights` and how to load it.

    Weights don't compress, so they are stored.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:

        def add(name: str, content: IO[bytes]) -> None:
            entry = zipfile.ZipInfo(f"{target.stem}/{name}", ZIP_DATE)
            entry.external_attr = 0o644 << 16
            with archive.open(entry, "w", force_zip64=True) as file:
                shutil.copyfileobj(content, file, 1 << 20)

        add("HOW-TO-LOAD.txt", BytesIO(text.encode()))
        for name, path in zip(ADAPTER_FILES, (adapter.weights.with_name(ADAPTER_FILES[0]), weights), strict=True):
            with path.open("rb") as content:
                add(name, content)


def how_to_load(adapter: AdapterFile, metadata: dict[str, str], folder: str) -> str:
    """The text that goes with a PEFT folder."""
    base = (
        " ".join(filter(None, (metadata.get("base_model"), metadata.get("variant")))) or "the model it was trained on"
    )
    return f"""{metadata.get("name", folder)}: {adapter}, made with Descant.
It goes with ACE-Step 1.5, {base}; with another variant it does something else.

In ACE-Step: unpack the zip, and on the page, under LoRA, give the path of the folder {folder}.

In Python, with ACE-Step's own model:

    from peft import PeftModel

    model.decoder = PeftModel.from_pretrained(model.decoder, "{folder}")
"""
