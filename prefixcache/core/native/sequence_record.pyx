# cython: language_level=3
"""The fields of one live sequence as members of a C struct, which compiled calls read at once.

`prefixcache.core.python.sequence_record` says what they are.
"""

from cpython cimport array
from libc.stdint cimport int32_t, int64_t


cdef class SequenceRecord:
    def __cinit__(self, *args, **kwargs):
        self.sequence_id = self.serial = 0
        self.last_attention_start = {}
        self.running_layers = set()
        self.copy_holds = []

    def __init__(
        self,
        bytes owner,
        request_id,
        cache_use,
        extra_keys,
        array.array token_ids,
        array.array block_table,
        bytearray hashes,
        list computed,
        int64_t num_prompt_tokens,
        int64_t num_cached_tokens,
        int64_t num_cached_blocks,
        int64_t first_writable,
        bint registers,
        double created_at_s,
        int32_t account=0,
        int64_t num_lookahead_tokens=0,
    ):
        self.owner, self.request_id = owner, request_id
        self.cache_use, self.extra_keys = cache_use, extra_keys
        self.token_ids, self.block_table, self.hashes = token_ids, block_table, hashes
        self.computed = computed
        self.num_prompt_tokens = num_prompt_tokens
        self.num_cached_tokens = num_cached_tokens
        self.num_cached_blocks = num_cached_blocks
        self.first_writable = first_writable
        self.registers = registers
        self.created_at_s = created_at_s
        self.account = account
        self.num_lookahead_tokens = num_lookahead_tokens

    def note_applied(self, tuple call, reply):
        self.note_applied_call(call, reply)

    cdef int note_applied_call(self, tuple call, reply) except -1:
        cdef tuple before = self.last_call
        if before is not None and call[0] == "append" and before[0] == "commit":
            self.commit_before = (before, self.last_reply)
        elif self.commit_before is not None:
            self.commit_before = None
        self.last_call = call
        self.last_reply = reply
        if self.last_attention_start:
            self.last_attention_start.clear()
        return 0
