/* The hash chain of a prompt: one digest for each block, each with the one before in its input.
 *
 * The recipes are those of prefixcache/core/hashing.py. Touches no Python object, so it runs
 * without the GIL.
 */
#ifndef PREFIXCACHE_HASH_CHAIN_H
#define PREFIXCACHE_HASH_CHAIN_H

#define XXH_INLINE_ALL
#include "xxhash.h"

#include "sha256.h"
#include "thread_pool.h"

#if !defined(__BYTE_ORDER__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__
#error "token ids are little-endian in the recipes; the Python form serves other machines"
#endif

enum { CHAIN_SHA256_CBOR, CHAIN_XXHASH_CBOR, CHAIN_XXH3 };

#define GIVE_WAY_BLOCKS 64 /* about 20 us */

/* What a message has besides tokens and extra keys, at most: heads, parent, null and padding. The
 * encoder writes 8 bytes for each token and moves on by the 1 to 5 that count. */
#define CHAIN_OVERHEAD_BYTES (1 + 2 + 32 + 5 + 8 + 1 + SHA256_PAD_BYTES)

/* extra_keys, extra_bytes: one pointer and size for each block, or NULL for none in any.
 * message: scratch of CHAIN_OVERHEAD_BYTES, 5 bytes a token of a block, and the longest keys. */
typedef struct {
    int recipe;
    sha256_compress compress;
    size_t num_blocks, block_size;
    const uint8_t *parent;
    const uint32_t *token_ids;
    const uint8_t *const *extra_keys;
    const size_t *extra_bytes;
    uint8_t *message;
    uint8_t *digests;
} hash_chain_job;

static inline uint8_t *cbor_head(uint8_t *to, int major, uint32_t value) {
    static const uint8_t heads[5] = {0, 0x18, 0x19, 0, 0x1a};
    int width = (value > 23) + (value > 0xff) + 2 * (value > 0xffff);
    uint32_t swapped = __builtin_bswap32(value);
    uint64_t payload = (uint64_t)swapped >> (32 - 8 * width);
    uint64_t head = width ? heads[width] : value;
    uint64_t word = head | (uint64_t)major << 5 | payload << 8;
    memcpy(to, &word, 8);
    return to + 1 + width;
}

static inline uint8_t *cbor_tokens(uint8_t *to, const uint32_t *token_ids, size_t count) {
    for (size_t i = 0; i < count; i++) to = cbor_head(to, 0, token_ids[i]);
    return to;
}

static inline uint8_t *append_bytes(uint8_t *to, const void *from, size_t size) {
    memcpy(to, from, size);
    return to + size;
}

static inline void xxh3_digest(const uint8_t *message, size_t size, uint8_t *digest) {
    XXH128_canonical_t canonical;
    XXH128_canonicalFromHash(&canonical, XXH3_128bits(message, size));
    memcpy(digest, canonical.digest, sizeof canonical.digest);
}

#if SHA256_HAS_X86
/* `hash_chain_run` of the recipe with SHA-256, where the digest before stays in registers. */
static void hash_chain_run_x86(const hash_chain_job *job) {
    const size_t size = job->block_size;
    const __m128i head = _mm_set_epi32(0x20588300, 0, 0, 0);
    __m128i digest[2];
    uint8_t *start = job->message + SHA256_CHAINED_AT + sizeof digest;
    memcpy(digest, job->parent, sizeof digest);
    for (size_t block = 0; block < job->num_blocks; block++) {
        const size_t extra_bytes = job->extra_keys ? job->extra_bytes[block] : 0;
        uint8_t *end = cbor_tokens(cbor_head(start, 4, (uint32_t)size),
                                   job->token_ids + block * size, size);
        if (extra_bytes)
            end = append_bytes(end, job->extra_keys[block], extra_bytes);
        else
            *end++ = 0xf6;
        size_t num_chunks = sha256_pad(job->message, (size_t)(end - job->message));
        sha256_chained_x86(job->message, num_chunks, head, digest);
        memcpy(job->digests + block * sizeof digest, digest, sizeof digest);
        if (block % GIVE_WAY_BLOCKS == GIVE_WAY_BLOCKS - 1) pool_give_way();
    }
}
#endif

static void hash_chain_run(const hash_chain_job *job) {
    const size_t digest_bytes = job->recipe == CHAIN_SHA256_CBOR ? 32 : 16, size = job->block_size;
    const int is_cbor = job->recipe != CHAIN_XXH3;
    const uint8_t *parent = job->parent;
    uint8_t *digest = job->digests, *start = job->message;
#if SHA256_HAS_X86
    if (job->recipe == CHAIN_SHA256_CBOR && job->compress == sha256_compress_x86) {
        hash_chain_run_x86(job);
        return;
    }
#endif
    if (is_cbor) {
        *start++ = 0x83;
        start = cbor_head(start, 2, (uint32_t)digest_bytes);
    }
    for (size_t block = 0; block < job->num_blocks; block++, digest += digest_bytes) {
        const uint32_t *token_ids = job->token_ids + block * size;
        const size_t extra_bytes = job->extra_keys ? job->extra_bytes[block] : 0;
        uint8_t *end = append_bytes(start, parent, digest_bytes);
        if (is_cbor) {
            end = cbor_tokens(cbor_head(end, 4, (uint32_t)size), token_ids, size);
            if (!extra_bytes) *end++ = 0xf6;
        } else {
            end = append_bytes(end, token_ids, 4 * size);
        }
        if (extra_bytes) end = append_bytes(end, job->extra_keys[block], extra_bytes);
        const size_t num_bytes = (size_t)(end - job->message);
        if (job->recipe == CHAIN_SHA256_CBOR)
            sha256_padded(job->compress, job->message, num_bytes, digest);
        else
            xxh3_digest(job->message, num_bytes, digest);
        parent = digest;
        if (block % GIVE_WAY_BLOCKS == GIVE_WAY_BLOCKS - 1) pool_give_way();
    }
}

#endif
