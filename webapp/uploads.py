"""Adapters uploaded from elsewhere: checked, then kept in the home folder for runs to start from."""

import hashlib
import os
import shutil
import tempfile
import zipfile
from collections.abc import Mapping
from pathlib import Path, PurePosixPath
from typing import IO

from trainer_core import adapter_files
from trainer_core.adapter_files import ADAPTER_FILES, AdapterFile
from trainer_core.run_dir import slug
from trainer_core.sources import SourceError, shorten

MAX_BYTES = 4 << 30
"""Of an adapter, unpacked: some ten times the largest that Descant trains on the XL model."""
PIECE = 1 << 20


def keep(files: Mapping[str, IO[bytes]], home: Path) -> AdapterFile:
    """Copy the adapter in the uploaded `files`, by name, into `home`; the same one again is kept once.

    It may be one .safetensors file, the two files of a PEFT folder, or a zip of that folder.
    Raises SourceError for anything else and for what is no adapter that Descant trains, and leaves nothing behind.
    """
    folder = home / "adapters"
    folder.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=".upload-", dir=folder))
    try:
        name = _unpack(files, partial)
        adapter_files.read(partial)
        digest = hashlib.sha256()
        for path in sorted(partial.iterdir()):
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                while piece := file.read(PIECE):
                    digest.update(piece)
        final = folder / f"{slug(name) or 'adapter'}-{digest.hexdigest()[:12]}"
        if not final.is_dir():
            partial.rename(final)
        return adapter_files.read(final)
    except SourceError as error:
        said = str(error).replace(f"{partial}{os.sep}", "").replace(str(partial), "The upload")
        raise SourceError(said) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(files: Mapping[str, IO[bytes]], folder: Path) -> str:
    """Write the adapter's files into `folder` by names of our own; what to call it."""
    if sorted(files) == sorted(ADAPTER_FILES):
        for name, file in files.items():
            _copy(file, folder / name)
        return "adapter"
    if len(files) != 1:
        raise SourceError(
            f"{len(files)} files were given ({shorten(files)}). Give one .safetensors file, a zip, or the two files "
            f"{' and '.join(ADAPTER_FILES)}."
        )
    (name, file), *_ = files.items()
    kind = PurePosixPath(name).suffix.lower()
    if kind == ".safetensors":
        _copy(file, folder / "adapter.safetensors")
    elif kind == ".zip":
        _unzip(file, folder)
    else:
        raise SourceError(f"{name} was given; this takes .safetensors files and zips. Pickled weights are not read.")
    return PurePosixPath(name).stem


def _unzip(file: IO[bytes], folder: Path) -> None:
    """Take the two files of a PEFT folder out of a zip, whatever else is in it and wherever in it they are."""
    try:
        with zipfile.ZipFile(file) as archive:
            for wanted in ADAPTER_FILES:
                found = [entry for entry in archive.infolist() if PurePosixPath(entry.filename).name == wanted]
                if len(found) != 1:
                    raise SourceError(f"The zip has {len(found)} files named {wanted}; it should have one.")
                with archive.open(found[0]) as entry:
                    _copy(entry, folder / wanted)
    except (zipfile.BadZipFile, NotImplementedError, RuntimeError, EOFError) as error:
        raise SourceError(f"The zip can't be read: {error}.") from error


def _copy(source: IO[bytes], target: Path) -> None:
    size = 0
    with target.open("wb") as file:
        while piece := source.read(PIECE):
            size += len(piece)
            if size > MAX_BYTES:
                raise SourceError(f"{target.name} is larger than {MAX_BYTES >> 30} GiB, which no adapter is.")
            file.write(piece)
