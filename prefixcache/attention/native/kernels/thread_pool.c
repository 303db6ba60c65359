#include "thread_pool.h"

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>

typedef struct job {
    pool_function function;
    void *context;
    int num_pieces;
    atomic_int next_piece;
    /* Under the lock: */
    int wanted_helpers, num_helpers, running_helpers;
    struct job *next;
} job;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t work_there = PTHREAD_COND_INITIALIZER;
static pthread_cond_t helper_done = PTHREAD_COND_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static job *jobs; /* that want helpers */
static int num_threads_made;

static void run_pieces(job *work, int worker) {
    int piece;
    while ((piece = atomic_fetch_add(&work->next_piece, 1)) < work->num_pieces)
        work->function(work->context, piece, worker);
}

static void leave_list(job *work) {
    for (job **link = &jobs; *link != NULL; link = &(*link)->next)
        if (*link == work) {
            *link = work->next;
            return;
        }
}

static void *help(void *unused) {
    pthread_mutex_lock(&lock);
    for (;;) {
        while (jobs == NULL) pthread_cond_wait(&work_there, &lock);
        job *work = jobs;
        int worker = ++work->num_helpers; /* the caller is 0 */
        work->running_helpers++;
        if (work->num_helpers == work->wanted_helpers) leave_list(work);
        pthread_mutex_unlock(&lock);
        run_pieces(work, worker);
        pthread_mutex_lock(&lock);
        if (--work->running_helpers == 0) pthread_cond_broadcast(&helper_done);
    }
    return unused;
}

/* A child of fork has none of the threads, and whatever state the lock was in. */
static void forget_threads(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&work_there, NULL);
    pthread_cond_init(&helper_done, NULL);
    jobs = NULL;
    num_threads_made = 0;
}

static void prepare(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Under the lock. */
static void make_threads(int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    for (; num_threads_made < count; num_threads_made++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, NULL) != 0) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void pool_run(pool_function function, void *context, int num_pieces, int num_threads) {
    job work = {.function = function, .context = context, .num_pieces = num_pieces};
    atomic_init(&work.next_piece, 0);
    work.wanted_helpers = (num_threads < num_pieces ? num_threads : num_pieces) - 1;
    if (work.wanted_helpers < 1) {
        run_pieces(&work, 0);
        return;
    }
    pthread_once(&prepared, prepare);
    pthread_mutex_lock(&lock);
    make_threads(work.wanted_helpers);
    work.next = jobs;
    jobs = &work;
    if (work.wanted_helpers == 1)
        pthread_cond_signal(&work_there);
    else
        pthread_cond_broadcast(&work_there);
    pthread_mutex_unlock(&lock);
    run_pieces(&work, 0);
    pthread_mutex_lock(&lock);
    leave_list(&work);
    while (work.running_helpers > 0) pthread_cond_wait(&helper_done, &lock);
    pthread_mutex_unlock(&lock);
}
