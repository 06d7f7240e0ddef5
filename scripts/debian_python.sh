#!/usr/bin/env bash
# A CPython of another release of Debian, in a folder, with that release's C library beside it: it runs here as if it were
# installed, and makes virtual environments. Nothing else on the machine knows of it.
#
# usage: scripts/debian_python.sh FOLDER RELEASE VERSION      (target/pythons/3.14 testing 3.14)
set -euo pipefail
folder=$1 release=$2 version=$3

command -v patchelf >/dev/null || { echo "error: patchelf is missing: apt-get install patchelf" >&2; exit 1; }
rm -rf "$folder"
"$(dirname "$0")/debian_root.sh" "$folder" amd64 "$release" "python$version" "python$version-venv" "python$version-dev"
folder=$(cd "$folder" && pwd)
libraries=$folder/usr/lib/x86_64-linux-gnu
# Its own loader and libraries, also for what it loads later: hence the older kind of path, which holds for those too.
patchelf --set-interpreter "$libraries/ld-linux-x86-64.so.2" --force-rpath --set-rpath "$libraries" \
    "$folder/usr/bin/python$version"
# Where its pip is, for `-m venv`, and its headers, for what the tests compile.
sed -i "s|/usr/share/python-wheels|$folder/usr/share/python-wheels|" "$folder/usr/lib/python$version"/_sysconfigdata*.py
ln -s ../x86_64-linux-gnu "$folder/usr/include/python$version/x86_64-linux-gnu"
rm -rf "$folder/usr/lib/python$version/__pycache__"
"$folder/usr/bin/python$version" -c 'import ensurepip, ssl, sqlite3, sys, venv; print(sys.version)'
