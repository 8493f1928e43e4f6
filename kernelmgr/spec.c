/* Kernelspecs of all ready templates under one roof. The default template's specs keep their names;
 * another template's spec is "TEMPLATE.SPEC" when its bare name is taken. Nothing is cached: the
 * service's table is the truth, and it is small. */
#include "common/id.h"
#include "kernelmgr/km_priv.h"
#include <errno.h>
#include <string.h>

static const struct vm_template_desc *default_template(struct km_manager *m)
{
    const struct vm_template_desc *t, *first = NULL;
    const char *want = m->cfg.default_template ? m->cfg.default_template : "python";
    size_t n = vm_templates(m->vms, &t);
    for (size_t i = 0; i < n; i++) {
        if (!t[i].ready)
            continue;
        if (!strcmp(t[i].name, want))
            return &t[i];
        if (!first)
            first = &t[i];
    }
    return first;
}

/* {public name: [template index, guest name]} in order, new reference. */
static json_t *names(struct km_manager *m)
{
    const struct vm_template_desc *t, *def = default_template(m);
    size_t n = vm_templates(m->vms, &t);
    json_t *all = json_object();
    for (size_t pass = 0; pass <= n; pass++) { /* the default template first */
        const struct vm_template_desc *d = pass == 0 ? def : &t[pass - 1];
        const char *spec;
        json_t *entry;
        if (!d || !d->ready || (pass > 0 && d == def))
            continue;
        json_object_foreach(json_object_get(d->specs, "kernelspecs"), spec, entry)
        {
            CLEANUP(freep) char *longer = xasprintf("%s.%s", d->name, spec);
            const char *name = json_object_get(all, spec) ? longer : spec;
            if (json_is_object(json_object_get(entry, "spec")))
                json_object_set_new(all, name, json_pack("[I,s]", (json_int_t)(d - t), spec));
        }
    }
    return all;
}

static void ref_of(struct km_manager *m, const json_t *pair, struct km_spec_ref *ret)
{
    const struct vm_template_desc *t;
    vm_templates(m->vms, &t);
    const struct vm_template_desc *d = &t[json_integer_value(json_array_get(pair, 0))];
    json_t *specs = json_object_get(d->specs, "kernelspecs");
    const char *wanted = json_string_value(json_array_get(pair, 1));
    /* Point at the template's own copy of the name: the table of names is short-lived. */
    const char *spec;
    json_t *entry;
    json_object_foreach(specs, spec, entry)
    {
        if (!strcmp(spec, wanted))
            *ret = (struct km_spec_ref) { d, spec, entry };
    }
}

/* Public name of the default spec, borrowed from `all`, or NULL when there is no spec at all. */
static const char *default_name(struct km_manager *m, json_t *all)
{
    const struct vm_template_desc *def = default_template(m);
    const char *want = def ? json_string_value(json_object_get(def->specs, "default")) : NULL;
    void *it = json_object_iter(all);
    if (m->cfg.default_spec && json_object_get(all, m->cfg.default_spec))
        return json_object_iter_key(json_object_iter_at(all, m->cfg.default_spec));
    if (want && json_object_get(all, want))
        return json_object_iter_key(json_object_iter_at(all, want));
    return it ? json_object_iter_key(it) : NULL;
}

static void list_names(json_t *all, char *ret, size_t size)
{
    const char *name;
    json_t *v;
    size_t at = 0;
    ret[0] = 0;
    json_object_foreach(all, name, v)
    {
        int n = snprintf(ret + at, size - at, "%s%s", at ? ", " : "", name);
        if (n < 0 || (size_t)n >= size - at) {
            snprintf(ret + (size - 5), 5, " ...");
            return;
        }
        at += (size_t)n;
    }
}

int km_spec_resolve(struct km_manager *m, const char *name, char **ret_name,
                    struct km_spec_ref *ret, struct err *e)
{
    CLEANUP(json_decrefp) json_t *all = names(m);
    char known[240];
    if (!json_object_size(all))
        return err_set(
            e, -ENOENT,
            "there is no kernelspec at all: build a template first (cellvisor template build)");
    if (!name || !*name)
        name = default_name(m, all);
    const json_t *pair = json_object_get(all, name);
    if (!pair) {
        list_names(all, known, sizeof(known));
        return err_set(e, -ENOENT, "no kernelspec named \"%.100s\"; there are: %s", name, known);
    }
    ref_of(m, pair, ret);
    *ret_name = xstrdup(name);
    return 0;
}

/* Size of the bytes behind a base64 text. */
static json_int_t decoded_size(const json_t *base64)
{
    const char *s = json_string_value(base64);
    size_t n = s ? json_string_length(base64) : 0, pad = 0;
    while (pad < 2 && pad < n && s[n - 1 - pad] == '=')
        pad++;
    return (json_int_t)(n / 4 * 3 - pad);
}

static json_t *public_entry(const char *name, const struct km_spec_ref *ref)
{
    const char *file;
    json_t *data, *spec = json_deep_copy(json_object_get(ref->entry, "spec"));
    json_t *resources = json_object();
    json_t *metadata = json_object_get(spec, "metadata");
    if (!json_is_object(metadata)) {
        metadata = json_object();
        json_object_set_new(spec, "metadata", metadata);
    }
    json_object_set_new(metadata, "cellvisor",
                        json_pack("{s:s,s:s,s:I}", "template", ref->template->name, "tier",
                                  vm_tier_name(ref->template->tier), "memory_mb",
                                  (json_int_t)ref->template->memory_mb));
    json_object_foreach(json_object_get(ref->entry, "resources"), file, data)
        json_object_set_new(resources, file, json_integer(decoded_size(data)));
    return json_pack("{s:s,s:o,s:o}", "name", name, "spec", spec, "resources", resources);
}

json_t *km_specs(struct km_manager *m)
{
    CLEANUP(json_decrefp) json_t *all = names(m);
    const char *name, *def = default_name(m, all);
    json_t *pair, *specs = json_object();
    json_object_foreach(all, name, pair)
    {
        struct km_spec_ref ref = { 0 };
        ref_of(m, pair, &ref);
        json_object_set_new(specs, name, public_entry(name, &ref));
    }
    return json_pack("{s:s,s:o}", "default", def ? def : "", "kernelspecs", specs);
}

int km_spec_resource(struct km_manager *m, const char *spec, const char *file, uint8_t **ret,
                     size_t *ret_len)
{
    CLEANUP(freep) char *name = NULL;
    struct km_spec_ref ref;
    if (!spec || !*spec || km_spec_resolve(m, spec, &name, &ref, NULL) < 0)
        return -ENOENT;
    const json_t *data = json_object_get(json_object_get(ref.entry, "resources"), file);
    if (!json_is_string(data))
        return -ENOENT;
    size_t n = json_string_length(data), room = n / 4 * 3 + 3;
    uint8_t *bytes = malloc(room);
    if (!bytes)
        return -ENOMEM;
    int r = id_base64_decode(slice_of(json_string_value(data), n), bytes, &room);
    if (r < 0) {
        free(bytes);
        return -ENOENT;
    }
    *ret = bytes;
    *ret_len = room;
    return 0;
}
