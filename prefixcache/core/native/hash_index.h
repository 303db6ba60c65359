/* The hash index: an open-addressing table from digests to the blocks registered for them.
 *
 * A slot is a block's number plus one and 32 bits of its key, or 0; the digests themselves stand in
 * a column by block. At most half of the slots are used, collisions go to the next slot, and a
 * removal moves later entries back, so there are no marks of removed ones to clean up.
 *
 * The key is a multilinear function of the digest with random factors, because whoever chooses
 * tokens can choose XXH3 digests that agree in the bits that a fixed function would look at.
 */
#ifndef PREFIXCACHE_HASH_INDEX_H
#define PREFIXCACHE_HASH_INDEX_H

#include <stdint.h>
#include <string.h>

#define INDEX_MIN_DIGEST_BYTES 16
/* A look-up reads a slot and then a digest, both far away. Several are under way at a time. */
#define INDEX_SLOTS_AHEAD 24
#define INDEX_DIGESTS_AHEAD 12

typedef struct {
    uint64_t *slots; /* [2 ** num_bits] */
    uint8_t *digests; /* [num_blocks * digest_bytes] */
    size_t digest_bytes;
    int num_bits;
    uint64_t factors[2]; /* odd */
    int64_t count;
} hash_index;

static inline uint32_t index_key(const hash_index *index, const uint8_t *digest) {
    uint64_t words[2];
    memcpy(words, digest, sizeof words);
    return (uint32_t)((words[0] * index->factors[0] + words[1] * index->factors[1]) >> 32);
}

static inline uint64_t index_home(const hash_index *index, uint32_t key) {
    return key >> (32 - index->num_bits);
}

static inline uint8_t *index_digest(const hash_index *index, int32_t block) {
    return index->digests + (size_t)block * index->digest_bytes;
}

/* Slot of a digest, or the empty slot where it would go. */
static inline uint64_t
index_slot(const hash_index *index, uint32_t key, const uint8_t *digest) {
    const uint64_t mask = ((uint64_t)1 << index->num_bits) - 1;
    uint64_t at = index_home(index, key), slot;
    for (; (slot = index->slots[at]); at = (at + 1) & mask) {
        if (slot >> 32 != key) continue;
        const uint8_t *there = index_digest(index, (int32_t)((uint32_t)slot - 1));
        if (!memcmp(there, digest, index->digest_bytes)) break;
    }
    return at;
}

static inline int32_t index_block_at(const hash_index *index, uint64_t at) {
    return (int32_t)((uint32_t)index->slots[at] - 1);
}

/* The block registered under a digest, or -1. */
static inline int32_t index_find(const hash_index *index, const uint8_t *digest) {
    return index_block_at(index, index_slot(index, index_key(index, digest), digest));
}

static inline void
index_set(hash_index *index, uint64_t at, uint32_t key, int32_t block) {
    index->slots[at] = (uint64_t)key << 32 | ((uint32_t)block + 1);
}

static inline void index_prefetch_slot(const hash_index *index, const uint8_t *digest) {
    __builtin_prefetch(index->slots + index_home(index, index_key(index, digest)));
}

/* Start to load what looking up the digests `ahead` of this one will read. */
static inline void
index_prefetch(const hash_index *index, const uint8_t *digest, int64_t num_left) {
    const size_t width = index->digest_bytes;
    if (num_left > INDEX_SLOTS_AHEAD)
        index_prefetch_slot(index, digest + INDEX_SLOTS_AHEAD * width);
    if (num_left > INDEX_DIGESTS_AHEAD) {
        uint32_t key = index_key(index, digest + INDEX_DIGESTS_AHEAD * width);
        uint32_t number = (uint32_t)index->slots[index_home(index, key)];
        if (number) __builtin_prefetch(index_digest(index, (int32_t)(number - 1)));
    }
}

/* Blocks of the longest run of `count` digests that is in the index; returns its length. */
static inline int64_t index_match(
    const hash_index *index, const uint8_t *digests, int64_t count, int32_t *blocks) {
    for (int64_t number = 0; number < count; number++, digests += index->digest_bytes) {
        index_prefetch(index, digests, count - number);
        int32_t block = index_find(index, digests);
        if (block < 0) return number;
        blocks[number] = block;
    }
    return count;
}

/* How many of these blocks, from the first on, are registered for these digests. A block that is
 * `registered` is the one that the index has for its digest, so the slots need not be read. */
static inline int64_t index_confirm(
    const hash_index *index, const uint8_t *states, uint8_t registered, const uint8_t *digests,
    int64_t count, const int32_t *blocks) {
    for (int64_t number = 0; number < count; number++, digests += index->digest_bytes) {
        if (count - number > INDEX_DIGESTS_AHEAD) {
            __builtin_prefetch(index_digest(index, blocks[number + INDEX_DIGESTS_AHEAD]));
            __builtin_prefetch(states + blocks[number + INDEX_DIGESTS_AHEAD]);
        }
        if (states[blocks[number]] != registered) return number;
        if (memcmp(index_digest(index, blocks[number]), digests, index->digest_bytes))
            return number;
    }
    return count;
}

/* Take the entry of a registered block out. */
static inline void index_remove(hash_index *index, int32_t block) {
    const uint64_t mask = ((uint64_t)1 << index->num_bits) - 1;
    const uint8_t *digest = index_digest(index, block);
    uint64_t hole = index_slot(index, index_key(index, digest), digest), at = hole, slot;
    while ((slot = index->slots[at = (at + 1) & mask])) {
        uint64_t home = index_home(index, (uint32_t)(slot >> 32));
        /* It may move back to the hole if that is not before its home. */
        if (((at - home) & mask) >= ((at - hole) & mask)) {
            index->slots[hole] = slot;
            hole = at;
        }
    }
    index->slots[hole] = 0;
    index->count--;
}

#endif
