#define _GNU_SOURCE
#include "thread_pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdatomic.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

/* How the background gives way (Linux). A thread that wakes may have had more than its share, and
   then a computing thread goes on until the next tick, 1 to 4 ms later, whatever its niceness: an
   echo over gRPC, 10 wakes a call, came 4 ms late once in 100 calls. A yield lets the other thread
   run at once. But it also gives up the rest of the own slice, whoever else is there: with slices of
   3 ms, yields every 0.1 ms left 3 % of a core that was shared with a busy process, where 25 % are
   due; with the shortest slices 16 %. (Linux 6.18 at 250 Hz; others ignore what they do not know.) */
#define BACKGROUND_NICENESS 5 /* a third of the time of a thread that wants the same core */
#define BACKGROUND_SLICE_NS 100000
#define GIVE_WAY_NS 100000

/* A thread is woken where it ran last if that core is idle, and else maybe where the waking one runs.
   But an idle core of a virtual machine does not count as such if the host has taken it away (KVM),
   and is looked for among those that share a cache only. So helpers came to their caller's core, and
   stayed there: the two took turns, 3.0 ms for 1.6 on 2 cores (Linux 6.18). Hence they may run on all
   cores but the caller's, of those that they had when they were made: what the caller may use may be
   that one core. Where there are many, that costs more than it brings. */
#define MOST_CORES 16

typedef struct helper {
    pthread_t thread;
    int barred_core; /* -1: none */
    cpu_set_t own_cores, given_cores;
    struct helper *next;
} helper;

typedef struct job {
    pool_function function;
    void *context;
    int num_pieces;
    atomic_int next_piece;
    /* Under the lock: */
    int next_worker, end_worker, running_helpers;
    struct job *next;
} job;

/* Of either ground, under the lock. */
typedef struct {
    pthread_cond_t work_there;
    job *jobs;       /* that want helpers */
    helper *all;
    int num_threads; /* made so far */
    int num_wanted;  /* by all jobs that are not done */
} helpers;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t helper_done = PTHREAD_COND_INITIALIZER;
static pthread_once_t prepared = PTHREAD_ONCE_INIT;
static helpers grounds[2] = {{.work_there = PTHREAD_COND_INITIALIZER},
                             {.work_there = PTHREAD_COND_INITIALIZER}};

#define NEVER INT64_MIN
static _Thread_local int64_t gave_way_ns = NEVER; /* in the background: when, last */

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (int64_t)now.tv_sec * 1000000000 + now.tv_nsec;
}

static void run_pieces(job *work, int worker) {
    int piece;
    while ((piece = atomic_fetch_add(&work->next_piece, 1)) < work->num_pieces) {
        work->function(work->context, piece, worker);
        pool_give_way();
    }
}

static void leave_list(helpers *ground, job *work) {
    for (job **link = &ground->jobs; *link != NULL; link = &(*link)->next)
        if (*link == work) {
            *link = work->next;
            return;
        }
}

/* As sched_setattr(2) takes it; C libraries declare neither. */
typedef struct {
    uint32_t size, policy;
    uint64_t flags;
    int32_t nice;
    uint32_t priority;
    uint64_t runtime, deadline, period;
} thread_attributes;

/* On Linux a niceness is one thread's, and so is a slice. */
static void go_to_background(void) {
    id_t thread = (id_t)syscall(SYS_gettid);
    setpriority(PRIO_PROCESS, thread, getpriority(PRIO_PROCESS, thread) + BACKGROUND_NICENESS);
    thread_attributes attributes = {.size = sizeof attributes};
    if (syscall(SYS_sched_getattr, 0, &attributes, sizeof attributes, 0) == 0 &&
        attributes.policy == SCHED_OTHER) {
        attributes.runtime = BACKGROUND_SLICE_NS;
        syscall(SYS_sched_setattr, 0, &attributes, 0);
    }
    gave_way_ns = now_ns();
}

void pool_give_way(void) {
    if (gave_way_ns == NEVER) return;
    int64_t now = now_ns();
    if (now - gave_way_ns < GIVE_WAY_NS) return;
    sched_yield();
    gave_way_ns = now_ns();
}

/* False if the system will not have it, or there are too many cores. Under the lock. */
static int bar(helper *other, int core) {
    cpu_set_t cores;
    if (pthread_getaffinity_np(other->thread, sizeof cores, &cores) != 0) return 0;
    /* At first, and once somebody else has changed them. */
    if (!CPU_EQUAL(&cores, &other->given_cores)) other->own_cores = cores;
    if (CPU_COUNT(&other->own_cores) > MOST_CORES) return 0;
    cores = other->own_cores;
    CPU_CLR(core, &cores);
    if (CPU_COUNT(&cores) == 0) cores = other->own_cores;
    if (pthread_setaffinity_np(other->thread, sizeof cores, &cores) != 0) return 0;
    other->given_cores = cores;
    other->barred_core = core;
    return 1;
}

/* From the core of the calling thread. Under the lock. */
static void keep_off(helper *first) {
    int core = sched_getcpu();
    for (helper *other = first; other != NULL; other = other->next)
        if (other->barred_core != core && !bar(other, core)) return;
}

static void *help(void *context) {
    helpers *ground = context;
    helper self = {.thread = pthread_self(), .barred_core = -1};
    if (ground == &grounds[BACKGROUND]) go_to_background();
    pthread_mutex_lock(&lock);
    self.next = ground->all;
    ground->all = &self;
    for (;;) {
        while (ground->jobs == NULL) pthread_cond_wait(&ground->work_there, &lock);
        job *work = ground->jobs;
        int worker = work->next_worker++;
        work->running_helpers++;
        if (work->next_worker == work->end_worker) leave_list(ground, work);
        pthread_mutex_unlock(&lock);
        run_pieces(work, worker);
        pthread_mutex_lock(&lock);
        if (--work->running_helpers == 0) pthread_cond_broadcast(&helper_done);
    }
    return NULL;
}

/* A child of fork has none of the threads, and whatever state the lock was in. */
static void forget_threads(void) {
    pthread_mutex_init(&lock, NULL);
    pthread_cond_init(&helper_done, NULL);
    for (int i = 0; i < 2; i++) {
        pthread_cond_init(&grounds[i].work_there, NULL);
        grounds[i].jobs = NULL;
        grounds[i].all = NULL;
        grounds[i].num_threads = grounds[i].num_wanted = 0;
    }
}

static void prepare(void) { pthread_atfork(NULL, NULL, forget_threads); }

/* Under the lock. */
static void make_threads(helpers *ground, int count) {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before); /* signals are for the threads of the program */
    for (; ground->num_threads < count; ground->num_threads++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, help, ground) != 0) break;
        pthread_detach(thread);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Whether anybody still works on it, or has to begin. Under the lock. */
static int is_running(job *work) {
    return work->running_helpers > 0 || atomic_load(&work->next_piece) < work->num_pieces;
}

void pool_run(pool_function function, void *context, int num_pieces, int num_threads,
              pool_ground ground) {
    job work = {.function = function, .context = context, .num_pieces = num_pieces};
    helpers *all = &grounds[ground];
    atomic_init(&work.next_piece, 0);
    work.end_worker = num_threads < num_pieces ? num_threads : num_pieces;
    int num_helpers = ground == FOREGROUND ? work.end_worker - 1 : work.end_worker;
    if (num_helpers < 1) {
        run_pieces(&work, 0);
        return;
    }
    pthread_once(&prepared, prepare);
    pthread_mutex_lock(&lock);
    /* In the background no job waits for another's threads, having none of its own. */
    all->num_wanted += num_helpers;
    make_threads(all, ground == FOREGROUND ? num_helpers : all->num_wanted);
    int runs_here = ground == FOREGROUND || all->num_threads == 0;
    work.next_worker = runs_here; /* the caller is 0 */
    if (work.next_worker < work.end_worker) {
        work.next = all->jobs;
        all->jobs = &work;
    }
    if (ground == FOREGROUND) keep_off(all->all);
    if (num_helpers == 1)
        pthread_cond_signal(&all->work_there);
    else
        pthread_cond_broadcast(&all->work_there);
    pthread_mutex_unlock(&lock);
    if (runs_here) run_pieces(&work, 0);
    pthread_mutex_lock(&lock);
    if (runs_here) leave_list(all, &work);
    while (is_running(&work)) pthread_cond_wait(&helper_done, &lock);
    leave_list(all, &work);
    all->num_wanted -= num_helpers;
    pthread_mutex_unlock(&lock);
}
