"""How long the samples of a data set are, told from its files without torch.

The largest file stands for the longest sample: nearly all of a file is latents. What is in it is read from the pickle
in the `.pt` file, an ordinary zip, one operation after the other: where it makes a tensor its shape is kept, and
nothing else that it asks for is made. Python's own unpickler would let a file of some bytes take all memory or time.
"""

import pickletools
import zipfile
from pathlib import Path
from typing import Any

from trainer_core.free_memory import holds
from trainer_core.memory import Samples
from trainer_core.sources import DEMO, SourceError, find_tensors

DEMO_SAMPLES = Samples(frames=500, condition_tokens=20, bytes=2_120_000)
"""What `demo.samples` makes, for which it needs torch."""
MAX_SAMPLE_BYTES = 256 << 20
"""Of a file and of each tensor in it: an hour of music takes some 70 MB in fp32, a long condition some 20."""
MAX_PICKLE_BYTES = 1 << 18
"""It holds names, shapes and some text."""
REBUILD = "torch._utils _rebuild_tensor_v2"


def measure(source: str) -> Samples:
    """The size of a data set, `demo` or a folder. Raises SourceError for a folder or largest file that is none."""
    if source == DEMO:
        return DEMO_SAMPLES
    try:
        sizes = {path: path.stat().st_size for path in find_tensors(Path(source))}
        largest = max(sizes, key=lambda path: sizes[path])
        frames, condition_tokens = _read_lengths(largest)
        total = sum(sizes.values())
        return Samples(frames, condition_tokens, total if holds(total) else 0)
    except SourceError:
        raise
    except Exception as error:  # damaged bytes make zipfile and pickletools raise nearly anything
        raise SourceError(f"How long the samples in {source} are can't be read from its largest file.") from error


def _read_lengths(path: Path) -> tuple[int, int]:
    """Frames and condition tokens of a `.pt` file. Raises nearly anything for other files."""
    if path.stat().st_size > MAX_SAMPLE_BYTES:
        raise ValueError(f"a file of {path.stat().st_size} bytes")
    with zipfile.ZipFile(path) as archive:
        entry = next(entry for entry in archive.infolist() if entry.filename.endswith("/data.pkl"))
        if entry.file_size > MAX_PICKLE_BYTES:
            raise ValueError(f"a pickle of {entry.file_size} bytes")
        tensors = _read_shapes(archive.read(entry))
    lengths = tuple(tensors[name][0] for name in ("target_latents", "encoder_hidden_states"))
    if not all(type(length) is int and 1 <= length <= MAX_SAMPLE_BYTES for length in lengths):
        raise ValueError("lengths that are none")
    return lengths[0], lengths[1]


def _read_shapes(pickled: bytes) -> dict[str, Any]:
    """What a pickled dictionary has under each name, a shape in place of a tensor. Raises nearly anything for others.

    Takes time and memory as the pickle's length: nothing is copied, and nothing but text is looked up.
    """
    stack: list[Any] = []
    marks: list[int] = []
    memo: dict[Any, Any] = {}
    for operation, argument, _ in pickletools.genops(pickled):
        name = operation.name
        if name in ("TUPLE", "LIST", "DICT", "APPENDS", "SETITEMS"):  # of all above the last mark
            start = marks.pop()
            above = stack[start:]
            del stack[start:]
            if name == "SETITEMS":
                for key, value in zip(above[::2], above[1::2], strict=True):
                    _set(stack[-1], key, value)
            elif name != "APPENDS":
                stack.append(tuple(above))
        elif name in ("TUPLE1", "TUPLE2", "TUPLE3"):
            count = int(name[-1])
            stack[-count:] = [tuple(stack[-count:])]
        elif name == "MARK":
            marks.append(len(stack))
        elif name == "EMPTY_DICT":
            stack.append({})
        elif name in ("EMPTY_TUPLE", "EMPTY_LIST"):
            stack.append(())
        elif name in ("BINPUT", "LONG_BINPUT", "PUT"):
            memo[argument] = stack[-1]
        elif name == "MEMOIZE":
            memo[len(memo)] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET", "GET"):
            stack.append(memo[argument])
        elif name == "STACK_GLOBAL":
            if sum(map(len, stack[-2:])) > len(REBUILD) + 100:  # else texts could double without end
                raise ValueError("a class of a long name")
            stack[-2:] = [" ".join(stack[-2:])]
        elif name == "BINPERSID":
            stack[-1] = None  # a tensor's numbers
        elif name == "REDUCE":  # a call; of `_rebuild_tensor_v2` the shape is the third argument
            arguments = stack.pop()
            stack[-1] = arguments[2] if stack[-1] == REBUILD else None
        elif name in ("APPEND", "BUILD"):
            stack.pop()
        elif name == "SETITEM":
            value, key = stack.pop(), stack.pop()
            _set(stack[-1], key, value)
        elif name == "STOP":
            if not isinstance(content := stack.pop(), dict):
                raise ValueError("no dictionary")
            return content
        elif not operation.stack_before:  # a number, a text, the name of a class
            stack.extend([argument] * len(operation.stack_after))
        else:
            raise ValueError(f"{name} is no part of a file of tensors")
    raise ValueError("no end")


def _set(target: Any, key: Any, value: Any) -> None:
    """An entry of a dictionary; only those that have a name count."""
    if isinstance(target, dict) and isinstance(key, str):
        target[key] = value
