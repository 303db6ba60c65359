/* Ages of blocks in histograms, and ghosts of evicted ones; see prefixcache/core/block_ages.py.
 *
 * The two times of a block stand beside each other, and the ghosts of a set fill one line of the
 * processor's cache, so that each costs one access to memory.
 */
#ifndef PREFIXCACHE_BLOCK_AGES_H
#define PREFIXCACHE_BLOCK_AGES_H

#include <stdint.h>
#include <string.h>

#define AGES_MAX_BOUNDS 31
#define GHOST_WAYS 8
#define MAX_GHOST_GAP 8

typedef struct {
    uint32_t registered, used; /* ticks */
} block_times;

typedef struct {
    int64_t counts[AGES_MAX_BOUNDS + 1];
    int64_t sum; /* ticks */
    int32_t last; /* bucket of the last one: the blocks of a call are of nearly one age */
} age_counts;

typedef struct {
    block_times *times; /* [num_blocks] */
    uint64_t *ghosts; /* [num_sets, GHOST_WAYS]: bits of the hash, then the tick; 0: none */
    uint64_t num_sets;
    uint32_t bounds[AGES_MAX_BOUNDS + 1]; /* in ticks; the last is UINT32_MAX */
    age_counts lifetime, idle, reuse_gap, evict_to_reuse;
} block_ages;

static inline void age_add(const block_ages *ages, age_counts *counts, uint32_t age) {
    int32_t bucket = counts->last;
    if (age > ages->bounds[bucket] || (bucket && age <= ages->bounds[bucket - 1])) {
        for (bucket = 0; age > ages->bounds[bucket];) bucket++;
        counts->last = bucket;
    }
    counts->counts[bucket]++;
    counts->sum += age;
}

static inline uint64_t *ghost_set(const block_ages *ages, const uint8_t *digest, uint32_t *bits) {
    uint64_t word;
    memcpy(&word, digest, sizeof word);
    *bits = (uint32_t)(word >> 32);
    return ages->ghosts + ((word & UINT32_MAX) * ages->num_sets >> 32) * GHOST_WAYS;
}

static inline void ghost_prefetch(const block_ages *ages, const uint8_t *digest) {
    uint32_t bits;
    __builtin_prefetch(ghost_set(ages, digest, &bits));
}

/* Ticks since the digest was evicted, or -1. */
static inline int64_t ghost_age(const block_ages *ages, const uint8_t *digest, uint32_t now) {
    uint32_t bits;
    const uint64_t *set = ghost_set(ages, digest, &bits);
    for (int way = 0; way < GHOST_WAYS && set[way]; way++)
        if ((uint32_t)(set[way] >> 32) == bits) return now - (uint32_t)set[way];
    return -1;
}

/* Nothing that its set held was forgotten. */
static inline int ghost_set_has_room(const block_ages *ages, const uint8_t *digest) {
    uint32_t bits;
    return !ghost_set(ages, digest, &bits)[GHOST_WAYS - 1];
}

/* The newest of a set stands first, so one that is there twice is found by its last eviction. */
static inline void ghost_add(block_ages *ages, const uint8_t *digest, uint32_t now) {
    uint32_t bits;
    uint64_t *set = ghost_set(ages, digest, &bits);
    memmove(set + 1, set, (GHOST_WAYS - 1) * sizeof *set);
    set[0] = (uint64_t)bits << 32 | now;
}

static inline void ages_register(block_ages *ages, int32_t block, uint32_t now) {
    ages->times[block] = (block_times){now, now};
}

/* A standby has the place, and so the age, of a block that is taken. */
static inline void ages_take_over(block_ages *ages, int32_t heir, int32_t block) {
    ages->times[heir].registered = ages->times[block].registered;
}

static inline void ages_use(block_ages *ages, int32_t block, uint32_t now) {
    ages->times[block].used = now;
}

static inline void ages_hit(block_ages *ages, int32_t block, uint32_t now) {
    age_add(ages, &ages->reuse_gap, now - ages->times[block].used);
    ages->times[block].used = now;
}

static inline void
ages_evict(block_ages *ages, int32_t block, const uint8_t *digest, uint32_t now) {
    age_add(ages, &ages->lifetime, now - ages->times[block].registered);
    age_add(ages, &ages->idle, now - ages->times[block].used);
    ghost_add(ages, digest, now);
}

#endif
