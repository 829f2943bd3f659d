"""The folders that a request may name models, data sets and adapters in.

Covers: whoever may use the page but not all of the machine's files. Does not cover: people who can make links inside
these folders while a run is started; and the trainer itself, which does what its config.json says.
"""

import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from trainer_core.sources import SourceError, plain

SUFFIXES = (".json", ".pt", ".safetensors")
"""Of the files that a model, data set or adapter is read from."""
PARTS = ("transformer", "condition_encoder", "adapter")
"""The folders in such a folder that are looked into."""


@dataclass(frozen=True)
class Roots:
    """`folders`, absolute, with all that is in them; None is every folder."""

    folders: tuple[Path, ...] | None

    def check(self, path: str) -> None:
        """Raise SourceError unless the absolute `path` lies in one of the folders, also after links are followed.

        The links in a folder that it names are followed too.
        """
        if self.folders is None:
            return
        try:
            roots = [root.resolve() for root in self.folders]
            # As written first: on Windows to follow \\server\share would sign in to another machine.
            written = Path(os.path.normpath(path))
            if _is_in(written, (*self.folders, *roots)) and all(_is_in(each.resolve(), roots) for each in _read(path)):
                return
        except (OSError, RuntimeError, ValueError):  # a loop of links, as the Python version has it; a NUL
            pass
        allowed = ", ".join(map(str, self.folders))
        raise SourceError(
            f"{plain(path, 200)} is, or links to, something outside the folders that this server may read: {allowed}. "
            "Move it into one of them, or start Descant with --allow and its folder."
        )


ANYWHERE = Roots(None)


def _read(path: str) -> Iterator[Path]:
    """The path itself, its PARTS, and the links among their files."""
    for folder in (Path(path), *(Path(path) / part for part in PARTS)):
        yield folder
        yield from (found for found in folder.glob("*") if found.suffix in SUFFIXES and found.is_symlink())


def _is_in(path: Path, folders: Iterable[Path]) -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
