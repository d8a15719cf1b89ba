"""Where a conversion is written: whole under its name, or not there at all."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["appearing"]


@contextmanager
def appearing(source: str | os.PathLike, target: str | os.PathLike) -> Iterator[Path]:
    """A path beside `target`, for a file or a folder that is renamed to it when the block ends well and removed
    when it does not.

    Raises:
        ValueError: `target` is there already (an empty folder may be), has no folder to be in, or is within `source`.
        OSError: the block's own, with the target's name where it had none, as of a full disk.
    """
    target = Path(target)
    _check(Path(source), target)
    part = target.with_name(f".{target.name}.part")
    if os.path.lexists(part):
        raise ValueError(f"{part} is there: another conversion writes it, or one was stopped; else remove it")
    try:
        yield part
        part.rename(target)
    except BaseException as error:
        shutil.rmtree(part) if part.is_dir() else part.unlink(missing_ok=True)
        raise _reason(error, target) from None


def _check(source: Path, target: Path) -> None:
    if not target.name:
        raise ValueError(f"{str(target)!r} names no file or folder to write")
    empty = target.is_dir() and not target.is_symlink() and not any(target.iterdir())
    if os.path.lexists(target) and not empty:
        raise ValueError(f"{target} is there already; give another name")
    if not target.parent.is_dir():
        raise ValueError(f"{target} cannot be written: {target.parent} is no folder")
    if os.path.realpath(source) in map(str, Path(os.path.realpath(target)).parents):
        raise ValueError(f"{target} is within {source}, which is only read; give a place outside")


def _reason(error: BaseException, target: Path) -> BaseException:
    """torch completes its archive even after a failed write, fails at that as well, and so hides why."""
    if isinstance(error, RuntimeError) and isinstance(error.__context__, (OSError, KeyboardInterrupt)):
        error = error.__context__
    if isinstance(error, OSError) and error.errno is not None and error.filename is None:
        return OSError(error.errno, error.strerror, str(target))
    return error
