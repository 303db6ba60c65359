# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""How many slots have complete K/V: a walk over all live sequences, under the core's lock.

`prefixcache.core.slots` says what is counted; this does the same over columns of all
blocks. They are zeros that the system gives by the page, so what nobody touches costs nothing.
"""

import numpy as np

from cpython cimport array
from libc.stdint cimport int32_t, int64_t

from prefixcache.core.native.pool cimport PLAIN, Pool


def num_slots_written(Pool pool, holders):
    """holders: all sequences that hold blocks."""
    cdef int64_t size = pool.block_size, computed, written
    cdef Py_ssize_t index
    cdef int32_t[::1] num_partial = np.zeros(pool.num_blocks, dtype=np.int32)
    cdef int32_t[::1] most = np.zeros(pool.num_blocks, dtype=np.int32)
    cdef list partial = []
    cdef array.array table
    cdef int32_t block
    for sequence in holders:
        table = sequence.block_table
        computed = _least(sequence.computed)
        for index in range(computed // size, len(table)):
            block = table.data.as_ints[index]
            if not num_partial[block]:
                partial.append(block)
            num_partial[block] += 1
            most[block] = max(most[block], <int32_t>max(0, computed - index * size))
        for block in sequence.copy_holds:
            # The source of a copy counts by the tables that still have it.
            if not num_partial[block]:
                partial.append(block)
            num_partial[block] += 1
    written = pool.num_referenced * size
    for block in partial:
        # A block that is cached, or that one more holder has, is full for somebody.
        if pool._state[block] == PLAIN and pool._refs[block] == num_partial[block]:
            written -= size - most[block]
    return written


cdef int64_t _least(list counts) except? -1:
    cdef int64_t least = counts[0], count
    for count in counts:
        least = min(least, count)
    return least
