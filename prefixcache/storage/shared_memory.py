"""Anonymous shared-memory files (memfd_create(2)): made and sealed, opened for reading, mapped.

Whoever has a descriptor of such a file can map it. What it may do there goes with the descriptor:
one that was opened for reading can be mapped for reading only. The file cannot be opened again for
writing, through `/proc/PID/fd`, by other users: its mode lets its owner alone open it, and that for
reading only. A process of the same user can change the mode, as it could change the memory of
this process; root can do anything. Keeps no state.

Mapped by mmap(2) itself: Python's `mmap` keeps a descriptor of the file, which forked children
would have too, and torch takes a buffer for reading only with a warning.
"""

from __future__ import annotations

import ctypes
import fcntl
import mmap
import os
import weakref

SEALS = fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL
"""The size stays, so a mapping never loses its pages (SIGBUS), and nobody can seal it further."""

_F_SEAL_FUTURE_WRITE = 0x10
_MREMAP_MAYMOVE_FIXED = 1 | 2
_MAP_FAILED = ctypes.c_void_p(-1).value
_libc = ctypes.CDLL(None, use_errno=True)
_libc.mmap.restype = ctypes.c_void_p
_libc.mmap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int,
    ctypes.c_int64,
)
_libc.munmap.argtypes = (ctypes.c_void_p, ctypes.c_size_t)
_libc.mremap.restype = ctypes.c_void_p
_libc.mremap.argtypes = (
    ctypes.c_void_p,
    ctypes.c_size_t,
    ctypes.c_size_t,
    ctypes.c_int,
    ctypes.c_void_p,
)
_libc.madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)


def create_shared_memory(name: str, num_bytes: int) -> int:
    """A new file of that size, sealed, as a descriptor for reading and writing. Raises OSError.

    name: what it is called in `/proc/PID/maps`.
    """
    fd = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.ftruncate(fd, num_bytes)
        os.fchmod(fd, 0o400)
        fcntl.fcntl(fd, fcntl.F_ADD_SEALS, SEALS)
    except OSError:
        os.close(fd)
        raise
    return fd


def open_for_reading(fd: int) -> int:
    """Another descriptor of the same file, through which it cannot be written to. Raises OSError.

    Not `os.dup`, which shares what the descriptor may do.
    """
    return os.open(f"/proc/self/fd/{fd}", os.O_RDONLY | os.O_CLOEXEC)


def check_sealed(fd: int) -> int:
    """The size of somebody else's file, which is sure to stay; it can be mapped for writing too.

    Raises ValueError, which says what is wrong with it. One of huge pages is refused: whether they
    are there shows when they are touched, and then a lack of them ends the process (SIGBUS).
    """
    try:
        seals = fcntl.fcntl(fd, fcntl.F_GET_SEALS)
    except OSError as error:
        raise ValueError("is no shared memory") from error
    if not seals & fcntl.F_SEAL_SHRINK:
        raise ValueError("is not sealed against shrinking")
    if seals & (fcntl.F_SEAL_WRITE | _F_SEAL_FUTURE_WRITE):
        raise ValueError("is sealed against writing")
    if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_ACCMODE != os.O_RDWR:
        raise ValueError("is not open for reading and writing")
    if os.fstatvfs(fd).f_bsize != mmap.PAGESIZE:
        raise ValueError("has huge pages")
    return os.fstat(fd).st_size


def map_shared_memory(
    fd: int, num_bytes: int, *, writable: bool, populate: bool = True
) -> ctypes.Array[ctypes.c_uint8]:
    """The file's first bytes, for as long as the result is referenced.

    populate: put its pages in place; else each comes when it is touched. The descriptor may be
    closed then. A forked child has nothing there. A write to a mapping that
    is not writable ends the process (SIGSEGV), though the result does not look it. Raises OSError.
    """
    protection = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
    flags = mmap.MAP_SHARED | (mmap.MAP_POPULATE if populate else 0)
    address = _libc.mmap(None, num_bytes, protection, flags, fd, 0)
    if address == _MAP_FAILED:
        raise _last_error()
    if _libc.madvise(address, num_bytes, mmap.MADV_DONTFORK):
        error = _last_error()
        _libc.munmap(address, num_bytes)
        raise error
    mapped = (ctypes.c_uint8 * num_bytes).from_address(address)
    weakref.finalize(mapped, _unmap, os.getpid(), address, num_bytes).atexit = False
    return mapped


def make_private(address: int, num_bytes: int) -> None:
    """Put a copy in place of a part of a mapping: nobody shares it any more. Raises OSError.

    Whole pages. Others may read them meanwhile, but not write.
    """
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
    copy = _libc.mmap(None, num_bytes, protection, flags, -1, 0)
    if copy == _MAP_FAILED:
        raise _last_error()
    ctypes.memmove(copy, address, num_bytes)
    moved = _libc.mremap(copy, num_bytes, num_bytes, _MREMAP_MAYMOVE_FIXED, address)
    if moved == _MAP_FAILED:
        error = _last_error()
        _libc.munmap(copy, num_bytes)
        raise error


def _unmap(pid: int, address: int, num_bytes: int) -> None:
    # In a child, something else may be there.
    if os.getpid() == pid:
        _libc.munmap(address, num_bytes)


def _last_error() -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number))
