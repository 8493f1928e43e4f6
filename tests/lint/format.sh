#!/bin/sh
# clang-format 14 decides, whole tree. `tests/lint/format.sh --fix` applies it.
set -eu
cd "$(dirname "$0")/../.."
tool=clang-format-14
command -v "$tool" >/dev/null || tool=clang-format
command -v "$tool" >/dev/null || { echo "format: clang-format is missing (apt install clang-format-14)"; exit 1; }
mode='--dry-run -Werror'
[ "${1:-}" = --fix ] && mode=-i
# shellcheck disable=SC2086 # $mode is a list of words
git ls-files --cached --others --exclude-standard '*.c' '*.h' | while read -r file; do
    [ ! -f "$file" ] || echo "$file"
done | xargs -r "$tool" $mode
echo "format: fine"
