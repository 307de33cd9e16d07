#!/bin/sh
# vm_release.sh ROOT COMMAND...: run a command in the guest with the programs of an unpacked release. Its providers are
# mounted where its libibverbs looks for them. Installed programs find no providers from here on.
set -e
root=$1
shift
mount --bind "$root/usr/lib/x86_64-linux-gnu/libibverbs" /usr/lib/x86_64-linux-gnu/libibverbs
mount --bind "$root/etc/libibverbs.d" /etc/libibverbs.d
PATH=$root/usr/run:$PATH exec "$@"
