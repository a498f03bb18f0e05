#!/usr/bin/env bash
# Install the one torch that this project is tested with, in the build that suits the machine.
# usage: install_torch.sh PYTHON [auto|cpu|cuda]
#
# On Linux, plain `pip install torch` brings several gigabytes of CUDA libraries. A machine with a GPU needs them; a
# laptop, a login node or a CI runner does not. There, pip is asked first which torch it would install, so that a mirror
# or a local wheel that already offers a CPU build is used as it is.
set -euo pipefail

readonly version=2.13.0
readonly cpu_index=https://download.pytorch.org/whl/cpu
readonly python=${1:?usage: install_torch.sh PYTHON [auto|cpu|cuda]}
build=${2:-auto}

installed() { "$python" -c 'import importlib.metadata as m; print(m.version("torch"))' 2>/dev/null || true; }

has_gpu() { [[ $(nvidia-smi -L 2>/dev/null || true) == *GPU* ]]; }

# Asks for torch alone and reads its requirements: an index without separate metadata makes pip download whole wheels
# to answer, and the CUDA libraries must not be among them. --ignore-installed: what is offered, whatever is here.
index_offers_cuda() {
    "$python" -m pip install --dry-run --no-deps --ignore-installed --quiet --report - "torch==$version" |
        "$python" -c '
import json, sys
requirements = json.load(sys.stdin)["install"][0]["metadata"].get("requires_dist", [])
print(any(requirement.startswith(("nvidia-", "cuda-")) for requirement in requirements))'
}

case $build in
    auto)
        if has_gpu; then
            build=cuda
        elif [[ $(installed) == "$version"* ]]; then
            # Perhaps chosen by hand: a login node has no GPU, yet its environment serves nodes that have some.
            exit 0
        else
            build=cpu
        fi
        ;;
    cpu | cuda) ;;
    *)
        echo "install_torch.sh: the build is auto, cpu or cuda, not '$build'" >&2
        exit 2
        ;;
esac

if [[ $build == cpu ]]; then
    offers_cuda=False
    if [[ $(uname -s) == Linux ]]; then offers_cuda=$(index_offers_cuda); fi
    if [[ $offers_cuda == True ]]; then
        # +cpu is spelled out because an installed CUDA build satisfies the bare version.
        "$python" -m pip install --quiet --index-url "$cpu_index" "torch==$version+cpu"
    else
        "$python" -m pip install --quiet "torch==$version"
    fi
else
    # The bare version is satisfied by a CPU build too, so pip alone would never replace one.
    if [[ $(installed) == *+cpu ]]; then "$python" -m pip uninstall --quiet --yes torch; fi
    "$python" -m pip install --quiet "torch==$version"
fi
echo "torch $(installed) installed ($build build asked for)"
