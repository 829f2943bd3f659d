"""How long the samples of a data set are, told from its files without torch.

The largest file stands for the longest sample: nearly all of a file is latents. What is in it is read from the pickle
in the `.pt` file, an ordinary zip, by an unpickler that makes shapes where it says tensors and knows nothing else: no
code that a file names is found or run.
"""

import io
import pickle
import zipfile
from collections import OrderedDict
from collections.abc import Callable
from pathlib import Path
from typing import Any

from trainer_core.free_memory import holds
from trainer_core.memory import Samples
from trainer_core.sources import DEMO, SourceError, find_tensors

DEMO_SAMPLES = Samples(frames=500, condition_tokens=20, bytes=2_120_000)
"""What `demo.samples` makes, for which it needs torch."""
KNOWN: dict[tuple[str, str], Callable[..., Any]] = {
    ("torch._utils", "_rebuild_tensor_v2"): lambda storage, offset, shape, *rest: shape,
    ("collections", "OrderedDict"): OrderedDict,
}
MAX_PICKLE_BYTES = 1 << 20
"""It holds names, shapes and some text."""


def measure(source: str) -> Samples:
    """The size of a data set, `demo` or a folder. Raises SourceError for a folder or largest file that is none."""
    if source == DEMO:
        return DEMO_SAMPLES
    try:
        sizes = {path: path.stat().st_size for path in find_tensors(Path(source))}
        largest = max(sizes, key=lambda path: sizes[path])
        shapes = _read_shapes(largest)
        frames, condition = (shapes[name] for name in ("target_latents", "encoder_hidden_states"))
        total = sum(sizes.values())
        return Samples(frames[0], condition[0], total if holds(total) else 0)
    except SourceError:
        raise
    except Exception as error:  # damaged bytes make an unpickler raise nearly anything
        raise SourceError(f"How long the samples in {source} are can't be read from its largest file.") from error


def _read_shapes(path: Path) -> dict[str, tuple[int, ...]]:
    """The shapes of the tensors in a `.pt` file by name. Raises nearly anything for other files."""
    with zipfile.ZipFile(path) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"a pickle of {entry.file_size} bytes")
        content = _ShapeUnpickler(io.BytesIO(archive.read(entry))).load()
    return {key: value for key, value in content.items() if isinstance(value, tuple)}


class _ShapeUnpickler(pickle.Unpickler):
    def find_class(self, module: str, name: str) -> Any:
        """Of what a file of tensors names, the shape of a tensor, an empty dictionary and the names of dtypes."""
        if module == "torch" and name.endswith("Storage"):
            return name
        if (module, name) not in KNOWN:
            raise pickle.UnpicklingError(f"{module}.{name} is no part of a tensor")
        return KNOWN[module, name]

    def persistent_load(self, pid: Any) -> Any:
        """Nothing: the numbers of a tensor are not read."""
