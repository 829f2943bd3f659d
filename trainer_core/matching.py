"""What was found against what is needed: all of it, by name and shape, or words with counts. Light."""

from collections.abc import Mapping, Sequence

from trainer_core.sources import shorten


def mismatch(expected: Mapping[str, Sequence[int]], found: Mapping[str, Sequence[int]]) -> str | None:
    """How the shapes in `found` differ from those `expected`, in words with counts; None where they are the same."""
    missing = [name for name in expected if name not in found]
    unexpected = [name for name in found if name not in expected]
    reshaped = [
        f"{name} is {list(found[name])}, should be {list(shape)}"
        for name, shape in expected.items()
        if name in found and list(found[name]) != list(shape)
    ]
    if not (missing or unexpected or reshaped):
        return None
    named = [
        f"{len(names)} {kind} ({shorten(names)})"
        for kind, names in (("missing", missing), ("unexpected", unexpected), ("of another shape", reshaped))
        if names
    ]
    return f"{len(expected) - len(missing) - len(reshaped)} of {len(expected)} match, {', '.join(named)}"
