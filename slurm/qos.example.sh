#!/usr/bin/env bash
# Three QOS, with quotas and fair share of teams, for slurmdbd. Change the names and numbers, then run it as a Slurm
# administrator. slurm.conf needs these settings in addition to those of partitions.conf.example:
#
#   AccountingStorageType=accounting_storage/slurmdbd
#   AccountingStorageEnforce=associations,limits,qos
#   AccountingStorageTRES=gres/gpu
#   PriorityType=priority/multifactor
#   PriorityWeightFairshare=10000
#   PriorityWeightQOS=100000
#   PriorityWeightAge=1000
#   PreemptType=preempt/qos           # instead of preempt/partition_prio
#   PreemptMode=REQUEUE
set -euo pipefail

# `normal` always exists, and all of them do if the script is run again.
qos() {
    sacctmgr --immediate --quiet add qos "$1" >/dev/null || true
    sacctmgr --immediate --quiet modify qos "$1" set "${@:2}"
}

# spot: idle nodes, preempted with time to save a checkpoint. prod preempts only spot, never normal.
qos spot Priority=1 GraceTime=120 PreemptMode=requeue UsageFactor=0.2
qos normal Priority=100 PreemptMode=cluster MaxWall=7-00:00:00
# DenyOnLimit: a job that exceeds a limit is refused at submission instead of staying pending.
qos prod Priority=1000 PreemptMode=cluster Preempt=spot MaxWall=14-00:00:00 Flags=DenyOnLimit MaxTRESPerJob=gres/gpu=256

# Accounts are teams. GrpTRES: the GPUs that a team may use at the same time; Fairshare: its priority over other teams.
for team in vision language; do
    sacctmgr --immediate --quiet add account "$team" >/dev/null || true
    sacctmgr --immediate --quiet modify account "$team" set \
        Fairshare=50 GrpTRES=gres/gpu=128 QOS=spot,normal,prod DefaultQOS=normal
done
# Users: sacctmgr add user ada Account=language
