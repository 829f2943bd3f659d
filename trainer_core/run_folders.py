"""All runs of one home: making them, finding them by id, listing them."""

import re
import shutil
import unicodedata
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from trainer_core.config import RunConfig
from trainer_core.run_dir import RunDir, is_inside

# One folder's name, also as file managers name a copy: "20261130-084701-my-adapter (copy)".
RUN_ID = re.compile(r"\w[\w .()+-]{0,199}")


class RunFolders:
    """All runs of one home folder."""

    def __init__(self, home: Path) -> None:
        self.home = home
        self.path = home / "runs"

    def create(self, config: RunConfig, form_token: str = "") -> RunDir:
        """A new run folder that holds `config`. Raises OSError when it can't be written."""
        stem = f"{datetime.now():%Y%m%d-%H%M%S}-{slug(config.name)}".rstrip("-")
        path = _first_free(lambda count: self.path / (stem if count == 1 else f"{stem}-{count}"))
        try:
            if form_token:
                (path / "form_token").write_text(form_token, encoding="utf-8")
            # Last, as it makes the folder a run; and whole, as another server may look at it this moment.
            (path / ".config.json").write_text(config.model_dump_json(indent=2), encoding="utf-8")
            (path / ".config.json").rename(path / "config.json")
        except OSError:  # a full disk; an empty run would stay in the list for ever
            shutil.rmtree(path, ignore_errors=True)
            raise
        return RunDir(path)

    def find(self, run_id: str) -> RunDir | None:
        """The run with this id, or None. An id that would lead out of the folder finds nothing."""
        path = self.path / run_id
        if not RUN_ID.fullmatch(run_id) or not is_inside(path, self.path):
            return None
        try:
            return RunDir(path) if (path / "config.json").is_file() else None
        except OSError:  # a name longer than the system allows
            return None

    def __iter__(self) -> Iterator[RunDir]:
        """Newest first."""
        names = [path.name for path in self.path.iterdir()] if self.path.is_dir() else []
        found = [run for name in names if (run := self.find(name))]
        return iter(sorted(found, key=lambda run: (run.created, run.id), reverse=True))

    def active(self) -> list[RunDir]:
        """The runs whose trainers live."""
        return [run for run in self if run.is_alive()]


def _first_free(candidate: Callable[[int], Path]) -> Path:
    for count in range(1, 1000):
        try:
            candidate(count).mkdir(parents=True)
        except FileExistsError:
            continue
        return candidate(count)
    raise FileExistsError(f"There are already 999 folders like {candidate(1)}.")


def slug(name: str) -> str:
    """A run's name as a part of a file name that every system takes; empty where nothing of it is left."""
    plain = unicodedata.normalize("NFKD", name).encode("ascii", "ignore").decode().lower()
    return re.sub(r"[^a-z0-9]+", "-", plain).strip("-")[:40].strip("-")
