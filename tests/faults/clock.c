// A wall clock that ppdist_move_clock() moves, for one process: preloaded by clock.py.
//
// Everything that the process asks for the time of day hears the moved clock, in Python and in native
// code. Deadlines that were made of it are moved back before they are waited for, as if the clock of
// the system had been set. CLOCK_MONOTONIC, CLOCK_BOOTTIME and CLOCK_REALTIME_COARSE stay.

#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <semaphore.h>
#include <stddef.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static volatile time_t ahead;  // seconds

void ppdist_move_clock(long seconds) { ahead = seconds; }

int clock_gettime(clockid_t clock, struct timespec *now) {
  int failed = syscall(SYS_clock_gettime, clock, now);
  if (!failed && clock == CLOCK_REALTIME) now->tv_sec += ahead;
  return failed;
}

int gettimeofday(struct timeval *restrict now, void *restrict zone) {
  struct timespec exact;
  (void)zone;
  clock_gettime(CLOCK_REALTIME, &exact);
  now->tv_sec = exact.tv_sec;
  now->tv_usec = exact.tv_nsec / 1000;
  return 0;
}

time_t time(time_t *into) {
  struct timespec exact;
  clock_gettime(CLOCK_REALTIME, &exact);
  if (into) *into = exact.tv_sec;
  return exact.tv_sec;
}

// A monotonic deadline is smaller by decades: only one of the time of day is moved back.
static struct timespec real(const struct timespec *deadline) {
  struct timespec found = *deadline;
  if (found.tv_sec > 1000000000) found.tv_sec -= ahead;
  return found;
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline) {
  static int (*next)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
  struct timespec moved = real(deadline);
  // The version counts: glibc keeps another condition variable of 1999 under the same name.
  if (!next) *(void **)&next = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "pthread_cond_timedwait");
  return next(condition, mutex, &moved);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline) {
  static int (*next)(sem_t *, const struct timespec *);
  struct timespec moved = real(deadline);
  if (!next) *(void **)&next = dlsym(RTLD_NEXT, "sem_timedwait");
  return next(semaphore, &moved);
}
