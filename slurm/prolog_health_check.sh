#!/usr/bin/env bash
# Prolog of slurmd: checks the node before each job. Exit code 1 drains the node and requeues the job on other nodes; the
# problem is written to slurmd's log and, by scontrol, to the node's reason.
#
#   Prolog=/etc/slurm/prolog_health_check.sh
#   PrologFlags=Alloc                  # when the job gets its nodes, not at its first step
#   SchedulerParameters=nohold_on_prolog_fail    # otherwise the job is held until its owner releases it
#
# Checks only failures that end a job and that are found within a second: slower tests belong in HealthCheckProgram.
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
    # A driver that hangs would otherwise hang this script, and the node.
    status=$(timeout 30 nvidia-smi -q 2>&1) || bad "nvidia-smi: $(head -c 120 <<<"$status" | tr '\n' ' ')"
    grep -Eq 'Remapping Failure Occurred *: *Yes' <<<"$status" && bad "a GPU has memory that cannot be remapped"
    grep -Eq 'Pending *: *Yes' <<<"$status" && bad "a GPU needs a reset to remap failed memory"
    devices=$(find /dev -maxdepth 1 -name 'nvidia[0-9]*' | wc -l)
    counted=$(nvidia-smi -L 2>/dev/null | grep -c '^GPU ')
    [ "$counted" -ge "$devices" ] || bad "$counted of $devices GPUs answer"
fi
[ "$(free_megabytes /dev/shm)" -ge "$least_shm_megabytes" ] || bad "/dev/shm is full: a job left files in it"
[ "$(free_megabytes /tmp)" -ge "$least_tmp_megabytes" ] || bad "/tmp is full"
exit 0
