"""Writing checkpoints: beside their final name, checked, flushed to disk, then renamed into place.

A folder that has its final name is complete, whatever killed the process or the power.
"""

import json
import os
import shutil
from pathlib import Path

from diffusers import AceStepTransformer1DModel
from safetensors.torch import load_file, save_file

from trainer_core import adapter
from trainer_core.config import AdapterConfig
from trainer_core.events import Checkpoint
from trainer_core.run_dir import ADAPTER_FILES, RunDir
from trainer_core.sources import shorten


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
    run.checkpoints.mkdir(exist_ok=True)  # not its parents: a deleted run is not made again
    partial.mkdir()

    weights = partial / ADAPTER_FILES[1]
    save_file(adapter.tensors(transformer), weights, metadata={"format": "pt"})
    adapter.save_config(config, partial)
    (partial / "state.json").write_text(json.dumps({"step": step, "epoch": epoch}), encoding="utf-8")

    tensors = _check(weights, transformer)
    size = weights.stat().st_size
    for file in partial.iterdir():
        _flush(file)
    _flush(partial)
    partial.rename(final)
    _flush(run.checkpoints)
    _flush(run.path)
    return Checkpoint(name=name, step=step, epoch=epoch, bytes=size, tensors=tensors)


def _check(weights: Path, transformer: AceStepTransformer1DModel) -> int:
    """How many tensors the file holds; CheckpointError unless they are those that were trained, bit for bit."""
    trained = {adapter.saved_name(name): parameter.detach().cpu() for name, parameter in adapter.trainable(transformer)}
    written = load_file(weights)
    lacking = [name for name, tensor in trained.items() if name not in written or not tensor.equal(written[name])]
    if lacking or len(written) != len(trained):
        raise CheckpointError(
            f"{len(written)} tensors were written to {weights}, {len(trained)} were trained; "
            f"not as trained: {shorten(lacking) or 'none'}."
        )
    return len(written)


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows can't open a folder
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
