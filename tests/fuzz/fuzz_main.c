/* Replays files through a fuzz target without libFuzzer, so that seeds and old crashes are
 * regression tests in every build: fuzz_NAME FILE|FOLDER... Fails when it finds no file. */
#include "common/fs.h"
#include "common/mem.h"
#include "fuzz.h"
#include <dirent.h>
#include <string.h>
#include <sys/stat.h>

#define INPUT_MAX (64u << 20)

static unsigned replay_file(const char *path)
{
    struct buf input;
    struct err e = { 0 };
    uint8_t *exact;
    size_t n;

    if (fs_read_file(path, INPUT_MAX, &input, &e) < 0) {
        fprintf(stderr, "%s\n", e.msg);
        exit(2);
    }
    /* An allocation of just this size: reading past it is seen by ASAN. */
    n = buf_slice(&input).n;
    exact = xmalloc(n ? n : 1);
    if (n)
        memcpy(exact, buf_slice(&input).p, n);
    LLVMFuzzerTestOneInput(exact, n);
    free(exact);
    buf_fini(&input);
    return 1;
}

static unsigned replay_folder(const char *path)
{
    DIR *d = opendir(path);
    const struct dirent *entry;
    unsigned n = 0;

    if (!d) {
        perror(path);
        exit(2);
    }
    while ((entry = readdir(d))) {
        char *file;
        if (entry->d_name[0] == '.')
            continue;
        file = fs_join(path, entry->d_name);
        n += replay_file(file);
        free(file);
    }
    closedir(d);
    return n;
}

int main(int argc, char **argv)
{
    unsigned n = 0;

    for (int i = 1; i < argc; i++) {
        struct stat st;
        if (stat(argv[i], &st) < 0) {
            perror(argv[i]);
            return 2;
        }
        n += S_ISDIR(st.st_mode) ? replay_folder(argv[i]) : replay_file(argv[i]);
    }
    printf("%u inputs replayed\n", n);
    return n ? 0 : 1;
}
