"""A table in the README that a benchmark writes."""

from collections.abc import Sequence
from pathlib import Path

README = Path(__file__).parent.parent / "README.md"


def write(name: str, head: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print the table, and put it between the README's two comments of that name. Raises ValueError without them."""
    lines = [head, ["---"] * len(head), *rows]
    table = "".join(f"| {' | '.join(line)} |\n" for line in lines)
    print(table)
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(f"<!-- {name} -->\n")
    _, _, after = rest.partition(f"<!-- end of {name} -->\n")
    if not after:
        raise ValueError(f"{README} has no place for the table {name}.")
    README.write_text(f"{before}<!-- {name} -->\n{table}<!-- end of {name} -->\n{after}", encoding="utf-8")
