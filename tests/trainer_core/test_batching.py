"""Samples of like length together, in an order that is random and the same again."""

import torch

from trainer_core.batching import epoch_order, shuffled
from trainer_core.dataset import Sample
from trainer_core.objective import seed_of


def of_lengths(*lengths: int) -> list[Sample]:
    return [
        Sample(str(frames), torch.zeros(frames, 64), torch.zeros(frames, 128), torch.zeros(3, 8)) for frames in lengths
    ]


def test_batches_are_of_like_length_and_each_sample_is_in_one() -> None:
    samples = of_lengths(*[100, 200, 300] * 8)
    orders = [epoch_order(samples, 4, seed=1, epoch=epoch) for epoch in range(1, 21)]
    for order in orders:
        assert sorted(order) == list(range(24))
        for first in range(0, 24, 4):
            assert len({samples[index].shape for index in order[first : first + 4]}) == 1
    assert len(set(map(tuple, orders))) == 20
    assert {samples[order[0]].shape[0] for order in orders} == {100, 200, 300}
    assert orders == [epoch_order(samples, 4, seed=1, epoch=epoch) for epoch in range(1, 21)]
    assert epoch_order(samples, 4, seed=2, epoch=1) != orders[0]


def test_the_short_batch_at_the_end_is_of_any_length() -> None:
    samples = of_lengths(*range(10, 23))
    last = {epoch_order(samples, 4, seed=0, epoch=epoch)[-1] for epoch in range(200)}
    assert last == set(range(13))


def test_without_batches_the_order_is_the_plain_one() -> None:
    samples = of_lengths(30, 10, 20, 10)
    assert epoch_order(samples, 1, seed=5, epoch=2) == shuffled(4, seed_of(5, "order", 2))
