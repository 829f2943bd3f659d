"""The training run, top to bottom in one function: setup, loop, finish.

Covers: accumulation over short last windows, the guard against non-finite gradients, validation, stop requests,
checkpoints, and going on from one.
A step is one optimizer update over a window of `batch_size * gradient_accumulation` samples; the last window of an
epoch is as long as what is left. Each sample's loss is divided by its own window's length, so that losses and
gradients are plain means whatever the batch size and accumulation.
"""

import errno
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import Literal

import torch
from torch import Generator, Tensor
from torch.nn.utils import clip_grads_with_norm_, get_total_norm

from trainer_core import (
    adapter,
    adapter_files,
    allocator,
    attention,
    checkpoint,
    compiling,
    dataset,
    gradient_checkpointing,
    memory,
    model,
    model_shape,
    objective,
    optim,
    origin,
    precision,
)
from trainer_core.batching import draw_batches, epoch_order, split
from trainer_core.computed_once import compute_once
from trainer_core.config import RunConfig
from trainer_core.events import Epoch, Event, Finished, Phase, Skipped, Started, Step, Validation, Warning
from trainer_core.fingerprint import fingerprint
from trainer_core.lean_blocks import use_lean_blocks
from trainer_core.objective import seed_of
from trainer_core.origin import TrainingState
from trainer_core.patches import use_patches
from trainer_core.run_dir import RunDir
from trainer_core.sources import SourceError, shorten

MIN_SKIPS_TO_ABORT = 3
DISK_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
RETRY_SECONDS = 5.0
VALIDATION_DRAWS = 4
"""How many times each held-out sample is measured, each with its own noise and time: one time says little of all."""


def train(run: RunDir, config: RunConfig, emit: Callable[[Event], None]) -> Finished:
    """Train the adapter that `config` describes into `run`; the last event is returned, not emitted.

    Raises SourceError or HardwareError for what the person can mend, CheckpointError or OSError when a save fails.
    """

    def warn(message: str) -> None:
        emit(Warning(message=message))

    # Setup
    training = config.training
    start_from = adapter_files.read(Path(config.start_from)) if config.start_from else None
    if problems := origin.check(config, start_from):
        raise SourceError(" ".join(problems.values()))
    device, number_format = precision.choose(config.hardware, config.model.base_dtype)
    if precision.is_emulated(device, number_format):
        warn(
            "This processor has no units for bf16, so bf16-mixed is very slow here. Choose 32-true or auto, which are "
            "fast with base weights in bf16 too."
        )
    checkpointing = precision.choose_checkpointing(training.gradient_checkpointing, device, config.adapter)
    fabric = precision.make_fabric(device, number_format)
    resumed = origin.read_state(Path(config.resume_from)) if config.resume_from else None

    emit(Phase(name="loading_data", message="Reading and checking the data set"))
    samples, held_out = split(dataset.load(config.dataset.source), config.dataset.validation_fraction, training.seed)
    dataset_name = fingerprint(
        (f"{sample.name} {key}", tensor) for sample in [*samples, *held_out] for key, tensor in sample.tensors.items()
    )
    emit(Phase(name="loading_model", message="Loading the base model"))
    base = model.load(config.model.source, config.model.variant, config.model.base_dtype, fabric.device)
    goal = objective.make_objective(base, training)
    base_name = base.fingerprint
    dataset.check_width([*samples, *held_out], base.condition_width)
    dataset.check_variant(config.dataset.source, base.variant)
    if base.null_condition is None and objective.wanted_dropout(base.variant, training):
        warn(
            "This model folder has no null_condition_emb: training without condition dropout. Guidance may be weak "
            "with the adapter; downloading the model again may help."
        )

    transformer = base.transformer
    fabric.seed_everything(training.seed, verbose=False)
    adapted_modules = adapter.inject(transformer, config.adapter)
    if config.adapter.type == "lokr" and not start_from and (whole := adapter.idle_rank(transformer)):
        warn(
            f"Rank {config.adapter.rank} has no effect on the size of {whole} of {adapted_modules} "
            "modules, only on their strength (alpha / rank): with a Kronecker factor of "
            f"{config.adapter.decompose_factor} their matrices are smaller than it. A lower rank or another factor "
            "gives it one."
        )
    trained = dict(adapter.trainable(transformer))
    parameters = list(trained.values())
    assert all(parameter.dtype == torch.float32 for parameter in parameters)

    window = training.batch_size * training.gradient_accumulation
    total_steps = training.epochs * math.ceil(len(samples) / window)
    warmup_steps = training.warmup_steps
    if warmup_steps >= total_steps:
        warmup_steps = total_steps // 10
        warn(
            f"A warm-up of {training.warmup_steps} steps is not shorter than the run of {total_steps}; "
            f"warming up for {warmup_steps} instead."
        )
    if training.optimizer == "prodigy" and training.learning_rate < 0.1:
        warn(
            f"Prodigy multiplies the rate it finds by the learning rate; at {training.learning_rate:g} it "
            "will hardly move. 1 is usual."
        )
    optimizer = optim.make_optimizer(trained, training, fabric.device)
    module, stepper = fabric.setup(transformer, optimizer)
    longest = max(sample.target_latents.shape[0] for sample in samples)
    with fabric.autocast():
        windowed = attention.fastest(transformer, longest // transformer.config.patch_size, fabric.device)
        compute_once(transformer, fabric.device)
    attention.use_training_attention(transformer, windowed)
    use_lean_blocks(transformer)
    use_patches(transformer)
    module.train()
    assert all(parameter is trained[name] for name, parameter in adapter.trainable(transformer))
    assert all(parameter.dtype == torch.float32 for parameter in parameters)
    scaler = getattr(fabric.strategy.precision, "scaler", None)
    plan = memory.plan(  # of what is free now that the model is where it is computed
        model_shape.read_shape(transformer.config),
        config,
        dataset.sizes([*samples, *held_out]),
        number_format,
        checkpointing,
        precision.free_bytes(fabric.device),
    )
    if plan.shortage:
        warn(plan.shortage)
    gradient_checkpointing.enable(transformer, plan.recomputed)
    if plan.is_tight and device == "cpu":
        allocator.give_back_at_once()

    step = saved_step = consecutive_skips = epoch = 0
    first_epoch = 1
    position, loss_sum, loss_samples, updates, skipped = 0, 0.0, 0, 0, 0
    validation_loss, validation_step = math.nan, 0
    if start_from:
        matched, cast = adapter.load(transformer, start_from)
        emit(
            Phase(
                name="loading_adapter",
                message=f"Starting from {start_from.place}: {matched} of {len(trained)} tensors matched, {cast} of "
                "them cast to fp32. Optimizer, schedule and steps begin anew.",
            )
        )
    if resumed is not None:
        folder = Path(config.resume_from)
        if resumed.base_model != base_name:
            raise SourceError(
                f"The base model in {config.model.source} is not the one that {folder} was trained on: its weights "
                "or its config differ. Give that model, or give the checkpoint under Start from."
            )
        if (resumed.dataset, resumed.samples) != (dataset_name, len(samples)):
            raise SourceError(
                f"The data set in {config.dataset.source} is not the one that {folder} was trained on: {len(samples)} "
                f"samples now, {resumed.samples} then, or other contents. Give that data set, or give the checkpoint "
                "under Start from."
            )
        matched, cast = adapter.load(transformer, adapter_files.read(folder))
        states, cast_states = checkpoint.load_optimizer_state(optimizer, transformer, folder, resumed.optimizer)
        if scaler is not None and resumed.scaler:
            scaler.load_state_dict(resumed.scaler)
        step = resumed.step  # not saved_step: this run's folder has no checkpoint yet
        first_epoch = resumed.epochs_done + 1
        consecutive_skips = resumed.consecutive_skips
        if resumed.validation_loss is not None:
            validation_loss, validation_step = resumed.validation_loss, step
        if resumed.position < resumed.samples:
            position, loss_sum, loss_samples = resumed.position, resumed.loss_sum, resumed.loss_samples
            updates, skipped = resumed.updates, resumed.skipped
        emit(
            Phase(
                name="loading_adapter",
                message=f"Resuming after step {step} of {folder}: {matched} of {len(trained)} tensors of the adapter "
                f"and {states} of {len(resumed.optimizer.shapes)} of the optimizer matched",
            )
        )
        if cast:
            warn(f"{cast} of {matched} adapter tensors were not in fp32; cast to it.")
        if cast_states:
            warn(f"{cast_states} of {states} optimizer tensors were in half precision; cast to fp32.")
        if (resumed.device, resumed.precision) != (device, number_format):
            warn(
                f"The run was on {resumed.device} with {resumed.precision} and continues on {device} with "
                f"{number_format}: rightly, but not bit for bit as it would have there."
            )
        if (before := resumed.config.model.base_dtype) != config.model.base_dtype:
            held, hold = (kind.replace("auto", "fp32") for kind in (before, config.model.base_dtype))
            warn(f"The run had base weights in {held} and continues with them in {hold}.")
    scheduler = optim.make_scheduler(optimizer, training, warmup_steps, total_steps, done=step)

    def on_device(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        """The batch on its way to the device; on cuda the host does not wait for it."""
        if fabric.device.type == "cuda":
            batch = {name: tensor.pin_memory() for name, tensor in batch.items()}
        moved: dict[str, Tensor] = fabric.to_device(batch)
        return moved

    def predict(batch: dict[str, Tensor]) -> Tensor:
        """The velocities the model predicts for a drawn batch, [B, T, 64]."""
        hidden_states = objective.noisy(batch["latents"], batch["noise"], batch["timesteps"])
        prediction: Tensor = module(
            hidden_states=hidden_states,
            timestep=batch["timesteps"],
            timestep_r=batch["timesteps"],
            encoder_hidden_states=batch["condition"],
            context_latents=batch["context"],
            return_dict=False,
        )[0]
        return prediction

    def rehearse() -> None:
        """Compute a batch forward and backward, and forget it."""
        batch = on_device(next(draw_batches(samples[: training.batch_size], goal, Generator())))
        fabric.backward(objective.sample_losses(predict(batch), batch["latents"], batch["noise"]).mean())
        optimizer.zero_grad()

    is_compiled = False
    if config.hardware.compile:
        emit(Phase(name="compiling", message="Compiling the model's blocks"))
        problem = compiling.compile_blocks(transformer, rehearse)
        is_compiled = not problem
        if problem:
            optimizer.zero_grad()
            warn(f"The model's blocks could not be compiled; training goes on without, only slower. {problem}")

    emit(
        Started(
            device=str(fabric.device),
            precision=number_format,
            variant=base.variant,
            base_dtype="fp32" if config.model.base_dtype == "auto" else config.model.base_dtype,
            gradient_checkpointing=plan.description,
            estimated_bytes=plan.estimate.total,
            window_attention=windowed.__name__,
            compiled=is_compiled,
            samples=len(samples),
            validation_samples=len(held_out),
            total_epochs=training.epochs,
            total_steps=total_steps,
            first_step=step + 1,
            trainable_parameters=sum(parameter.numel() for parameter in parameters),
            adapted_modules=adapted_modules,
        )
    )
    emit(Phase(name="training", message=f"Training on {fabric.device}"))

    def rest_of_epoch() -> Iterator[tuple[int, dict[str, Tensor]]]:
        """The batches that are left of the epoch, each with where in the order its window begins.

        Each is drawn when it is asked for. groupby asks for the first of a window before the one before it has ended:
        on a graphics card it is drawn and sent while that is still being computed.
        """
        order = epoch_order(samples, training.batch_size, training.seed, epoch)
        for start in range(position, len(order), window):
            generator = Generator().manual_seed(seed_of(training.seed, "noise", epoch, start))
            for first in range(start, min(start + window, len(order)), training.batch_size):
                chosen = [samples[index] for index in order[first : min(first + training.batch_size, start + window)]]
                for batch in draw_batches(chosen, goal, generator):
                    yield start, on_device(batch)

    def validate() -> None:
        """Measure the mean loss over the held-out samples, unless a stop is asked for meanwhile."""
        nonlocal validation_loss, validation_step
        module.eval()
        generator = Generator().manual_seed(seed_of(training.seed, "validation"))
        without_dropout = replace(goal, condition_dropout=0.0)
        losses: list[Tensor] = []
        with torch.no_grad():
            for sample in held_out * VALIDATION_DRAWS:
                if run.stop.exists():
                    break
                for batch in map(on_device, draw_batches([sample], without_dropout, generator)):
                    losses.append(objective.sample_losses(predict(batch), batch["latents"], batch["noise"]))
        module.train()
        if len(losses) == len(held_out) * VALIDATION_DRAWS:
            validation_loss, validation_step = torch.cat(losses).mean().item(), step
            emit(Validation(step=step, epoch=epoch, loss=validation_loss))
        else:
            warn(f"A stop was asked for while validating: epoch {epoch} has no validation loss.")

    def save() -> None:
        nonlocal saved_step
        emit(Phase(name="saving", message=f"Writing the checkpoint of step {step}"))
        optimizer_state, optimizer_tensors = checkpoint.optimizer_state(optimizer, transformer)
        state = TrainingState(
            step=step,
            epoch=epoch,
            position=position,
            samples=len(samples),
            loss_sum=loss_sum,
            loss_samples=loss_samples,
            updates=updates,
            skipped=skipped,
            consecutive_skips=consecutive_skips,
            validation_loss=validation_loss if validation_step == step and math.isfinite(validation_loss) else None,
            device=device,
            precision=number_format,
            base_model=base_name,
            dataset=dataset_name,
            optimizer=optimizer_state,
            scaler=scaler.state_dict() if scaler is not None else None,
            config=config,
        )
        emit(checkpoint.save(run, module, base.variant, state, optimizer_tensors))
        saved_step = step

    def save_or_go_on() -> None:
        """Save; on a full disk training goes on, and the next save may find room."""
        try:
            save()
        except OSError as error:
            if error.errno not in DISK_FULL:
                raise
            warn(f"{no_room(error)} Training goes on; free some space before the next one.")

    def save_at_last() -> None:
        """Save; on a full disk wait for room, since what was learned is nowhere but in memory."""
        is_waiting = False
        while step > saved_step:
            try:
                save()
            except OSError as error:
                if error.errno not in DISK_FULL or not run.config.exists():
                    raise
                if not is_waiting:
                    warn(f"{no_room(error)} Trying again every {RETRY_SECONDS:.0f} s: free some space.")
                is_waiting = True
                time.sleep(RETRY_SECONDS)

    def no_room(error: OSError) -> str:
        kept = f"that of step {saved_step} is kept" if saved_step else "there is none before it"
        return f"The checkpoint of step {step} could not be written ({error.strerror}); {kept}."

    def finish(reason: Literal["completed", "stopped", "aborted"], message: str) -> Finished:
        return Finished(reason=reason, message=message, step=step, epoch=epoch)

    def abort(message: str) -> Finished:
        # The bad updates were never made, so what was learned before them is worth keeping, if it is still sound.
        if all(parameter.isfinite().all() for parameter in parameters):
            save_at_last()
        return finish("aborted", message)

    # Loop
    if resumed and held_out and resumed.validation_loss is None and resumed.position in (0, resumed.samples):
        epoch = resumed.epochs_done  # its validation was interrupted
        validate()
    for epoch in range(first_epoch, training.epochs + 1):
        if epoch > first_epoch:
            position, loss_sum, loss_samples, updates, skipped = 0, 0.0, 0, 0, 0
        epoch_began = time.perf_counter()
        for start, batches in groupby(rest_of_epoch(), itemgetter(0)):
            began = time.perf_counter()
            window_samples = min(window, len(samples) - start)
            torch.manual_seed(seed_of(training.seed, "dropout", epoch, start))
            loss = torch.zeros((), device=fabric.device)
            for _, batch in batches:
                if not run.config.exists():
                    return finish("aborted", "The run's folder was moved or deleted while it was being trained.")
                if run.stop.exists():
                    optimizer.zero_grad()
                    if step == 0:
                        return finish("stopped", "Stopped before the first step; there was nothing to save.")
                    save_at_last()
                    return finish("stopped", f"Stopped after step {step:,} of {total_steps:,}; checkpoint saved.")
                losses = objective.sample_losses(predict(batch), batch["latents"], batch["noise"])
                batch_loss = losses.sum() / window_samples
                fabric.backward(batch_loss)
                loss += batch_loss.detach()

            if scaler is not None:
                scaler.unscale_(optimizer)
            total_norm = get_total_norm([p.grad for p in parameters if p.grad is not None])
            loss_value, grad_norm = torch.stack([loss, total_norm]).tolist()  # the step's one device sync
            position = start + window_samples
            if not (math.isfinite(loss_value) and math.isfinite(grad_norm)):
                bad = [name for name, p in trained.items() if p.grad is not None and not p.grad.isfinite().all()]
                if scaler is not None:
                    scaler.update()  # an overflow is ordinary in fp16: this lowers the scale
                optimizer.zero_grad()
                skipped += 1
                consecutive_skips += 1
                if bad:
                    reason = "non-finite gradients"
                else:
                    reason = "gradients too large for fp32" if math.isfinite(loss_value) else "non-finite loss"
                emit(
                    Skipped(
                        step=step + 1,
                        epoch=epoch,
                        reason=reason,
                        nonfinite_tensors=len(bad),
                        total_tensors=len(trained),
                        names=[adapter.saved_name(name).removeprefix(adapter.PEFT_PREFIX) for name in bad[:3]],
                    )
                )
                if consecutive_skips < training.max_consecutive_skips:
                    continue
                return abort(f"{consecutive_skips} steps in a row {nonfinite_advice(device, number_format)}")

            clip_grads_with_norm_(parameters, training.max_grad_norm, total_norm)
            group = optimizer.param_groups[0]
            learning_rate = group["lr"] * group.get("d", 1.0)  # Prodigy multiplies it by its own estimate
            stepper.step()
            scheduler.step()
            optimizer.zero_grad()
            step += 1
            updates += 1
            consecutive_skips = 0
            loss_sum += loss_value * window_samples
            loss_samples += window_samples
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
                loss=loss_sum / loss_samples if loss_samples else None,
                updates=updates,
                skipped=skipped,
                seconds=time.perf_counter() - epoch_began,
            )
        )
        # A few in a row, since an epoch of one window may just be unlucky, and a scaler is still finding its scale.
        if updates == 0 and consecutive_skips >= MIN_SKIPS_TO_ABORT and scaler is None:
            return abort(f"In epoch {epoch} every step {nonfinite_advice(device, number_format)}")
        if held_out and updates:
            validate()
        if (epoch % training.save_every_epochs == 0 or epoch == training.epochs) and step > saved_step:
            save_or_go_on() if epoch < training.epochs else save_at_last()

    # Finish
    here = f" This run made steps {resumed.step + 1} to {step}." if resumed else ""
    counts = " in ".join(f"{n} {unit}{'s' if n > 1 else ''}" for n, unit in ((step, "step"), (epoch, "epoch")))
    return finish("completed", f"Trained {counts} on {len(samples)} samples.{here}")


def nonfinite_advice(device: str, number_format: str) -> str:
    """What happened and what to try, for the reason of an abort."""
    tries = ["lower the learning rate"]
    if number_format != "32-true":
        tries.append("choose precision 32-true")
    return (
        f"produced non-finite gradients on {device} with {number_format}; no update was made from them. "
        f"Try to {shorten(tries)}. Checkpoints written before are unharmed."
    )
