#!/bin/sh
# Stand-ins for the programs that build a template: called by their names through links, they do the
# least the builder needs, in milliseconds. $FAKE_DIR holds what steers them:
#   vmlinuz           the kernel image that the "package" holds
#   NAME.fail         its content is printed and NAME fails
#   NAME.hang         NAME writes its process number to NAME.pid and sleeps
#   calls             every call is appended here
set -u
name=${0##*/}
echo "$name $*" >> "$FAKE_DIR/calls"

if [ -e "$FAKE_DIR/$name.fail" ]; then
    cat "$FAKE_DIR/$name.fail"
    exit 1
fi
if [ -e "$FAKE_DIR/$name.hang" ]; then
    echo $$ > "$FAKE_DIR/$name.pid.new"
    mv "$FAKE_DIR/$name.pid.new" "$FAKE_DIR/$name.pid"
    exec sleep 60
fi

resolve() {
    seen=
    for word in "$@"; do
        case $seen$word in
        --) seen=yes ;;
        yesnope*)
            echo "E: Unable to locate package $word" >&2
            exit 100
            ;;
        yes*) echo "'http://m.test/$word.deb' ${word}_1_amd64.deb ${FAKE_SIZE:-1000} SHA256:0" ;;
        esac
    done
}

unpack_kernel() {
    modules=$1/usr/lib/modules/6.0-fake
    mkdir -p "$1/boot" "$modules/kernel/x"
    cp "$FAKE_DIR/vmlinuz" "$1/boot/vmlinuz-6.0-fake"
    printf 'kernel/x/%s.ko\n' virtio_blk erofs libcrc32c overlay > "$modules/modules.order"
    echo kernel/x/virtio-rng.ko > "$modules/modules.builtin"
    for m in virtio_blk libcrc32c overlay; do
        printf 'x\0depends=\0' > "$modules/kernel/x/$m.ko"
    done
    printf 'x\0depends=libcrc32c\0' > "$modules/kernel/x/erofs.ko"
}

# The folder that the hooks copy results to: ... copy-out /usr/share/cellvisor/packages 'DIR'
install_packages() {
    for word in "$@"; do
        case $word in
        --customize-hook=copy-out*)
            out=${word#*\'}
            out=${out%\'}
            ;;
        esac
    done
    echo "Setting up python3 (3.13) ..."
    echo "python3 3.13.5-1" > "$out/packages"
    echo "image" > "$out/root.erofs"
}

case $name in
apt-get)
    case "$*" in
    *--print-uris*install*) resolve "$@" ;;
    *--print-uris*) echo "'http://m.test/debian/dists/x/InRelease' x 0 " ;;
    *download*) : > linux-image-6.0-fake_1_amd64.deb ;;
    esac
    ;;
apt-cache) echo "  Depends: linux-image-6.0-fake" ;;
dpkg-deb) unpack_kernel "$3" ;;
mmdebstrap) install_packages "$@" ;;
esac
exit 0
