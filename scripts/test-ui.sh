#!/usr/bin/env bash
# The web page of waste-serve in headless Chromium: asks, watches the answer come, stops one, and takes a picture of it.
# Usage: scripts/test-ui.sh [PICTURE.png]   Needs Python, Chromium and ChromeDriver (Debian: chromium chromium-driver).
set -euo pipefail
cd "$(dirname "$0")/.."
command -v chromedriver >/dev/null || { echo "chromedriver is needed (Debian: apt-get install chromium chromium-driver)" >&2; exit 1; }
[ -n "${WASTE_SERVE:-}" ] || cargo build -p waste-serve --quiet
exec python3 scripts/test-ui.py "${WASTE_SERVE:-target/debug/waste-serve}" "${1:-}"
