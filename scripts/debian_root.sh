#!/usr/bin/env bash
# Unpacks Debian's packages, and what they need, into a folder: programs for another processor or of another release. The
# machine itself keeps what it has: lists and archives are below the folder too. For `source` as architecture it unpacks
# what the package's authors wrote, without Debian's changes.
#
# usage: scripts/debian_root.sh FOLDER ARCHITECTURE|source RELEASE PACKAGE...
set -euo pipefail
folder=$1 architecture=$2 release=$3
shift 3

mirror=$(apt-get indextargets --format '$(REPO_URI)' 'Created-By: Packages' | grep -m 1 '/debian/$' || true)
mirror=${mirror:-https://deb.debian.org/debian/} # an Ubuntu knows none
keys=${DEBIAN_KEYS:-/usr/share/keyrings/debian-archive-keyring.gpg}
if [ ! -e "$keys" ]; then
    echo "error: $keys is missing, by which Debian's packages are known: apt-get install debian-archive-keyring" >&2
    exit 1
fi
mkdir -p "$folder"/apt/{lists/partial,archives/partial}
folder=$(cd "$folder" && pwd)
: >"$folder/apt/status"
own=(-o Dir::Etc::SourceList="$folder/apt/sources.list" -o Dir::Etc::SourceParts=- -o Dir::State="$folder/apt"
    -o Dir::State::status="$folder/apt/status" -o Dir::Cache="$folder/apt" -o APT::Sandbox::User=root)
kind=deb
if [ "$architecture" = source ]; then kind=deb-src; else
    own+=(-o APT::Architecture="$architecture" -o APT::Architectures="$architecture")
fi
echo "$kind [signed-by=$keys] $mirror $release main" >"$folder/apt/sources.list"
apt-get -qq "${own[@]}" update
if [ "$architecture" = source ]; then
    (cd "$folder/apt/archives" && apt-get -qq "${own[@]}" source --download-only --tar-only "$@" >"$folder/apt/log")
    for archive in "$folder"/apt/archives/*.orig.tar.*; do
        case "$archive" in *.asc) ;; *) tar -xf "$archive" -C "$folder" --strip-components=1 ;; esac
    done
else
    apt-get -qq "${own[@]}" install --download-only --yes --no-install-recommends "$@" >"$folder/apt/log"
    for archive in "$folder"/apt/archives/*.deb; do
        dpkg-deb --extract "$archive" "$folder"
    done
fi
rm -rf "$folder/apt"
