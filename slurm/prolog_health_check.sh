#!/usr/bin/env bash
# Prolog of slurmd: looks at the node before each job, and keeps the job off a bad one. Exit code 1 drains the node and
# requeues the job elsewhere; what is wrong goes to slurmd's log, and by scontrol into the node's reason.
#
#   Prolog=/etc/slurm/prolog_health_check.sh
#   PrologFlags=Alloc                  # as the job gets its nodes, not at its first step
#   SchedulerParameters=nohold_on_prolog_fail    # else the job comes back held, and waits for its owner
#
# Only what a job cannot survive, and only what is known in a second: slower tests belong to HealthCheckProgram.
set -u
least_shm_megabytes=${LEAST_SHM_MEGABYTES:-1024}
least_tmp_megabytes=${LEAST_TMP_MEGABYTES:-1024}

bad() {
    echo "health check: $*" >&2
    scontrol update "NodeName=${SLURMD_NODENAME:-$(hostname -s)}" State=DRAIN "Reason=health check: $*" 2>/dev/null
    exit 1
}

free_megabytes() { df --output=avail -BM "$1" 2>/dev/null | tail -1 | tr -dc '0-9'; }

if command -v nvidia-smi >/dev/null; then
    # A driver that hangs would hang this script and the node with it.
    told=$(timeout 30 nvidia-smi -q 2>&1) || bad "nvidia-smi: $(head -c 120 <<<"$told" | tr '\n' ' ')"
    grep -Eq 'Remapping Failure Occurred *: *Yes' <<<"$told" && bad "a GPU has memory that cannot be repaired"
    grep -Eq 'Pending *: *Yes' <<<"$told" && bad "a GPU waits for a reset to take broken memory out of use"
    devices=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
    counted=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
    [ "$counted" -ge "$devices" ] || bad "$counted of $devices GPUs answer"
fi
[ "$(free_megabytes /dev/shm)" -ge "$least_shm_megabytes" ] || bad "/dev/shm is full: a job has left files in it"
[ "$(free_megabytes /tmp)" -ge "$least_tmp_megabytes" ] || bad "/tmp is full"
exit 0
