"""Adapters uploaded from elsewhere: checked, then kept in the home folder for runs to start from."""

import contextlib
import hashlib
import os
import shutil
import stat
import tempfile
import time
import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import IO

from trainer_core import adapter_files
from trainer_core.adapter_files import ADAPTER_FILES, AdapterFile
from trainer_core.adapter_settings import MAX_CONFIG_BYTES
from trainer_core.run_folders import slug
from trainer_core.sources import PATH_SEPARATORS, SourceError, plain, shorten

MAX_BYTES = {ADAPTER_FILES[0]: MAX_CONFIG_BYTES, ADAPTER_FILES[1]: 16 << 30}
"""Rank 1024 on all layers of the XL model takes some 9 GB in fp32."""
MAX_UPLOAD_BYTES = sum(MAX_BYTES.values()) + (1 << 20)
"""Of the request that brings them."""
MAX_ENTRIES = 1000
MAX_EXPANSION = 100
"""Of a zip. Weights hardly shrink; what is all zeros shrinks by a thousand."""
ENCRYPTED = 1
PIECE = 1 << 20
ABANDONED_SECONDS = 24 * 3600
"""After which what a killed server left of an upload is removed."""


def keep(files: Mapping[str, IO[bytes]], home: Path) -> AdapterFile:
    """Copy the adapter in the uploaded `files`, by name, into `home`; the same one again is kept once.

    It may be one .safetensors file, the two files of a PEFT folder, or a zip of that folder.
    Raises SourceError for anything else and for what is no adapter that Descant trains, and leaves nothing behind.
    """
    folder = home / "adapters"
    folder.mkdir(parents=True, exist_ok=True)
    for abandoned in folder.glob(".upload-*"):
        with contextlib.suppress(FileNotFoundError):  # another upload that has just ended
            if abandoned.stat().st_mtime < time.time() - ABANDONED_SECONDS:
                shutil.rmtree(abandoned, ignore_errors=True)
    partial = Path(tempfile.mkdtemp(prefix=".upload-", dir=folder))
    try:
        stem = _unpack({PATH_SEPARATORS.split(name)[-1]: file for name, file in files.items()}, partial)
        adapter_files.read(partial)
        digest = hashlib.sha256()
        for path in sorted(partial.iterdir()):
            with path.open("rb") as file:
                digest.update(f"{path.name}\0{path.stat().st_size}\0".encode())
                while piece := file.read(PIECE):
                    digest.update(piece)
        final = folder / f"{stem}-{digest.hexdigest()[:12]}"
        try:
            partial.rename(final)
        except OSError:
            if not final.is_dir():
                raise
        try:
            return adapter_files.read(final)  # which may have been kept before
        except SourceError:
            shutil.rmtree(final)  # and damaged since
            partial.rename(final)
            return adapter_files.read(final)
    except SourceError as error:
        said = str(error).replace(f"{partial}{os.sep}", "").replace(str(partial), "The upload")
        raise SourceError(said) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _unpack(files: Mapping[str, IO[bytes]], folder: Path) -> str:
    """Write the adapter's files into `folder`, by names that are safe; what to call it."""
    if sorted(files) == sorted(ADAPTER_FILES):
        for name, file in files.items():
            _copy(file, folder / name)
        return "adapter"
    if len(files) != 1 or ADAPTER_FILES[0] in files:
        raise SourceError(
            f"{shorten(files) or 'Nothing'} was given. Choose one .safetensors file, one zip, or {ADAPTER_FILES[0]} "
            f"and {ADAPTER_FILES[1]} together."
        )
    ((name, file),) = files.items()
    stem, _, kind = name.rpartition(".")
    stem = slug(stem) or "adapter"
    if kind.lower() == "safetensors":
        _copy(file, folder / f"{stem}.safetensors")
    elif kind.lower() == "zip":
        _unzip(file, folder)
    else:
        raise SourceError(f"{name} was given; this takes .safetensors files and zips. Pickled weights are not read.")
    return stem


def _unzip(file: IO[bytes], folder: Path) -> None:
    """Take the two files of a PEFT folder out of a zip, wherever in it they are, if all that is in it is sound."""
    try:
        with zipfile.ZipFile(file) as archive:
            entries = archive.infolist()
            if problem := _zip_problem(entries, file.seek(0, os.SEEK_END)):
                raise SourceError(f"The zip is refused whole: {plain(problem, 300)}.")
            for wanted in ADAPTER_FILES:
                found = [entry for entry in entries if entry.filename.split("/")[-1] == wanted]
                if len(found) != 1:
                    raise SourceError(
                        f"The zip is not that of one PEFT adapter: it has {len(found) or 'no'} files called {wanted}."
                    )
                if found[0].compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED):
                    raise SourceError(
                        "The zip is compressed in a way that is not read. Make it anew with deflate, as usual."
                    )
                with archive.open(found[0]) as entry:
                    _copy(entry, folder / wanted)
    except SourceError:
        raise
    except (zipfile.BadZipFile, zlib.error, ValueError, NotImplementedError, RuntimeError, EOFError) as error:
        raise SourceError(f"The zip can't be read: {error}.") from error


def _zip_problem(entries: list[zipfile.ZipInfo], size: int) -> str | None:
    """What is wrong with a zip of `size` bytes, by its table of contents. No more than that says is ever unpacked."""
    if len(entries) > MAX_ENTRIES:
        return f"it has {len(entries):,} files, and an adapter's has no more than {MAX_ENTRIES:,}"
    seen = set()
    for entry in entries:
        # As it stands there: `filename` ends at a NUL, and on Windows has other separators.
        name, kind = entry.orig_filename, stat.S_IFMT(entry.external_attr >> 16)
        if not name or "\0" in name or "\\" in name or ":" in name or name.startswith("/") or ".." in name.split("/"):
            return f"{name!r} in it is no name of a file inside its folder"
        if kind not in (0, stat.S_IFREG, stat.S_IFDIR):
            return f"{name!r} in it is a link or a device, not a file"
        if entry.flag_bits & ENCRYPTED:
            return f"{name!r} in it is encrypted"
        if name.casefold() in seen:
            return f"{name!r} is in it twice"
        seen.add(name.casefold())
    unpacked = sum(entry.file_size for entry in entries)
    if unpacked > MAX_EXPANSION * size + MAX_CONFIG_BYTES or unpacked > MAX_UPLOAD_BYTES:
        return f"it unpacks to {unpacked >> 20:,} MiB from {size >> 10:,} KiB, which no adapter does"
    return None


def _copy(source: IO[bytes], target: Path) -> None:
    """Write what is in `source` to `target`. Raises SourceError where it is too large."""
    most = MAX_BYTES.get(target.name, MAX_BYTES[ADAPTER_FILES[1]])
    size = 0
    with target.open("wb") as file:
        while piece := source.read(PIECE):
            size += len(piece)
            if size > most:
                raise SourceError(f"{target.name} is larger than {most >> 20:,} MiB, which none of its kind is.")
            file.write(piece)
