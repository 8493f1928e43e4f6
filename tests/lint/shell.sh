#!/bin/sh
# Runs shellcheck over every file that starts as a shell script.
set -eu
cd "$(dirname "$0")/../.."
command -v shellcheck >/dev/null || { echo "shell: shellcheck is missing (apt install shellcheck)"; exit 1; }
git ls-files --cached --others --exclude-standard | while read -r file; do
    [ -f "$file" ] || continue
    if head -n 1 "$file" 2>/dev/null | tr -d '\0' | grep -Eq '^#!.*[ /](ba)?sh( |$)'; then
        echo "$file"
    fi
done | xargs -r shellcheck -x
echo "shell: fine"
