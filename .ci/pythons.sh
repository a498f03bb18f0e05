#!/usr/bin/env bash
# Print the interpreter of each Python 3.10 to 3.13, the versions that pyproject.toml names, that PATH or pyenv has.
set -euo pipefail

for version in 3.10 3.11 3.12 3.13; do
    for found in "python$version" "${PYENV_ROOT:-$HOME/.pyenv}"/versions/"$version".*/bin/python; do
        if command -v "$found" >/dev/null && "$found" -c 'import ssl, venv' 2>/dev/null; then
            command -v "$found"
            break
        fi
    done
done
