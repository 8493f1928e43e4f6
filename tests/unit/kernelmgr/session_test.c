#include "kernelmgr/km_session.h"
#include "tests/support/km_rig.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#define ID "01234567-89ab-cdef-0123-456789abcdef"

struct told {
    unsigned calls;
    struct km_session *s;
    struct err e;
};
struct bench {
    struct rig r;
    struct told told[20];
    struct km_op *op[20];
    struct err e;
};

static int setup(void **state)
{
    struct bench *t = calloc(1, sizeof(*t));
    rig_init(&t->r);
    rig_start_manager(&t->r);
    t->r.vms.prestarted = true;
    *state = t;
    return 0;
}

static int teardown(void **state)
{
    struct bench *t = *state;
    rig_fini(&t->r);
    free(t);
    return 0;
}

static void on_told(void *ctx, struct km_session *s, const struct err *e)
{
    struct told *w = ctx;
    w->calls++;
    w->s = s;
    w->e = e ? *e : (struct err) { 0 };
}

static int create(struct bench *t, unsigned i, const char *path, const char *kernel_id,
                  const char *spec)
{
    struct km_session_req r = {
        .path = path, .name = "n", .type = "notebook", .kernel_id = kernel_id, .spec = spec
    };
    return km_session_create(t->r.m, "me", &r, on_told, &t->told[i], &t->op[i], &t->e);
}

/* A session with a running kernel. */
static struct km_session *session(struct bench *t, unsigned i, const char *path,
                                  const char *kernel_id)
{
    unsigned before = t->r.vms.acquired;
    assert_int_equal(create(t, i, path, kernel_id, NULL), 0);
    if (t->r.vms.acquired > before)
        fake_vm_up(fake_vm_last(&t->r.vms));
    rig_turn(&t->r);
    assert_int_equal(t->told[i].calls, 1);
    assert_non_null(t->told[i].s);
    return t->told[i].s;
}

static struct km_session *patch(struct bench *t, struct km_session *s, struct km_session_req r)
{
    struct told w = { 0 };
    unsigned before = t->r.vms.acquired;
    assert_int_equal(km_session_patch(t->r.m, s, &r, on_told, &w, NULL, &t->e), 0);
    if (t->r.vms.acquired > before)
        fake_vm_up(fake_vm_last(&t->r.vms));
    rig_turn(&t->r);
    assert_int_equal(w.calls, 1);
    return w.s;
}

static bool add(void *ctx, struct km_session *s)
{
    (void)s;
    ++*(unsigned *)ctx;
    return true;
}

static unsigned count(struct bench *t, const char *principal)
{
    unsigned n = 0;
    km_session_each(t->r.m, principal, add, &n);
    return n;
}

static void a_session_starts_its_kernel(void **state)
{
    struct bench *t = *state;
    struct km_session *s = session(t, 0, "a.ipynb", NULL);
    assert_string_equal(s->path, "a.ipynb");
    assert_non_null(km_kernel_find(t->r.m, "me", s->kernel_id));
    assert_ptr_equal(km_session_find(t->r.m, "me", s->id), s);
    assert_null(km_session_find(t->r.m, "you", s->id));
    assert_int_equal(count(t, "me"), 1);
    assert_int_equal(count(t, "you"), 0);
}

static void twenty_askers_for_one_path_share_one_start(void **state)
{
    struct bench *t = *state;
    for (unsigned i = 0; i < 20; i++)
        assert_int_equal(create(t, i, "race.ipynb", NULL, NULL), 0);
    assert_int_equal(t->r.vms.acquired, 1);
    fake_vm_up(fake_vm_last(&t->r.vms));
    rig_turn(&t->r);
    for (unsigned i = 0; i < 20; i++) {
        assert_int_equal(t->told[i].calls, 1);
        assert_ptr_equal(t->told[i].s, t->told[0].s);
    }
    assert_int_equal(count(t, NULL), 1);
    struct km_session *first = t->told[0].s;
    t->told[0] = (struct told) { 0 };
    assert_ptr_equal(session(t, 0, "race.ipynb", NULL), first); /* one who comes later */
}

static void a_start_ends_only_when_its_last_asker_leaves(void **state)
{
    struct bench *t = *state;
    assert_int_equal(create(t, 0, "a", NULL, NULL), 0);
    assert_int_equal(create(t, 1, "a", NULL, NULL), 0);
    km_op_cancel(t->op[0]);
    rig_turn(&t->r);
    assert_int_equal(t->r.vms.alive, 1);
    km_op_cancel(t->op[1]);
    rig_turn(&t->r);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(count(t, NULL), 0);
    assert_int_equal(t->told[0].calls + t->told[1].calls, 0);
}

static void a_failed_start_fails_all_askers_and_leaves_no_session(void **state)
{
    struct bench *t = *state;
    assert_int_equal(create(t, 0, "a", NULL, NULL), 0);
    assert_int_equal(create(t, 1, "a", NULL, NULL), 0);
    fake_vm_down(fake_vm_last(&t->r.vms), VM_EXIT_START_FAILED, "no memory");
    rig_turn(&t->r);
    for (unsigned i = 0; i < 2; i++) {
        assert_int_equal(t->told[i].calls, 1);
        assert_null(t->told[i].s);
        assert_non_null(strstr(t->told[i].e.msg, "no memory"));
    }
    assert_int_equal(count(t, NULL), 0);
}

static void missing_fields_and_unknown_specs_are_refused(void **state)
{
    struct bench *t = *state;
    struct km_session_req r = { .path = "p" };
    assert_int_equal(create(t, 0, NULL, NULL, NULL), -EINVAL);
    assert_string_equal(t->e.msg, "Missing field in JSON data: path");
    assert_int_equal(km_session_create(t->r.m, "me", &r, on_told, &t->told[0], NULL, &t->e),
                     -EINVAL);
    assert_string_equal(t->e.msg, "Missing field in JSON data: type");
    assert_int_equal(create(t, 0, "p", NULL, "nope"), -ENOENT);
    assert_non_null(strstr(t->e.msg, "nope"));
    assert_int_equal(create(t, 0, "p", "not a uuid", NULL), -EINVAL);
    assert_int_equal(count(t, NULL), 0);
}

static void a_known_kernel_is_joined_and_an_unknown_id_is_started(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", ID);
    assert_string_equal(a->kernel_id, ID);
    struct km_session *b = session(t, 1, "b", ID);
    assert_string_equal(b->kernel_id, ID);
    assert_int_equal(t->r.vms.acquired, 1);
}

static void a_kernel_ends_with_its_last_session(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", ID), *b = session(t, 1, "b", ID);
    assert_int_equal(km_session_delete(t->r.m, a), 0);
    assert_non_null(km_kernel_find(t->r.m, "me", ID));
    assert_int_equal(km_session_delete(t->r.m, b), 0);
    assert_null(km_kernel_find(t->r.m, "me", ID));
    assert_int_equal(count(t, NULL), 0);
}

static void deleting_a_session_whose_kernel_is_gone_says_so(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", ID);
    km_kernel_shutdown(km_kernel_find(t->r.m, "me", ID), "deleted");
    assert_ptr_equal(km_session_find(t->r.m, "me", a->id), a);
    assert_int_equal(km_session_delete(t->r.m, a), -ENODEV);
    session(t, 1, "b", ID);
    km_kernel_shutdown(km_kernel_find(t->r.m, "me", ID), "deleted");
    assert_int_equal(count(t, NULL), 0); /* a listing shows what exists */
}

static void a_new_session_for_the_path_replaces_one_without_kernel(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", NULL);
    char old[40];
    snprintf(old, sizeof(old), "%s", a->id);
    km_kernel_shutdown(km_kernel_find(t->r.m, "me", a->kernel_id), "deleted");
    struct km_session *b = session(t, 1, "a", NULL);
    assert_string_not_equal(b->id, old);
    assert_null(km_session_find(t->r.m, "me", old));
}

static void patch_changes_path_name_and_type(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", ID);
    assert_ptr_equal(patch(t, a, (struct km_session_req) { .path = "n.ipynb" }), a);
    assert_string_equal(a->path, "n.ipynb");
    patch(t, a, (struct km_session_req) { .name = "r", .type = "console" });
    assert_string_equal(a->name, "r");
    assert_string_equal(a->type, "console");
    patch(t, a, (struct km_session_req) { 0 });
    assert_string_equal(a->kernel_id, ID);
    assert_string_equal(a->path, "n.ipynb");
}

static void patch_by_spec_starts_a_kernel_and_ends_the_old(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", ID);
    assert_ptr_equal(patch(t, a, (struct km_session_req) { .spec = "python3" }), a);
    assert_string_not_equal(a->kernel_id, ID);
    assert_non_null(km_kernel_find(t->r.m, "me", a->kernel_id));
    assert_null(km_kernel_find(t->r.m, "me", ID));
}

static void patch_by_id_rebinds_and_refuses_unknown_ids(void **state)
{
    struct bench *t = *state;
    struct km_session *a = session(t, 0, "a", NULL), *b = session(t, 1, "b", ID);
    char old[40];
    struct km_session_req bad = { .kernel_id = "01234567-89ab-cdef-0123-000000000000" };
    assert_int_equal(km_session_patch(t->r.m, a, &bad, on_told, &t->told[2], NULL, &t->e), -EINVAL);
    assert_non_null(strstr(t->e.msg, "No such kernel"));
    snprintf(old, sizeof(old), "%s", a->kernel_id);
    patch(t, a, (struct km_session_req) { .kernel_id = ID });
    assert_string_equal(a->kernel_id, ID);
    assert_null(km_kernel_find(t->r.m, "me", old));
    assert_non_null(km_kernel_find(t->r.m, "me", b->kernel_id));
}

static void a_failed_patch_keeps_the_old_kernel(void **state)
{
    struct bench *t = *state;
    struct told w = { 0 };
    struct km_session *a = session(t, 0, "a", ID);
    struct km_session_req r = { .spec = "python3" };
    assert_int_equal(km_session_patch(t->r.m, a, &r, on_told, &w, NULL, &t->e), 0);
    assert_int_equal(km_session_patch(t->r.m, a, &r, on_told, &w, NULL, &t->e), -EAGAIN);
    fake_vm_down(fake_vm_last(&t->r.vms), VM_EXIT_START_FAILED, "no");
    rig_turn(&t->r);
    assert_int_equal(w.calls, 1);
    assert_null(w.s);
    assert_string_equal(a->kernel_id, ID);
    assert_non_null(km_kernel_find(t->r.m, "me", ID));
}

static bool first(void *ctx, struct km_session *s)
{
    *(struct km_session **)ctx = s;
    return false;
}

static void deleting_a_session_during_its_start_undoes_that(void **state)
{
    struct bench *t = *state;
    struct km_session *s = NULL;
    assert_int_equal(create(t, 0, "a", ID, NULL), 0);
    km_session_each(t->r.m, "me", first, &s);
    assert_true(s->starting);
    assert_int_equal(km_session_delete(t->r.m, s), 0);
    rig_turn(&t->r);
    assert_int_equal(t->told[0].calls, 1);
    assert_int_equal(t->told[0].e.code, -ESRCH);
    assert_int_equal(t->r.vms.alive, 0);
    assert_null(km_kernel_find(t->r.m, "me", ID));
}

static void deleting_the_kernel_during_the_start_ends_the_session(void **state)
{
    struct bench *t = *state;
    assert_int_equal(create(t, 0, "a", ID, NULL), 0);
    km_kernel_shutdown(km_kernel_find(t->r.m, "me", ID), "deleted by another client");
    rig_turn(&t->r);
    assert_int_equal(t->told[0].calls, 1);
    assert_int_equal(t->told[0].e.code, -ESRCH);
    assert_int_equal(t->r.vms.alive, 0);
    assert_int_equal(count(t, NULL), 0);
}

#define TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)
int main(void)
{
    const struct CMUnitTest tests[] = {
        TEST(a_session_starts_its_kernel),
        TEST(twenty_askers_for_one_path_share_one_start),
        TEST(a_start_ends_only_when_its_last_asker_leaves),
        TEST(a_failed_start_fails_all_askers_and_leaves_no_session),
        TEST(missing_fields_and_unknown_specs_are_refused),
        TEST(a_known_kernel_is_joined_and_an_unknown_id_is_started),
        TEST(a_kernel_ends_with_its_last_session),
        TEST(deleting_a_session_whose_kernel_is_gone_says_so),
        TEST(a_new_session_for_the_path_replaces_one_without_kernel),
        TEST(patch_changes_path_name_and_type),
        TEST(patch_by_spec_starts_a_kernel_and_ends_the_old),
        TEST(patch_by_id_rebinds_and_refuses_unknown_ids),
        TEST(a_failed_patch_keeps_the_old_kernel),
        TEST(deleting_a_session_during_its_start_undoes_that),
        TEST(deleting_the_kernel_during_the_start_ends_the_session),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
