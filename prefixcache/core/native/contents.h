/* The content of cached blocks, for verified hits; see prefixcache/core/python/contents.py.
 *
 * Extra keys are rare: a flag says which blocks have some, and those are compared in Python.
 */
#ifndef PREFIXCACHE_CONTENTS_H
#define PREFIXCACHE_CONTENTS_H

#include <stdint.h>
#include <string.h>

#define CONTENTS_ROOT_ENTRY 0
#define CONTENTS_AHEAD 8

typedef struct {
    uint32_t *token_ids; /* [num_blocks, block_size] */
    int64_t *entry, *parent; /* [num_blocks] */
    uint8_t *has_keys; /* [num_blocks] */
    int64_t last_entry;
    size_t block_size;
} contents;

static inline uint32_t *contents_row(const contents *all, int32_t block) {
    return all->token_ids + (size_t)block * all->block_size;
}

static inline int64_t contents_entry(const contents *all, int32_t block) {
    return block < 0 ? CONTENTS_ROOT_ENTRY : all->entry[block];
}

/* How many blocks, from the first on, have these tokens and follow each other; extra keys apart. */
static inline int64_t contents_match(
    const contents *all, const int32_t *blocks, int64_t count, const uint32_t *token_ids) {
    int64_t parent = CONTENTS_ROOT_ENTRY;
    for (int64_t index = 0; index < count; index++, token_ids += all->block_size) {
        if (index + CONTENTS_AHEAD < count) {
            int32_t later = blocks[index + CONTENTS_AHEAD];
            __builtin_prefetch(contents_row(all, later));
            __builtin_prefetch(all->parent + later);
            __builtin_prefetch(all->entry + later);
        }
        int32_t block = blocks[index];
        if (all->parent[block] != parent) return index;
        if (memcmp(contents_row(all, block), token_ids, 4 * all->block_size)) return index;
        parent = all->entry[block];
    }
    return count;
}

static inline void contents_write(
    contents *all, const int32_t *blocks, int64_t count, const uint32_t *token_ids) {
    for (int64_t index = 0; index < count; index++, token_ids += all->block_size) {
        memcpy(contents_row(all, blocks[index]), token_ids, 4 * all->block_size);
        all->has_keys[blocks[index]] = 0;
    }
}

/* A node of its own for a block that follows `parent`, a block or -1. */
static inline void contents_enter(contents *all, int32_t block, int32_t parent) {
    all->parent[block] = contents_entry(all, parent);
    all->entry[block] = ++all->last_entry;
}

/* True if the block has the tokens of the holder and follows the same node; extra keys apart. */
static inline int
contents_same(const contents *all, int32_t block, int32_t holder, int32_t parent) {
    return all->parent[holder] == contents_entry(all, parent)
        && !memcmp(contents_row(all, block), contents_row(all, holder), 4 * all->block_size);
}

static inline void contents_share(contents *all, int32_t block, int32_t holder) {
    all->entry[block] = all->entry[holder];
    all->parent[block] = all->parent[holder];
}

#endif
