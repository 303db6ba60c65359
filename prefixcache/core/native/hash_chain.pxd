"""What compiled modules may use of the hash chain."""

from libc.stdint cimport uint8_t, uint32_t

cdef int plain_digests(
    str recipe,
    const uint8_t *parent,
    const uint32_t *token_ids,
    Py_ssize_t num_blocks,
    Py_ssize_t block_size,
    uint8_t *digests,
) except -1
