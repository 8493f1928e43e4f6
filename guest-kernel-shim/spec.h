#pragma once
/* Kernelspecs as they lie in the file system (jupyter.md 1.3): found, read, checked, reported.
 * The catalog is made once at start and owned by the shim; specs live as long as it. Files may be
 * anything, so each has a cap and a broken one is skipped with a log line. */
#include "common/err.h"
#include "common/log.h"
#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>

#define SHIM_SPECS_MAX 64u
#define SHIM_RESOURCE_MAX (1u << 20)  /* one file */
#define SHIM_RESOURCES_MAX (4u << 20) /* all files of all specs */

struct shim_spec {
    char *name;        /* the folder's name, byte for byte */
    char *dir;         /* resource_dir */
    char *prefix;      /* of the installation: DIR/../../../.. (sys.prefix of its Python) */
    json_t *json;      /* kernel.json */
    json_t *resources; /* {file: base64} */
    const char *display_name, *language; /* borrowed from json; never NULL */
    bool interrupt_by_message;
};

struct shim_catalog {
    struct shim_spec *specs[SHIM_SPECS_MAX];
    size_t n;
    size_t resource_bytes;
};

/* Look through `dirs` (NULL-terminated, most important first; missing ones are fine). */
void shim_catalog_load(struct shim_catalog *c, const char *const *dirs, const struct log_ctx *log);
void shim_catalog_fini(struct shim_catalog *c);
/* The search path of this process's environment (JUPYTER_PATH, the user's, the virtual
 * environment's or python3's prefix, /usr/local, /usr). NULL-terminated; free with shim_dirs_free.
 */
char **shim_spec_dirs(void);
void shim_dirs_free(char **dirs);
const struct shim_spec *shim_catalog_find(const struct shim_catalog *c, const char *name);
/* "python3" when there is one, else the first Python, else the first; NULL: no specs. */
const char *shim_catalog_default(const struct shim_catalog *c);
/* Body of GL_SPECS; caller frees. */
char *shim_catalog_json(const struct shim_catalog *c);
/* Known names for an error text: "a, b, c". */
void shim_catalog_names(const struct shim_catalog *c, char *ret, size_t size);
