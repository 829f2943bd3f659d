"""Checkpoints: written beside their final name, checked, flushed to disk, then renamed into place; and read back.

A folder that has its final name is complete, whatever killed the process or the power. It holds an adapter that loads
elsewhere, and what an exact resume needs besides; no pickle.
"""

import os
import re
import shutil
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from diffusers import AceStepTransformer1DModel
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.optim import Optimizer

from trainer_core import adapter, tensor_files
from trainer_core.adapter_files import ADAPTER_FILES, DORA_SCALES
from trainer_core.config import as_text
from trainer_core.events import Checkpoint
from trainer_core.matching import mismatch
from trainer_core.origin import STATE_FILES, OptimizerState, TrainingState
from trainer_core.run_dir import RunDir
from trainer_core.sources import SourceError, is_hub_id, shorten

COUNTERS = ("k", "d", "d_max", "d_hat", "d_numerator", "d_denom")
"""Prodigy's, kept in its parameter groups; all else there are options, which the settings give."""


class CheckpointError(RuntimeError):
    """What was written is not what was trained."""


def save(
    run: RunDir, module: nn.Module, variant: str, state: TrainingState, optimizer_tensors: Mapping[str, Tensor]
) -> Checkpoint:
    """Write the adapter in `module`, whatever wraps it, and the run's state; the event counts what is in the file.

    `variant` is the base model's, for the header.

    Raises CheckpointError or OSError and leaves no folder under the final name.
    """
    transformer = adapter.unwrap(module)
    name = f"step-{state.step:06d}"
    final, partial = run.checkpoints / name, run.checkpoints / f".{name}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    run.checkpoints.mkdir(exist_ok=True)  # not its parents: a deleted run is not made again
    partial.mkdir()
    try:
        weights = partial / ADAPTER_FILES[1]
        save_file(adapter.tensors(transformer), weights, metadata=_metadata(state, variant))
        adapter.save_config(state.config.adapter, partial)
        save_file(dict(optimizer_tensors), partial / STATE_FILES[0])
        (partial / STATE_FILES[1]).write_text(state.model_dump_json(), encoding="utf-8")

        trained = {adapter.saved_name(name): parameter for name, parameter in adapter.trainable(transformer)}
        _check(weights, trained)
        _check(partial / STATE_FILES[0], optimizer_tensors)
        if scales := adapter.dora_scales(transformer):
            save_file(scales, partial / DORA_SCALES)
            _check(partial / DORA_SCALES, scales)
        size = weights.stat().st_size
        for file in partial.iterdir():
            _flush(file)
        _flush(partial)
        partial.rename(final)
    except SafetensorError as error:
        # What the package makes of a full disk. On Windows the number is another, which OSError takes as its fourth.
        if number := re.search(r"os error (\d+)", str(error)):
            raise OSError(int(number[1]), os.strerror(int(number[1])), None, int(number[1])) from error
        raise CheckpointError(str(error)) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)  # on a full disk every byte counts
    _flush(run.checkpoints)
    _flush(run.path)
    return Checkpoint(name=name, step=state.step, epoch=state.epoch, bytes=size, tensors=len(trained))


def _metadata(state: TrainingState, variant: str) -> dict[str, str]:
    """What a file with the adapter says of it in its header. Of the base model's place no more than its last name."""
    settings, source = state.config, state.config.model.source
    described = {
        "format": "pt",
        "name": settings.name,
        "base_model": source if is_hub_id(source) else Path(source).name,
        "variant": variant,
        "adapter": settings.adapter.type,
        "rank": settings.adapter.rank,
        "alpha": settings.adapter.alpha,
        "rank_stabilized": settings.adapter.rank_stabilized,
        "steps": state.step,
        "epochs": state.epoch,
        "training_loss": f"{state.loss_sum / state.loss_samples:.6g}" if state.loss_samples else "unknown",
        "descant_version": metadata.version("descant"),
    }
    return {key: as_text(value) for key, value in described.items()}


def optimizer_state(
    optimizer: Optimizer, transformer: AceStepTransformer1DModel
) -> tuple[OptimizerState, dict[str, Tensor]]:
    """The state of `optimizer` over the adapter's parameters, and its tensors on the CPU as `<parameter>/<key>`."""
    names = {id(parameter): adapter.saved_name(name) for name, parameter in adapter.trainable(transformer)}
    counters = {key: optimizer.param_groups[0][key] for key in COUNTERS if key in optimizer.param_groups[0]}
    tensors: dict[str, Tensor] = {}
    numbers: dict[str, dict[str, int | float]] = {}
    for parameter, values in optimizer.state.items():  # not `state_dict()`: bitsandbytes nests its tensors there
        name = names[id(parameter)]
        for key, value in values.items():
            if isinstance(value, Tensor):
                # A copy: bitsandbytes lets all parameters share one quantisation table, which safetensors refuses.
                tensors[f"{name}/{key}"] = value.detach().to("cpu", copy=True).contiguous()
            else:
                numbers.setdefault(name, {})[key] = value
    shapes = {name: list(tensor.shape) for name, tensor in tensors.items()}
    return OptimizerState(counters=counters, numbers=numbers, shapes=shapes), tensors


def load_optimizer_state(
    optimizer: Optimizer, transformer: AceStepTransformer1DModel, checkpoint: Path, saved: OptimizerState
) -> tuple[int, int]:
    """Continue `optimizer` where a checkpoint left it; how many tensors it has, and how many were cast to fp32.

    Raises SourceError unless the tensors are those that were saved, for the parameters that are trained.
    """
    path = checkpoint / STATE_FILES[0]
    found = tensor_files.read(path, saved.shapes)
    names = {id(parameter): adapter.saved_name(name) for name, parameter in adapter.trainable(transformer)}
    order = [names[id(parameter)] for group in optimizer.param_groups for parameter in group["params"]]
    stateful = {name.rpartition("/")[0] for name in saved.shapes} | set(saved.numbers)
    if differences := mismatch(dict.fromkeys(order, ()), dict.fromkeys(stateful, ())):
        raise SourceError(f"The optimizer state in {path} is not that of the parameters to train: {differences}.")

    halves = [name for name, tensor in found.items() if tensor.dtype in (torch.float16, torch.bfloat16)]
    for name in halves:
        found[name] = found[name].float()
    # An optimizer numbers its parameters through its groups.
    indices = {name: index for index, name in enumerate(order)}
    states: dict[int, dict[str, Any]] = {index: dict(saved.numbers.get(name, {})) for name, index in indices.items()}
    for name, tensor in found.items():
        parameter, _, key = name.rpartition("/")
        states[indices[parameter]][key] = tensor.clone()  # what was read is a view of the file, which may be deleted
    groups = optimizer.state_dict()["param_groups"]
    for group in groups:
        group.update({key: value for key, value in saved.counters.items() if key in COUNTERS})
    optimizer.load_state_dict({"state": states, "param_groups": groups})
    return len(found), len(halves)


def _check(path: Path, expected: Mapping[str, Tensor]) -> None:
    """CheckpointError unless the file holds the tensors in `expected`, bit for bit."""
    if bad := [name for name, tensor in expected.items() if not tensor.isfinite().all()]:
        raise CheckpointError(
            f"Not saved: {len(bad)} of {len(expected)} tensors hold NaN or infinite values ({shorten(bad)}), so the "
            "checkpoint would be useless. Earlier ones are unharmed; a lower learning rate may help."
        )
    written = load_file(path)
    lacking = [
        name
        for name, tensor in expected.items()
        if name not in written or not tensor.detach().cpu().equal(written[name])
    ]
    if lacking or len(written) != len(expected):
        raise CheckpointError(
            f"{len(written)} tensors were written to {path}, {len(expected)} were trained; "
            f"not as trained: {shorten(lacking) or 'none'}."
        )


def _flush(path: Path) -> None:
    if path.is_dir() and os.name == "nt":  # Windows can't open a folder
        return
    handle = os.open(path, os.O_RDONLY if path.is_dir() else os.O_RDWR)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
