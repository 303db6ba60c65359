/* One form of native attention, to be included by a file that compiles it for an instruction set and
   defines FORM, LANES, STRIP (rows of a strip, whose sums fill the registers), HAS_PAIRS, and what
   vectors.h declares. */

#include "thread_pool.h"
#include "vectors.h"
#include "softmax.h"
#include "few_rows.h"
#include "many_rows.h"

#define FEW_ROWS 16   /* from more on, matrix products are faster */
#define MOST_ROWS 192 /* of a segment: enough for copying a tile not to count */

/* Heads that lie together in a block are met together where the rows are few. */
static int heads_at_once(const attention_call *call, int num_tokens) {
    int lie_together = call->keys.head_stride < call->keys.block_stride;
    return num_tokens * call->group <= FEW_ROWS && lie_together ? call->num_kv_heads : 1;
}

static size_t scratch_bytes(const attention_call *call, int num_tokens) {
    int num_rows = num_tokens * call->group * heads_at_once(call, num_tokens);
    size_t count = (size_t)(num_rows + STRIP - 1) / STRIP * STRIP;
    size_t key_size = (size_t)padded(call->keys.size), value_size = (size_t)padded(call->values.size);
    size_t few = 4 * count * (key_size + MOST_KEYS);
    size_t many = 4 * (count * key_size + MOST_KEYS * (key_size + value_size));
    return rows_bytes(call, (int)count) + (few > many ? few : many) + 10 * 64;
}

static void attend(const attention_call *call, const segment *work, int first_head,
                   const partial_outputs *parts, void *scratch) {
    if (work->num_tokens * call->group > FEW_ROWS) {
        if (has_pairs(call))
            many_rows(call, work, first_head, parts, scratch, 1);
        else
            many_rows(call, work, first_head, parts, scratch, 0);
        return;
    }
    int num_heads = heads_at_once(call, work->num_tokens);
#define FEW(type)                                                           \
    case type:                                                              \
        few_rows(call, work, first_head, num_heads, parts, scratch, type); \
        break;
    switch (call->stored_type) { FEW(FLOAT32) FEW(FLOAT16) FEW(BFLOAT16) FEW(INT8) FEW(FLOAT8) }
#undef FEW
}

static const attention_form form = {FORM, LANES, MOST_ROWS, heads_at_once, scratch_bytes, attend, join};
