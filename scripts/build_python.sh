#!/usr/bin/env bash
# Builds a CPython from Debian's source package into a folder: one that this machine has no package for, or one without a GIL.
# Its tests are not run, and it is not optimised: good to test with, not to measure with.
#
# usage: scripts/build_python.sh FOLDER SOURCE_PACKAGE RELEASE [OPTION OF configure...]
set -euo pipefail
folder=$1 package=$2 release=$3
shift 3

mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$' || true)
if [ -z "$mirror" ]; then
    echo "error: apt-get knows no mirror of Debian (apt-get indextargets): this needs a Debian with its package lists" >&2
    exit 1
fi
mkdir -p "$folder"
folder=$(cd "$folder" && pwd)
work=$folder.build
mkdir -p "$work"/apt/{lists/partial,archives/partial}
: >"$work/apt/status"
echo "deb-src [signed-by=/usr/share/keyrings/debian-archive-keyring.gpg] $mirror $release main" >"$work/apt/sources.list"
own=(-o Dir::Etc::SourceList="$work/apt/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State="$work/apt"
    -o Dir::State::status="$work/apt/status" -o Dir::Cache="$work/apt" -o APT::Sandbox::User=root)
apt-get -qq "${own[@]}" update
cd "$work"
# Only the authors' archive: Debian's changes are for Debian's Python.
apt-get -qq "${own[@]}" source --download-only "$package"
mkdir -p source
tar -xf "$package"_*.orig.tar.* -C source --strip-components=1
cd source
./configure --quiet --prefix="$folder" --with-ensurepip=install --without-static-libpython "$@" >"$work/log"
make --silent -j2 >>"$work/log" 2>&1
make --silent install >>"$work/log" 2>&1
cd / && rm -rf "$work"
