"""Runs of the training loop in the test's own process, on the fixture model and its five samples."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.conftest import make_run
from trainer_core import objective
from trainer_core.events import Event, Finished, Step
from trainer_core.run_dir import RunDir
from trainer_core.train import train

Collected = tuple[RunDir, list[Event], Finished]
Kind = TypeVar("Kind", bound=Event)


def run_training(home: Path, after_event: Callable[[RunDir, Event], None] | None = None, **sections: Any) -> Collected:
    """Train in this process; the run, its events and how it finished."""
    run = make_run(home, **sections)
    events: list[Event] = []

    def emit(event: Event) -> None:
        events.append(event)
        if after_event:
            after_event(run, event)

    return run, events, train(run, run.load_config(), emit)


def stop_at(step: int) -> Callable[[RunDir, Event], None]:
    """An `after_event` that asks for a stop after update `step`."""

    def stop(run: RunDir, event: Event) -> None:
        if isinstance(event, Step) and event.step == step:
            run.stop.touch()

    return stop


def of_kind(events: list[Event], kind: type[Kind]) -> list[Kind]:
    return [event for event in events if isinstance(event, kind)]


def steps(events: list[Event]) -> list[Step]:
    return of_kind(events, Step)


def weights(run: RunDir, name: str) -> dict[str, Tensor]:
    return load_file(run.checkpoints / name / "adapter_model.safetensors")


def spoil_gradients(
    monkeypatch: pytest.MonkeyPatch,
    is_bad: Callable[[int], bool],
    spoil: Callable[[Tensor], Tensor] = lambda losses: losses * torch.inf,
) -> None:
    """Make the losses of some windows bad, by the count of losses computed so far."""
    calls = 0
    honest = objective.sample_losses

    def sample_losses(prediction: Tensor, latents: Tensor, noise: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        losses = honest(prediction, latents, noise)
        return spoil(losses) if is_bad(calls) else losses

    monkeypatch.setattr(objective, "sample_losses", sample_losses)


def write_samples(folder: Path, shapes: list[tuple[int, int]]) -> str:
    """A data set of made-up samples with these frames and condition tokens."""
    folder.mkdir()
    torch.manual_seed(0)
    for number, (frames, tokens) in enumerate(shapes):
        tensors = {
            "target_latents": torch.randn(frames, 64),
            "context_latents": torch.randn(frames, 128),
            "encoder_hidden_states": torch.randn(tokens, 64),
            "encoder_attention_mask": torch.ones(tokens),
        }
        torch.save(tensors, folder / f"{number:03d}.pt")
    return str(folder)
