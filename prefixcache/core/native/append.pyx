# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Append of plain tokens, the one call that every sequence makes at every step.

`prefixcache.core.growth.append` says what Append does; this does the same for a row that does no
more than put tokens behind those of an idle sequence: no drafts, no lookahead, no extra keys, no
copy to be made or let go, room for its blocks. Any other row is left to it.
"""

from cpython cimport array
from cpython.bytearray cimport PyByteArray_AS_STRING, PyByteArray_Resize
from cpython.bytes cimport PyBytes_AS_STRING
from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport int32_t, int64_t, uint8_t, uint32_t, uint64_t
from libc.string cimport memset

from prefixcache.core.native.hash_chain cimport plain_digests
from prefixcache.core.native.pool cimport PLAIN, Pool
from prefixcache.core.native.sequence_record cimport SequenceRecord

import os
from array import array as _array

import numpy as np

from prefixcache.core import growth
from prefixcache.core.append_batch import AppendedBatch
from prefixcache.core.sequence import AppendRow
from prefixcache.types import NO_EXTRA_KEYS, AppendResult, ResultCode

cdef object _NO_EXTRA_KEYS = NO_EXTRA_KEYS
cdef object _AppendResult = AppendResult
cdef object _AppendRow = AppendRow
cdef object _AppendedBatch = AppendedBatch
cdef object _OK = ResultCode.OK
cdef uint32_t _OK_CODE = ResultCode.OK
cdef object _NO_BLOCKS = AppendResult(ResultCode.OK)
cdef object _ZERO = 0
cdef array.array _COLUMN = _array("I")
cdef int64_t _MAX_NEW_BLOCKS = 64
cdef enum:
    _MAX_ROWS = 256
    _TABLE_BITS = 9
    _TABLE_SIZE = 1 << _TABLE_BITS
cdef uint64_t _FACTOR = int.from_bytes(os.urandom(8), "little") | 1


def append_batch(
    Pool pool, hasher, dict live, bytes owner, batch, append_row, grown, int32_t account=0
):
    """Append each row in turn; returns what became of them.

    live: sequences by id. append_row: called with the owner and each row that is not plain. grown:
    called with the sequence of each other row that has a block's tokens or more. account: for which
    the blocks that are free after the batch are counted.
    """
    pool._check_account(account)
    ids, starts, lengths, tokens, valids, lookaheads, extra_keys = batch
    if not _fit(ids, starts, lengths, tokens, valids, lookaheads):
        raise ValueError(f"{len(ids)} bytes of ids and {len(tokens)} of tokens: columns do not fit")
    cdef const uint64_t *sequence_ids = <const uint64_t *>PyBytes_AS_STRING(ids)
    cdef const uint32_t *start_positions = _numbers(starts)
    cdef const uint32_t *num_tokens = _numbers(lengths)
    cdef const uint32_t *token_ids = _numbers(tokens)
    cdef const uint32_t *num_kv_valid = _numbers(valids)
    cdef const uint32_t *num_lookahead_tokens = _numbers(lookaheads)
    cdef dict keys_by_row = extra_keys
    cdef Py_ssize_t num_rows = len(ids) // sizeof(uint64_t), row, begin = 0, end = 0
    cdef array.array codes = array.clone(_COLUMN, num_rows, zero=False)
    cdef array.array num_new_blocks = array.clone(_COLUMN, num_rows, zero=True)
    cdef array.array num_copies = array.clone(_COLUMN, num_rows, zero=True)
    cdef array.array new_block_ids = array.clone(_COLUMN, 0, zero=False)
    cdef array.array sources = array.clone(_COLUMN, 0, zero=False)
    cdef array.array destinations = array.clone(_COLUMN, 0, zero=False)
    cdef int32_t taken[64]
    cdef Py_ssize_t num_taken
    cdef const uint32_t *new_tokens
    cdef PyObject *found
    cdef object sequence_id
    for row in range(num_rows):
        sequence_id = sequence_ids[row]
        end = begin + num_tokens[row]
        num_taken = -1
        found = PyDict_GetItem(live, sequence_id)
        if (
            found != NULL
            and end > begin
            and not (num_kv_valid and num_kv_valid[row])
            and not (num_lookahead_tokens and num_lookahead_tokens[row])
            and (not keys_by_row or row not in keys_by_row)
        ):
            new_tokens = &token_ids[begin]
            num_taken = _append_plain(
                pool,
                hasher,
                <SequenceRecord>found,
                owner,
                start_positions[row],
                new_tokens,
                end - begin,
                taken,
            )
        if num_taken >= 0:
            codes.data.as_uints[row] = _OK_CODE
            if end - begin >= pool.block_size:
                grown(<object>found)
            num_new_blocks.data.as_uints[row] = num_taken
            if num_taken:
                array.extend_buffer(new_block_ids, <char *>taken, num_taken)
        else:
            result = append_row(
                owner,
                _AppendRow(
                    sequence_id,
                    start_positions[row],
                    np.frombuffer(tokens, dtype="<u4")[begin:end],
                    num_kv_valid[row] if num_kv_valid else 0,
                    num_lookahead_tokens[row] if num_lookahead_tokens else 0,
                    keys_by_row.get(row, _NO_EXTRA_KEYS),
                ),
            )
            codes.data.as_uints[row] = result.code
            num_new_blocks.data.as_uints[row] = len(result.new_block_ids)
            new_block_ids.extend(result.new_block_ids)
            num_copies.data.as_uints[row] = len(result.copies)
            for copy in result.copies:
                sources.append(copy.source)
                destinations.append(copy.destination)
        begin = end
    return _AppendedBatch(
        codes,
        num_new_blocks,
        new_block_ids,
        num_copies,
        sources,
        destinations,
        pool._num_available(account, 0),
    )


def columns_agree(
    bytes ids,
    bytes starts,
    bytes lengths,
    bytes tokens,
    bytes valids,
    bytes lookaheads,
    int64_t max_tokens,
    int64_t max_rows,
):
    """Whether these are the columns of a batch that may be appended, as far as they say it alone.

    That is: they fit together, with 1 to `max_rows` rows of distinct sequences, `max_tokens` at
    most with the lookahead, and no more drafts in a row than tokens. False also for what is
    too large to be looked at here.
    """
    cdef Py_ssize_t num_rows = len(ids) // sizeof(uint64_t), row
    cdef int64_t total = len(tokens) // sizeof(uint32_t)
    cdef const uint32_t *num_tokens = _numbers(lengths)
    cdef const uint32_t *num_kv_valid = _numbers(valids)
    cdef const uint32_t *num_lookahead_tokens = _numbers(lookaheads)
    if not 1 <= num_rows <= min(max_rows, _MAX_ROWS):
        return False
    if not _fit(ids, starts, lengths, tokens, valids, lookaheads):
        return False
    for row in range(num_rows):
        if num_lookahead_tokens:
            total += num_lookahead_tokens[row]
        if num_kv_valid and num_kv_valid[row] > num_tokens[row]:
            return False
    if total > max_tokens:
        return False
    return _are_distinct(<const uint64_t *>PyBytes_AS_STRING(ids), num_rows)


cdef const uint32_t *_numbers(bytes column) except? NULL:
    """NULL for an empty column."""
    return <const uint32_t *>PyBytes_AS_STRING(column) if len(column) else NULL


cdef bint _fit(
    bytes ids, bytes starts, bytes lengths, bytes tokens, bytes valids, bytes lookaheads
) except -1:
    """Whether each column has an entry a row, but for those that are left out, and the tokens are
    those of the rows.
    """
    cdef Py_ssize_t num_rows = len(ids) // sizeof(uint64_t), row
    cdef Py_ssize_t width = num_rows * sizeof(uint32_t)
    cdef const uint32_t *num_tokens = _numbers(lengths)
    cdef uint64_t total = 0
    if len(ids) % sizeof(uint64_t) or len(starts) != width or len(lengths) != width:
        return False
    if len(valids) not in (0, width) or len(lookaheads) not in (0, width):
        return False
    for row in range(num_rows):
        total += num_tokens[row]
    return total * sizeof(uint32_t) == <uint64_t>len(tokens)


cdef bint _are_distinct(const uint64_t *ids, Py_ssize_t count) noexcept:
    """Of at most `_MAX_ROWS` ids. The factor is random, so that no client can make them collide."""
    cdef uint64_t table[_TABLE_SIZE]
    cdef bint has_zero = False
    cdef Py_ssize_t row, at
    memset(table, 0, sizeof(table))
    for row in range(count):
        if ids[row] == 0:
            if has_zero:
                return False
            has_zero = True
            continue
        at = ids[row] * _FACTOR >> 64 - _TABLE_BITS
        while table[at]:
            if table[at] == ids[row]:
                return False
            at = (at + 1) % _TABLE_SIZE
        table[at] = ids[row]
    return True


cdef Py_ssize_t _append_plain(
    Pool pool,
    hasher,
    SequenceRecord sequence,
    bytes owner,
    int64_t position,
    const uint32_t *new_tokens,
    int64_t count,
    int32_t *taken,
) except -2:
    """How many blocks it took; -1, and nothing is changed, for a row that is not plain."""
    if sequence.owner != owner or sequence.running_layers or sequence.is_copying:
        return -1
    if sequence.copy_holds or sequence.num_lookahead_tokens:
        return -1

    cdef array.array token_ids = sequence.token_ids, table = sequence.block_table
    cdef int64_t size = pool.block_size, old = len(token_ids), num_added
    cdef Py_ssize_t index
    cdef int32_t last, account = 0
    if position != old:
        return -1
    if old % size:
        last = table.data.as_ints[old // size]
        if pool._refs[last] != 1 or pool._state[last] != PLAIN:
            return -1
    num_added = (old + count + size - 1) // size - len(table)
    if num_added > 0:
        if pool.keeps_accounts:
            account = sequence.account
            if not pool._may_hold(account, len(table) + num_added, num_added):
                return -1
        if num_added > _MAX_NEW_BLOCKS or num_added > pool._num_available(account, 0):
            return -1
    array.extend_buffer(token_ids, <char *>new_tokens, count)
    call = ("append", position, count, _ZERO, _ZERO, _NO_EXTRA_KEYS)
    if num_added > 0:
        pool.take_into(taken, num_added, account)
        array.extend_buffer(table, <char *>taken, num_added)
        new = tuple([taken[index] for index in range(num_added)])
        reply = _AppendResult(_OK, new)
    else:
        num_added = 0
        reply = _NO_BLOCKS
    if sequence.registers and (old + count) // size > old // size:
        _hash_new_blocks(hasher, sequence, token_ids, old // size, (old + count) // size)
    sequence.note_applied_call(call, reply)
    return num_added


cdef int _hash_new_blocks(
    hasher, SequenceRecord sequence, array.array token_ids, Py_ssize_t first, Py_ssize_t end
) except -1:
    """Add the hashes of blocks `first ..< end` to those of the sequence."""
    algorithm = hasher.algorithm
    keys = sequence.extra_keys
    if not algorithm.is_recipe or (keys and (first == 0 or keys.reaches_later_blocks)):
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
