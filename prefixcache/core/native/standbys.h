/* Standbys of a registered block: a ring through it and them, in the order in which they came.
 *
 * Two columns hold the block after and before, plus one; 0 for a block in no ring. Taking a block
 * out needs no more than the block: when it is the registered one, the longest standing standby is
 * its successor and heads the ring in its place.
 */
#ifndef PREFIXCACHE_STANDBYS_H
#define PREFIXCACHE_STANDBYS_H

#include <stdint.h>

typedef struct {
    int32_t *after, *before; /* [num_blocks] */
} standby_rings;

static inline void ring_add(standby_rings *rings, int32_t registered, int32_t standby) {
    int32_t last = rings->before[registered] ? rings->before[registered] - 1 : registered;
    rings->after[last] = rings->before[registered] = standby + 1;
    rings->before[standby] = last + 1;
    rings->after[standby] = registered + 1;
}

static inline void ring_remove(standby_rings *rings, int32_t block) {
    int32_t after = rings->after[block] - 1, before = rings->before[block] - 1;
    if (after == before) {
        rings->after[after] = rings->before[after] = 0;
    } else {
        rings->after[before] = after + 1;
        rings->before[after] = before + 1;
    }
    rings->after[block] = rings->before[block] = 0;
}

#endif
