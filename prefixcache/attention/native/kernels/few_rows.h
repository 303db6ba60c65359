/* Few rows of one KV head: bound by reading K and V, each number once for all rows.

   Keys are met four at a time as they lie in memory; LANES sums of products then become scores by
   one tree of additions. The next tile's K and V are asked for while this one's are computed. */

#define FEW_KEYS 64 /* of a tile: its scores and pointers stay in the first cache */
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE (LANES / KEYS_AT_ONCE)
#define VALUE_ROWS (LANES == 8 ? 2 : 4) /* with VALUE_VECS: the sums that registers hold */
#define VALUE_VECS 4

/* Scores of four keys for `num_rows` rows. queries: [num_rows, padded D]; scores: [num_rows,
   MOST_KEYS]. next: keys to ask for. */
INLINE void score_keys(const char *const *keys, const char *const *next, const float *queries,
                       int size, float *scores, element_type type, int num_rows, int asks) {
    vec products[LANES] = {{0}};
    int d = 0;
    for (; d < padded(size); d += LANES) {
        vec k[KEYS_AT_ONCE];
#pragma GCC unroll 4
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            k[i] = load_part(keys[i], d, size, type);
            if (asks) __builtin_prefetch(next[i] + (ptrdiff_t)d * element_bytes(type), 0, 3);
        }
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            vec q = load_floats(queries + r * padded(size) + d);
#pragma GCC unroll 4
            for (int i = 0; i < KEYS_AT_ONCE; i++) products[r * KEYS_AT_ONCE + i] += k[i] * q;
        }
    }
    vec all = sums(products);
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
        memcpy(scores + r * MOST_KEYS, (const char *)&all + 4 * r * KEYS_AT_ONCE,
               4 * KEYS_AT_ONCE);
}

/* Add weighted V to `num_vecs` vectors of `num_rows` rows, from element d on. */
INLINE void add_values(const key_tile *tile, const key_tile *next, const float *weights,
                       const float *fades, float *values, int d, int size, element_type type,
                       int num_rows, int num_vecs, int asks) {
    vec sum[VALUE_ROWS][VALUE_VECS];
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++)
            sum[r][i] = load_floats(values + r * padded(size) + d + i * LANES) * fades[r];
    for (int j = 0; j < tile->count; j++) {
        vec v[VALUE_VECS];
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++) {
            v[i] = num_vecs > 1
                       ? load(tile->values[j] + (ptrdiff_t)(d + i * LANES) * element_bytes(type), type)
                       : load_part(tile->values[j], d, size, type);
            if (asks)
                __builtin_prefetch(
                    next->values[j] + (ptrdiff_t)(d + i * LANES) * element_bytes(type), 0, 3);
        }
#pragma GCC unroll 4
        for (int r = 0; r < num_rows; r++) {
            float weight = weights[r * MOST_KEYS + j];
#pragma GCC unroll 4
            for (int i = 0; i < num_vecs; i++) sum[r][i] += weight * v[i];
        }
    }
#pragma GCC unroll 4
    for (int r = 0; r < num_rows; r++)
#pragma GCC unroll 4
        for (int i = 0; i < num_vecs; i++)
            store_floats(values + r * padded(size) + d + i * LANES, sum[r][i]);
}

INLINE void add_all_values(const key_tile *tile, const key_tile *next, const float *weights,
                           const float *fades, float *values, int size, element_type type,
                           int num_rows, int asks) {
    int d = 0;
    for (; d + VALUE_VECS * LANES <= size; d += VALUE_VECS * LANES)
        add_values(tile, next, weights, fades, values, d, size, type, num_rows, VALUE_VECS, asks);
    for (; d < size; d += LANES)
        add_values(tile, next, weights, fades, values, d, size, type, num_rows, 1, asks);
}

/* `body` with `count`, which is at least 1 and at most `most`, as a constant. */
#define WITH_CONSTANT(count, most, body)                              \
    if ((most) >= 4 && (count) == 4) { enum { CONSTANT = 4 }; body; } \
    else if ((most) >= 3 && (count) == 3) { enum { CONSTANT = 3 }; body; } \
    else if ((most) >= 2 && (count) == 2) { enum { CONSTANT = 2 }; body; } \
    else { enum { CONSTANT = 1 }; body; }

INLINE void few_rows(const attention_call *call, const segment *work, int kv_head,
                     const partial_outputs *parts, char *scratch, element_type type) {
    int key_size = call->keys.size, value_size = call->values.size;
    row_state rows = start_rows(call, work, kv_head, work->num_tokens * call->group, &scratch);
    float *queries = (float *)take_memory(&scratch, 4 * (size_t)rows.count * padded(key_size));
    float *scores = (float *)take_memory(&scratch, 4 * (size_t)rows.count * MOST_KEYS);
    for (int r = 0; r < rows.count; r++)
        for (int d = 0; d < key_size; d += LANES)
            store_floats(queries + (ptrdiff_t)r * padded(key_size) + d,
                         load_query(call, query_of(call, work, kv_head, r), d));
    key_tile tiles[2];
    find_keys(call, work, kv_head, work->first_key, FEW_KEYS, &tiles[0]);
    for (int first = work->first_key, turn = 0; first < work->end_key; first += FEW_KEYS, turn ^= 1) {
        const key_tile *tile = &tiles[turn], *next = &tiles[turn ^ 1];
        find_keys(call, work, kv_head, first + FEW_KEYS, FEW_KEYS, &tiles[turn ^ 1]);
        int asks = next->count > 0;
        for (int row = 0; row < rows.count; row += ROWS_AT_ONCE) {
            int some = rows.count - row < ROWS_AT_ONCE ? rows.count - row : ROWS_AT_ONCE;
            const float *q = queries + (ptrdiff_t)row * padded(key_size);
            WITH_CONSTANT(some, ROWS_AT_ONCE, {
                if (asks && row == 0)
                    for (int j = 0; j < tile->count; j += KEYS_AT_ONCE)
                        score_keys(tile->keys + j, next->keys + j, q, key_size, scores + j, type, CONSTANT, 1);
                else
                    for (int j = 0; j < tile->count; j += KEYS_AT_ONCE)
                        score_keys(tile->keys + j, NULL, q, key_size, scores + (ptrdiff_t)row * MOST_KEYS + j, type, CONSTANT, 0);
            })
        }
        take_scores(call, &rows, 0, rows.count, scores, tile, first);
        for (int row = 0; row < rows.count; row += VALUE_ROWS) {
            int some = rows.count - row < VALUE_ROWS ? rows.count - row : VALUE_ROWS;
            const float *w = scores + (ptrdiff_t)row * MOST_KEYS;
            float *values = rows.values + (ptrdiff_t)row * padded(value_size);
            WITH_CONSTANT(some, VALUE_ROWS, {
                if (asks && row == 0)
                    add_all_values(tile, next, w, rows.fades + row, values, value_size, type, CONSTANT, 1);
                else
                    add_all_values(tile, next, w, rows.fades + row, values, value_size, type, CONSTANT, 0);
            })
        }
    }
    finish_rows(call, work, kv_head, parts, &rows);
}
