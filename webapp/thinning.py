"""Which points of a long curve a chart needs, and its moving average at those."""

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

NEWEST_STEPS = 50
"""They all stay: the page takes its pace from them."""
SMOOTHING = 0.95
"""Of the moving average; run_store.js goes on with the same."""
WINDOW = 800
"""Losses that an average feels: an older one weighs less than 1e-17."""


def choose(losses: "NDArray[np.float64]", points: int) -> list[int]:
    """Places of at most `points` losses, in order; NaN stands for one that was not finite.

    The first and the newest stay, and of each stretch of the others the highest and the lowest. A quarter of the
    points is kept for those that are not finite: where there are more, they are thinned evenly.
    """
    import numpy as np
    from tsdownsample import MinMaxDownsampler

    if len(losses) <= points:
        return list(range(len(losses)))
    is_bad = np.isnan(losses)
    bad = spread(np.flatnonzero(is_bad), points // 4)
    newest = np.arange(len(losses) - NEWEST_STEPS, len(losses))
    finite = np.flatnonzero(~is_bad)
    room = (points - len(bad) - NEWEST_STEPS - 1) // 2 * 2
    if len(finite) > room:
        finite = finite[MinMaxDownsampler().downsample(losses[finite], n_out=room)]
    chosen: list[int] = np.unique(np.concatenate(([0], finite, bad, newest))).tolist()
    return chosen


def spread(values: "NDArray[np.int64]", most: int) -> "NDArray[np.int64]":
    """At most `most` of the values, evenly over their places, the first and the last among them."""
    import numpy as np

    if len(values) <= most:
        return values
    return values[np.linspace(0, len(values) - 1, most).astype(np.int64)]


def averages(losses: "NDArray[np.float64]", places: list[int]) -> list[tuple[float, float]]:
    """The exponential moving average of the finite losses up to each place, as its sum and the sum of its weights.

    Divided they are the average; both are 0 before the first finite loss.
    """
    import numpy as np

    is_finite = ~np.isnan(losses)
    finite = losses[is_finite]
    counts = np.cumsum(is_finite)
    weights = (1 - SMOOTHING) * SMOOTHING ** np.arange(WINDOW - 1, -1, -1)
    found = []
    for place in places:
        count = int(counts[place])
        window = finite[max(0, count - WINDOW) : count]
        found.append((float(window @ weights[WINDOW - len(window) :]), 1 - SMOOTHING**count))
    return found
