"""The order in which runs wait for their turn. That they wait is seen from their folders; no more than that is kept."""

import json

from trainer_core.run_dir import RunDir, RunFolders


class RunQueue:
    """The waiting runs of one home. All but reading is done under `supervisor.starting`."""

    def __init__(self, runs: RunFolders) -> None:
        self._runs = runs
        self._file = runs.home / "queue.json"

    def is_empty(self) -> bool:
        """Whether nothing has been put in the queue, as far as the file knows."""
        return not self._order()

    def waiting(self) -> list[RunDir]:
        """The runs that wait, the next one first; those of which the file knows nothing last, oldest first."""
        order = {run_id: place for place, run_id in enumerate(self._order())}
        found = [run for run in self._runs if run.is_queued()]
        return sorted(found, key=lambda run: (order.get(run.id, len(order)), run.created, run.id))

    def add(self, run: RunDir) -> None:
        """Put `run` at the end."""
        self._write([other.id for other in self.waiting() if other.id != run.id] + [run.id])

    def move(self, run: RunDir, position: int) -> None:
        """Put `run`, which waits, at `position`, from 1; beyond the end is the end."""
        order = [other.id for other in self.waiting() if other.id != run.id]
        order.insert(min(position - 1, len(order)), run.id)
        self._write(order)

    def update(self) -> None:
        """Forget runs that don't wait any more, and note those that were put there by hand."""
        self._write([run.id for run in self.waiting()])

    def _order(self) -> list[str]:
        try:
            order = json.loads(self._file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):  # none yet, or damaged: then in the order they were made
            return []
        return [run_id for run_id in order if isinstance(run_id, str)] if isinstance(order, list) else []

    def _write(self, order: list[str]) -> None:
        if order == self._order():
            return
        partial = self._file.with_name(".queue.json")
        partial.write_text(json.dumps(order), encoding="utf-8")
        partial.replace(self._file)
