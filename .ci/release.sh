#!/usr/bin/env bash
# Build the release into dist/ and try each file of it in an empty environment. Nothing is published or signed here.
# usage: release.sh    (as in `make release`; packages come from the index, and the hashes with them)
#
#   scaletrain-*.tar.gz, *.whl    the wheel is built from the sdist, which so has everything that it needs
#   requirements-core.txt         all packages of the core, and this wheel, with hashes, for Linux on x86-64
#   requirements-train.txt        the same with the extra train: the CUDA build of torch, which is the one on PyPI
#   sbom-core.cdx.json            CycloneDX: the packages of the core as they are installed, with licenses and who needs whom
#   sbom-train.cdx.json           CycloneDX: the packages of requirements-train.txt, with hashes
#   SHA256SUMS                    of the files above
set -euo pipefail
cd "$(dirname "$0")/.."

readonly dist=$PWD/dist work=$PWD/build/release
mapfile -t pythons < <(.ci/pythons.sh)
[[ ${#pythons[@]} -gt 0 ]] || { echo 'release.sh: none of Python 3.10 to 3.13 is on PATH or in pyenv' >&2; exit 1; }
rm -rf "$dist" "$work"
mkdir -p "$dist" "$work"

"${pythons[-1]}" -m venv "$work/tools"
readonly tools=$work/tools/bin
"$tools/python" -m pip install --quiet --requirement .ci/release_tools.txt

"$tools/uv" build --quiet --python "${pythons[-1]}" --build-constraints constraints.txt --out-dir "$dist"
wheel=$(basename "$dist"/scaletrain-*.whl)
sdist=$(basename "$dist"/scaletrain-*.tar.gz)
version=$(cut -d- -f2 <<<"$wheel")
readonly wheel sdist version

# requirements NAME EXTRAS: every version that constraints.txt allows, with the hashes of all its files on the index. The
# file serves Python 3.10 to 3.13, by markers. uv reads no settings of pip: a wheel on this disk has no public hash.
requirements() {
    local file=$dist/requirements-$1.txt options=(--universal --python-version 3.10 --generate-hashes --no-header)
    if [[ -n $2 ]]; then options+=(--extra "$2"); fi
    UV_PYTHON_DOWNLOADS=never "$tools/uv" pip compile --quiet --python "${pythons[-1]}" --constraint constraints.txt \
        "${options[@]}" --no-annotate --output-file "$file" pyproject.toml
    printf 'scaletrain%s==%s --hash=sha256:%s\n' "${2:+[$2]}" "$version" "$(sha256sum <"$dist/$wheel" | cut -d' ' -f1)" >>"$file"
}
requirements core ''
requirements train train

# try PYTHON FILE ARGUMENTS: install into an empty environment, and run there, outside the checkout, what a newcomer runs.
try() {
    local python=$1 file=$2 place said='installed; version, help, init, validate, plan'
    place=$work/$("$python" -c 'import platform; print(platform.python_version())')-$file
    "$python" -m venv --without-pip "$place/venv"
    if ! bash -euo pipefail -s -- "$tools/python" "$place" "$version" "${@:3}" >"$place/log" 2>&1 <<'TRY'
python=$1 place=$2 version=$3
cd "$place"
unset PYTHONPATH
"$python" -m pip --python venv/bin/python install "${@:4}"
"$python" -m pip --python venv/bin/python check
export PATH=$place/venv/bin:$PATH SCALETRAIN_RUNS=$place/runs
set -x
[[ $(scaletrain --version) == "scaletrain $version" ]]
scaletrain --help
scaletrain init
scaletrain validate run.yaml
scaletrain init --recipe llama-7b-h100 7b.yaml
scaletrain plan 7b.yaml
TRY
    then
        said="failed: $place/log"
        failed=1
        tail -n 20 "$place/log" >&2
    fi
    row "$("$python" --version)" "$file" "$said"
}

row() { printf '%-14s %-36s %s\n' "$@"; }
failed=0
row Python file result
for python in "${pythons[@]}"; do
    try "$python" "$wheel" "$dist/$wheel"
    try "$python" "$sdist" "$dist/$sdist"
    try "$python" requirements-core.txt --require-hashes --find-links "$dist" --requirement "$dist/requirements-core.txt"
done
# Not installed here: 5 GB. pip resolves the file and compares the hashes that the index states with those in it.
"$tools/python" -m pip install --quiet --dry-run --ignore-installed --require-hashes --find-links "$dist" \
    --requirement "$dist/requirements-train.txt"
row "$("$tools/python" --version)" requirements-train.txt 'resolved, not installed'

# cyclonedx-py takes the version of the root from pyproject.toml alone, and validates what it writes.
sed "s/^dynamic = .*/version = \"$version\"/" pyproject.toml >"$work/pyproject.toml"
installed=("$work"/*-requirements-core.txt)
"$tools/cyclonedx-py" environment --pyproject "$work/pyproject.toml" --output-reproducible --validate \
    --output-file "$dist/sbom-core.cdx.json" "${installed[-1]}/venv/bin/python"
"$tools/cyclonedx-py" requirements --output-reproducible --validate \
    --output-file "$dist/sbom-train.cdx.json" "$dist/requirements-train.txt"
(cd "$dist" && sha256sum -- * >SHA256SUMS)
[[ $failed == 0 ]]
