/* Loaded before torch: gloo's threads are slow right after they have woken whoever waits for their work, as they are
   where others want their core. Each work wakes twice: the waiters of its future, and then those of the work itself. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <string.h>
#include <time.h>

static long milliseconds(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * 1000 + now.tv_nsec / 1000000;
}

/* std::condition_variable::notify_all() */
void _ZNSt18condition_variable10notify_allEv(void *self) {
    static void (*original)(void *);
    static __thread int calls;
    char name[32] = "";
    if (!original) original = (void (*)(void *))dlsym(RTLD_NEXT, "_ZNSt18condition_variable10notify_allEv");
    original(self);
    pthread_getname_np(pthread_self(), name, sizeof name);
    if (strncmp(name, "pt_gloo", 7) || ++calls % 2) return;
    for (long start = milliseconds(); milliseconds() < start + 30;) continue;
}
