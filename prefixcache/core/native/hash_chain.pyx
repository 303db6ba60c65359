# cython: language_level=3, boundscheck=False, wraparound=False, initializedcheck=False
"""The hash chain in C; the loop is in hash_chain.h. Pure, so it runs outside the core's lock."""

from cpython.bytes cimport PyBytes_AS_STRING, PyBytes_FromStringAndSize
from libc.stdint cimport uint8_t, uint32_t
from libc.stdlib cimport free, malloc

cdef extern from "hash_chain.h" nogil:
    ctypedef void (*sha256_compress)(uint32_t *state, const uint8_t *data, size_t num_chunks)
    sha256_compress sha256_fastest()
    sha256_compress sha256_compress_portable
    void sha256_padded(sha256_compress compress, uint8_t *message, size_t size, uint8_t *digest)
    enum:
        CHAIN_SHA256_CBOR, CHAIN_XXHASH_CBOR, CHAIN_XXH3
        CHAIN_OVERHEAD_BYTES, SHA256_PAD_BYTES
    ctypedef struct hash_chain_job:
        int recipe
        sha256_compress compress
        size_t num_blocks
        size_t block_size
        const uint8_t *parent
        const uint32_t *token_ids
        const uint8_t **extra_keys
        const size_t *extra_bytes
        uint8_t *message
        uint8_t *digests
    void hash_chain_run(const hash_chain_job *job)

cdef extern from "thread_pool.h" nogil:
    ctypedef enum pool_ground:
        FOREGROUND, BACKGROUND
    ctypedef void (*pool_function)(void *context, int piece, int worker)
    void pool_run(
        pool_function function, void *context, int num_pieces, int num_threads, pool_ground ground
    )

cdef dict _RECIPES = {
    "sha256_cbor": CHAIN_SHA256_CBOR,
    "xxhash_cbor": CHAIN_XXHASH_CBOR,
    "xxh3": CHAIN_XXH3,
}
# Below it, letting go of the GIL and taking it back costs more than others gain.
cdef Py_ssize_t _MIN_TOKENS_WITHOUT_GIL = 1000
# They take 0.1 ms or more.
cdef Py_ssize_t _MIN_TOKENS_IN_BACKGROUND = 16_384
cdef sha256_compress _compress = sha256_fastest()


def hash_chain(
    str recipe,
    bytes parent,
    const uint32_t[::1] token_ids,
    extra_keys,
    Py_ssize_t block_size,
    bint in_background=False,
):
    """Digests of the blocks of `token_ids`, one after another, chained from `parent`.

    recipe: a name of `HASH_ALGORITHMS`; parent has its digest's length. token_ids: `[n] uint32`,
    contiguous, n a multiple of block_size. extra_keys: encoded, one a block, or None. Lets others
    run while it hashes a long prompt. in_background: a thread of lower priority hashes it.
    """
    cdef hash_chain_job job
    cdef pool_ground ground
    cdef Py_ssize_t num_tokens = token_ids.shape[0], index
    cdef size_t longest = 0
    cdef const uint8_t **keys = NULL
    cdef size_t *sizes = NULL
    cdef tuple held
    cdef bytes key
    job.recipe = _RECIPES[recipe]
    cdef Py_ssize_t digest_bytes = 32 if job.recipe == CHAIN_SHA256_CBOR else 16
    if block_size < 1 or num_tokens % block_size or len(parent) != digest_bytes:
        raise ValueError(f"{num_tokens} tokens, block size {block_size}, parent {parent!r}")
    cdef Py_ssize_t num_blocks = num_tokens // block_size
    cdef bytes digests = PyBytes_FromStringAndSize(NULL, num_blocks * digest_bytes)
    if num_blocks == 0:
        return digests

    job.compress = _compress
    job.num_blocks, job.block_size = num_blocks, block_size
    job.parent = <const uint8_t *>PyBytes_AS_STRING(parent)
    job.token_ids = &token_ids[0]
    job.digests = <uint8_t *>PyBytes_AS_STRING(digests)
    job.message = NULL
    try:
        if extra_keys is not None:
            held = tuple(extra_keys)  # nobody else can change it meanwhile
            if len(held) != num_blocks:
                raise ValueError(f"{len(held)} extra keys for {num_blocks} blocks")
            keys = <const uint8_t **>malloc(num_blocks * sizeof(keys[0]))
            sizes = <size_t *>malloc(num_blocks * sizeof(sizes[0]))
            if keys == NULL or sizes == NULL:
                raise MemoryError
            for index in range(num_blocks):
                key = held[index]
                keys[index] = <const uint8_t *>PyBytes_AS_STRING(key)
                sizes[index] = len(key)
                longest = max(longest, sizes[index])
        job.extra_keys, job.extra_bytes = keys, sizes
        job.message = <uint8_t *>malloc(CHAIN_OVERHEAD_BYTES + 5 * block_size + longest)
        if job.message == NULL:
            raise MemoryError
        if num_tokens < _MIN_TOKENS_WITHOUT_GIL:
            hash_chain_run(&job)
        else:
            ground = FOREGROUND
            if in_background and num_tokens >= _MIN_TOKENS_IN_BACKGROUND:
                ground = BACKGROUND
            with nogil:
                pool_run(_run_job, &job, 1, 1, ground)
    finally:
        free(job.message)
        free(keys)
        free(sizes)
    return digests


cdef void _run_job(void *job, int piece, int worker) noexcept nogil:
    hash_chain_run(<hash_chain_job *>job)


cdef int plain_digests(
    str recipe,
    const uint8_t *parent,
    const uint32_t *token_ids,
    Py_ssize_t num_blocks,
    Py_ssize_t block_size,
    uint8_t *digests,
) except -1:
    """`hash_chain` of few blocks without extra keys, over what the caller has in memory."""
    cdef hash_chain_job job
    job.recipe = _RECIPES[recipe]
    job.compress = _compress
    job.num_blocks, job.block_size = num_blocks, block_size
    job.parent, job.token_ids, job.digests = parent, token_ids, digests
    job.extra_keys, job.extra_bytes = NULL, NULL
    job.message = <uint8_t *>malloc(CHAIN_OVERHEAD_BYTES + 5 * block_size)
    if job.message == NULL:
        raise MemoryError
    hash_chain_run(&job)
    free(job.message)
    return 0


def sha256(bytes data, *, bint portable=False):
    """SHA-256 of any bytes, as the chain computes it. portable: without special instructions."""
    cdef Py_ssize_t size = len(data)
    cdef bytearray message = bytearray(data) + bytearray(SHA256_PAD_BYTES)
    cdef bytes digest = PyBytes_FromStringAndSize(NULL, 32)
    cdef sha256_compress compress = sha256_compress_portable if portable else _compress
    sha256_padded(compress, <uint8_t *>(<char *>message), size, <uint8_t *>PyBytes_AS_STRING(digest))
    return digest
