"""What fuzz tests share: the same examples every time, and ways to damage bytes."""

import json
from typing import Any

from hypothesis import HealthCheck, settings
from hypothesis import strategies as st


def repeatable(examples: int) -> settings:
    """So many examples, drawn the same way on every machine."""
    return settings(
        max_examples=examples,
        derandomize=True,
        deadline=None,
        database=None,
        suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow, HealthCheck.data_too_large],
    )


@st.composite
def damaged(draw: st.DrawFn, whole: bytes, first: int | None = None) -> bytes:
    """`whole` with some bytes changed, put in, or cut out, more often within the `first` ones."""
    content = bytearray(whole)
    for _ in range(draw(st.integers(1, 8))):
        most = draw(st.sampled_from([min(first or len(whole), len(content)), len(content)]))
        start = draw(st.integers(0, most))
        kind = draw(st.sampled_from(["change", "insert", "cut", "end"]))
        if kind == "end":
            del content[start:]
        elif kind == "cut":
            del content[start : start + draw(st.integers(1, 64))]
        else:
            piece = draw(st.binary(min_size=1, max_size=8))
            content[start : start + (len(piece) if kind == "change" else 0)] = piece
    return bytes(content)


def json_values() -> st.SearchStrategy[Any]:
    """Anything that JSON can say, large numbers and odd text too."""
    plain = st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | st.just(10**40)
    return st.recursive(
        plain, lambda inner: st.lists(inner) | st.dictionaries(st.text(max_size=8), inner), max_leaves=5
    )


def as_safetensors(header: object) -> bytes:
    """A safetensors file with this header, and some bytes behind it."""
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + bytes(64)
