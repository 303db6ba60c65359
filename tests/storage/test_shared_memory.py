import ctypes
import fcntl
import mmap
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from prefixcache.storage.shared_memory import (
    SEALS,
    create_shared_memory,
    make_private,
    map_shared_memory,
    open_for_reading,
)
from tests.support.open_files import open_files

SIZE = 3 * mmap.PAGESIZE
NAME = "prefixcache-test"
ANOTHER_USER = 65534


@pytest.fixture
def fd() -> Iterator[int]:
    fd = create_shared_memory(NAME, SIZE)
    yield fd
    os.close(fd)


@pytest.fixture
def reader(fd: int) -> Iterator[int]:
    reader = open_for_reading(fd)
    yield reader
    os.close(reader)


def mappings() -> list[str]:
    maps = Path("/proc/self/maps").read_text(encoding="ascii")
    return [line for line in maps.splitlines() if NAME in line]


def run_with(fd: int, program: str) -> int:
    """The exit code of a program that has the descriptor, whose number is its argument."""
    done = subprocess.run(
        [sys.executable, "-S", "-c", program, str(fd)], pass_fds=[fd], timeout=60, check=False
    )
    return done.returncode


def test_what_one_descriptor_writes_another_reads(fd: int, reader: int) -> None:
    written = map_shared_memory(fd, SIZE, writable=True)
    seen = map_shared_memory(reader, SIZE, writable=False)
    assert bytes(seen) == bytes(SIZE)
    written[SIZE - 1] = 77
    assert seen[SIZE - 1] == 77


def test_a_descriptor_for_reading_cannot_be_mapped_for_writing(reader: int) -> None:
    with pytest.raises(PermissionError):
        map_shared_memory(reader, SIZE, writable=True)
    with pytest.raises(PermissionError):
        mmap.mmap(reader, SIZE, mmap.MAP_SHARED, mmap.PROT_WRITE)
    with pytest.raises(OSError):
        os.pwrite(reader, b"x", 0)


def test_a_mapping_for_reading_cannot_be_made_writable(reader: int) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    seen = map_shared_memory(reader, SIZE, writable=False)
    address = ctypes.c_void_p(ctypes.addressof(seen))
    assert libc.mprotect(address, ctypes.c_size_t(SIZE), mmap.PROT_READ | mmap.PROT_WRITE) == -1
    assert ctypes.get_errno() == 13


REOPEN = """
import os, sys
number = int(sys.argv[1])
for flags in (os.O_RDWR, os.O_WRONLY):
    try:
        os.open(f"/proc/self/fd/{number}", flags)
        sys.exit("opened it for writing")
    except PermissionError:
        pass
try:
    os.fchmod(number, 0o600)
except PermissionError:
    sys.exit(0)
sys.exit("changed its mode")
"""
BECOME_ANOTHER_USER = f"""
import os
os.setgroups([]); os.setgid({ANOTHER_USER}); os.setuid({ANOTHER_USER})
"""


@pytest.mark.skipif(os.getuid() != 0, reason="only root can run a program as another user")
def test_another_user_can_neither_open_it_for_writing_nor_change_its_mode(reader: int) -> None:
    assert run_with(reader, BECOME_ANOTHER_USER + REOPEN) == 0


def test_a_process_of_the_same_user_is_not_kept_out(reader: int) -> None:
    """What the module says of it, so that nobody relies on more."""
    program = (
        "import os, sys; n = int(sys.argv[1]); os.fchmod(n, 0o600); "
        "os.pwrite(os.open(f'/proc/self/fd/{n}', os.O_RDWR), b'x', 0)"
    )
    assert run_with(reader, program) == 0
    assert map_shared_memory(reader, SIZE, writable=False)[0] == ord("x")


def test_a_write_to_a_mapping_for_reading_ends_the_process_and_changes_nothing(
    fd: int, reader: int
) -> None:
    program = (
        "import sys; from prefixcache.storage.shared_memory import map_shared_memory; "
        f"map_shared_memory(int(sys.argv[1]), {SIZE}, writable=False)[5] = 1"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(reader)], pass_fds=[reader], timeout=60, check=False
    )
    assert done.returncode == -signal.SIGSEGV
    assert bytes(map_shared_memory(fd, SIZE, writable=True)) == bytes(SIZE)


@pytest.mark.parametrize("num_bytes", [0, SIZE - 1, SIZE + 1])
def test_its_size_is_sealed(fd: int, num_bytes: int) -> None:
    with pytest.raises(PermissionError):
        os.ftruncate(fd, num_bytes)
    assert fcntl.fcntl(fd, fcntl.F_GET_SEALS) == SEALS


def test_no_more_seals_can_be_added(fd: int) -> None:
    with pytest.raises(PermissionError):
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE)


def test_a_mapping_lives_as_long_as_it_is_referenced() -> None:
    fd = create_shared_memory(NAME, SIZE)
    mapped = map_shared_memory(fd, SIZE, writable=True)
    part = memoryview(mapped).cast("B")[10:20]
    os.close(fd)
    assert not open_files(NAME)
    del mapped
    assert len(mappings()) == 1
    assert part[0] == 0
    del part
    assert mappings() == []


def test_a_part_can_be_made_private_in_place(fd: int) -> None:
    one, other = (map_shared_memory(fd, SIZE, writable=True) for _ in range(2))
    one[:] = bytes([1]) * SIZE
    make_private(ctypes.addressof(one) + mmap.PAGESIZE, mmap.PAGESIZE)
    assert bytes(one) == bytes([1]) * SIZE
    one[:] = bytes([2]) * SIZE
    other[mmap.PAGESIZE] = 3
    assert one[mmap.PAGESIZE] == 2
    pages = [bytes([number]) * mmap.PAGESIZE for number in (2, 1, 2)]
    pages[1] = bytes([3]) + pages[1][1:]
    assert bytes(other) == b"".join(pages)


def test_what_cannot_be_made_private_stays_as_it_is(fd: int) -> None:
    mapped = map_shared_memory(fd, SIZE, writable=True)
    with pytest.raises(OSError, match="Invalid argument"):
        make_private(ctypes.addressof(mapped) + 1, mmap.PAGESIZE)
    with pytest.raises(OSError, match="Cannot allocate"):
        make_private(ctypes.addressof(mapped), 2**60)


def test_a_forked_child_has_no_part_of_it(fd: int) -> None:
    # In a process without the threads of other tests.
    program = """
import os, sys
from tests.storage.test_shared_memory import SIZE, map_shared_memory, mappings
mapped = map_shared_memory(int(sys.argv[1]), SIZE, writable=True)
child = os.fork()
if child == 0:
    is_there = bool(mappings())
    del mapped  # nothing is unmapped here, where something else may be
    os._exit(int(is_there))
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
assert mapped[0] == 0
"""
    subprocess.run([sys.executable, "-c", program, str(fd)], pass_fds=[fd], timeout=60, check=True)


def test_a_file_that_cannot_be_made_leaves_no_descriptor(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError("no space")

    monkeypatch.setattr(os, "fchmod", refuse)
    with pytest.raises(OSError, match="no space"):
        create_shared_memory(NAME, SIZE)
    assert not open_files(NAME)
