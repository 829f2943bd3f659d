"""The training run, top to bottom in one function: setup, loop, finish.

Covers: accumulation over short last windows, the guard against non-finite gradients, stop requests, checkpoints.
A step is one optimizer update over a window of `batch_size * gradient_accumulation` samples; the last window of an
epoch is as long as what is left. Each sample's loss is divided by its own window's length, so that losses and
gradients are plain means whatever the batch size and accumulation.
"""

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer_core import adapter, checkpoint, dataset, model, objective, optim, precision
from trainer_core.config import RunConfig
from trainer_core.dataset import Sample
from trainer_core.events import Epoch, Event, Finished, Phase, Skipped, Started, Step, Warning
from trainer_core.model import LoadedModel
from trainer_core.run_dir import RunDir
from trainer_core.sources import shorten

MIN_SKIPS_TO_ABORT, MAX_CONSECUTIVE_SKIPS = 3, 25


def train(run: RunDir, config: RunConfig, emit: Callable[[Event], None]) -> Finished:
    """Train the adapter that `config` describes into `run`; the last event is returned, not emitted.

    Raises SourceError or HardwareError for what the person can mend, CheckpointError or OSError when a save fails.
    """
    # Setup
    training = config.training
    device, number_format = precision.choose(config.hardware)
    fabric = precision.make_fabric(device, number_format)
    fabric.seed_everything(training.seed, verbose=False)
    generator = Generator().manual_seed(training.seed)  # on the CPU, so that all devices draw the same

    emit(Phase(name="loading_data", message="Reading and checking the data set"))
    samples = dataset.load(config.dataset.source)
    emit(Phase(name="loading_model", message="Loading the base model"))
    base = model.load(config.model.source, config.model.variant)
    dataset.check_width(samples, base.condition_width)
    if base.null_condition is None and objective.CONDITION_DROPOUT[base.variant]:
        emit(Warning(message="This model folder has no null_condition_emb: training without condition dropout."))

    transformer = base.transformer
    adapted_modules = adapter.inject(transformer, config.adapter)
    trained = dict(adapter.trainable(transformer))
    parameters = list(trained.values())
    window = training.batch_size * training.gradient_accumulation
    total_steps = training.epochs * math.ceil(len(samples) / window)
    warmup_steps = training.warmup_steps
    if warmup_steps >= total_steps:
        warmup_steps = total_steps // 10
        emit(
            Warning(
                message=f"A warm-up of {training.warmup_steps} steps is not shorter than the run of {total_steps}; "
                f"warming up for {warmup_steps} instead."
            )
        )
    optimizer = optim.make_optimizer(parameters, training)
    scheduler = optim.make_scheduler(optimizer, warmup_steps, total_steps)
    module, stepper = fabric.setup(transformer, optimizer)
    module.train()
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    emit(
        Started(
            device=str(fabric.device),
            precision=number_format,
            variant=base.variant,
            samples=len(samples),
            total_epochs=training.epochs,
            total_steps=total_steps,
            first_step=1,
            trainable_parameters=sum(parameter.numel() for parameter in parameters),
            adapted_modules=adapted_modules,
        )
    )
    emit(Phase(name="training", message=f"Training on {fabric.device}"))

    step = saved_step = consecutive_skips = epoch = 0

    def save() -> None:
        nonlocal saved_step
        emit(Phase(name="saving", message=f"Writing the checkpoint of step {step}"))
        emit(checkpoint.save(run, transformer, config.adapter, step, epoch))
        saved_step = step

    def finish(reason: Literal["completed", "stopped", "aborted"], message: str) -> Finished:
        return Finished(reason=reason, message=message, step=step, epoch=epoch)

    # Loop
    for epoch in range(1, training.epochs + 1):
        epoch_began = time.perf_counter()
        epoch_loss, epoch_samples, updates, skipped = 0.0, 0, 0, 0
        order = torch.randperm(len(samples), generator=generator).tolist()
        for start in range(0, len(order), window):
            began = time.perf_counter()
            chosen = [samples[index] for index in order[start : start + window]]
            loss = torch.zeros((), device=fabric.device)
            for first in range(0, len(chosen), training.batch_size):
                if not run.config.exists():
                    return finish("aborted", "The run's folder was moved or deleted while it was being trained.")
                if run.stop.exists():
                    if step == 0:
                        return finish("stopped", "Stopped before the first step; there was nothing to save.")
                    if step > saved_step:
                        save()
                    return finish("stopped", f"Stopped after step {step} of {total_steps}; checkpoint saved.")
                for batch in draw_batches(chosen[first : first + training.batch_size], base, generator):
                    batch = fabric.to_device(batch)
                    prediction = module(
                        hidden_states=objective.noisy(batch["latents"], batch["noise"], batch["timesteps"]),
                        timestep=batch["timesteps"],
                        timestep_r=batch["timesteps"],
                        encoder_hidden_states=batch["condition"],
                        context_latents=batch["context"],
                        return_dict=False,
                    )[0]
                    losses = objective.sample_losses(prediction, batch["latents"], batch["noise"])
                    batch_loss = losses.sum() / len(chosen)
                    fabric.backward(batch_loss)
                    loss += batch_loss.detach()

            if scaler is not None:
                scaler.unscale_(optimizer)
            total_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            loss_value, grad_norm = torch.stack([loss, total_norm]).tolist()  # the step's one device sync
            if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
                bad = [name for name, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()]
                if scaler is not None:
                    scaler.update()  # an overflow is ordinary in fp16: this lowers the scale
                optimizer.zero_grad()
                skipped += 1
                consecutive_skips += 1
                emit(
                    Skipped(
                        step=step + 1,
                        epoch=epoch,
                        reason="non-finite gradients" if bad else "non-finite loss",
                        nonfinite_tensors=len(bad),
                        total_tensors=len(trained),
                        names=[model.to_original(name) for name in bad[:3]],
                    )
                )
                if consecutive_skips < MAX_CONSECUTIVE_SKIPS:
                    continue
                return finish(
                    "aborted", f"{consecutive_skips} steps in a row {nonfinite_advice(device, number_format)}"
                )

            clip_grads_with_norm_(parameters, training.max_grad_norm, total_norm)
            learning_rate = optimizer.param_groups[0]["lr"]
            stepper.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            updates += 1
            consecutive_skips = 0
            epoch_loss += loss_value * len(chosen)
            epoch_samples += len(chosen)
            emit(
                Step(
                    step=step,
                    epoch=epoch,
                    loss=loss_value,
                    learning_rate=learning_rate,
                    grad_norm=grad_norm,
                    seconds=time.perf_counter() - began,
                    memory_bytes=precision.memory_bytes(fabric.device),
                )
            )

        emit(
            Epoch(
                epoch=epoch,
                loss=epoch_loss / epoch_samples if epoch_samples else None,
                updates=updates,
                skipped=skipped,
                seconds=time.perf_counter() - epoch_began,
            )
        )
        # A few in a row, since an epoch of one window may just be unlucky, and a scaler is still finding its scale.
        if updates == 0 and consecutive_skips >= MIN_SKIPS_TO_ABORT and scaler is None:
            return finish("aborted", f"In epoch {epoch} every step {nonfinite_advice(device, number_format)}")
        if epoch % training.save_every_epochs == 0 and step > saved_step:
            save()

    # Finish
    if step > saved_step:
        save()
    return finish("completed", f"Trained {step} steps in {epoch} epochs on {len(samples)} samples.")


def draw_batches(samples: Sequence[Sample], base: LoadedModel, generator: Generator) -> Iterable[dict[str, Tensor]]:
    """The samples with their noise, times and dropped conditions, stacked into one batch for each shape.

    Everything is drawn sample by sample, so a sample gets the same draws whatever it is batched with; and samples
    of unlike lengths are computed one after the other, so no padding enters attention or loss.
    """
    by_shape: dict[tuple[int, int], list[dict[str, Tensor]]] = defaultdict(list)
    for sample in samples:
        condition = sample.encoder_hidden_states.float()
        if objective.draw_dropped(base, 1, generator).item():
            assert base.null_condition is not None
            condition = base.null_condition[0].expand_as(condition)
        by_shape[sample.shape].append(
            {
                "latents": sample.target_latents.float(),
                "noise": torch.randn(sample.target_latents.shape, generator=generator),
                "timesteps": objective.draw_timesteps(base, 1, generator)[0],
                "condition": condition,
                "context": sample.context_latents.float(),
            }
        )
    for drawn in by_shape.values():
        yield {key: torch.stack([one[key] for one in drawn]) for key in drawn[0]}


def nonfinite_advice(device: str, number_format: str) -> str:
    """What happened and what to try, for the reason of an abort."""
    tries = ["lower the learning rate"]
    if number_format != "32-true":
        tries.append("choose precision 32-true")
    return (
        f"produced non-finite gradients on {device} with {number_format}; no update was made from them. "
        f"Try to {shorten(tries)}. Checkpoints written before are unharmed."
    )
