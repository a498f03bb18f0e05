#!/usr/bin/env bash
# Install the OpenSSH server for tests/login_node, without starting it. Root on Debian; does nothing if it is there.
set -euo pipefail
[[ ! -x /usr/sbin/sshd ]] || exit 0
policy=/usr/sbin/policy-rc.d
if [[ ! -e $policy ]]; then
    trap 'rm -f "$policy"' EXIT
    printf '#!/bin/sh\nexit 101\n' >"$policy"
    chmod 755 "$policy"
fi
export DEBIAN_FRONTEND=noninteractive
apt-get -o DPkg::Lock::Timeout=300 update -q
apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends openssh-client openssh-server
