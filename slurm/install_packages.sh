#!/bin/sh
# Install the packages of the dev cluster (packages.txt) without starting a system service.
# Does nothing if everything is installed.
set -eu

here=$(cd "$(dirname "$0")" && pwd)
missing=
for package in $(sed 's/#.*//' "$here/packages.txt"); do
    status=$(dpkg-query -W -f '${Status}' "$package" 2>/dev/null || true)
    [ "$status" = "install ok installed" ] || missing="$missing $package"
done
[ -n "$missing" ] || exit 0
if [ "$(id -u)" != 0 ]; then
    echo "missing:$missing; as root: apt-get install -y --no-install-recommends$missing" >&2
    exit 4
fi

# A policy-rc.d that exits 101 keeps the packages' scripts from starting slurmctld, slurmd and munge, which would use
# /etc/slurm and the default ports. An existing one is left unchanged.
policy=/usr/sbin/policy-rc.d
if [ ! -e "$policy" ]; then
    trap 'rm -f "$policy"' EXIT
    trap 'exit 130' INT TERM
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi

export DEBIAN_FRONTEND=noninteractive RUNLEVEL=1
apt-get -o DPkg::Lock::Timeout=300 update -q
# shellcheck disable=SC2086  # a list of package names
apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends $missing
