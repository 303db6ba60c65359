/* Charges, guarantees and the order of eviction of accounts; the rules are those of
 * prefixcache.core.accounts.
 *
 * A block has two columns: the account that it is charged to, and a mark, which is when it was last
 * used while it is evictable, and the number of its first sharer, plus one, while it is referenced.
 * A sharer is an account that references a block which is charged to another; those of a block are
 * a list in the order in which they came. A block's references are its ref count; those of the
 * account it is charged to are what its sharers leave of it.
 *
 * Group 0 keeps its evictable blocks behind the blank ones, in the pool's own queue; each other
 * group has a queue of evictable blocks over the same columns.
 */
#ifndef PREFIXCACHE_ACCOUNTS_H
#define PREFIXCACHE_ACCOUNTS_H

#include <stdint.h>

#include "free_queue.h"

#define MAX_ACCOUNTS 1024
#define NO_GROUP (-1)

typedef struct {
    int32_t group;
    int64_t guaranteed, max_blocks;
    int64_t charged; /* referenced blocks */
    int64_t shared; /* of these, with sharers */
    int64_t joined; /* referenced blocks that are charged to others */
    int64_t evictable, evictions;
} account;

typedef struct {
    free_queue *queue;
    free_queue own;
    int64_t guaranteed, used;
} account_group;

typedef struct {
    int32_t next; /* plus one; of an unused one, the next unused */
    int32_t account, refs;
} block_sharer;

typedef struct {
    account *all; /* [MAX_ACCOUNTS] */
    account_group *groups; /* [MAX_ACCOUNTS] */
    int32_t count, num_groups;
    uint16_t *charge; /* [num_blocks] */
    int64_t *mark; /* [num_blocks] */
    block_sharer *sharers;
    int64_t num_sharers, capacity; /* ever used, and made */
    int32_t unused; /* plus one */
    int64_t num_unused;
    int64_t num_blocks, reserved, guaranteed, clock;
} account_book;

static inline int64_t larger(int64_t a, int64_t b) { return a > b ? a : b; }
static inline int64_t smaller(int64_t a, int64_t b) { return a < b ? a : b; }

static inline int64_t book_private(const account_book *book, int32_t number) {
    return book->all[number].charged - book->all[number].shared;
}

static inline int64_t book_held(const account_book *book, int32_t number) {
    return book->all[number].charged + book->all[number].joined;
}

static inline account_group *book_group(const account_book *book, int32_t number) {
    return &book->groups[book->all[number].group];
}

static inline free_queue *book_queue(const account_book *book, int32_t block) {
    return book_group(book, book->charge[block])->queue;
}

static inline int64_t own_reserve(const account_book *book, int32_t number) {
    return larger(book->all[number].guaranteed, book_private(book, number));
}

/* Referenced blocks charged to an account, and those among them with sharers, become more. */
static inline void
change_charged(account_book *book, int32_t number, int64_t charged, int64_t shared) {
    account *one = &book->all[number];
    book->reserved -= own_reserve(book, number);
    one->charged += charged;
    one->shared += shared;
    book->reserved += own_reserve(book, number) + shared;
    book_group(book, number)->used += charged;
}

static inline void change_evictable(account_book *book, int32_t number, int64_t change) {
    book->all[number].evictable += change;
    book_group(book, number)->used += change;
}

/* A block that was free is referenced by one account. */
static inline void book_charge(account_book *book, int32_t block, int32_t number) {
    book->charge[block] = (uint16_t)number;
    book->mark[block] = 0;
    change_charged(book, number, 1, 0);
}

/* One more reference, of any account, to a referenced block. */
static inline void book_share(account_book *book, int32_t block, int32_t number) {
    int32_t owner = book->charge[block], at = (int32_t)book->mark[block], last = 0;
    if (owner == number) return;
    for (; at; last = at, at = book->sharers[at - 1].next) {
        if (book->sharers[at - 1].account == number) {
            book->sharers[at - 1].refs++;
            return;
        }
    }
    if (book->unused) {
        at = book->unused;
        book->unused = book->sharers[at - 1].next;
        book->num_unused--;
    } else {
        at = (int32_t)++book->num_sharers;
    }
    book->sharers[at - 1] = (block_sharer){0, number, 1};
    if (last) {
        book->sharers[last - 1].next = at;
    } else {
        book->mark[block] = at;
        change_charged(book, owner, 0, 1);
    }
    book->all[number].joined++;
}

/* Take the sharer after `last` (0: the first) out of a block's list. */
static inline void drop_sharer(account_book *book, int32_t block, int32_t last) {
    int32_t at = last ? book->sharers[last - 1].next : (int32_t)book->mark[block];
    block_sharer *sharer = &book->sharers[at - 1];
    if (last) book->sharers[last - 1].next = sharer->next;
    else book->mark[block] = sharer->next;
    book->all[sharer->account].joined--;
    sharer->next = book->unused;
    book->unused = at;
    book->num_unused++;
}

/* One reference less of an account; `refs` are left, at least one, and the block has sharers. */
static inline void
book_leave(account_book *book, int32_t block, int32_t number, int32_t refs) {
    int32_t owner = book->charge[block], at = (int32_t)book->mark[block], last = 0;
    if (owner == number) {
        for (; at; at = book->sharers[at - 1].next) refs -= book->sharers[at - 1].refs;
        if (refs) return;
        int32_t heir = book->sharers[book->mark[block] - 1].account;
        drop_sharer(book, block, 0);
        change_charged(book, owner, -1, -1);
        book->charge[block] = (uint16_t)heir;
        change_charged(book, heir, 1, book->mark[block] != 0);
        return;
    }
    while (book->sharers[at - 1].account != number) {
        last = at;
        at = book->sharers[at - 1].next;
    }
    if (--book->sharers[at - 1].refs) return;
    drop_sharer(book, block, last);
    if (!book->mark[block]) change_charged(book, owner, 0, -1);
}

/* The last reference is gone. */
static inline void book_free(account_book *book, int32_t block, int is_evictable) {
    int32_t owner = book->charge[block];
    change_charged(book, owner, -1, 0);
    if (is_evictable) {
        change_evictable(book, owner, 1);
        book->mark[block] = ++book->clock;
    }
}

/* An evictable block was used, by a standby of it. */
static inline void book_use(account_book *book, int32_t block) {
    book->mark[block] = ++book->clock;
}

static inline void book_guarantee(account_book *book, int32_t number, int64_t guaranteed) {
    int64_t more = guaranteed - book->all[number].guaranteed;
    book->reserved -= own_reserve(book, number);
    book->all[number].guaranteed = guaranteed;
    book->reserved += own_reserve(book, number);
    book->guaranteed += more;
    book_group(book, number)->guaranteed += more;
}

/* ---- what an account can have */

typedef struct {
    int64_t num_free, num_new, num_reserved, num_takeable;
} hit_counts;

static inline hit_counts book_count_hits(
    const account_book *book, int32_t number, const int32_t *refs, const int32_t *blocks,
    int64_t count) {
    hit_counts counts = {0, 0, 0, count};
    const int64_t unreserved = larger(0, book->num_blocks - book->reserved);
    int32_t made_shared[MAX_ACCOUNTS] = {0}; /* of each account's private blocks */
    for (int64_t index = 0; index < count; index++) {
        int32_t block = blocks[index], owner = book->charge[block];
        if (!refs[block]) {
            counts.num_free++;
            counts.num_new++;
        } else if (owner != number) {
            int32_t at = (int32_t)book->mark[block];
            if (!at) {
                int64_t over = book_private(book, owner) - book->all[owner].guaranteed;
                counts.num_reserved += ++made_shared[owner] > larger(0, over);
                if (counts.num_reserved > unreserved && counts.num_takeable == count)
                    counts.num_takeable = index;
            }
            while (at && book->sharers[at - 1].account != number)
                at = book->sharers[at - 1].next;
            counts.num_new += !at;
        }
    }
    return counts;
}

/* Blocks that the order of eviction can find for an account. */
static inline int64_t
book_findable(const account_book *book, int32_t number, int64_t num_blank) {
    int32_t mine = book->all[number].group;
    int64_t found = num_blank;
    for (int32_t group = 0; group < book->num_groups; group++) {
        const account_group *one = &book->groups[group];
        int64_t evictable = one->queue->length - (group ? 0 : num_blank);
        int64_t over = larger(0, one->used - one->guaranteed);
        found += group == mine ? evictable : smaller(evictable, over);
    }
    return found;
}

/* Blocks that an account can have, when `more` are reserved for what it shares. */
static inline int64_t
book_available(const account_book *book, int32_t number, int64_t num_blank, int64_t more) {
    int64_t left = larger(0, book->all[number].guaranteed - book_private(book, number));
    int64_t unreserved = book->num_blocks - book->reserved - more;
    if (unreserved >= 0) return left + unreserved;
    return smaller(left, book_findable(book, number, num_blank));
}

/* Blocks that an account may hold at most. */
static inline int64_t book_limit(const account_book *book, int32_t number) {
    const account *one = &book->all[number];
    return smaller(one->max_blocks, book->num_blocks - book->guaranteed + one->guaranteed);
}

/* ---- the order of eviction */

static inline int is_over(const account_group *group) { return group->used > group->guaranteed; }

/* The group that loses the next block to one of `mine`, when none is blank; `until` is the mark at
 * which another one does. */
static inline int32_t next_to_lose(const account_book *book, int32_t mine, int64_t *until) {
    int64_t least = INT64_MAX;
    int32_t found = NO_GROUP;
    *until = INT64_MAX;
    for (int32_t group = 0; group < book->num_groups; group++) {
        const free_queue *queue = book->groups[group].queue;
        if (!queue->length || !is_over(&book->groups[group])) continue;
        int64_t mark = book->mark[queue->next[queue->ends]];
        if (mark < least) {
            *until = least;
            least = mark;
            found = group;
        } else if (mark < *until) {
            *until = mark;
        }
    }
    return found == NO_GROUP ? mine : found;
}

/* Take blocks out of the queues for an account, which has as many available. The evictable ones
 * among them still have the charge that they had. */
static inline void book_pop(
    account_book *book, int32_t number, int64_t num_blank, int64_t count, int32_t *blocks) {
    int64_t done = smaller(count, num_blank), until;
    int32_t mine = book->all[number].group;
    queue_pop(book->groups[0].queue, done, blocks);
    change_charged(book, number, done, 0);
    while (done < count) {
        int32_t group = next_to_lose(book, mine, &until);
        account_group *loser = &book->groups[group];
        free_queue *queue = loser->queue;
        int was_over = is_over(loser), mine_was_over = is_over(&book->groups[mine]);
        while (done < count && queue->length) {
            int32_t block = queue->next[queue->ends];
            if (book->mark[block] >= until || is_over(loser) != was_over
                || is_over(&book->groups[mine]) != mine_was_over) break;
            queue_remove(queue, block);
            change_evictable(book, book->charge[block], -1);
            change_charged(book, number, 1, 0);
            blocks[done++] = block;
        }
    }
}

#endif
