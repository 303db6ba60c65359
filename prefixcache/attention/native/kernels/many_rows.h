/* Many rows of one KV head: bound by arithmetic, as two matrix products a tile of keys.

   A tile's K (transposed) and V are copied as float32 into panels of two vectors' width, which stay
   in the second cache while strips of STRIP rows pass over them: a strip's products are sums in
   registers, and its scores never leave the first cache. The blocking is Goto and van de Geijn's
   (ACM TOMS 34, 2008), the order FlashAttention-2's (arXiv 2307.08691).

   With `pairs` K, V and q stay bfloat16, and so do the weights (as in FlashAttention): a step of a
   product is two numbers of each, which lie in the place of one float32. K and q are copied like
   float32 numbers of half the size. Sums are float32 in any case. */

#define PANEL (2 * LANES)
#define PANELS(size) (((size) + PANEL - 1) / PANEL)

INLINE int has_pairs(const attention_call *call) {
    return HAS_PAIRS && call->stored_type == BFLOAT16 && call->q_type == BFLOAT16 &&
           call->keys.size % 2 == 0;
}

/* sums += rows . columns: `count` steps, in each STRIP numbers of rows and num_vecs vectors. */
INLINE void multiply(vec sums[STRIP][2], const float *rows, ptrdiff_t row_step, ptrdiff_t step,
                     const float *columns, int count, int num_vecs, int pairs) {
    for (int i = 0; i < count; i++) {
        vec low = load_floats(columns + (ptrdiff_t)i * num_vecs * LANES);
        vec high = low;
        if (num_vecs == 2) high = load_floats(columns + (ptrdiff_t)i * 2 * LANES + LANES);
#pragma GCC unroll 16
        for (int r = 0; r < STRIP; r++) {
            const float *from = rows + r * row_step + i * step;
            if (pairs) {
                sums[r][0] = add_pairs(sums[r][0], from, low);
                if (num_vecs == 2) sums[r][1] = add_pairs(sums[r][1], from, high);
                continue;
            }
            vec number = *from - (vec){0};
            sums[r][0] += number * low;
            if (num_vecs == 2) sums[r][1] += number * high;
        }
    }
}

/* keys: [panels of PANEL keys][D][PANEL]. */
INLINE void pack_keys(const key_tile *tile, int size, element_type type, float *keys) {
    for (int j = 0; j < tile->count; j += LANES) {
        float *panel = keys + (ptrdiff_t)(j / PANEL) * size * PANEL + j % PANEL;
        for (int d = 0; d < size; d += LANES) {
            vec block[LANES];
            if (d + LANES <= size) {
                ptrdiff_t place = (ptrdiff_t)d * element_bytes(type);
#pragma GCC unroll 16
                for (int i = 0; i < LANES; i++) block[i] = load(tile->keys[j + i] + place, type);
            } else {
                for (int i = 0; i < LANES; i++)
                    block[i] = load_part(tile->keys[j + i], d, size, type);
            }
            transpose(block);
            int count = size - d < LANES ? size - d : LANES;
            for (int i = 0; i < count; i++) store_floats(panel + (ptrdiff_t)(d + i) * PANEL, block[i]);
        }
    }
}

/* values: [panels of Dv][MOST_KEYS][PANEL, or LANES in a last panel that is one vector]. */
INLINE void pack_values(const key_tile *tile, int size, element_type type, float *values) {
    int d = 0;
    for (; d + PANEL <= size; d += PANEL) {
        float *panel = values + (ptrdiff_t)d * MOST_KEYS;
        ptrdiff_t low = (ptrdiff_t)d * element_bytes(type), high = low + LANES * element_bytes(type);
        for (int j = 0; j < tile->count; j++) {
            store_floats(panel + j * PANEL, load(tile->values[j] + low, type));
            store_floats(panel + j * PANEL + LANES, load(tile->values[j] + high, type));
        }
    }
    int width = padded(size) - d;
    for (int j = 0; j < tile->count; j++)
        for (int i = 0; i < width; i += LANES)
            store_floats(values + (ptrdiff_t)d * MOST_KEYS + j * width + i,
                         load_part(tile->values[j], d + i, size, type));
}

/* values: as of `pack_values`, but for [MOST_KEYS / 2]: pairs of two tokens' numbers. */
INLINE void pack_value_pairs(const key_tile *tile, int size, float *values) {
    for (int j = 0; j < tile->count; j += 2) {
        int is_whole = j + 1 < tile->count;
        for (int d = 0; d < size; d += PANEL) {
            const char *first = tile->values[j] + 2 * (ptrdiff_t)d;
            const char *second = tile->values[j + is_whole] + 2 * (ptrdiff_t)d;
            int count = size - d < PANEL ? size - d : PANEL, num_vecs = count > LANES ? 2 : 1;
            vec zipped[2];
            if (is_whole && count == PANEL) {
                zip_pairs(first, second, zipped);
            } else {
                uint16_t rows[2][PANEL] = {{0}};
                memcpy(rows[0], first, 2 * (size_t)count);
                if (is_whole) memcpy(rows[1], second, 2 * (size_t)count);
                zip_pairs(rows[0], rows[1], zipped);
            }
            float *panel = values + (ptrdiff_t)d * (MOST_KEYS / 2) + j / 2 * num_vecs * LANES;
            for (int i = 0; i < num_vecs; i++) store_floats(panel + i * LANES, zipped[i]);
        }
    }
}

/* Bring a share of the next tile's K and V nearer while this one's are computed. */
INLINE void ask_for_rows(const attention_call *call, const key_tile *next, int first, int end) {
    int bytes = element_bytes(call->stored_type);
    for (int j = first; j < end; j++) {
        for (int i = 0; i < call->keys.size * bytes; i += 64)
            __builtin_prefetch(next->keys[j] + i, 0, 2);
        for (int i = 0; i < call->values.size * bytes; i += 64)
            __builtin_prefetch(next->values[j] + i, 0, 2);
    }
}

/* queries: [strips][D][STRIP], zeros where there is no row; times the scale, but for pairs. */
static void pack_queries(const attention_call *call, const segment *work, const row_state *rows,
                         int pairs, float *queries) {
    int size = call->keys.size / (pairs ? 2 : 1);
    for (int r = 0; r < (rows->count + STRIP - 1) / STRIP * STRIP; r++) {
        float *strip = queries + (ptrdiff_t)(r / STRIP) * size * STRIP + r % STRIP;
        const char *query = r < rows->count ? query_of(call, work, rows, r) : NULL;
        for (int d = 0; d < size; d += LANES) {
            vec v = {0};
            if (query != NULL)
                v = pairs ? load_part(query, d, size, FLOAT32) : load_query(call, query, d);
            for (int i = 0; i < LANES && d + i < size; i++) strip[(ptrdiff_t)(d + i) * STRIP] = v[i];
        }
    }
}

/* The keys of a tile that any row of a strip sees, as places in the tile; its positions rise. */
typedef struct {
    int first, end;
} key_range;

static key_range seen_keys(const attention_call *call, const row_state *rows, int row, int num_rows,
                           int first_key, int num_keys) {
    int lowest = INT32_MAX, highest = 0;
    for (int r = row; r < row + num_rows; r++) {
        if (rows->positions[r] < lowest) lowest = rows->positions[r];
        if (rows->positions[r] > highest) highest = rows->positions[r];
    }
    key_range range = {first_seen(call, lowest) - first_key, highest - first_key + 1};
    if (range.first < 0) range.first = 0;
    if (range.end > num_keys) range.end = num_keys;
    return range;
}

/* One pair of tokens, of which only one is seen: the other's V may be no number. */
INLINE void add_half(vec sums[STRIP][2], const float *weights, const float *columns, int is_second,
                     int num_vecs) {
    float half[PANEL];
    int_vec mask = (int_vec){0} + (is_second ? (int32_t)0xFFFF0000 : 0xFFFF);
    for (int i = 0; i < num_vecs; i++)
        store_floats(half + i * LANES, (vec)((int_vec)load_floats(columns + i * LANES) & mask));
    multiply(sums, weights, MOST_KEYS / 2, 1, half, 1, num_vecs, 1);
}

/* sums += weights . values, of the keys that are seen. weights: [STRIP, MOST_KEYS], or pairs, half as
   many; columns: a panel. */
INLINE void add_seen(vec sums[STRIP][2], const float *weights, const float *columns, key_range seen,
                     int num_vecs, int pairs) {
    if (!pairs) {
        multiply(sums, weights + seen.first, MOST_KEYS, 1,
                 columns + (ptrdiff_t)seen.first * num_vecs * LANES, seen.end - seen.first, num_vecs,
                 0);
        return;
    }
    int first = (seen.first + 1) / 2, end = seen.end / 2, width = num_vecs * LANES;
    multiply(sums, weights + first, MOST_KEYS / 2, 1, columns + (ptrdiff_t)first * width, end - first,
             num_vecs, 1);
    if (seen.first % 2)
        add_half(sums, weights + first - 1, columns + (ptrdiff_t)(first - 1) * width, 1, num_vecs);
    if (seen.end % 2) add_half(sums, weights + end, columns + (ptrdiff_t)end * width, 0, num_vecs);
}

INLINE void attend_strip(const attention_call *call, row_state *rows, int row, const float *queries,
                         const float *keys, const float *values, const tile_scales *tile,
                         int first_key, int pairs) {
    float scores[STRIP * MOST_KEYS] __attribute__((aligned(64)));
    float weight_pairs[STRIP * MOST_KEYS / 2] __attribute__((aligned(64)));
    int num_rows = rows->count - row < STRIP ? rows->count - row : STRIP;
    int key_size = call->keys.size / (pairs ? 2 : 1), row_size = padded(call->values.size);
    float scale = pairs ? call->scale : 1;
    key_range seen = seen_keys(call, rows, row, num_rows, first_key, tile->count);
    if (seen.first >= seen.end) return;
    for (int panel = seen.first / PANEL; panel < PANELS(seen.end); panel++) {
        vec sums[STRIP][2] = {{{0}}};
        multiply(sums, queries, 1, STRIP, keys + (ptrdiff_t)panel * key_size * PANEL, key_size, 2,
                 pairs);
#pragma GCC unroll 16
        for (int r = 0; r < STRIP; r++) {
            store_floats(scores + r * MOST_KEYS + panel * PANEL, sums[r][0] * scale);
            store_floats(scores + r * MOST_KEYS + panel * PANEL + LANES, sums[r][1] * scale);
        }
    }
    take_scores(call, rows, row, num_rows, scores, tile, first_key);
    for (int r = 0; pairs && r < STRIP; r++)
        for (int j = seen.first / PANEL * PANEL; j < seen.end; j += PANEL) {
            const float *from = scores + r * MOST_KEYS + j;
            store_floats(weight_pairs + (r * MOST_KEYS + j) / 2,
                         to_pairs(load_floats(from), load_floats(from + LANES)));
        }
    for (int d = 0; d < row_size; d += PANEL) {
        float *out = rows->values + (ptrdiff_t)row * row_size + d;
        int num_vecs = row_size - d < PANEL ? 1 : 2;
        const float *columns = values + (ptrdiff_t)d * (MOST_KEYS / (pairs ? 2 : 1));
        vec sums[STRIP][2];
#define ADD_PANEL(num_vecs)                                                                  \
    _Pragma("GCC unroll 16") for (int r = 0; r < STRIP; r++)                                 \
        _Pragma("GCC unroll 2") for (int i = 0; i < num_vecs; i++)                           \
            sums[r][i] = load_floats(out + (ptrdiff_t)r * row_size + i * LANES) * rows->fades[row + r]; \
    add_seen(sums, pairs ? weight_pairs : scores, columns, seen, num_vecs, pairs);           \
    _Pragma("GCC unroll 16") for (int r = 0; r < STRIP; r++)                                 \
        _Pragma("GCC unroll 2") for (int i = 0; i < num_vecs; i++)                           \
            store_floats(out + (ptrdiff_t)r * row_size + i * LANES, sums[r][i]);
        if (num_vecs == 2) {
            ADD_PANEL(2)
        } else {
            ADD_PANEL(1)
        }
#undef ADD_PANEL
    }
}

INLINE void many_rows(const attention_call *call, const segment *work, int kv_head,
                      const partial_outputs *parts, char *scratch, int pairs) {
    int key_size = call->keys.size, value_size = call->values.size;
    int padded_count = (work->num_tokens * call->group + STRIP - 1) / STRIP * STRIP;
    row_state rows = start_rows(call, work, kv_head, 1, padded_count, &scratch);
    float *queries = (float *)take_memory(&scratch, 4 * (size_t)padded_count * (size_t)key_size);
    float *keys = (float *)take_memory(&scratch, 4 * MOST_KEYS * (size_t)key_size);
    float *values = (float *)take_memory(&scratch, 4 * MOST_KEYS * (size_t)padded(value_size));
    pack_queries(call, work, &rows, pairs, queries);
    key_tile tiles[2];
    tile_scales scales;
    int num_strips = padded_count / STRIP;
    find_keys(call, work, kv_head, work->first_key, MOST_KEYS, &tiles[0]);
    for (int first = work->first_key, turn = 0; first < work->end_key; first += MOST_KEYS, turn ^= 1) {
        const key_tile *tile = &tiles[turn], *next = &tiles[turn ^ 1];
        find_keys(call, work, kv_head, first + MOST_KEYS, MOST_KEYS, &tiles[turn ^ 1]);
        find_scales(call, tile, 0, &scales);
#define PACK(type)                                    \
    case type:                                        \
        pack_keys(tile, key_size, type, keys);       \
        pack_values(tile, value_size, type, values); \
        break;
        if (pairs) {
            pack_keys(tile, key_size / 2, FLOAT32, keys);
            pack_value_pairs(tile, value_size, values);
        } else {
            switch (call->stored_type) { PACK(FLOAT32) PACK(FLOAT16) PACK(BFLOAT16) PACK(INT8) PACK(FLOAT8) }
        }
#undef PACK
        for (int strip = 0; strip < num_strips; strip++) {
            int row = strip * STRIP;
            ask_for_rows(call, next, next->count * strip / num_strips,
                         next->count * (strip + 1) / num_strips);
            attend_strip(call, &rows, row, queries + (ptrdiff_t)row * (key_size / (pairs ? 2 : 1)),
                         keys, values, &scales, first, pairs);
        }
        pool_give_way();
    }
    finish_rows(call, work, parts, &rows);
}
