"""Every error optkit raises on purpose, and the exit code the command line returns for it.

    OptkitError                 1   anything below; never raised itself
    ├── UsageError              2   an option or argument that makes no sense (Click's own code for bad usage)
    │   └── RecipeError         2   a recipe with an unknown key, a wrong type or an impossible value
    ├── InputError              3   something given to optkit is missing, truncated or not what it claims to be
    │   ├── CheckpointError     3   a model directory, hub id or GGUF file
    │   └── ArtifactError       3   an exported directory
    ├── UnsupportedError        4   understood, but optkit (or the target, or the engine) cannot do it; names the feature
    ├── LimitError              5   a prompt, batch or memory request that does not fit; raised before running
    ├── ParityError             6   the candidate does not answer like the reference within the limits
    ├── VerificationError       7   a stage's own self-check failed: the result would have been wrong
    ├── DependencyError         8   a library, or the right version of it, is not installed
    ├── StorageError            9   disk full, not writable
    └── EngineError            10   the engine failed while running, or produced NaN/Inf

A message is one line that says what, where, why, and what to do. The command line prints ``error: <message>`` without
a traceback; ``-v`` adds the traceback.
"""

from __future__ import annotations

import contextlib
import errno
from collections.abc import Iterator
from pathlib import Path


class OptkitError(Exception):
    """Base of all errors that optkit raises on purpose."""

    exit_code = 1


class UsageError(OptkitError):
    exit_code = 2


class RecipeError(UsageError):
    exit_code = 2


class InputError(OptkitError):
    exit_code = 3


class CheckpointError(InputError):
    pass


class ArtifactError(InputError):
    pass


class UnsupportedError(OptkitError):
    exit_code = 4


class LimitError(OptkitError):
    exit_code = 5


class ParityError(OptkitError):
    exit_code = 6


class VerificationError(OptkitError):
    exit_code = 7


class DependencyError(OptkitError):
    exit_code = 8


class StorageError(OptkitError):
    exit_code = 9


class EngineError(OptkitError):
    exit_code = 10


DISK_FULL = (errno.ENOSPC, errno.EDQUOT)


@contextlib.contextmanager
def storage_errors(where: str | Path) -> Iterator[None]:
    """Turns a full or read-only disk met while writing ``where`` into a :class:`StorageError`.

    Libraries wrap the operating system's error in their own types (safetensors raises ``SafetensorError`` with the
    text), so the text is looked at as well.
    """
    try:
        yield
    except OptkitError:
        raise
    except OSError as error:
        if error.errno in DISK_FULL:
            raise StorageError(f"{where}: no space left on the device; free some and run again") from error
        if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
            raise StorageError(f"{where}: not writable ({error.strerror}); choose another output directory") from error
        raise
    except Exception as error:
        if "No space left on device" in str(error) or "os error 28" in str(error):
            raise StorageError(f"{where}: no space left on the device; free some and run again") from error
        raise


def nearest(word: str, known: list[str] | tuple[str, ...]) -> str:
    """`` (did you mean 'x'?)`` when one of ``known`` is close to ``word``, else the empty string."""
    import difflib

    close = difflib.get_close_matches(word, list(known), n=1, cutoff=0.5)
    return f" (did you mean {close[0]!r}?)" if close else ""
