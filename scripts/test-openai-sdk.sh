#!/usr/bin/env bash
# The OpenAI Python SDK, of a pinned version, against waste-serve with the small model that comes with the project.
# Needs Python 3 with venv, and the network once for the SDK. Usage: scripts/test-openai-sdk.sh [PYTEST-LIKE-FILTER]
set -euo pipefail
cd "$(dirname "$0")/.."

home=target/openai-sdk
[ -x "$home/bin/python" ] || python3 -m venv "$home"
"$home/bin/python" -c 'import openai, sys; sys.exit(openai.__version__ != "3.57.0")' 2>/dev/null ||
  "$home/bin/pip" install --quiet "openai==3.57.0"
[ -n "${WASTE_SERVE:-}" ] || cargo build -p waste-serve --quiet
exec "$home/bin/python" scripts/test-openai-sdk.py "${WASTE_SERVE:-target/debug/waste-serve}" "$@"
