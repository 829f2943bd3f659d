"""Writing checkpoints: beside their final name, checked, flushed to disk, then renamed into place.

A folder that has its final name is complete, whatever killed the process or the power.
"""

import json
import os
import shutil
from pathlib import Path

from diffusers import AceStepTransformer1DModel
from safetensors import safe_open
from safetensors.torch import save_file

from trainer_core import adapter
from trainer_core.config import AdapterConfig
from trainer_core.events import Checkpoint
from trainer_core.run_dir import ADAPTER_FILES, RunDir


class CheckpointError(RuntimeError):
    """What was written is not what was trained."""


def save(
    run: RunDir, transformer: AceStepTransformer1DModel, config: AdapterConfig, step: int, epoch: int
) -> Checkpoint:
    """Write the adapter after update `step`; the returned event counts what is in the written file.

    Raises CheckpointError or OSError and leaves no folder under the final name.
    """
    name = f"step-{step:06d}"
    final, partial = run.checkpoints / name, run.checkpoints / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)

    tensors = adapter.tensors(transformer)
    weights = partial / ADAPTER_FILES[1]
    save_file(tensors, weights, metadata={"format": "pt"})
    adapter.save_config(config, partial)
    (partial / "state.json").write_text(json.dumps({"step": step, "epoch": epoch}), encoding="utf-8")

    _check(weights, transformer)
    size = weights.stat().st_size
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    partial.rename(final)
    _flush(run.checkpoints)
    return Checkpoint(name=name, step=step, epoch=epoch, bytes=size, tensors=len(tensors))


def _check(weights: Path, transformer: AceStepTransformer1DModel) -> None:
    trained = adapter.trainable(transformer)
    with safe_open(weights, "pt") as file:
        sizes = [file.get_slice(name).get_shape() for name in file.keys()]  # noqa: SIM118 (not a dict)
    expected = sorted(list(parameter.shape) for _, parameter in trained)
    if sorted(sizes) != expected:
        raise CheckpointError(f"{len(sizes)} tensors were written to {weights}, {len(expected)} were trained.")


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows can't open a folder
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
