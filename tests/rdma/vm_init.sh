#!/bin/busybox sh
# First stage of the guest, in its initramfs: load modules, mount a writable tmpfs over the host's root, and switch to
# it. Any failure here ends the machine; the host then shows this console.

die() {
    echo "vm: $*"
    poweroff -f
}

/bin/busybox --install -s /bin
mount -t proc proc /proc
mount -t sysfs sysfs /sys
mount -t devtmpfs devtmpfs /dev

# The host asks only whether this accelerator runs a guest at all.
if grep -q vm.probe /proc/cmdline; then
    die "alive"
fi

while read -r module; do
    insmod "/modules/$module" || die "cannot load $module"
done </modules/order

mount -t 9p -o trans=virtio,version=9p2000.L,ro,msize=512000,cache=loose host /lower ||
    die "cannot mount the host's root"
mount -t tmpfs -o mode=755,size=60% tmpfs /upper
mkdir /upper/data /upper/work
mount -t overlay -o lowerdir=/lower,upperdir=/upper/data,workdir=/upper/work overlay /root ||
    die "cannot mount the overlay"

# The host's /run has sockets of services that do not run in the guest.
mount -t tmpfs -o mode=755 tmpfs /root/run
mkdir -m 1777 /root/run/tmp
mkdir /root/run/vm
mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,cache=none run /root/run/vm ||
    die "cannot mount the share for results"

mount -o move /proc /root/proc
mount -o move /sys /root/sys
mount -o move /dev /root/dev
exec switch_root /root /bin/sh /run/vm/guest.sh
