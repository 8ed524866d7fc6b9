#!/bin/sh
# Prints a Python that concertina runs on: 3.11 to 3.13, with venv and ssl.
set -eu

for name in python3 python3.13 python3.12 python3.11; do
    for path in $(which -a "$name" 2>/dev/null || true); do
        if "$path" -c 'import ensurepip, ssl, sys, venv; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then
            "$path" -c 'import sys; print(sys.executable)'
            exit 0
        fi
    done
done
echo "No Python 3.11, 3.12 or 3.13 with the modules venv and ssl is on PATH: install one (on Debian and Ubuntu" >&2
echo "python3 and python3-venv), or name one with PYTHON=/path/to/python." >&2
exit 1
