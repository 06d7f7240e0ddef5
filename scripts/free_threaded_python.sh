#!/usr/bin/env bash
# A CPython without a GIL, in a folder: there is none to install. It is built from the sources in one of Debian's releases, and
# optimised a little.
#
# usage: scripts/free_threaded_python.sh FOLDER RELEASE VERSION      (target/pythons/free-threaded testing 3.13)
set -euo pipefail
folder=$1 release=$2 version=$3

rm -rf "$folder" "$folder.build"
"$(dirname "$0")/debian_root.sh" "$folder.build" source "$release" "python$version"
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
build=$folder.build
exec 3>&1 4>&2 >"$folder.log" 2>&1
trap 'tail -n 30 "$folder.log" >&4' ERR
cd "$build"
OPT='-O1 -DNDEBUG' ./configure --quiet --prefix="$folder" --disable-gil --disable-test-modules
make --silent -j2
make --silent install
exec >&3 2>&4
trap - ERR
cd /
rm -rf "$build" "$folder.log"
"$folder/bin/python${version}t" -c 'import ctypes, ensurepip, sys, zlib; print(sys.version); assert not sys._is_gil_enabled()'
