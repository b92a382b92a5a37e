/* Has the clock of the day be off for the processes that this is preloaded into, see clock.py.

   TENSORVINE_TEST_CLOCK_S: by how many seconds. CLOCK_REALTIME is what it concerns, in all ways to ask for it, and
   deadlines by it that the kernel is given, which knows the true time: they go back by as much. A deadline before 2001
   is one by CLOCK_MONOTONIC. File times are the file system's own. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdlib.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <time.h>
#include <unistd.h>

#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

static long off;

__attribute__((constructor)) static void begin(void) {
    const char *seconds = getenv("TENSORVINE_TEST_CLOCK_S");
    off = seconds ? atol(seconds) : 0;
}

static int is_of_day(clockid_t clock) { return clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE; }

/* Give a deadline by the kernel's time. */
static const struct timespec *true_time(const struct timespec *deadline, struct timespec *room) {
    if (!deadline || deadline->tv_sec < 1000000000) return deadline;
    *room = *deadline;
    room->tv_sec -= off;
    return room;
}

int clock_gettime(clockid_t clock, struct timespec *now) {
    int failed = (int)syscall(SYS_clock_gettime, clock, now);
    if (!failed && is_of_day(clock)) now->tv_sec += off;
    return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
    (void)zone;
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    now->tv_sec = found.tv_sec;
    now->tv_usec = found.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *out) {
    struct timespec found;
    clock_gettime(CLOCK_REALTIME, &found);
    if (out) *out = found.tv_sec;
    return found.tv_sec;
}

int timespec_get(struct timespec *now, int base) {
    if (base != TIME_UTC) return 0;
    clock_gettime(CLOCK_REALTIME, now);
    return base;
}

typedef int (*cond_t)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
int pthread_cond_timedwait(pthread_cond_t *cond, pthread_mutex_t *mutex, const struct timespec *deadline) {
    REAL("pthread_cond_timedwait", cond_t);
    struct timespec room;
    return real(cond, mutex, true_time(deadline, &room));
}

typedef int (*cond_clock_t)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
int pthread_cond_clockwait(pthread_cond_t *cond, pthread_mutex_t *mutex, clockid_t clock, const struct timespec *deadline) {
    REAL("pthread_cond_clockwait", cond_clock_t);
    struct timespec room;
    return real(cond, mutex, clock, true_time(deadline, &room));
}

typedef int (*mutex_t)(pthread_mutex_t *, const struct timespec *);
int pthread_mutex_timedlock(pthread_mutex_t *mutex, const struct timespec *deadline) {
    REAL("pthread_mutex_timedlock", mutex_t);
    struct timespec room;
    return real(mutex, true_time(deadline, &room));
}

typedef int (*semaphore_t)(sem_t *, const struct timespec *);
int sem_timedwait(sem_t *semaphore, const struct timespec *deadline) {
    REAL("sem_timedwait", semaphore_t);
    struct timespec room;
    return real(semaphore, true_time(deadline, &room));
}

typedef int (*sleep_t)(clockid_t, int, const struct timespec *, struct timespec *);
int clock_nanosleep(clockid_t clock, int flags, const struct timespec *until, struct timespec *left) {
    REAL("clock_nanosleep", sleep_t);
    struct timespec room;
    return real(clock, flags, flags & TIMER_ABSTIME ? true_time(until, &room) : until, left);
}

typedef int (*timer_t_)(int, int, const struct itimerspec *, struct itimerspec *);
int timerfd_settime(int fd, int flags, const struct itimerspec *value, struct itimerspec *old) {
    REAL("timerfd_settime", timer_t_);
    struct itimerspec changed = *value;
    if (flags & TFD_TIMER_ABSTIME) changed.it_value = *true_time(&value->it_value, &changed.it_value);
    return real(fd, flags, &changed, old);
}

/* Abseil waits by futexes of its own. */
long syscall(long number, ...) {
    static long (*real)(long, ...);
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    va_list given;
    va_start(given, number);
    long a = va_arg(given, long), b = va_arg(given, long), c = va_arg(given, long);
    long d = va_arg(given, long), e = va_arg(given, long), f = va_arg(given, long);
    va_end(given);
    struct timespec room;
    if (number == SYS_futex && (b & FUTEX_CLOCK_REALTIME)) d = (long)true_time((const struct timespec *)d, &room);
    return real(number, a, b, c, d, e, f);
}
