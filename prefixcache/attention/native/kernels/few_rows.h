/* Few rows of each KV head: bound by reading K and V, each number once for all rows of its head.

   All heads of a tile are met before the next tile, as they lie in a block: memory is read in order
   (1.05x to 1.15x faster than head by head), and what comes next is asked for meanwhile. Keys are
   met four at a time; LANES sums of products then become scores by one tree of additions. */

#define FEW_KEYS 64 /* of a tile: its scores and pointers stay in the first cache */
#define KEYS_AT_ONCE 4
#define ROWS_AT_ONCE (LANES / KEYS_AT_ONCE)
#define VALUE_ROWS (LANES == 8 ? 2 : 4) /* with VALUE_VECS: the sums that registers hold */
#define VALUE_VECS 4

/* One head's K or V of a tile, and what to ask for: the next head's, or the next tile's. */
typedef struct {
    int count;
    const char *const *these, *const *next;
    ptrdiff_t offset, next_offset;
} head_tile;

/* Scores of the four keys from `key` on for `num_rows` rows. queries: [num_rows, padded D]; scores:
   [num_rows, MOST_KEYS]. */
INLINE void score_keys(const head_tile *keys, int key, const float *queries, int size,
                       float *scores, element_type type, int num_rows, int asks) {
    vec products[LANES] = {{0}};
    int d = 0;
    for (; d < padded(size); d += LANES) {
        vec k[KEYS_AT_ONCE];
#pragma GCC unroll 4
        for (int i = 0; i < KEYS_AT_ONCE; i++) {
            k[i] = load_part(keys->these[key + i] + keys->offset, d, size, type);
            if (asks)
                __builtin_prefetch(keys->next[key + i] + keys->next_offset +
                                       (ptrdiff_t)d * element_bytes(type), 0, 3);
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
        memcpy(scores + r * MOST_KEYS + key, (const char *)&all + 4 * r * KEYS_AT_ONCE,
               4 * KEYS_AT_ONCE);
}

/* Add weighted V to `num_vecs` vectors of `num_rows` rows, from element d on. */
INLINE void add_values(const head_tile *tile, const float *weights, const float *fades,
                       float *values, int d, int size, element_type type, int num_rows,
                       int num_vecs, int asks) {
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
            ptrdiff_t place = (ptrdiff_t)(d + i * LANES) * element_bytes(type);
            const char *head = tile->these[j] + tile->offset;
            v[i] = num_vecs > 1 ? load(head + place, type) : load_part(head, d, size, type);
            if (asks) __builtin_prefetch(tile->next[j] + tile->next_offset + place, 0, 3);
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

INLINE void add_all_values(const head_tile *tile, const float *weights, const float *fades,
                           float *values, int size, element_type type, int num_rows, int asks) {
    int d = 0;
    for (; d + VALUE_VECS * LANES <= size; d += VALUE_VECS * LANES)
        add_values(tile, weights, fades, values, d, size, type, num_rows, VALUE_VECS, asks);
    for (; d < size; d += LANES)
        add_values(tile, weights, fades, values, d, size, type, num_rows, 1, asks);
}

/* `body` with `count`, which is at least 1 and at most `most`, as a constant. */
#define WITH_CONSTANT(count, most, body)                              \
    if ((most) >= 4 && (count) == 4) { enum { CONSTANT = 4 }; body; } \
    else if ((most) >= 3 && (count) == 3) { enum { CONSTANT = 3 }; body; } \
    else if ((most) >= 2 && (count) == 2) { enum { CONSTANT = 2 }; body; } \
    else { enum { CONSTANT = 1 }; body; }

/* The scores of one head's rows. queries: [num_rows, padded D], scores: [num_rows, MOST_KEYS]. */
INLINE void score_head(const head_tile *keys, const float *queries, int num_rows, int size,
                       float *scores, element_type type) {
    for (int row = 0; row < num_rows; row += ROWS_AT_ONCE) {
        int some = num_rows - row < ROWS_AT_ONCE ? num_rows - row : ROWS_AT_ONCE;
        const float *q = queries + (ptrdiff_t)row * padded(size);
        float *out = scores + (ptrdiff_t)row * MOST_KEYS;
        int asks = row == 0 && keys->next != NULL;
        WITH_CONSTANT(some, ROWS_AT_ONCE, {
            if (asks)
                for (int j = 0; j < keys->count; j += KEYS_AT_ONCE)
                    score_keys(keys, j, q, size, out, type, CONSTANT, 1);
            else
                for (int j = 0; j < keys->count; j += KEYS_AT_ONCE)
                    score_keys(keys, j, q, size, out, type, CONSTANT, 0);
        })
    }
}

INLINE void add_head(const head_tile *values, const float *weights, const float *fades,
                     int num_rows, int size, float *out, element_type type) {
    for (int row = 0; row < num_rows; row += VALUE_ROWS) {
        int some = num_rows - row < VALUE_ROWS ? num_rows - row : VALUE_ROWS;
        const float *w = weights + (ptrdiff_t)row * MOST_KEYS;
        float *sums = out + (ptrdiff_t)row * padded(size);
        int asks = row == 0 && values->next != NULL;
        WITH_CONSTANT(some, VALUE_ROWS, {
            if (asks)
                add_all_values(values, w, fades + row, sums, size, type, CONSTANT, 1);
            else
                add_all_values(values, w, fades + row, sums, size, type, CONSTANT, 0);
        })
    }
}

INLINE void few_rows(const attention_call *call, const segment *work, int first_head, int num_heads,
                     const partial_outputs *parts, char *scratch, element_type type) {
    int key_size = call->keys.size, value_size = call->values.size;
    int num_rows = work->num_tokens * call->group;
    row_state rows =
        start_rows(call, work, first_head, num_heads, num_rows * num_heads, &scratch);
    float *queries = (float *)take_memory(&scratch, 4 * (size_t)rows.count * padded(key_size));
    float *scores = (float *)take_memory(&scratch, 4 * (size_t)num_rows * MOST_KEYS);
    for (int r = 0; r < rows.count; r++)
        for (int d = 0; d < key_size; d += LANES)
            store_floats(queries + (ptrdiff_t)r * padded(key_size) + d,
                         load_query(call, query_of(call, work, &rows, r), d));
    key_tile tiles[2];
    tile_scales scales;
    find_keys(call, work, first_head, work->first_key, FEW_KEYS, &tiles[0]);
    for (int first = work->first_key, turn = 0; first < work->end_key; first += FEW_KEYS, turn ^= 1) {
        const key_tile *tile = &tiles[turn], *next = &tiles[turn ^ 1];
        find_keys(call, work, first_head, first + FEW_KEYS, FEW_KEYS, &tiles[turn ^ 1]);
        for (int h = 0; h < num_heads; h++) {
            int is_last = h + 1 == num_heads, row = h * num_rows;
            const key_tile *after = !is_last ? tile : next->count > 0 ? next : NULL;
            head_tile keys = {tile->count, tile->keys, after == NULL ? NULL : after->keys,
                              h * call->keys.head_stride,
                              is_last ? 0 : (h + 1) * call->keys.head_stride};
            head_tile values = {tile->count, tile->values, after == NULL ? NULL : after->values,
                                h * call->values.head_stride,
                                is_last ? 0 : (h + 1) * call->values.head_stride};
            find_scales(call, tile, h, &scales);
            score_head(&keys, queries + (ptrdiff_t)row * padded(key_size), num_rows, key_size,
                       scores, type);
            take_scores(call, &rows, row, num_rows, scores, &scales, first);
            add_head(&values, scores, rows.fades + row, num_rows, value_size,
                     rows.values + (ptrdiff_t)row * padded(value_size), type);
        }
        pool_give_way();
    }
    finish_rows(call, work, parts, &rows);
}
