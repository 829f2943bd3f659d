"""The order in which runs wait for their turn. That they wait is seen from their folders; no more than that is kept."""

import json

from trainer_core.run_dir import RunDir
from trainer_core.run_folders import RunFolders


class RunQueue:
    """The waiting runs of one home. All but reading is done under `supervisor.starting`."""

    def __init__(self, runs: RunFolders) -> None:
        self._runs = runs
        self._file = runs.home / "queue.json"

    def waiting(self) -> list[RunDir]:
        """The runs that wait, the next one first."""
        listed = map(self._runs.find, self._order())
        return [run for run in listed if run and run.is_queued()]

    def add(self, run: RunDir) -> None:
        """Put `run` at the end. Raises OSError when that can't be written."""
        self._write([*self.waiting(), run])

    def move(self, run: RunDir, position: int) -> None:
        """Put `run`, which waits, at `position`, from 1; beyond the end is the end. Raises OSError as `add` does."""
        order = [other for other in self.waiting() if other.id != run.id]
        order.insert(min(position - 1, len(order)), run)
        self._write(order)

    def take_up(self, before: float) -> None:
        """Add the runs made `before`, in seconds since 1970, that were neither begun nor added: a start was cut off.

        For a server's start only: later such a folder may be one that is still being copied here.
        """
        waiting = self.waiting()
        listed = {run.id for run in waiting}
        others = [run for run in self._runs if run.id not in listed and run.created < before and run.is_queued()]
        self._write(waiting + sorted(others, key=lambda run: run.created))

    def _order(self) -> list[str]:
        try:
            order = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # none yet, or damaged: `take_up` finds the runs
            return []
        return [run_id for run_id in order if isinstance(run_id, str)] if isinstance(order, list) else []

    def _write(self, waiting: list[RunDir]) -> None:
        order = [run.id for run in waiting]
        if order == self._order():
            return
        partial = self._file.with_name(".queue.json")
        partial.write_text(json.dumps(order), encoding="utf-8")
        partial.replace(self._file)
