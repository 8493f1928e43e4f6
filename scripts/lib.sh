# Shared by the scripts: messages, cache folder, packages. Sourced, not run. POSIX sh.
# shellcheck shell=sh

ROOT=$(cd "$(dirname "$0")/.." && pwd)
CACHE=${CELLVISOR_CACHE:-${XDG_CACHE_HOME:-$HOME/.cache}/cellvisor}

say() {
    printf '\n==> %s\n' "$*"
}

fail() {
    printf '%s: %s\n' "$(basename "$0")" "$*" >&2
    exit 1
}

# Lines "package probe": the package is wanted when the probe fails. A probe is a program, pc:NAME for a
# pkg-config module, py:MODULE for a module of the system's Python, or /path/glob.
BUILD_PACKAGES='
gcc gcc
libc6-dev /usr/include/stdio.h
cmake cmake
ninja-build ninja
pkg-config pkg-config
libuv1-dev pc:libuv
libjansson-dev pc:jansson
libssl-dev pc:libssl
libzmq3-dev pc:libzmq
libsqlite3-dev pc:sqlite3
git git
python3 python3
'
RUN_PACKAGES='
qemu-system-x86 qemu-system-x86_64
util-linux setpriv
'
TEMPLATE_PACKAGES='
mmdebstrap mmdebstrap
erofs-utils mkfs.erofs
cpio cpio
xz-utils xz
zstd zstd
ca-certificates /etc/ssl/certs/ca-certificates.crt
'
TEST_PACKAGES='
libcmocka-dev pc:cmocka
clang clang
libclang-rt-14-dev /usr/lib/llvm-14/lib/clang/14*/lib/linux/libclang_rt.fuzzer-x86_64.a
clang-format-14 clang-format-14
pmccabe pmccabe
codespell codespell
shellcheck shellcheck
python3-venv py:ensurepip
nodejs node
npm npm
chromium chromium
fonts-dejavu-core /usr/share/fonts/truetype/dejavu/DejaVuSans.ttf
procps ps
'

probe() {
    case $1 in
        pc:*) command -v pkg-config >/dev/null && pkg-config --exists "${1#pc:}" ;;
        py:*) /usr/bin/python3 -c "import ${1#py:}" 2>/dev/null ;;
        /*)
            # shellcheck disable=SC2086 # the probe may be a pattern
            set -- $1
            [ -e "$1" ]
            ;;
        *) command -v "$1" >/dev/null ;;
    esac
}

# missing_packages "LIST": names of the packages whose probe fails.
missing_packages() {
    printf '%s\n' "$1" | while read -r package check; do
        [ -z "$package" ] || probe "$check" || printf '%s ' "$package"
    done
}

# install_packages "LIST": only what is missing; never asks.
install_packages() {
    wanted=$(missing_packages "$1")
    [ -n "$wanted" ] || return 0
    command -v apt-get >/dev/null ||
        fail "these packages are missing and this is no Debian: $wanted"
    if [ "$(id -u)" = 0 ]; then
        as_root=
    elif command -v sudo >/dev/null && sudo -n true 2>/dev/null; then
        as_root='sudo -n'
    else
        fail "packages are missing and I may not install them. Run this as root, or: sudo apt-get install $wanted"
    fi
    say "installing packages: $wanted"
    log=$(mktemp)
    # shellcheck disable=SC2086 # both are lists of words
    if ! { $as_root apt-get update -qq &&
        $as_root env DEBIAN_FRONTEND=noninteractive apt-get install -qq -y --no-install-recommends $wanted; } \
        >"$log" 2>&1 </dev/null; then
        tail -n 30 "$log" >&2
        fail "apt-get could not install: $wanted"
    fi
    rm -f "$log"
    left=$(missing_packages "$1")
    [ -z "$left" ] || fail "installed, but still not found: $left"
}

# build_preset PRESET [TARGET ...]: configure (quietly) and build with as many jobs as there are CPUs.
build_preset() {
    preset=$1
    shift
    log=$(mktemp)
    (cd "$ROOT" && cmake --preset "$preset") >"$log" 2>&1 || {
        tail -n 40 "$log" >&2
        fail "cmake --preset $preset failed"
    }
    rm -f "$log"
    cmake --build "$ROOT/build/$preset" -j "$(nproc)" ${1+--target "$@"}
}
