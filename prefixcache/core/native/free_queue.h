/* A doubly linked list through two columns of int32: 8 bytes a block, every step a few stores.
 *
 * Entry `ends` of each column, `num_blocks` or above, is the list's two ends: its next is the head,
 * its prev the tail. Lists with other ends may share the columns, a block being in one at a time.
 */
#ifndef PREFIXCACHE_FREE_QUEUE_H
#define PREFIXCACHE_FREE_QUEUE_H

#include <stdint.h>

#define QUEUE_ABSENT (-1)

typedef struct {
    int32_t *next, *prev; /* [num_blocks + number of lists]; QUEUE_ABSENT for a block that is not in the list */
    int32_t ends;
    int64_t length;
} free_queue;

static inline void queue_fill(free_queue *queue) {
    int32_t ends = queue->ends;
    for (int32_t block = 0; block < ends; block++) {
        queue->next[block] = block + 1;
        queue->prev[block] = block - 1;
    }
    queue->next[ends] = 0;
    queue->prev[ends] = ends - 1;
    if (ends) queue->prev[0] = ends;
    else queue->next[ends] = queue->prev[ends] = ends;
    queue->length = ends;
}

static inline void queue_start(free_queue *queue) {
    queue->next[queue->ends] = queue->prev[queue->ends] = queue->ends;
    queue->length = 0;
}

static inline int queue_has(const free_queue *queue, int32_t block) {
    return queue->next[block] != QUEUE_ABSENT;
}

/* `after` is a block of the list, or its ends: then the block becomes the head. */
static inline void queue_insert(free_queue *queue, int32_t block, int32_t after) {
    int32_t before = queue->next[after];
    queue->next[block] = before;
    queue->prev[block] = after;
    queue->next[after] = block;
    queue->prev[before] = block;
    queue->length++;
}

static inline void queue_push_tail(free_queue *queue, int32_t block) {
    queue_insert(queue, block, queue->prev[queue->ends]);
}

static inline void queue_remove(free_queue *queue, int32_t block) {
    int32_t before = queue->prev[block], after = queue->next[block];
    queue->next[before] = after;
    queue->prev[after] = before;
    queue->next[block] = queue->prev[block] = QUEUE_ABSENT;
    queue->length--;
}

/* The first `count` blocks from the head on; the list has as many. */
static inline void queue_peek(const free_queue *queue, int64_t count, int32_t *blocks) {
    int32_t block = queue->ends;
    for (int64_t index = 0; index < count; index++) {
        block = queue->next[block];
        blocks[index] = block;
    }
}

static inline void queue_pop(free_queue *queue, int64_t count, int32_t *blocks) {
    int32_t ends = queue->ends, block = queue->next[ends];
    for (int64_t index = 0; index < count; index++) {
        int32_t after = queue->next[block];
        blocks[index] = block;
        queue->next[block] = queue->prev[block] = QUEUE_ABSENT;
        block = after;
    }
    queue->next[ends] = block;
    queue->prev[block] = ends;
    queue->length -= count;
}

/* Put all blocks of another list behind the tail. */
static inline void queue_splice(free_queue *queue, free_queue *other) {
    if (!other->length) return;
    int32_t ends = queue->ends, tail = queue->prev[ends];
    int32_t first = other->next[other->ends], last = other->prev[other->ends];
    queue->next[tail] = first;
    queue->prev[first] = tail;
    queue->next[last] = ends;
    queue->prev[ends] = last;
    queue->length += other->length;
    queue_start(other);
}

#endif
