/* Threads that work off a call's pieces, in the foreground or in the background.

   Pieces are taken one by one by whoever is free, so that neither uneven pieces nor a busy neighbour
   on one core hold up a call, and a helper that comes late finds nothing to do. Any thread may call,
   several at once; helpers are shared by all of them. They sleep when idle, and keep off the core of
   the caller who does its share. Each compiled module has threads of its own. */
#ifndef PREFIXCACHE_THREAD_POOL_H
#define PREFIXCACHE_THREAD_POOL_H

/* In the foreground the caller does its share. In the background it sleeps, and all is done by
   threads of lower priority: a long call then delays short ones less. The caller's own priority will
   not do: it holds locks before and after, and may not raise it again. */
typedef enum { FOREGROUND, BACKGROUND } pool_ground;

/* `piece` is below the call's num_pieces; `worker` is below its num_threads, and no other thread has
   the same one meanwhile. */
typedef void (*pool_function)(void *context, int piece, int worker);

/* For long pieces to call every few tens of microseconds at most. In the background it lets threads
   run that wait for the core, which the system may else do at its next tick only: see the .c file. */
void pool_give_way(void);

/* Run all pieces on up to `num_threads` threads, and return when all are done. Fewer threads run if
   the system gives no more. */
void pool_run(pool_function function, void *context, int num_pieces, int num_threads,
              pool_ground ground);

#endif
