#!/usr/bin/env bash
# Make the virtual environments of the peers that benchmarks compare with, one for each: tools/bench/peers/make.sh [FOLDER] [PEER ...]
# They hold gigabytes and take minutes. What is there already is kept.
set -euo pipefail
here=$(cd "$(dirname "$0")" && pwd)
folder=${1:-$here/../../../.peers}
shift || true
mkdir -p "$folder"
for peer in "${@:-torch paddleformers erniekit}"; do
    for name in $peer; do
        [[ -e $folder/$name/.complete ]] && continue
        "${PYTHON:-python3}" -m venv "$folder/$name"
        "$folder/$name/bin/python" -m pip install --quiet --disable-pip-version-check -r "$here/$name.txt"
        touch "$folder/$name/.complete"
        echo "made $folder/$name"
    done
done
