/* K/V of new tokens to the slots that they were given: rows are copied as they are. */
#ifndef PREFIXCACHE_WRITE_KV_H
#define PREFIXCACHE_WRITE_KV_H

#include <stddef.h>
#include <stdint.h>

/* K or V of the new tokens, and where all of it lies; strides in bytes, elements side by side. */
typedef struct {
    const char *rows; /* [T, Hkv, D] */
    ptrdiff_t row_token_stride, row_head_stride;
    char *stored; /* [N, Hkv, B, D] */
    ptrdiff_t block_stride, head_stride, token_stride;
    size_t row_bytes;
} new_rows;

typedef struct {
    new_rows tensors[2]; /* the second has no bytes where latents are all that there is */
    int num_tokens, num_kv_heads, block_size;
    const int64_t *slot_mapping; /* [T]; below 0: not written */
} kv_write;

void write_kv_run(const kv_write *write, int num_threads);

#endif
