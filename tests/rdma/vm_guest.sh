#!/bin/sh
# Second stage of the guest, on the host's files: create devices and two soft-RoCE links, connected by a veth pair,
# then run the host's command. This is process 1: it never returns.

PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
export PATH

off() {
    /bin/busybox sync
    /bin/busybox poweroff -f
}

die() {
    echo "vm: $*"
    echo "$*" >/run/vm/failure
    off
}

must() {
    "$@" || die "failed: $*"
}

set_ipv4() {
    for interface in all default veth0 veth1; do
        echo "$2" >"/proc/sys/net/ipv4/conf/$interface/$1" || die "cannot set $1 of $interface"
    done
}

/bin/busybox hostname rxe
mkdir -p /dev/pts /dev/shm
must mount -t devpts -o gid=5,mode=620,ptmxmode=666 devpts /dev/pts
must mount -t tmpfs -o mode=1777 tmpfs /dev/shm
for link in fd:fd stdin:fd/0 stdout:fd/1 stderr:fd/2; do
    ln -snf "/proc/self/${link#*:}" "/dev/${link%%:*}"
done
must ulimit -l unlimited

# A packet between two addresses of one machine would take the loopback device. The rules put the veth pair before
# the table of local addresses, for outgoing packets only.
must ip link set lo up
must ip link add veth0 mtu 9000 type veth peer name veth1 mtu 9000
set_ipv4 accept_local 1
set_ipv4 rp_filter 0
set_ipv4 arp_ignore 1
for n in 0 1; do
    must ip address add "10.77.0.$((n + 1))/24" dev "veth$n"
    must ip link set "veth$n" up
    must ip route add "10.77.0.$((2 - n))/32" dev "veth$n" src "10.77.0.$((n + 1))" table "10$n"
    must ip rule add pref "1$n" iif lo from "10.77.0.$((n + 1))" to "10.77.0.$((2 - n))" \
        lookup "10$n"
done
must ip rule add pref 100 lookup local
must ip rule del pref 0

for n in 0 1; do
    must rdma link add "rxe$n" type rxe netdev "veth$n"
done

# The IPv4 GID appears slightly later than the device.
for n in 0 1; do
    gid="0000:0000:0000:0000:0000:ffff:0a4d:000$((n + 1))"
    tries=100
    until [ "$(cat "/sys/class/infiniband/rxe$n/ports/1/gids/1" 2>/dev/null)" = "$gid" ]; do
        tries=$((tries - 1))
        [ "$tries" -gt 0 ] || die "rxe$n has no IPv4 GID at index 1"
        /bin/busybox usleep 50000
    done
done
[ -c /dev/infiniband/uverbs1 ] || die "there is no /dev/infiniband/uverbs1"

if [ -e /run/vm/terminal ]; then
    read -r rows columns </run/vm/terminal
    # Held open, since the last close resets a terminal.
    exec 3<>/dev/hvc0
    stty rows "$rows" columns "$columns" <&3
    echo >/run/vm/booted
    /bin/busybox setsid -c /bin/sh /run/vm/command <&3 >&3 2>&3 3>&-
    echo $? >/run/vm/status
    off
fi

# Not directly to the port: the command gets a pipe that it can reopen as /dev/stdout, and a process left behind that
# keeps the output open does not keep the machine running.
mkfifo /run/output
cat /run/output >/dev/vport0p1 &
copier=$!
exec 3>/run/output
echo >/run/vm/booted
/bin/busybox setsid /bin/sh /run/vm/command </dev/null >&3 2>&1 3>&-
status=$?
exec 3>&-
tries=20
while kill -0 "$copier" 2>/dev/null && [ "$tries" -gt 0 ]; do
    tries=$((tries - 1))
    /bin/busybox usleep 50000
done
echo "$status" >/run/vm/status
off
