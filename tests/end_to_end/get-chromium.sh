#!/usr/bin/env bash
# Chromium, which tests/end_to_end/test_report.py opens the benchmarks' report in: installs Debian's where it is missing and this may
# be done. Where it may not, says so, and the test is skipped.
set -euo pipefail
for name in chromium chromium-browser google-chrome; do
    command -v "$name" > /dev/null && exit 0
done
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update && apt-get install --yes --no-install-recommends chromium && exit 0
    echo "chromium could not be installed; the test of the report is skipped" >&2
else
    echo "chromium is missing, and this is no root with apt-get: the test of the report is skipped; on Debian: apt install chromium" >&2
fi
