"""The exception tree and its exit codes, and how storage errors are told from others."""

import errno
import inspect
import re

import pytest

from optkit import errors


def classes():
    return [c for _, c in inspect.getmembers(errors, inspect.isclass) if issubclass(c, errors.OptkitError)]


def test_exit_codes_are_those_drawn_at_the_top_of_the_module():
    drawn = dict(re.findall(r"(\w+Error)\s+(\d+)\s", errors.__doc__))
    assert len(drawn) == len(classes())
    assert {c.__name__: str(c.exit_code) for c in classes()} == drawn


def test_no_error_but_the_base_uses_the_code_of_an_unexpected_failure():
    assert [c.__name__ for c in classes() if c.exit_code == 1] == ["OptkitError"]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
def test_a_full_disk_becomes_a_storage_error_with_a_remedy(code):
    with pytest.raises(errors.StorageError, match=r"out: no space left on the device; free some"), errors.storage_errors("out"):
        raise OSError(code, "No space left on device")


def test_a_full_disk_reported_by_a_library_in_words_is_recognised():
    with pytest.raises(errors.StorageError), errors.storage_errors("out"):
        raise RuntimeError("Error while serializing: I/O error: No space left on device (os error 28)")


def test_a_read_only_place_is_a_storage_error_and_other_errors_pass_through():
    with pytest.raises(errors.StorageError, match="not writable"), errors.storage_errors("out"):
        raise PermissionError(errno.EACCES, "Permission denied")
    with pytest.raises(FileNotFoundError), errors.storage_errors("out"):
        raise FileNotFoundError(errno.ENOENT, "No such file or directory")
    with pytest.raises(KeyError), errors.storage_errors("out"):
        raise KeyError("x")


def test_an_optkit_error_inside_is_not_rewritten():
    with pytest.raises(errors.UsageError, match="no space left"), errors.storage_errors("out"):
        raise errors.UsageError("no space left in this sentence")


def test_the_nearest_known_word_is_named_and_a_far_one_is_not():
    assert errors.nearest("grup_size", ["group_size", "method"]) == " (did you mean 'group_size'?)"
    assert errors.nearest("zzz", ["group_size", "method"]) == ""
