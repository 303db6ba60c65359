# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""Commit of tokens that fill no block, which most of an engine's are.

`prefixcache.core.row_calls` says what Commit does; this does the same for a row of an idle sequence that
is no repeat and makes nothing findable. Any other row is left to it.
"""

from cpython.dict cimport PyDict_GetItem
from cpython.ref cimport PyObject
from libc.stdint cimport int64_t

from prefixcache.core.native.sequence_record cimport SequenceRecord

from prefixcache.types import CommitResult, ResultCode

cdef object _CommitResult = CommitResult
cdef object _OK = ResultCode.OK


def commit_rows(Py_ssize_t block_size, counters, dict live, bytes owner, rows, commit_row):
    """Commit each row in turn; returns their results.

    live: sequences by id. commit_row: called with the owner and each row that is not plain.
    """
    cdef PyObject *found
    results = []
    for row in rows:
        result = None
        found = PyDict_GetItem(live, row.sequence_id)
        if found != NULL:
            result = _commit_plain(block_size, counters, <SequenceRecord>found, owner, row)
        results.append(commit_row(owner, row) if result is None else result)
    return results


cdef object _commit_plain(
    int64_t size, counters, SequenceRecord sequence, bytes owner, row
):
    """The row's result, or None, and nothing is changed, for a row that is not plain."""
    if sequence.owner != owner or sequence.running_layers or sequence.is_copying:
        return None
    cdef list computed = sequence.computed
    if sequence.copy_holds:
        return None
    # An empty Commit may be a repeat; of any other, the start is where no repeat's is.
    cdef int64_t start = row.start_position, count = row.num_computed_tokens, end = start + count
    cdef int64_t num_cached_blocks = sequence.num_cached_blocks
    cdef int64_t prompt_end = sequence.num_prompt_tokens
    cdef Py_ssize_t layer, num_layers = len(computed)
    if count < 1 or end > len(sequence.token_ids):
        return None
    for layer in range(num_layers):
        if start != computed[layer]:
            return None
    if sequence.registers and end // size > num_cached_blocks:
        return None

    if start < prompt_end:
        counters.prefill_tokens_computed += min(end, prompt_end) - start
    for layer in range(num_layers):
        computed[layer] = end
    reply = _CommitResult(_OK, num_cached_blocks)
    sequence.note_applied_call(("commit", start, count), reply)
    return reply
