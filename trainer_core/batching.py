"""Which samples are computed together and in which order: all of it random, and the same again from the same seed."""

from collections import defaultdict
from collections.abc import Iterator, Sequence

import torch
from torch import Generator, Tensor

from trainer_core.dataset import Sample
from trainer_core.objective import Objective, seed_of
from trainer_core.sources import SourceError


def split(samples: list[Sample], fraction: float, seed: int) -> tuple[list[Sample], list[Sample]]:
    """The samples to train on and those held out for validation, at least one of each where there is a `fraction`.

    Raises SourceError for a single sample.
    """
    if not fraction:
        return samples, []
    if len(samples) < 2:
        raise SourceError("A data set of one sample has none to hold out. Set the validation share to 0.")
    count = max(1, round(fraction * len(samples)))
    chosen = set(shuffled(len(samples), seed_of(seed, "held out"))[:count])
    return (
        [sample for index, sample in enumerate(samples) if index not in chosen],
        [sample for index, sample in enumerate(samples) if index in chosen],
    )


def shuffled(count: int, seed: int) -> list[int]:
    """The numbers below `count` in an order of their own for each seed."""
    order: list[int] = torch.randperm(count, generator=Generator().manual_seed(seed)).tolist()
    return order


def epoch_order(samples: Sequence[Sample], batch_size: int, seed: int, epoch: int) -> list[int]:
    """The order of an epoch, in which each `batch_size` in a row are of like length where there are such.

    What makes no full batch is drawn first and comes last, so that no length is always in the shorter update.
    """
    order = shuffled(len(samples), seed_of(seed, "order", epoch))
    if batch_size == 1:
        return order
    left = len(order) % batch_size
    alike = sorted(order[left:], key=lambda index: samples[index].shape)
    batches = [alike[first : first + batch_size] for first in range(0, len(alike), batch_size)]
    turns = shuffled(len(batches), seed_of(seed, "batches", epoch))
    return [index for turn in turns for index in batches[turn]] + order[:left]


def draw_batches(samples: Sequence[Sample], goal: Objective, generator: Generator) -> Iterator[dict[str, Tensor]]:
    """The samples with their noise, times and dropped conditions, stacked into one batch for each shape.

    Everything is drawn sample by sample, so a sample gets the same draws whatever it is batched with; and samples
    of unlike lengths are computed one after the other, so no padding enters attention or loss.
    """
    by_shape: dict[tuple[int, int], list[dict[str, Tensor]]] = defaultdict(list)
    for sample in samples:
        condition = sample.encoder_hidden_states.float()
        if goal.draw_dropped(1, generator).item():
            assert goal.null_condition is not None
            condition = goal.null_condition[0].expand_as(condition)
        by_shape[sample.shape].append(
            {
                "latents": sample.target_latents.float(),
                "noise": torch.randn(sample.target_latents.shape, generator=generator),
                "timesteps": goal.draw_timesteps(1, generator)[0],
                "condition": condition,
                "context": sample.context_latents.float(),
            }
        )
    for drawn in by_shape.values():
        yield {key: torch.stack([one[key] for one in drawn]) for key in drawn[0]}
