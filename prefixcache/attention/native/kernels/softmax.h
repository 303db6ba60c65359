/* From products of q and K to weights, a tile of keys at a time, with a running maximum and sum for
   each row (Milakov and Gimelshein, arXiv 1805.02867). */

#define MOST_KEYS 128 /* of a tile */

/* The rows of a piece of work: of its KV head h, token t and query head g row (h * tokens + t) * G +
   g. Arrays of one number a row, padded. */
typedef struct {
    int count;
    int32_t *tokens, *heads, *positions;
    float *slopes, *maxima, *sums, *fades;
    float *values; /* [count, padded Dv]: sums of weighted V */
} row_state;

/* Where the keys of a tile lie, those of the first head; [MOST_KEYS] each, of which the last is
   repeated. */
typedef struct {
    int count;
    const char *keys[MOST_KEYS], *values[MOST_KEYS];
    const float *key_scales[MOST_KEYS], *value_scales[MOST_KEYS];
} key_tile;

static void find_keys(const attention_call *call, const segment *work, int first_head, int first,
                      int most, key_tile *tile) {
    const stored_tensor *k = &call->keys, *v = &call->values;
    int count = work->end_key - first < most ? work->end_key - first : most;
    ptrdiff_t logical = first / call->block_size;
    int offset = first % call->block_size;
    tile->count = count < 0 ? 0 : count;
    for (int j = 0; j < count; j++) {
        ptrdiff_t block = work->table[logical];
        tile->keys[j] = k->data + block * k->block_stride + first_head * k->head_stride +
                        offset * k->token_stride;
        tile->values[j] = v->data + block * v->block_stride + first_head * v->head_stride +
                          offset * v->token_stride;
        if (k->scales != NULL) {
            tile->key_scales[j] = k->scales + block * k->scale_block_stride +
                                  first_head * k->scale_head_stride +
                                  offset * k->scale_token_stride;
            tile->value_scales[j] = v->scales + block * v->scale_block_stride +
                                    first_head * v->scale_head_stride +
                                    offset * v->scale_token_stride;
        }
        if (++offset == call->block_size) {
            offset = 0;
            logical++;
        }
    }
    for (int j = count; j < most && count > 0; j++) {
        tile->keys[j] = tile->keys[count - 1];
        tile->values[j] = tile->values[count - 1];
    }
}

/* The scales of a tile's keys and values, of one head; 0 where there is no key. */
typedef struct {
    int count;
    float keys[MOST_KEYS], values[MOST_KEYS];
} tile_scales;

INLINE void find_scales(const attention_call *call, const key_tile *tile, int head,
                        tile_scales *scales) {
    scales->count = tile->count;
    if (call->keys.scales == NULL) return;
    for (int j = 0; j < tile->count; j++) {
        scales->keys[j] = tile->key_scales[j][head * call->keys.scale_head_stride];
        scales->values[j] = tile->value_scales[j][head * call->values.scale_head_stride];
    }
    for (int j = tile->count; j < padded(tile->count); j++) scales->keys[j] = scales->values[j] = 0;
}

INLINE int first_seen(const attention_call *call, int position) {
    return position < call->window ? 0 : position - call->window + 1;
}

/* Apply the options to the scores of one row, for the tile's keys from position `first_key` on, and
   return the largest. What the row does not see, and what is no key, gets -FLT_MAX: finite, since a
   row may see nothing of its first tiles, and what they leave fades to 0 when its own token comes. */
INLINE float weigh(const attention_call *call, float *scores, const tile_scales *tile, int first_key,
                   int position, float slope) {
    int lowest = first_seen(call, position) - first_key;
    int end = position - first_key + 1 < tile->count ? position - first_key + 1 : tile->count;
    int num_lanes = padded(tile->count);
    int_vec lane;
    for (int i = 0; i < LANES; i++) lane[i] = i;
    vec largest = (vec){0} - FLT_MAX;
    for (int j = 0; j < num_lanes; j += LANES) {
        vec s = load_floats(scores + j);
        if (call->keys.scales != NULL) s *= load_floats(tile->keys + j);
        if (call->soft_cap != 0) s = tanh_any(s / call->soft_cap) * call->soft_cap;
        int_vec place = lane + j;
        if (slope != 0)
            s += slope * __builtin_convertvector(place + (first_key - position), vec);
        if (j < lowest || j + LANES > end)
            s = choose((place >= lowest) & (place < end), s, (vec){0} - FLT_MAX);
        largest = larger(s, largest);
        store_floats(scores + j, s);
    }
    return largest_of(largest);
}

/* Scores become weights below `maximum`, times the scales of V; returns the sum without those. */
INLINE float to_weights(const attention_call *call, float *scores, const tile_scales *tile,
                        float maximum) {
    vec sum = {0};
    for (int j = 0; j < padded(tile->count); j += LANES) {
        vec weights = exp_negative(load_floats(scores + j) - maximum);
        sum += weights;
        if (call->values.scales != NULL) weights *= load_floats(tile->values + j);
        store_floats(scores + j, weights);
    }
    return sum_of(sum);
}

/* Weights of `num_rows` rows from `row` on: scores is [num_rows, MOST_KEYS]. Afterwards `fades` says
   what the sums so far have to be multiplied with. */
INLINE void take_scores(const attention_call *call, row_state *rows, int row, int num_rows,
                        float *scores, const tile_scales *tile, int first_key) {
    float maxima[padded(num_rows)];
    for (int r = 0; r < num_rows; r++) {
        float largest = weigh(call, scores + r * MOST_KEYS, tile, first_key,
                              rows->positions[row + r], rows->slopes[row + r]);
        float before = rows->maxima[row + r];
        maxima[r] = largest > before ? largest : before;
    }
    for (int r = num_rows; r < padded(num_rows); r++) maxima[r] = 0;
    for (int r = 0; r < num_rows; r += LANES)
        store_floats(rows->fades + row + r, exp_negative(load_floats(rows->maxima + row + r) -
                                                         load_floats(maxima + r)));
    for (int r = 0; r < num_rows; r++) {
        float sum = to_weights(call, scores + r * MOST_KEYS, tile, maxima[r]);
        rows->sums[row + r] = rows->sums[row + r] * rows->fades[row + r] + sum;
        rows->maxima[row + r] = maxima[r];
    }
}

/* ---- the rows of a segment: their memory, their start and their end */

static char *take_memory(char **scratch, size_t bytes) {
    char *memory = *scratch;
    *scratch += (bytes + 63) / 64 * 64;
    return memory;
}

/* Room for vectors that start at the last row. */
static size_t row_bytes(int count) { return (4 * (size_t)(count + 2 * LANES) + 63) / 64 * 64; }

static size_t rows_bytes(const attention_call *call, int count) {
    return 7 * row_bytes(count) + (size_t)count * (size_t)padded(call->values.size) * 4 + 64;
}

static row_state start_rows(const attention_call *call, const segment *work, int first_head,
                            int num_heads, int padded_count, char **scratch) {
    row_state rows;
    int rows_of_head = work->num_tokens * call->group;
    rows.count = rows_of_head * num_heads;
    rows.tokens = (int32_t *)take_memory(scratch, row_bytes(padded_count));
    rows.heads = (int32_t *)take_memory(scratch, row_bytes(padded_count));
    rows.positions = (int32_t *)take_memory(scratch, row_bytes(padded_count));
    rows.slopes = (float *)take_memory(scratch, row_bytes(padded_count));
    rows.maxima = (float *)take_memory(scratch, row_bytes(padded_count));
    rows.sums = (float *)take_memory(scratch, row_bytes(padded_count));
    rows.fades = (float *)take_memory(scratch, row_bytes(padded_count));
    size_t value_bytes = (size_t)padded_count * (size_t)padded(call->values.size) * 4;
    rows.values = (float *)take_memory(scratch, value_bytes);
    memset(rows.values, 0, value_bytes);
    for (int r = 0; r < rows.count; r++) {
        int kv_head = first_head + r / rows_of_head;
        rows.tokens[r] = r % rows_of_head / call->group;
        rows.heads[r] = kv_head * call->group + r % call->group;
        rows.positions[r] = work->positions[work->tokens[rows.tokens[r]]];
        rows.slopes[r] = call->slopes == NULL ? 0 : call->slopes[rows.heads[r]];
        rows.sums[r] = 0;
    }
    for (int r = 0; r < padded_count + 2 * LANES; r++) rows.maxima[r] = -FLT_MAX;
    return rows;
}

INLINE const char *query_of(const attention_call *call, const segment *work, const row_state *rows,
                            int row) {
    return call->q + work->tokens[rows->tokens[row]] * call->q_token_stride +
           rows->heads[row] * call->q_head_stride;
}

/* A vector of a row's query, times the scale. */
INLINE vec load_query(const attention_call *call, const char *query, int d) {
    int size = call->keys.size;
    vec v = call->q_type == FLOAT32   ? load_part(query, d, size, FLOAT32)
            : call->q_type == FLOAT16 ? load_part(query, d, size, FLOAT16)
                                      : load_part(query, d, size, BFLOAT16);
    return v * call->scale;
}

/* Divide by the sum of the weights, that of the head's sink with them, and write the output. */
static void finish_row(const attention_call *call, int token, int head, float maximum, float sum,
                       float *values) {
    float factor = 1;
    if (call->sinks != NULL) {
        float sink = call->sinks[head];
        float largest = sink > maximum ? sink : maximum;
        vec below = {maximum - largest, sink - largest};
        vec weights = exp_negative(below);
        factor = weights[0];
        sum = sum * factor + weights[1];
    }
    int size = call->values.size, num_heads = call->num_kv_heads * call->group;
    for (int d = 0; d < padded(size); d += LANES)
        store_floats(values + d, load_floats(values + d) * (factor / sum));
    size_t place = ((size_t)token * (size_t)num_heads + (size_t)head) * (size_t)size;
    store_head(call->out + place * (size_t)element_bytes(call->q_type), values, size, call->q_type);
}

static void finish_rows(const attention_call *call, const segment *work,
                        const partial_outputs *parts, const row_state *rows) {
    int num_heads = call->num_kv_heads * call->group, row_size = padded(call->values.size);
    for (int r = 0; r < rows->count; r++) {
        float *values = rows->values + (ptrdiff_t)r * row_size;
        if (work->part < 0) {
            finish_row(call, work->tokens[rows->tokens[r]], rows->heads[r], rows->maxima[r],
                       rows->sums[r], values);
            continue;
        }
        size_t place = (size_t)(work->part + rows->tokens[r]) * (size_t)num_heads +
                       (size_t)rows->heads[r];
        parts->maxima[place] = rows->maxima[r];
        parts->sums[place] = rows->sums[r];
        memcpy(parts->values + place * (size_t)row_size, values, 4 * (size_t)row_size);
    }
}

/* One token's output from its parts, for every head. scratch: padded Dv floats. */
static void join(const attention_call *call, const partial_outputs *parts, int token,
                 const int32_t *part_ids, int num_parts, float *scratch) {
    int num_heads = call->num_kv_heads * call->group, row_size = padded(call->values.size);
    for (int head = 0; head < num_heads; head++) {
        float maximum = -FLT_MAX, sum = 0;
        memset(scratch, 0, 4 * (size_t)row_size);
        for (int i = 0; i < num_parts; i++) {
            size_t place = (size_t)part_ids[i] * (size_t)num_heads + (size_t)head;
            float largest = parts->maxima[place] > maximum ? parts->maxima[place] : maximum;
            vec below = {maximum - largest, parts->maxima[place] - largest};
            vec factors = exp_negative(below);
            const float *values = parts->values + place * (size_t)row_size;
            for (int d = 0; d < row_size; d += LANES)
                store_floats(scratch + d, load_floats(scratch + d) * factors[0] +
                                              load_floats(values + d) * factors[1]);
            sum = sum * factors[0] + parts->sums[place] * factors[1];
            maximum = largest;
        }
        finish_row(call, token, head, maximum, sum, scratch);
    }
}
