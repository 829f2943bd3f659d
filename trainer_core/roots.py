"""The folders that a request may name models, data sets and adapters in.

Covers: whoever may use the page but not all of the machine's files. Does not cover: people who can make links inside
these folders while a run is started; and the trainer itself, which does what its config.json says.
"""

import os
from dataclasses import dataclass
from pathlib import Path

from trainer_core.sources import SourceError, plain


@dataclass(frozen=True)
class Roots:
    """`folders`, absolute, with all that is in them; None is every folder."""

    folders: tuple[Path, ...] | None

    def check(self, path: str) -> None:
        """Raise SourceError unless the absolute `path` lies in one of the folders, also after links are followed."""
        if self.folders is None:
            return
        try:
            roots = [root.resolve() for root in self.folders]
            # As written first: on Windows to follow \\server\share would sign in to another machine.
            written = Path(os.path.normpath(path))
            if _is_in(written, (*self.folders, *roots)) and _is_in(Path(path).resolve(), roots):
                return
        except (OSError, RuntimeError, ValueError):  # a loop of links, as the Python version has it; a NUL
            pass
        allowed = " and ".join(map(str, self.folders))
        raise SourceError(
            f"{plain(path, 200)} lies outside of {allowed}, and this server takes nothing from elsewhere. Move it "
            "there, or start Descant with --allow and its folder."
        )


ANYWHERE = Roots(None)


def _is_in(path: Path, folders: "tuple[Path, ...] | list[Path]") -> bool:
    return any(path.is_relative_to(folder) for folder in folders)
