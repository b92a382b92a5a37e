/* Lets system calls below a folder be slow or fail: preloaded into the processes of a soak, see disk.py.

   TENSORVINE_SOAK_FOLDER: absolute path; only what lies below it is concerned.
   TENSORVINE_SOAK_SWITCH: file of 8 bytes, mapped: int32 error number (0: none), int32 microseconds of delay.
   ENOSPC concerns what takes room only; other numbers whatever reads or writes, but closing and locking. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/uio.h>
#include <unistd.h>

static volatile int *trouble;
static const char *folder;
static size_t length;

__attribute__((constructor)) static void begin(void) {
    const char *file = getenv("TENSORVINE_SOAK_SWITCH");
    folder = getenv("TENSORVINE_SOAK_FOLDER");
    if (!file || !folder) return;
    int (*real)(const char *, int, ...) = dlsym(RTLD_NEXT, "open");
    int fd = real(file, O_RDONLY | O_CLOEXEC);
    if (fd < 0) return;
    void *page = mmap(NULL, 8, PROT_READ, MAP_SHARED, fd, 0);
    close(fd);
    if (page == MAP_FAILED) return;
    length = strlen(folder);
    trouble = page;
}

/* Give the error that a call is to fail with, or 0, after the delay. */
static int event(const char *path, int takes_room) {
    if (!trouble || (!trouble[0] && !trouble[1])) return 0;
    if (!path || strncmp(path, folder, length) || (path[length] && path[length] != '/')) return 0;
    if (trouble[1]) usleep(trouble[1]);
    return trouble[0] == ENOSPC && !takes_room ? 0 : trouble[0];
}

static int event_of(int fd, int takes_room) {
    char link[64], path[4096];
    if (!trouble || (!trouble[0] && !trouble[1])) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (n < 0) return 0;
    path[n] = 0;
    return event(path, takes_room);
}

#define FAIL_IF(call) do { int code = (call); if (code) { errno = code; return -1; } } while (0)
#define REAL(name, type) static type real; if (!real) real = (type)dlsym(RTLD_NEXT, name)

typedef int (*open_t)(const char *, int, ...);
#define OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; va_start(rest, flags); mode_t mode = va_arg(rest, mode_t); va_end(rest); \
        REAL(#name, open_t); \
        FAIL_IF(event(path, flags & O_CREAT)); \
        return real(path, flags, mode); }
OPEN(open)
OPEN(open64)

typedef ssize_t (*read_t)(int, void *, size_t);
ssize_t read(int fd, void *data, size_t count) { REAL("read", read_t); FAIL_IF(event_of(fd, 0)); return real(fd, data, count); }
typedef ssize_t (*write_t)(int, const void *, size_t);
ssize_t write(int fd, const void *data, size_t count) { REAL("write", write_t); FAIL_IF(event_of(fd, 1)); return real(fd, data, count); }
typedef ssize_t (*writev_t)(int, const struct iovec *, int);
ssize_t writev(int fd, const struct iovec *data, int count) { REAL("writev", writev_t); FAIL_IF(event_of(fd, 1)); return real(fd, data, count); }
typedef int (*fd_t)(int);
int fsync(int fd) { REAL("fsync", fd_t); FAIL_IF(event_of(fd, 0)); return real(fd); }
int fdatasync(int fd) { REAL("fdatasync", fd_t); FAIL_IF(event_of(fd, 0)); return real(fd); }
typedef int (*rename_t)(const char *, const char *);
int rename(const char *from, const char *to) { REAL("rename", rename_t); FAIL_IF(event(to, 1)); return real(from, to); }
typedef int (*path_t)(const char *);
int unlink(const char *path) { REAL("unlink", path_t); FAIL_IF(event(path, 0)); return real(path); }
typedef int (*mkdir_t)(const char *, mode_t);
int mkdir(const char *path, mode_t mode) { REAL("mkdir", mkdir_t); FAIL_IF(event(path, 1)); return real(path, mode); }
typedef DIR *(*opendir_t)(const char *);
DIR *opendir(const char *path) {
    REAL("opendir", opendir_t);
    int code = event(path, 0);
    if (code) { errno = code; return NULL; }
    return real(path);
}
