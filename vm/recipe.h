#pragma once
/* Recipes: templates/NAME/template.json, what a person writes to get a template (format:
 * docs/templates.md). Reading is strict: unknown keys, wrong types and values that could only fail
 * minutes later are refused at once, with the key's path in the text. A recipe is immutable after
 * loading and owns all its strings. */
#include "common/err.h"
#include "common/slice.h"
#include <jansson.h>
#include <stdbool.h>

#define VM_RECIPE_MAX (1u << 20)       /* bytes of template.json */
#define VM_RECIPE_LIST_MAX 512u        /* packages of a kind, files */
#define VM_RECIPE_FILE_MAX (16u << 20) /* bytes of one copied file */
#define VM_RECIPE_NAME_MAX 40u

struct vm_recipe_file {
    char *path;    /* in the image, absolute */
    char *source;  /* absolute host path, or NULL: content */
    char *content; /* literal text, or NULL: source */
    unsigned mode; /* permission bits */
};

struct vm_recipe {
    char *name, *description;
    char *folder;             /* that holds template.json; sources are relative to it */
    char *suite;              /* Debian code name or "stable" */
    char **apt, **pip, **npm; /* NULL-terminated, in the order written */
    struct vm_recipe_file *files;
    size_t n_files;
    json_t *env;            /* object of strings */
    json_t *kernelspecs;    /* object: name -> kernel.json content */
    char *default_kernel;   /* started before the snapshot */
    char *preload, *warmup; /* code, or NULL */
    uint64_t memory_mb, disk_mb;
    unsigned vcpus;
};

/* path: template.json or the folder that holds it. -ENOENT, -EINVAL with a text that starts with
 * the file's name. */
int vm_recipe_load(const char *path, struct vm_recipe **ret, struct err *e);
/* The same from memory; name is the default for "name", folder resolves sources. */
int vm_recipe_parse(struct slice text, const char *name, const char *folder, struct vm_recipe **ret,
                    struct err *e);
void vm_recipe_free(struct vm_recipe *r); /* NULL ok */

/* "[a-z0-9][a-z0-9_-]*", at most VM_RECIPE_NAME_MAX. */
bool vm_recipe_name_ok(const char *name);

/* Everything that decides what is in the root image, as canonical JSON (sources by their SHA-256).
 * The caller frees with json_decref. -ENOENT: a source file is missing. */
int vm_recipe_root_inputs(const struct vm_recipe *r, json_t **ret, struct err *e);
/* The rest: what additionally decides the snapshot. */
json_t *vm_recipe_snapshot_inputs(const struct vm_recipe *r);
