#!/bin/sh
# codespell over everything people read; words it may keep are in codespell.txt.
set -eu
cd "$(dirname "$0")/../.."
command -v codespell >/dev/null || { echo "spelling: codespell is missing (apt install codespell)"; exit 1; }
git ls-files -z --cached --others --exclude-standard \
    ':!:*.png' ':!:*.json' ':!:tests/fuzz/corpus' ':!:tests/fuzz/crash' ':!:LICENSE' |
    xargs -0 codespell --ignore-words tests/lint/codespell.txt
echo "spelling: fine"
