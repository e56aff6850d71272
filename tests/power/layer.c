/* A layer between a program and its disk: it writes down each change of the files below one folder, in order.

   LD_PRELOAD puts it before the C library. FEDRING_DISK_LOG names the log, FEDRING_DISK_ROOT the folder. Each call is
   done first and logged then, before it returns, so that what a program does next comes behind it in the log. A sync
   has two records: what was logged before the first of them is on the disk at the second. A record is a head, two
   names and the bytes that were written; tests/power/records.py reads it.

   Files are called by their inode numbers, and folders by their paths. Writes through shared mappings cannot be seen;
   mapping a file so is logged. Nor can calls of the kernel that do not go through the C library: safetensors renames so.
   The reader of the log finds that out by the inode numbers, and compares what the log leads to with the real files. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

struct head {
    uint32_t bytes; /* of the data */
    uint32_t pid;
    uint16_t kind, name, other, zero; /* a letter, and the lengths of two names */
    uint64_t inode, number; /* the number is an offset or a size */
} __attribute__((packed));

static int log_fd = -1;
static char root[PATH_MAX];
static size_t root_length;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int sent_last; /* whether the last record of this process says that it has sent something */

#define REAL(name) ((__typeof__(&name))real(#name))

static void *real(const char *name) {
    return dlsym(RTLD_NEXT, name);
}

__attribute__((constructor)) static void begin(void) {
    const char *log = getenv("FEDRING_DISK_LOG"), *folder = getenv("FEDRING_DISK_ROOT");
    if (!log || !folder || strlen(folder) >= sizeof root) return;
    strcpy(root, folder);
    root_length = strlen(root);
    int fd = REAL(open)(log, O_RDWR | O_APPEND | O_CREAT | O_CLOEXEC, 0600);
    log_fd = fcntl(fd, F_DUPFD_CLOEXEC, 500); /* out of the way of programs that count on low numbers */
    REAL(close)(fd);
    if (log_fd < 0) abort();
}

static int below_root(const char *path) {
    return !strncmp(path, root, root_length) && (path[root_length] == '/' || !path[root_length]);
}

/* Append a record; the lock is held. A log with a gap would be worse than none. */
static void record(char kind, uint64_t inode, uint64_t number, const char *name, const char *other, const void *data,
                   size_t bytes) {
    struct head head = {bytes, getpid(), kind, strlen(name), strlen(other), 0, inode, number};
    struct iovec parts[] = {{&head, sizeof head}, {(void *)name, head.name}, {(void *)other, head.other},
                            {(void *)data, bytes}};
    ssize_t wanted = sizeof head + head.name + head.other + bytes;
    if (REAL(writev)(log_fd, parts, 4) != wanted) abort();
    sent_last = kind == 'S';
}

/* Whether the descriptor is a regular file (or a folder) below the root; gives its path and its inode. */
static int is_ours(int fd, char *path, struct stat *status, int folders) {
    if (log_fd < 0 || fd < 0 || fd == log_fd || fstat(fd, status)) return 0;
    if (!S_ISREG(status->st_mode) && !(folders && S_ISDIR(status->st_mode))) return 0;
    char link[40];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return below_root(path);
}

/* The absolute path of a name, if it is below the root. */
static int resolve(int folder, const char *name, char *path) {
    if (log_fd < 0 || !name) return 0;
    size_t length = 0;
    if (name[0] != '/') {
        if (folder == AT_FDCWD) {
            if (!getcwd(path, PATH_MAX)) return 0;
            length = strlen(path);
        } else {
            char link[40];
            snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
            ssize_t got = readlink(link, path, PATH_MAX - 1);
            if (got < 0) return 0;
            length = got;
        }
        path[length++] = '/';
    }
    if (length + strlen(name) >= PATH_MAX) return 0;
    strcpy(path + length, name);
    length = strlen(path);
    while (length > 1 && path[length - 1] == '/') path[--length] = 0;
    return below_root(path);
}

#define LOCKED(...)                                                                                                    \
    do {                                                                                                               \
        int error_;                                                                                                    \
        pthread_mutex_lock(&lock);                                                                                     \
        __VA_ARGS__;                                                                                                   \
        error_ = errno;                                                                                                \
        pthread_mutex_unlock(&lock);                                                                                   \
        errno = error_;                                                                                                \
    } while (0)

/* Share the lock of the log, or leave it. Who kills a process takes it alone: no change is done then, and not logged. */
static void share(short type) {
    struct flock whole = {.l_type = type, .l_whence = SEEK_SET};
    while (log_fd >= 0 && fcntl(log_fd, F_SETLKW, &whole))
        if (errno != EINTR) abort();
}

#define CHANGED(...)                                                                                                   \
    LOCKED({                                                                                                           \
        share(F_RDLCK);                                                                                                \
        __VA_ARGS__;                                                                                                   \
        share(F_UNLCK);                                                                                                \
    })

static int open_logged(int folder, const char *name, int flags, mode_t mode) {
    char path[PATH_MAX];
    int fd = -1;
    if (!(flags & (O_CREAT | O_TRUNC)) || !resolve(folder, name, path)) return REAL(openat)(folder, name, flags, mode);
    CHANGED({
        struct stat before, after;
        int existed = !fstatat(AT_FDCWD, path, &before, 0);
        fd = REAL(openat)(folder, name, flags, mode);
        if (fd >= 0 && !fstat(fd, &after) && S_ISREG(after.st_mode)) {
            if (!existed) record('C', after.st_ino, 0, path, "", NULL, 0);
            else if (flags & O_TRUNC) record('T', after.st_ino, 0, path, "", NULL, 0);
        }
    });
    return fd;
}

#define MODE_OF(flags) va_list list; va_start(list, flags); mode_t mode = (flags & (O_CREAT | O_TMPFILE)) ? va_arg(list, mode_t) : 0; va_end(list)

int open(const char *name, int flags, ...) { MODE_OF(flags); return open_logged(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_OF(flags); return open_logged(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE_OF(flags); return open_logged(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE_OF(flags); return open_logged(folder, name, flags, mode); }
int creat(const char *name, mode_t mode) { return open_logged(AT_FDCWD, name, O_WRONLY | O_CREAT | O_TRUNC, mode); }
int creat64(const char *name, mode_t mode) { return creat(name, mode); }

/* Log the bytes that a write has put at an offset, read from the vectors. */
static void log_vectors(int fd, const struct stat *status, const char *path, const struct iovec *parts, int count,
                        size_t written, off_t offset) {
    for (int i = 0; i < count && written; i++) {
        size_t bytes = parts[i].iov_len < written ? parts[i].iov_len : written;
        if (bytes) record('W', status->st_ino, offset, path, "", parts[i].iov_base, bytes);
        offset += bytes;
        written -= bytes;
    }
}

static ssize_t write_logged(int fd, const struct iovec *parts, int count, off_t offset, int at) {
    char path[PATH_MAX];
    struct stat status;
    ssize_t written = -1;
    if (!is_ours(fd, path, &status, 0)) {
        if (log_fd >= 0 && fd != log_fd && !fstat(fd, &status) && S_ISSOCK(status.st_mode))
            LOCKED(if (!sent_last) record('S', 0, 0, "", "", NULL, 0));
        return at ? REAL(pwritev)(fd, parts, count, offset) : REAL(writev)(fd, parts, count);
    }
    CHANGED({
        written = at ? REAL(pwritev)(fd, parts, count, offset) : REAL(writev)(fd, parts, count);
        if (written > 0) {
            if (!at) offset = lseek(fd, 0, SEEK_CUR) - written; /* right also for O_APPEND */
            log_vectors(fd, &status, path, parts, count, written, offset);
        }
    });
    return written;
}

ssize_t write(int fd, const void *data, size_t bytes) {
    struct iovec part = {(void *)data, bytes};
    return write_logged(fd, &part, 1, 0, 0);
}
ssize_t pwrite(int fd, const void *data, size_t bytes, off_t offset) {
    struct iovec part = {(void *)data, bytes};
    return write_logged(fd, &part, 1, offset, 1);
}
ssize_t pwrite64(int fd, const void *data, size_t bytes, off64_t offset) { return pwrite(fd, data, bytes, offset); }
ssize_t writev(int fd, const struct iovec *parts, int count) { return write_logged(fd, parts, count, 0, 0); }
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) { return write_logged(fd, parts, count, offset, 1); }
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) { return write_logged(fd, parts, count, offset, 1); }

/* Log what another call has put into a file, by reading it back: copies within the kernel. */
static void log_copied(int fd, off_t offset, ssize_t copied) {
    char path[PATH_MAX], link[40], data[1 << 16];
    struct stat status;
    if (copied <= 0 || !is_ours(fd, path, &status, 0)) return;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    int reader = REAL(open)(link, O_RDONLY | O_CLOEXEC); /* the descriptor itself may be for writing only */
    while (copied > 0) {
        ssize_t got = pread(reader, data, copied < (ssize_t)sizeof data ? copied : (ssize_t)sizeof data, offset);
        if (got <= 0) abort();
        record('W', status.st_ino, offset, path, "", data, got);
        offset += got;
        copied -= got;
    }
    REAL(close)(reader);
}

ssize_t sendfile(int out, int in, off_t *offset, size_t count);
ssize_t sendfile(int out, int in, off_t *offset, size_t count) {
    ssize_t copied;
    CHANGED({
        copied = REAL(sendfile)(out, in, offset, count);
        if (copied > 0) log_copied(out, lseek(out, 0, SEEK_CUR) - copied, copied);
    });
    return copied;
}
ssize_t sendfile64(int out, int in, off64_t *offset, size_t count) { return sendfile(out, in, offset, count); }
ssize_t copy_file_range(int in, off64_t *from, int out, off64_t *to, size_t count, unsigned flags) {
    ssize_t copied;
    CHANGED({
        copied = REAL(copy_file_range)(in, from, out, to, count, flags);
        if (copied > 0) log_copied(out, (to ? *to : lseek(out, 0, SEEK_CUR)) - copied, copied);
    });
    return copied;
}

static void log_size(int fd, off_t size, int only_longer) {
    char path[PATH_MAX];
    struct stat status;
    if (is_ours(fd, path, &status, 0) && !(only_longer && status.st_size != size))
        record('T', status.st_ino, size, path, "", NULL, 0);
}

int ftruncate(int fd, off_t size) {
    int result;
    CHANGED(if (!(result = REAL(ftruncate)(fd, size))) log_size(fd, size, 0));
    return result;
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *name, off_t size) {
    int fd = REAL(open)(name, O_WRONLY | O_CLOEXEC);
    if (fd < 0) return -1;
    int result = ftruncate(fd, size);
    REAL(close)(fd);
    return result;
}
int truncate64(const char *name, off64_t size) { return truncate(name, size); }
int posix_fallocate(int fd, off_t offset, off_t bytes) {
    int result;
    CHANGED(if (!(result = REAL(posix_fallocate)(fd, offset, bytes))) log_size(fd, offset + bytes, 1));
    return result;
}
int posix_fallocate64(int fd, off64_t offset, off64_t bytes) { return posix_fallocate(fd, offset, bytes); }
int fallocate(int fd, int mode, off_t offset, off_t bytes) {
    int result;
    CHANGED(if (!(result = REAL(fallocate)(fd, mode, offset, bytes)) && !mode) log_size(fd, offset + bytes, 1));
    return result;
}
int fallocate64(int fd, int mode, off64_t offset, off64_t bytes) { return fallocate(fd, mode, offset, bytes); }

static int rename_logged(int from, const char *old, int to, const char *new, unsigned flags) {
    char before[PATH_MAX], after[PATH_MAX];
    if (!resolve(from, old, before) || !resolve(to, new, after)) return REAL(renameat2)(from, old, to, new, flags);
    int result;
    CHANGED({
        struct stat status;
        int known = !REAL(lstat)(before, &status);
        if (!(result = REAL(renameat2)(from, old, to, new, flags)))
            record('R', known && S_ISREG(status.st_mode) ? status.st_ino : 0, 0, before, after, NULL, 0);
    });
    return result;
}
int rename(const char *old, const char *new) { return rename_logged(AT_FDCWD, old, AT_FDCWD, new, 0); }
int renameat(int from, const char *old, int to, const char *new) { return rename_logged(from, old, to, new, 0); }
int renameat2(int from, const char *old, int to, const char *new, unsigned flags) { return rename_logged(from, old, to, new, flags); }

static int link_logged(int from, const char *old, int to, const char *new, int flags) {
    char before[PATH_MAX], after[PATH_MAX];
    if (!resolve(from, old, before) || !resolve(to, new, after)) return REAL(linkat)(from, old, to, new, flags);
    int result;
    CHANGED(if (!(result = REAL(linkat)(from, old, to, new, flags))) record('L', 0, 0, before, after, NULL, 0));
    return result;
}
int link(const char *old, const char *new) { return link_logged(AT_FDCWD, old, AT_FDCWD, new, 0); }
int linkat(int from, const char *old, int to, const char *new, int flags) { return link_logged(from, old, to, new, flags); }

static int unlink_logged(int folder, const char *name, int flags) {
    char path[PATH_MAX];
    if (!resolve(folder, name, path)) return REAL(unlinkat)(folder, name, flags);
    int result;
    CHANGED({
        struct stat status;
        int known = !REAL(lstat)(path, &status);
        if (!(result = REAL(unlinkat)(folder, name, flags)))
            record('U', known && S_ISREG(status.st_mode) ? status.st_ino : 0, 0, path, "", NULL, 0);
    });
    return result;
}
int unlink(const char *name) { return unlink_logged(AT_FDCWD, name, 0); }
int unlinkat(int folder, const char *name, int flags) { return unlink_logged(folder, name, flags); }
int rmdir(const char *name) { return unlink_logged(AT_FDCWD, name, AT_REMOVEDIR); }

static int mkdir_logged(int folder, const char *name, mode_t mode) {
    char path[PATH_MAX];
    if (!resolve(folder, name, path)) return REAL(mkdirat)(folder, name, mode);
    int result;
    CHANGED(if (!(result = REAL(mkdirat)(folder, name, mode))) record('D', 0, 0, path, "", NULL, 0));
    return result;
}
int mkdir(const char *name, mode_t mode) { return mkdir_logged(AT_FDCWD, name, mode); }
int mkdirat(int folder, const char *name, mode_t mode) { return mkdir_logged(folder, name, mode); }

/* Other threads write while a sync runs, so the lock is not held: only what came before its first record counts. */
static int sync_logged(int fd, int data_only) {
    char path[PATH_MAX];
    struct stat status;
    static uint64_t last;
    uint64_t number = 0;
    int ours = is_ours(fd, path, &status, 1), folder = ours && S_ISDIR(status.st_mode);
    if (ours) LOCKED(number = ++last; record(folder ? 'E' : 'B', status.st_ino, number, path, "", NULL, 0));
    int result = data_only ? REAL(fdatasync)(fd) : REAL(fsync)(fd);
    if (ours && !result) LOCKED(record('F', status.st_ino, number, path, "", NULL, 0));
    return result;
}
int fsync(int fd) { return sync_logged(fd, 0); }
int fdatasync(int fd) { return sync_logged(fd, 1); }

static void *map_logged(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) {
    char path[PATH_MAX];
    struct stat status;
    if (fd >= 0 && (protection & PROT_WRITE) && (flags & MAP_SHARED) && is_ours(fd, path, &status, 0))
        LOCKED(record('P', status.st_ino, 0, path, "", NULL, 0));
    return REAL(mmap)(at, bytes, protection, flags, fd, offset);
}
void *mmap(void *at, size_t bytes, int protection, int flags, int fd, off_t offset) { return map_logged(at, bytes, protection, flags, fd, offset); }
void *mmap64(void *at, size_t bytes, int protection, int flags, int fd, off64_t offset) { return map_logged(at, bytes, protection, flags, fd, offset); }

static void log_sending(void) {
    if (log_fd >= 0) LOCKED(if (!sent_last) record('S', 0, 0, "", "", NULL, 0));
}
ssize_t sendmsg(int fd, const struct msghdr *message, int flags) { log_sending(); return REAL(sendmsg)(fd, message, flags); }
ssize_t send(int fd, const void *data, size_t bytes, int flags) { log_sending(); return REAL(send)(fd, data, bytes, flags); }
ssize_t sendto(int fd, const void *data, size_t bytes, int flags, const struct sockaddr *to, socklen_t length) {
    log_sending();
    return REAL(sendto)(fd, data, bytes, flags, to, length);
}
