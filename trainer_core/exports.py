"""Checkpoints as files to take away. Light: the web page makes them without torch."""

import shutil
import zipfile
from pathlib import Path
from typing import IO

from trainer_core.origin import ADAPTER_FILES


def write_zip(checkpoint: Path, folder: str, target: IO[bytes]) -> int:
    """Write the checkpoint's PEFT adapter into `target` as a zip with one `folder`; returns its bytes.

    Weights don't compress, so they are stored, and read in pieces.
    """
    with zipfile.ZipFile(target, "w", zipfile.ZIP_STORED) as archive:
        for name in ADAPTER_FILES:
            info = zipfile.ZipInfo.from_file(checkpoint / name, f"{folder}/{name}")
            with (checkpoint / name).open("rb") as source, archive.open(info, "w", force_zip64=True) as entry:
                shutil.copyfileobj(source, entry, 1 << 20)
    return target.tell()
