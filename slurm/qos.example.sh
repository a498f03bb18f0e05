#!/usr/bin/env bash
# Three ways to run, and who may use how much: QOS, associations and fair share for slurmdbd. Run it once, as a Slurm
# administrator; change the names and numbers first. slurm.conf needs, beside partitions.conf.example:
#
#   AccountingStorageType=accounting_storage/slurmdbd
#   AccountingStorageEnforce=associations,limits,qos
#   AccountingStorageTRES=gres/gpu
#   PriorityType=priority/multifactor
#   PriorityWeightFairshare=10000
#   PriorityWeightQOS=100000
#   PriorityWeightAge=1000
#   PreemptType=preempt/qos           # in place of preempt/partition_prio: one of the two
#   PreemptMode=REQUEUE
set -euo pipefail

# `normal` is there from the start, and so is everything at the second run of this script.
qos() {
    sacctmgr --immediate --quiet add qos "$1" >/dev/null || true
    sacctmgr --immediate --quiet modify qos "$1" set "${@:2}"
}

# spot: whatever nobody else wants, taken back with time to save. prod takes it from spot alone, never from normal work.
qos spot Priority=1 GraceTime=120 PreemptMode=requeue UsageFactor=0.2
qos normal Priority=100 PreemptMode=cluster MaxWall=7-00:00:00
# DenyOnLimit: a job that it could never hold is refused at once instead of waiting indefinitely.
qos prod Priority=1000 PreemptMode=cluster Preempt=spot MaxWall=14-00:00:00 Flags=DenyOnLimit MaxTRESPerJob=gres/gpu=256

# Accounts are teams. GrpTRES: what a team may hold at once; fairshare: who goes first when all want more.
for team in vision language; do
    sacctmgr --immediate --quiet add account "$team" >/dev/null || true
    sacctmgr --immediate --quiet modify account "$team" set \
        Fairshare=50 GrpTRES=gres/gpu=128 QOS=spot,normal,prod DefaultQOS=normal
done
# Users: sacctmgr add user ada Account=language
