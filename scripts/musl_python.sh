#!/usr/bin/env bash
# A CPython with musl for its C library, in a folder: there is none to install. It is built from the sources in one of
# Debian's releases, and not optimised: good to test with, not to measure with. It runs with that release's musl, since
# NumPy's wheel needs 1.2.4 or newer.
#
# usage: scripts/musl_python.sh FOLDER RELEASE VERSION      (target/pythons/musl testing 3.13)
set -euo pipefail
folder=$1 release=$2 version=$3
unpack=$(cd "$(dirname "$0")" && pwd)/debian_root.sh

for tool in musl-gcc patchelf; do
    command -v $tool >/dev/null || { echo "error: $tool is missing: apt-get install musl-tools patchelf" >&2; exit 1; }
done
rm -rf "$folder" "$folder.build"
"$unpack" "$folder" amd64 "$release" musl
"$unpack" "$folder.build/libffi" source bookworm libffi # later archives have no `configure`
"$unpack" "$folder.build/python" source "$release" "python$version"
folder=$(cd "$folder" && pwd)
build=$folder.build

# musl-gcc names glibc's system where it is asked for its own, which configure compares.
printf '#!/bin/sh\ncase "$*" in *print-multiarch*) exit ;; esac\nexec musl-gcc "$@"\n' >"$build/cc"
chmod +x "$build/cc"
export CC=$build/cc
# No library of this machine is one of musl's; ctypes wants libffi.
export PKG_CONFIG_LIBDIR=/nowhere LIBFFI_CFLAGS=-I$build/ffi/include LIBFFI_LIBS=$build/ffi/lib/libffi.a
exec 3>&1 4>&2 >"$build/log" 2>&1
trap 'tail -n 30 "$build/log" >&4' ERR
cd "$build/libffi"
# Its static trampolines want the kernel's headers, which musl-gcc does not find.
CFLAGS='-O1 -fPIC' ./configure --quiet --prefix="$build/ffi" --libdir="$build/ffi/lib" --disable-shared --disable-docs \
    --disable-multi-os-directory --disable-exec-static-tramp
make --silent -j2 install
cd "$build/python"
OPT='-O1 -DNDEBUG' ./configure --quiet --prefix="$folder" --with-ensurepip=no --disable-test-modules
make --silent -j2
make --silent install
exec >&3 2>&4
trap - ERR
cd /
rm -rf "$build"
patchelf --set-interpreter "$folder/usr/lib/x86_64-linux-musl/libc.so" "$folder/bin/python$version"
"$folder/bin/python$version" -c 'import ctypes, hashlib, socket, sys; print(sys.version)'
