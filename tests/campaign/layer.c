/* A layer between a daemon and its operating system, which the campaign tells to fail: syncs, writes, and the clock.

   LD_PRELOAD puts it before the C library. The variable FL_CAMPAIGN_PAGE names a file that tests/campaign/layer.py
   writes, and that is mapped here; daemons are forks, so it is looked for whenever a variable is set. Without a page,
   nothing changes. Only regular files and folders below the page's root fail, so that logs go on.

   The clock is that of the time of day. A deadline in it, which a program has computed from what it was told here, is
   translated on its way to the kernel; waits that have begun end when they would have ended. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <pthread.h>
#include <semaphore.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct page {
    int64_t jump; /* seconds that the clock is ahead */
    int32_t sync_error, write_error; /* the number of an error; 0 = all works */
    int64_t failed_syncs, failed_writes; /* how many have failed */
    char root[4064];
};

static struct page *page;

/* Looked up once: clocks are read often. Two threads that look at once find the same. */
#define REAL(name)                                                                                                     \
    ({                                                                                                                 \
        static __typeof__(&name) found_;                                                                               \
        if (!found_) found_ = (__typeof__(&name))dlsym(RTLD_NEXT, #name);                                              \
        found_;                                                                                                        \
    })

static void map_page(const char *name) {
    if (page) munmap(page, sizeof *page);
    page = NULL;
    int fd = REAL(open)(name, O_RDWR | O_CLOEXEC);
    if (fd < 0) return;
    void *mapped = mmap(NULL, sizeof *page, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    close(fd);
    if (mapped != MAP_FAILED) page = mapped;
}

__attribute__((constructor)) static void begin(void) {
    const char *name = getenv("FL_CAMPAIGN_PAGE");
    if (name) map_page(name);
}

int setenv(const char *name, const char *value, int overwrite) {
    int result = REAL(setenv)(name, value, overwrite);
    if (!result && !strcmp(name, "FL_CAMPAIGN_PAGE")) map_page(value);
    return result;
}

/* Whether the descriptor is a regular file or a folder below the root; and whether a daemon only tries its disk there. */
static int is_ours(int fd, int *is_trial) {
    struct stat status;
    char link[40], path[PATH_MAX];
    if (fd < 0 || fstat(fd, &status) || !(S_ISREG(status.st_mode) || S_ISDIR(status.st_mode))) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, sizeof path - 1);
    size_t above = strlen(page->root);
    *is_trial = length > 6 && !memcmp(path + length - 6, "/probe", 6);
    return length > 0 && (size_t)length >= above && !memcmp(path, page->root, above) &&
           ((size_t)length == above || path[above] == '/');
}

/* The error with which a call on the descriptor must fail; 0 = none. */
static int fails(const int32_t *error, int64_t *count, int fd) {
    int number = page ? __atomic_load_n(error, __ATOMIC_SEQ_CST) : 0;
    int is_trial;
    if (!number || !is_ours(fd, &is_trial)) return 0;
    if (!is_trial) __atomic_add_fetch(count, 1, __ATOMIC_SEQ_CST); /* nothing is kept there, so the daemon goes on */
    return number;
}

#define SYNC_FAILS(fd) (page ? fails(&page->sync_error, &page->failed_syncs, fd) : 0)
#define WRITE_FAILS(fd) (page ? fails(&page->write_error, &page->failed_writes, fd) : 0)
#define FAIL(error, call) return (errno = (error)) ? -1 : (call)

int fsync(int fd) { FAIL(SYNC_FAILS(fd), REAL(fsync)(fd)); }
int fdatasync(int fd) { FAIL(SYNC_FAILS(fd), REAL(fdatasync)(fd)); }

ssize_t write(int fd, const void *data, size_t bytes) { FAIL(WRITE_FAILS(fd), REAL(write)(fd, data, bytes)); }
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t at) { FAIL(WRITE_FAILS(fd), REAL(pwrite)(fd, data, bytes, at)); }
ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t at) { FAIL(WRITE_FAILS(fd), REAL(pwrite64)(fd, data, bytes, at)); }
ssize_t writev(int fd, const struct iovec *parts, int count) { FAIL(WRITE_FAILS(fd), REAL(writev)(fd, parts, count)); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) { FAIL(WRITE_FAILS(fd), REAL(pwritev)(fd, parts, count, at)); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t at) { FAIL(WRITE_FAILS(fd), REAL(pwritev64)(fd, parts, count, at)); }
int posix_fallocate(int fd, off_t at, off_t bytes) {
    int error = WRITE_FAILS(fd);
    return error ? error : REAL(posix_fallocate)(fd, at, bytes);
}
int posix_fallocate64(int fd, off64_t at, off64_t bytes) {
    int error = WRITE_FAILS(fd);
    return error ? error : REAL(posix_fallocate64)(fd, at, bytes);
}

static time_t jump(void) {
    return page ? __atomic_load_n(&page->jump, __ATOMIC_SEQ_CST) : 0;
}

int clock_gettime(clockid_t clock, struct timespec *at) {
    int result = REAL(clock_gettime)(clock, at);
    if (!result && (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)) at->tv_sec += jump();
    return result;
}
int gettimeofday(struct timeval *at, void *zone) {
    int result = REAL(gettimeofday)(at, zone);
    if (!result) at->tv_sec += jump();
    return result;
}
time_t time(time_t *at) {
    time_t now = REAL(time)(NULL) + jump();
    if (at) *at = now;
    return now;
}

/* The moment of the kernel's clock for one of ours; other clocks count from the start of the machine. */
static const struct timespec *for_kernel(const struct timespec *at, struct timespec *changed) {
    if (!at || at->tv_sec < 1000000000) return at;
    changed->tv_sec = at->tv_sec - jump();
    changed->tv_nsec = at->tv_nsec;
    return changed;
}

int sem_timedwait(sem_t *semaphore, const struct timespec *at) {
    struct timespec changed;
    return REAL(sem_timedwait)(semaphore, for_kernel(at, &changed));
}
int pthread_cond_timedwait(pthread_cond_t *condition, pthread_mutex_t *mutex, const struct timespec *at) {
    /* Two functions have the name on some machines, and the older one knows conditions of another size. */
    static __typeof__(&pthread_cond_timedwait) found;
    if (!found) found = (__typeof__(found))dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    struct timespec changed;
    at = for_kernel(at, &changed);
    return found ? found(condition, mutex, at) : REAL(pthread_cond_timedwait)(condition, mutex, at);
}

/* Locks that do without the C library wait here, as those of gRPC do. */
long syscall(long number, ...) {
    long given[6];
    struct timespec changed;
    va_list list;
    va_start(list, number);
    for (int i = 0; i < 6; i++) given[i] = va_arg(list, long);
    va_end(list);
    if (number == SYS_futex && (given[1] & FUTEX_CLOCK_REALTIME) && (given[1] & FUTEX_CMD_MASK) == FUTEX_WAIT_BITSET)
        given[3] = (long)for_kernel((const struct timespec *)given[3], &changed);
    return REAL(syscall)(number, given[0], given[1], given[2], given[3], given[4], given[5]);
}
