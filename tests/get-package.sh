#!/usr/bin/env bash
# get-package.sh PACKAGE [PROGRAM...]: install Debian's package, which tests use, unless it or one of the programs is there.
# Where that may not be done, say so: its tests are skipped.
set -euo pipefail
package=$1
for program in "$@"; do
    command -v "$program" > /dev/null && exit 0
done
dpkg --status "$package" > /dev/null 2>&1 && exit 0
if [ "$(id -u)" = 0 ] && command -v apt-get > /dev/null; then
    apt-get update && apt-get install --yes --no-install-recommends "$package" && exit 0
    echo "$package could not be installed; its tests are skipped" >&2
else
    echo "$package is missing, and this is no root with apt-get: its tests are skipped; on Debian: apt install $package" >&2
fi
