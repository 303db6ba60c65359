#include "write_kv.h"

#include <string.h>

#include "thread_pool.h"

/* What a thread copies at a time, and the least for which others are woken: less than that is
   copied while they wake. */
#define PIECE_BYTES (64 * 1024)
#define SHARED_BYTES (512 * 1024)

typedef struct {
    const kv_write *write;
    int tokens_a_piece;
} pieces;

static void write_piece(void *context, int piece, int worker) {
    (void)worker;
    const pieces *all = context;
    const kv_write *write = all->write;
    int first = piece * all->tokens_a_piece;
    int end = write->num_tokens - first > all->tokens_a_piece ? first + all->tokens_a_piece
                                                              : write->num_tokens;
    for (int t = first; t < end; t++) {
        int64_t slot = write->slot_mapping[t];
        if (slot < 0) continue;
        ptrdiff_t block = (ptrdiff_t)(slot / write->block_size);
        ptrdiff_t place = (ptrdiff_t)(slot % write->block_size);
        for (int i = 0; i < 2 && write->tensors[i].row_bytes > 0; i++) {
            const new_rows *tensor = &write->tensors[i];
            const char *from = tensor->rows + t * tensor->row_token_stride;
            char *to = tensor->stored + block * tensor->block_stride + place * tensor->token_stride;
            for (int head = 0; head < write->num_kv_heads; head++)
                memcpy(to + head * tensor->head_stride, from + head * tensor->row_head_stride,
                       tensor->row_bytes);
        }
    }
}

void write_kv_run(const kv_write *write, int num_threads) {
    size_t token_bytes = (write->tensors[0].row_bytes + write->tensors[1].row_bytes) *
                         (size_t)write->num_kv_heads;
    size_t tokens = token_bytes < PIECE_BYTES ? PIECE_BYTES / token_bytes : 1;
    pieces all = {.write = write, .tokens_a_piece = (int)tokens};
    int num_pieces = (int)(((size_t)write->num_tokens + tokens - 1) / tokens);
    int is_shared = token_bytes * (size_t)write->num_tokens >= SHARED_BYTES;
    pool_run(write_piece, &all, num_pieces, is_shared ? num_threads : 1, FOREGROUND);
}
