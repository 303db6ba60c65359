/* One attention call: cut into segments, run by the threads, and joined. */

#include "attention.h"

#include <stdlib.h>

#include "thread_pool.h"

#define LEAST_KEYS 256 /* of a segment that is cut off for the sake of threads */
#define PIECES_A_THREAD 4 /* so that threads end at about the same time */
#define LONG_WORK 5e7 /* multiplications, of which a core does so many in about 1 ms */

int attention_forms(const attention_form *forms[MOST_FORMS]) {
    const attention_form *avx512 = attention_form_avx512(), *bf16 = attention_form_avx512_bf16(),
                         *avx2 = attention_form_avx2(), *neon = attention_form_neon();
    int count = 0;
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512vl")) {
        if (__builtin_cpu_supports("avx512bf16")) forms[count++] = bf16;
        forms[count++] = avx512;
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma")) forms[count++] = avx2;
#endif
    if (neon != NULL) forms[count++] = neon;
    (void)avx512, (void)bf16, (void)avx2;
    return count;
}

/* What a thread takes at a time. */
typedef struct {
    int segment, first_head;
} piece;

/* What a call allocates; all of it is NULL or owned. */
typedef struct {
    const attention_call *call;
    const attention_form *form;
    int32_t *positions, *all_tokens; /* [T] */
    segment *segments;
    int num_segments, room;
    piece *pieces;
    int num_pieces, num_parts;
    int32_t *first_part_of, *part_ids; /* a token's parts are part_ids[first_part_of[t]...] */
    int32_t *joined_tokens;            /* those that have parts */
    int num_joined;
    partial_outputs parts;
    char *scratch;
    size_t scratch_bytes; /* of a thread */
} attention_work;

static int int_max(int a, int b) { return a > b ? a : b; }
static int int_min(int a, int b) { return a < b ? a : b; }

static int add_segment(attention_work *work, segment added) {
    if (work->num_segments == work->room) {
        int room = work->room * 2 + 64;
        segment *grown = realloc(work->segments, (size_t)room * sizeof *grown);
        if (grown == NULL) return -1;
        work->segments = grown;
        work->room = room;
    }
    work->segments[work->num_segments++] = added;
    return 0;
}

/* The tokens from `first` on in steps whose rows pay, over the keys that they see from `first_key`
   to before `end_key`. */
static int add_tokens(attention_work *work, const int32_t *tokens, int num_tokens,
                      const int32_t *table, int first_key, int end_key) {
    const attention_call *call = work->call;
    int step = int_max(1, work->form->most_rows / call->group);
    /* The last tokens see the most, and the longest work comes first. */
    for (int end = num_tokens; end > 0; end -= step) {
        int first = int_max(0, end - step);
        int lowest = INT32_MAX, highest = 0;
        for (int i = first; i < end; i++) {
            lowest = int_min(lowest, work->positions[tokens[i]]);
            highest = int_max(highest, work->positions[tokens[i]]);
        }
        int seen = lowest < call->window ? 0 : lowest - call->window + 1;
        segment added = {tokens + first, work->positions, table, end - first,
                         int_max(first_key, seen), int_min(end_key, highest + 1), -1};
        if (added.first_key < added.end_key && add_segment(work, added) != 0) return -1;
    }
    return 0;
}

static int add_all_tokens(attention_work *work) {
    const attention_call *call = work->call;
    const shared_runs *shared = &call->shared;
    for (int s = 0; s < call->num_sequences; s++) {
        int first = call->query_start[s], count = call->query_start[s + 1] - first;
        for (int i = 0; i < count; i++) {
            work->all_tokens[first + i] = first + i;
            work->positions[first + i] = call->seq_lens[s] - count + i;
        }
    }
    for (int run = 0; run < shared->num_runs; run++) {
        int first = shared->run_first_queries[run];
        const int32_t *table = call->block_tables + shared->run_sequences[run] * call->table_stride;
        if (add_tokens(work, shared->query_tokens + first, shared->run_end_queries[run] - first,
                       table, shared->run_starts[run], shared->run_ends[run]) != 0)
            return -1;
    }
    for (int s = 0; s < call->num_sequences; s++) {
        int first = call->query_start[s], count = call->query_start[s + 1] - first;
        int first_key = shared->num_runs > 0 ? shared->private_starts[s] : 0;
        if (add_tokens(work, work->all_tokens + first, count,
                       call->block_tables + s * call->table_stride, first_key,
                       call->seq_lens[s]) != 0)
            return -1;
    }
    return 0;
}

/* Few long segments become more and shorter ones, so that all threads have work. */
static int cut_segments(attention_work *work, int num_threads) {
    if (num_threads == 1) return 0;
    const attention_call *call = work->call;
    int64_t all_keys = 0;
    for (int i = 0; i < work->num_segments; i++) {
        const segment *s = &work->segments[i];
        all_keys += (int64_t)s->num_tokens * (s->end_key - s->first_key) * call->num_kv_heads;
    }
    int64_t share = all_keys / (num_threads * PIECES_A_THREAD) + 1;
    int num_segments = work->num_segments;
    for (int i = 0; i < num_segments; i++) {
        segment whole = work->segments[i];
        int num_keys = whole.end_key - whole.first_key;
        int num_heads = work->form->heads_at_once(call, whole.num_tokens);
        int64_t cuts = ((int64_t)num_keys * whole.num_tokens * num_heads + share - 1) / share;
        cuts = cuts < num_keys / LEAST_KEYS ? cuts : num_keys / LEAST_KEYS;
        for (int64_t cut = 1; cut < cuts; cut++) {
            segment rest = whole;
            rest.first_key = whole.first_key + (int)(num_keys * cut / cuts);
            rest.end_key = whole.first_key + (int)(num_keys * (cut + 1) / cuts);
            if (add_segment(work, rest) != 0) return -1;
        }
        if (cuts > 1) work->segments[i].end_key = whole.first_key + (int)(num_keys / cuts);
    }
    return 0;
}

/* How many multiplications the segments take. */
static double amount(const attention_work *work) {
    const attention_call *call = work->call;
    double pairs = 0;
    for (int i = 0; i < work->num_segments; i++) {
        const segment *s = &work->segments[i];
        pairs += (double)s->num_tokens * (s->end_key - s->first_key);
    }
    return pairs * call->num_kv_heads * call->group * (call->keys.size + call->values.size);
}

static int list_pieces(attention_work *work) {
    size_t most = (size_t)work->num_segments * (size_t)work->call->num_kv_heads;
    work->pieces = malloc((most + 1) * sizeof *work->pieces);
    if (work->pieces == NULL) return -1;
    for (int i = 0; i < work->num_segments; i++) {
        int step = work->form->heads_at_once(work->call, work->segments[i].num_tokens);
        for (int head = 0; head < work->call->num_kv_heads; head += step) {
            piece added = {i, head};
            work->pieces[work->num_pieces++] = added;
        }
    }
    return 0;
}

/* Segments with a token that others have too write parts, and the token gets a list of them. */
static int list_parts(attention_work *work) {
    int num_tokens = work->call->num_tokens;
    int32_t *counts = calloc((size_t)num_tokens + 2, sizeof *counts);
    work->first_part_of = counts;
    if (counts == NULL) return -1;
    for (int i = 0; i < work->num_segments; i++)
        for (int t = 0; t < work->segments[i].num_tokens; t++)
            counts[work->segments[i].tokens[t]]++;
    for (int i = 0; i < work->num_segments; i++) {
        segment *s = &work->segments[i];
        int has_others = 0;
        for (int t = 0; t < s->num_tokens; t++) has_others |= counts[s->tokens[t]] > 1;
        if (!has_others) continue;
        s->part = work->num_parts;
        work->num_parts += s->num_tokens;
    }
    if (work->num_parts == 0) return 0;
    work->part_ids = malloc((size_t)work->num_parts * sizeof *work->part_ids);
    work->joined_tokens = malloc((size_t)num_tokens * sizeof *work->joined_tokens);
    if (work->part_ids == NULL || work->joined_tokens == NULL) return -1;
    /* Counts of parts, then ends of the lists, then, filled from behind, their starts. */
    for (int t = 0; t <= num_tokens; t++) counts[t] = 0;
    for (int i = 0; i < work->num_segments; i++)
        for (int t = 0; t < work->segments[i].num_tokens && work->segments[i].part >= 0; t++)
            counts[work->segments[i].tokens[t]]++;
    for (int t = 0, end = 0; t <= num_tokens; t++) {
        if (counts[t] > 0) work->joined_tokens[work->num_joined++] = t;
        end += counts[t];
        counts[t] = end;
    }
    for (int i = 0; i < work->num_segments; i++)
        for (int t = 0; t < work->segments[i].num_tokens && work->segments[i].part >= 0; t++)
            work->part_ids[--counts[work->segments[i].tokens[t]]] = work->segments[i].part + t;
    return 0;
}

static int make_memory(attention_work *work, int num_threads) {
    const attention_call *call = work->call;
    int lanes = work->form->lanes;
    size_t most_bytes = 0;
    work->parts.padded_size = (call->values.size + lanes - 1) / lanes * lanes;
    for (int i = 0; i < work->num_segments; i++) {
        size_t bytes = work->form->scratch_bytes(call, work->segments[i].num_tokens);
        if (bytes > most_bytes) most_bytes = bytes;
    }
    work->scratch_bytes = (most_bytes + 127) / 128 * 128;
    work->scratch = aligned_alloc(128, work->scratch_bytes * (size_t)num_threads);
    if (work->scratch == NULL) return -1;
    if (work->num_parts == 0) return 0;
    size_t rows = (size_t)work->num_parts * (size_t)(call->num_kv_heads * call->group);
    work->parts.values = malloc(rows * (size_t)work->parts.padded_size * sizeof(float));
    work->parts.maxima = malloc(rows * sizeof(float));
    work->parts.sums = malloc(rows * sizeof(float));
    return work->parts.values == NULL || work->parts.maxima == NULL || work->parts.sums == NULL
               ? -1
               : 0;
}

static void attend_piece(void *context, int index, int worker) {
    const attention_work *work = context;
    const piece *taken = &work->pieces[index];
    work->form->attend(work->call, &work->segments[taken->segment], taken->first_head,
                       &work->parts, work->scratch + (size_t)worker * work->scratch_bytes);
}

static void join_piece(void *context, int index, int worker) {
    const attention_work *work = context;
    int token = work->joined_tokens[index];
    int first = work->first_part_of[token];
    work->form->join(work->call, &work->parts, token, work->part_ids + first,
                     work->first_part_of[token + 1] - first,
                     (float *)(work->scratch + (size_t)worker * work->scratch_bytes));
}

int attention_run(const attention_call *call, const attention_form *form, int num_threads,
                  int in_background) {
    attention_work work = {.call = call, .form = form};
    size_t num_tokens = (size_t)call->num_tokens;
    int result = -1;
    work.positions = malloc((num_tokens + 1) * sizeof *work.positions);
    work.all_tokens = malloc((num_tokens + 1) * sizeof *work.all_tokens);
    if (work.positions != NULL && work.all_tokens != NULL && add_all_tokens(&work) == 0 &&
        cut_segments(&work, num_threads) == 0 && list_pieces(&work) == 0 && list_parts(&work) == 0 &&
        make_memory(&work, num_threads) == 0) {
        pool_ground ground = in_background && amount(&work) > LONG_WORK ? BACKGROUND : FOREGROUND;
        pool_run(attend_piece, &work, work.num_pieces, num_threads, ground);
        pool_run(join_piece, &work, work.num_joined, num_threads, ground);
        result = 0;
    }
    free(work.positions);
    free(work.all_tokens);
    free(work.segments);
    free(work.pieces);
    free(work.first_part_of);
    free(work.part_ids);
    free(work.joined_tokens);
    free(work.parts.values);
    free(work.parts.maxima);
    free(work.parts.sums);
    free(work.scratch);
    return result;
}
