from __future__ import annotations

import os
import resource
import signal
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from prefixcache.errors import InvalidArgumentError
from prefixcache.server.record_file import RecordFile


def test_only_its_owner_may_read_it(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    previous = os.umask(0)
    try:
        RecordFile(path, 2**16).close()
    finally:
        os.umask(previous)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_an_earlier_record_becomes_the_first_old_one(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    path.write_text("earlier\n")
    file = RecordFile(path, 2**16)
    assert file.append(b"now\n")
    file.close()
    assert path.read_text() == "now\n"
    assert (tmp_path / "record.jsonl.1").read_text() == "earlier\n"


def test_an_empty_earlier_record_leaves_the_old_one_alone(tmp_path: Path) -> None:
    path, old = tmp_path / "record.jsonl", tmp_path / "record.jsonl.1"
    old.write_text("earlier\n")
    for _ in range(2):
        RecordFile(path, 2**16).close()
    assert old.read_text() == "earlier\n"


def test_both_files_together_are_within_the_limit_and_hold_the_last_lines(tmp_path: Path) -> None:
    path, old = tmp_path / "record.jsonl", tmp_path / "record.jsonl.1"
    file = RecordFile(path, 100)
    for index in range(57):
        assert file.append(b"line %4d\n" % index)
        sizes = [each.stat().st_size for each in (path, old) if each.exists()]
        assert max(sizes) <= 50
    file.close()
    lines = (old.read_text() + path.read_text()).splitlines()
    assert lines == [f"line {index:4}" for index in range(57 - len(lines), 57)]
    assert len(lines) == 7
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_line_as_large_as_a_file_fits_and_a_larger_one_is_left_out(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path, 20)
    assert file.append(b"123456789\n")
    assert not file.append(b"1234567890\n")
    assert file.append(b"x\n")
    file.close()
    assert path.read_text() == "x\n"


def test_a_record_that_a_daemon_writes_is_refused_and_not_touched(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path, 2**16)
    file.append(b"line\n")
    with pytest.raises(InvalidArgumentError, match="written by a running daemon"):
        RecordFile(path, 2**16)
    assert path.read_text() == "line\n"
    file.close()
    RecordFile(path, 2**16).close()


@pytest.mark.parametrize("kind", ["folder", "link", "fifo", "no folder"])
def test_what_is_no_regular_file_is_refused(tmp_path: Path, kind: str) -> None:
    path, target = tmp_path / "record.jsonl", tmp_path / "target"
    if kind == "folder":
        path.mkdir()
    elif kind == "link":
        target.write_text("another's")
        path.symlink_to(target)
    elif kind == "fifo":
        os.mkfifo(path)
    else:
        path = path / "in" / "no" / "folder"
    with pytest.raises(InvalidArgumentError) as caught:
        RecordFile(path, 2**16)
    assert caught.value.field == "record"
    if kind == "link":
        assert target.read_text() == "another's"
        assert path.is_symlink()


@contextmanager
def largest_file(num_bytes: int) -> Iterator[None]:
    """Writes beyond so many bytes of a file fail, as on a full disk: in part, then at all."""
    previous = resource.getrlimit(resource.RLIMIT_FSIZE)
    ignored = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (num_bytes, previous[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, previous)
        signal.signal(signal.SIGXFSZ, ignored)


def test_a_line_that_cannot_be_written_leaves_no_part_of_it(tmp_path: Path) -> None:
    path = tmp_path / "record.jsonl"
    file = RecordFile(path, 2**16)
    file.append(b"first\n")
    with largest_file(10), pytest.raises(OSError, match="too large"):
        file.append(b"second\n")
    file.close()
    assert path.read_text() == "first\n"
