# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
# cython: cdivision=True
"""The arrays of a batch in compiled code: making them, and whether they agree.

Neither says what is wrong: then the Python form in `batch` and `checks` does, which both must equal.
"""

from libc.stdint cimport INT32_MAX, int32_t, int64_t

import numpy as np


def make_arrays(
    block_tables, start_positions, num_tokens, first_writable, int64_t block_size
):
    """The first five fields of an `AttentionBatch`, in order; None if it is not for this form.

    Arguments: as of `make_batch`. None for all that it refuses, and for tables of another type.
    """
    try:
        return _arrays(block_tables, start_positions, num_tokens, first_writable, block_size)
    except (OverflowError, TypeError, ValueError):
        return None


cdef _arrays(block_tables, start_positions, num_tokens, first_writable, int64_t block_size):
    cdef Py_ssize_t num_sequences = len(block_tables), row, used, longest = 0
    cdef Py_ssize_t column
    cdef int64_t context, count, seq_len, position, offset, writable, total = 0
    if not len(start_positions) == len(num_tokens) == len(first_writable) == num_sequences:
        return None
    if block_size < 1:
        return None
    query_start = np.empty(num_sequences + 1, np.int32)
    context_lens = np.empty(num_sequences, np.int32)
    seq_lens = np.empty(num_sequences, np.int32)
    cdef int32_t[::1] starts = query_start, contexts = context_lens, lengths = seq_lens
    starts[0] = 0
    for row in range(num_sequences):
        context, count, writable = start_positions[row], num_tokens[row], first_writable[row]
        if not (0 <= context <= INT32_MAX and 0 <= count <= INT32_MAX and writable >= 0):
            return None
        total += count
        seq_len = context + count
        used = (seq_len + block_size - 1) // block_size
        if max(total, seq_len) > INT32_MAX or len(block_tables[row]) < used:
            return None
        starts[row + 1], contexts[row], lengths[row] = total, context, seq_len
        longest = max(longest, used)
    tables = np.full((num_sequences, longest), -1, np.int32)
    slot_mapping = np.empty(total, np.int64)
    cdef int32_t[:, ::1] padded = tables
    cdef int64_t[::1] slots = slot_mapping
    cdef const int32_t[:] table
    for row in range(num_sequences):
        table = block_tables[row]
        used = (lengths[row] + block_size - 1) // block_size
        if table.shape[0] < used:  # what its len says need not be so
            return None
        for column in range(used):
            padded[row, column] = table[column]
        writable = first_writable[row]
        column, offset = contexts[row] // block_size, contexts[row] % block_size
        for position in range(contexts[row], lengths[row]):
            slots[starts[row] + position - contexts[row]] = (
                table[column] * block_size + offset if position >= writable else -1
            )
            offset += 1
            if offset == block_size:
                column, offset = column + 1, 0
    return tables, query_start, context_lens, seq_lens, slot_mapping


def agrees(batch, int64_t num_tokens, int64_t num_blocks, int64_t block_size):
    """Whether `check_batch` has nothing against it."""
    cdef const int32_t[:, :] tables
    cdef const int32_t[:] starts, contexts, lengths
    try:
        tables, starts = batch.block_tables, batch.query_start
        contexts, lengths = batch.context_lens, batch.seq_lens
    except (TypeError, ValueError):
        return False
    cdef Py_ssize_t num_sequences = lengths.shape[0], row, column, used
    if tables.shape[0] != num_sequences or contexts.shape[0] != num_sequences:
        return False
    if starts.shape[0] != num_sequences + 1 or starts[0] != 0 or starts[num_sequences] != num_tokens:
        return False
    cdef int64_t count
    for row in range(num_sequences):
        count = <int64_t>starts[row + 1] - starts[row]
        if count < 0 or contexts[row] < 0 or lengths[row] != contexts[row] + count:
            return False
        used = (lengths[row] + block_size - 1) // block_size
        if used > tables.shape[1]:
            return False
        for column in range(used):
            if not 0 <= tables[row, column] < num_blocks:
                return False
    return True
