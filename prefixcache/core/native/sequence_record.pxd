"""What compiled modules may use of a sequence's record."""

from cpython cimport array
from libc.stdint cimport int32_t, int64_t

cdef class SequenceRecord:
    cdef public object sequence_id, serial, request_id, cache_use, extra_keys
    cdef public bytes owner
    cdef public array.array token_ids, block_table
    cdef public bytearray hashes
    cdef public list computed, copy_holds
    cdef public int64_t num_prompt_tokens, num_cached_tokens, num_cached_blocks
    cdef public int64_t first_writable, num_lookahead_tokens
    cdef public int32_t account
    cdef public bint registers, is_copying
    cdef public dict last_attention_start
    cdef public double created_at_s
    cdef public tuple last_call, commit_before
    cdef public object last_reply
    cdef public set running_layers, writers

    cdef int note_applied_call(self, tuple call, reply) except -1
