/* Pure parts of the image builder: what the tools print, and what a kernel image looks like. */
#include "common/cleanup.h"
#include "common/mem.h"
#include "common/rdwr.h"
#include "vm/template_priv.h"
#include <errno.h>
#include <setjmp.h>
#include <stdarg.h>
#include <string.h>

#include <cmocka.h>

static void sites(const char *text, struct tb *b)
{
    CLEANUP(freep) char *copy = xstrdup(text);
    tb_pick_sites(b, copy);
}

static void free_sites(struct tb *b)
{
    free(b->mirror);
    free(b->mirror_security);
}

static void test_the_mirror_is_the_one_apt_uses(void **state)
{
    (void)state;
    struct tb b = { .mirror = NULL };
    sites("'http://m.test/debian/dists/bookworm/InRelease' m.test_x 0 \n"
          "'http://m.test/debian-security/dists/bookworm-security/InRelease' m.test_y 0 \n"
          "'http://m.test/debian/dists/bookworm/main/binary-amd64/Packages.xz' z 0 \n",
          &b);
    assert_string_equal(b.mirror, "http://m.test/debian");
    assert_string_equal(b.mirror_security, "http://m.test/debian-security");
    free_sites(&b);
}

static void test_a_foreign_archive_listed_first_is_not_taken(void **state)
{
    (void)state;
    struct tb b = { .mirror = NULL };
    sites("W: something\n"
          "'https://node.test/node_20.x/dists/nodistro/InRelease' a 0 \n"
          "'https://u:p@m.test/debian/dists/trixie/InRelease' b 0 \n",
          &b);
    assert_string_equal(b.mirror, "https://u:p@m.test/debian");
    assert_null(b.mirror_security);
    free_sites(&b);
}

static void test_no_archive_is_no_mirror(void **state)
{
    (void)state;
    struct tb b = { .mirror = NULL };
    sites("", &b);
    sites("'http://m.test/flat/InRelease' x 0 \nnonsense /dists/ /InRelease' \n", &b);
    assert_null(b.mirror);
}

static void test_credentials_stay_out_of_the_image(void **state)
{
    (void)state;
    struct vm_recipe r = { .suite = xstrdup("trixie") };
    struct tb b = { .recipe = &r,
                    .mirror = xstrdup("https://user:secret@m.test/debian"),
                    .mirror_security = xstrdup("https://m.test/security") };
    CLEANUP(freep) char *inside = tb_sources(&b, true);
    CLEANUP(freep) char *outside = tb_sources(&b, false);
    assert_null(strstr(inside, "secret"));
    assert_non_null(strstr(inside, "https://m.test/debian trixie main\n"));
    assert_non_null(strstr(inside, "https://m.test/security trixie-security main\n"));
    assert_non_null(strstr(outside, "user:secret@"));
    free(r.suite);
    r.suite = xstrdup("sid"); /* has no security archive */
    CLEANUP(freep) char *sid = tb_sources(&b, true);
    assert_null(strstr(sid, "security"));
    free(r.suite);
    free_sites(&b);
}

static void test_the_download_is_added_up(void **state)
{
    (void)state;
    struct tb_plan p = { 0 };
    tb_count_uris("'http://m/a_1.deb' a_1_amd64.deb 1000 SHA256:00\n"
                  "W: noise 77\n"
                  "'http://m/b_1.deb' b_1_amd64.deb 234 SHA256:00",
                  &p);
    assert_int_equal(p.packages, 2);
    assert_int_equal(p.download_bytes, 1234);
    tb_count_uris("", &p);
    tb_count_uris(NULL, &p);
    assert_int_equal(p.packages, 2);
}

static void test_the_payload_of_a_kernel_image_is_found(void **state)
{
    (void)state;
    uint8_t image[4096] = { 0 };
    struct slice payload;
    memcpy(image + 0x202, "HdrS", 4);
    image[0x1f1] = 3; /* protected mode begins at 4 * 512 */
    put_u32le(image + 0x248, 100);
    put_u32le(image + 0x24c, 500);
    assert_int_equal(tb_bzimage_payload(slice_of(image, sizeof(image)), &payload), 0);
    assert_int_equal(payload.p - image, 2048 + 100);
    assert_int_equal(payload.n, 500);
}

static void test_kernel_images_that_lie_are_refused(void **state)
{
    (void)state;
    uint8_t image[4096] = { 0 };
    struct slice payload;
    assert_int_equal(tb_bzimage_payload(slice_of(image, sizeof(image)), &payload), -EINVAL);
    memcpy(image + 0x202, "HdrS", 4);
    image[0x1f1] = 3;
    static const uint32_t bad[][2] = { { 0, 4096 },         { 4000, 100 }, { 0xffffffff, 100 },
                                       { 100, 0xffffffff }, { 100, 0 },    { 0xfffffff0, 0x20 } };
    for (size_t i = 0; i < sizeof(bad) / sizeof(*bad); i++) {
        put_u32le(image + 0x248, bad[i][0]);
        put_u32le(image + 0x24c, bad[i][1]);
        assert_int_equal(tb_bzimage_payload(slice_of(image, sizeof(image)), &payload), -EINVAL);
    }
    assert_int_equal(tb_bzimage_payload(slice_of(image, 0x24f), &payload), -EINVAL);
}

static void test_modules_are_found_whatever_their_spelling(void **state)
{
    (void)state;
    static const char order[] = "kernel/drivers/char/hw_random/virtio-rng.ko\n"
                                "kernel/drivers/block/virtio_blk.ko.xz\n"
                                "kernel/fs/overlayfs/overlay.ko";
    CLEANUP(freep) char *rng = tb_find_module(order, "virtio_rng");
    CLEANUP(freep) char *blk = tb_find_module(order, "virtio_blk");
    CLEANUP(freep) char *last = tb_find_module(order, "overlay");
    assert_string_equal(rng, "kernel/drivers/char/hw_random/virtio-rng.ko");
    assert_string_equal(blk, "kernel/drivers/block/virtio_blk.ko");
    assert_string_equal(last, "kernel/fs/overlayfs/overlay.ko");
    assert_null(tb_find_module(order, "virtio"));
    assert_null(tb_find_module("", "x"));
}

static void test_dependencies_of_a_module_are_read(void **state)
{
    (void)state;
    static const char ko[] = "ELF\0license=GPL\0depends=libcrc32c,netfs\0name=erofs";
    CLEANUP(freep) char *some = tb_module_depends(slice_of(ko, sizeof(ko)));
    CLEANUP(freep) char *none = tb_module_depends(SLICE_LIT("nothing\0here"));
    CLEANUP(freep) char *cut = tb_module_depends(SLICE_LIT("x\0depends=ab"));
    assert_string_equal(some, "libcrc32c,netfs");
    assert_string_equal(none, "");
    assert_string_equal(cut, "ab"); /* the file ends in the middle: no byte behind it is read */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_the_mirror_is_the_one_apt_uses),
        cmocka_unit_test(test_a_foreign_archive_listed_first_is_not_taken),
        cmocka_unit_test(test_no_archive_is_no_mirror),
        cmocka_unit_test(test_credentials_stay_out_of_the_image),
        cmocka_unit_test(test_the_download_is_added_up),
        cmocka_unit_test(test_the_payload_of_a_kernel_image_is_found),
        cmocka_unit_test(test_kernel_images_that_lie_are_refused),
        cmocka_unit_test(test_modules_are_found_whatever_their_spelling),
        cmocka_unit_test(test_dependencies_of_a_module_are_read),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
