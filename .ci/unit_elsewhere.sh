#!/usr/bin/env bash
# Run the unit tests, which need no torch, on another Python with other versions of the core's libraries.
# usage: unit_elsewhere.sh oldest|newest PATH...
#
# oldest: the lowest version of each library of the core that pyproject.toml admits, on the lowest Python that is found.
# newest: the highest Python that is found, with the newest versions. pyproject.toml claims Python 3.10 to 3.13.
set -euo pipefail
cd "$(dirname "$0")/.."

readonly which=${1:?usage: unit_elsewhere.sh oldest|newest PATH...}
shift

mapfile -t found < <(.ci/pythons.sh)
interpreter=${found[0]:-}
if [[ $which == newest && -n $interpreter ]]; then interpreter=${found[-1]}; fi
readonly venv=build/unit-$which
"${interpreter:-${PYTHON:-python3}}" -m venv --clear "$venv"
readonly python=$venv/bin/python
echo "$("$python" --version), $which versions"

# What unit tests use beside the core: the client of Kubernetes too, in its newest version.
tools=(hypothesis jsonschema kubernetes kubernetes-validate packaging pytest pytest-timeout pytest-xdist pyyaml)
oldest=()
if [[ $which == oldest ]]; then
    mapfile -t oldest < <(sed -n '/^dependencies = \[/,/^\]/s/^ *"\([^">]*\)>=\([^",]*\)".*/\1==\2/p' pyproject.toml)
    echo "${oldest[*]}"
fi
"$python" -m pip install --quiet --disable-pip-version-check hatchling
"$python" -m pip install --quiet --disable-pip-version-check --editable . "${oldest[@]}" "${tools[@]}"
# Old libraries may use what newer ones beside them deprecate.
"$python" -m pytest -p tests.unit -W ignore::DeprecationWarning -q -n "${WORKERS:-2}" "$@"
