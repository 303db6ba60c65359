# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Append of plain tokens, the one call that every sequence makes at every step.

`prefixcache.core.growth.append` says what Append does; this does the same for a row that does no
more than put tokens behind those of an idle sequence: no drafts, no lookahead, no extra keys, no
copy to be made or let go, room for its blocks. Any other row is left to it.
"""

from cpython cimport array
from cpython.buffer cimport PyBUF_FORMAT, PyBUF_STRIDES, PyBuffer_Release, PyObject_GetBuffer
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t

from prefixcache.core.native.hash_chain cimport plain_digests
from prefixcache.core.native.pool cimport PLAIN, Pool

from prefixcache.core import growth
from prefixcache.types import NO_EXTRA_KEYS, AppendResult, ResultCode

cdef object _NO_EXTRA_KEYS = NO_EXTRA_KEYS
cdef object _AppendResult = AppendResult
cdef object _OK = ResultCode.OK
cdef object _NO_BLOCKS = AppendResult(ResultCode.OK)
cdef object _ZERO = 0
cdef Py_ssize_t _MAX_NEW_BLOCKS = 64


def append_rows(Pool pool, hasher, dict live, bytes owner, rows, append_row):
    """Append each row in turn; returns their results.

    live: sequences by id. append_row: called with the owner and each row that is not plain.
    """
    cdef PyObject *found
    results = []
    for row in rows:
        result = None
        found = PyDict_GetItem(live, row.sequence_id)
        if found != NULL:
            result = _append_plain(pool, hasher, <object>found, owner, row)
        results.append(append_row(owner, row) if result is None else result)
    return results


cdef object _append_plain(Pool pool, hasher, sequence, bytes owner, row):
    """The row's result, or None, and nothing is changed, for a row that is not plain."""
    if row.num_lookahead_tokens or row.num_kv_valid:
        return None
    if row.extra_keys is not _NO_EXTRA_KEYS and row.extra_keys:
        return None
    if sequence.owner != owner or sequence.running_layers or sequence.is_copying:
        return None
    if sequence.copy_holds or sequence.num_lookahead_tokens:
        return None

    cdef array.array token_ids = sequence.token_ids, table = sequence.block_table
    cdef int64_t size = pool.block_size, old = len(token_ids), position = row.start_position
    cdef Py_buffer given
    cdef Py_ssize_t count, num_added, index
    cdef int32_t last
    cdef int32_t taken[64]
    if position != old:
        return None
    if old % size:
        last = table.data.as_ints[old // size]
        if pool._refs[last] != 1 or pool._state[last] != PLAIN:
            return None
    PyObject_GetBuffer(row.token_ids, &given, PyBUF_FORMAT | PyBUF_STRIDES)
    try:
        if given.ndim != 1 or given.format[0] != b"I" or given.strides[0] != sizeof(int32_t):
            return None
        count = given.shape[0]
        if count == 0:
            return None
        num_added = (old + count + size - 1) // size - len(table)
        if num_added > _MAX_NEW_BLOCKS or num_added > pool._queue.queue.length:
            return None
        array.extend_buffer(token_ids, <char *>given.buf, count)
    finally:
        PyBuffer_Release(&given)
    call = ("append", position, count, _ZERO, _ZERO, _NO_EXTRA_KEYS)
    if num_added > 0:
        pool.take_into(taken, num_added)
        array.extend_buffer(table, <char *>taken, num_added)
        new = tuple([taken[index] for index in range(num_added)])
        reply = _AppendResult(_OK, new)
    else:
        reply = _NO_BLOCKS
    if sequence.registers and (old + count) // size > old // size:
        _hash_new_blocks(hasher, sequence, token_ids, old // size, (old + count) // size)
    before = sequence.last_call
    if before is not None and before[0] == "commit":
        sequence.commit_before = (before, sequence.last_reply)
    elif sequence.commit_before is not None:
        sequence.commit_before = None
    sequence.last_call = call
    sequence.last_reply = reply
    if sequence.last_attention_start:
        sequence.last_attention_start.clear()
    return reply


cdef int _hash_new_blocks(
    hasher, sequence, array.array token_ids, Py_ssize_t first, Py_ssize_t end
) except -1:
    """Add the hashes of blocks `first ..< end` to those of the sequence."""
    algorithm = hasher.algorithm
    if sequence.extra_keys or not algorithm.is_recipe:
        growth.hash_new_blocks(hasher, sequence)
        return 0
    cdef bytearray hashes = sequence.hashes
    cdef bytes start = hasher.none_hash
    cdef Py_ssize_t width = len(start), size = hasher.block_size
    PyByteArray_Resize(hashes, end * width)
    cdef uint8_t *digests = <uint8_t *>PyByteArray_AS_STRING(hashes) + first * width
    cdef const uint8_t *parent = digests - width
    if first == 0:
        parent = <const uint8_t *>PyBytes_AS_STRING(start)
    cdef const uint32_t *new_tokens = token_ids.data.as_uints + first * size
    return plain_digests(algorithm.name, parent, new_tokens, end - first, size, digests)
