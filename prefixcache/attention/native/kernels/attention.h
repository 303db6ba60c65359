/* What the parts of native attention share: one call, and the pieces of work that it is cut into.

   Letters of shapes: T new tokens, Hq query heads, Hkv KV heads, G = Hq / Hkv, D and Dv elements of
   K and of V, N blocks of B tokens. A row is one query head of one new token. */
#ifndef PREFIXCACHE_ATTENTION_H
#define PREFIXCACHE_ATTENTION_H

#include <stddef.h>
#include <stdint.h>

typedef enum { FLOAT32, FLOAT16, BFLOAT16, INT8, FLOAT8 } element_type;

/* K or V, [N, Hkv, B, D]; strides in bytes, elements side by side. */
typedef struct {
    const char *data;
    ptrdiff_t block_stride, head_stride, token_stride;
    int size; /* D or Dv */
    /* [N, Hkv, B], strides in elements; NULL: there are none. */
    const float *scales;
    ptrdiff_t scale_block_stride, scale_head_stride, scale_token_stride;
} stored_tensor;

/* Consecutive blocks that several sequences have in common, and whose queries read them: the arrays
   of `prefixcache.attention.shared_prefix.SharedPrefix`. */
typedef struct {
    int num_runs;
    const int32_t *run_sequences, *run_starts, *run_ends, *run_first_queries, *run_end_queries;
    const int32_t *query_tokens;
    const int32_t *private_starts;
} shared_runs;

typedef struct {
    element_type q_type, stored_type; /* the output has q's */
    const char *q;                    /* [T, Hq, D], strides in bytes */
    ptrdiff_t q_token_stride, q_head_stride;
    char *out; /* [T, Hq, Dv], contiguous */
    stored_tensor keys, values;
    int num_tokens, num_sequences, num_kv_heads, group, block_size;
    const int32_t *block_tables; /* [S, table_stride] */
    ptrdiff_t table_stride;
    const int32_t *query_start, *seq_lens;
    shared_runs shared;
    float scale;
    int window;                  /* INT32_MAX: all tokens */
    float soft_cap;              /* 0: none */
    const float *slopes, *sinks; /* [Hq], NULL: none */
} attention_call;

/* Queries and the keys that they meet, of every KV head: some heads of it are a piece of work. */
typedef struct {
    const int32_t *tokens; /* [num_tokens], rows of q */
    const int32_t *positions; /* [T] of each row of q, in its sequence */
    const int32_t *table;
    int num_tokens, first_key, end_key;
    int part; /* where the parts of its tokens start; -1: they are the whole output */
} segment;

/* Unfinished outputs, joined when all are there. A part is one token's, over some of its keys. */
typedef struct {
    float *values;        /* [parts, Hq, padded Dv]: sums of weighted V */
    float *maxima, *sums; /* [parts, Hq]: the largest score, and the sum of the weights below it */
    int padded_size;
} partial_outputs;

/* The same functions, compiled for one instruction set. */
typedef struct {
    const char *name;
    int lanes;      /* floats of a vector; sizes are padded to multiples of it */
    int most_rows;  /* of a segment that pays, but for one token's */
    int (*heads_at_once)(const attention_call *call, int num_tokens);
    size_t (*scratch_bytes)(const attention_call *call, int num_tokens);
    /* `heads_at_once` KV heads from `first_head` on, or those that are left. */
    void (*attend)(const attention_call *call, const segment *work, int first_head,
                   const partial_outputs *parts, void *scratch);
    void (*join)(const attention_call *call, const partial_outputs *parts, int token,
                 const int32_t *part_ids, int num_parts, float *scratch);
} attention_form;

/* NULL where it was not compiled. */
const attention_form *attention_form_avx2(void);
const attention_form *attention_form_avx512(void);
const attention_form *attention_form_avx512_bf16(void);
const attention_form *attention_form_neon(void);

/* The forms that this processor runs, best first; returns how many. */
#define MOST_FORMS 4
int attention_forms(const attention_form *forms[MOST_FORMS]);

/* 0, or -1 if there is no memory. in_background: threads of lower priority do it, if it is long. */
int attention_run(const attention_call *call, const attention_form *form, int num_threads,
                  int in_background);

#endif
