#!/bin/bash
#SBATCH --job-name=llama-7b-h100-1
#SBATCH --nodes=4
#SBATCH --ntasks-per-node=1
#SBATCH --gpus-per-node=h100:8
#SBATCH --cpus-per-task=96
#SBATCH --partition=gpu
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --reservation=week-7
#SBATCH --constraint=h100&nvlink
#SBATCH --exclude=gpu[13-14]
#SBATCH --nodelist=gpu[01-40]
#SBATCH --licenses=matlab:1,sim@db:2
#SBATCH --switches=1@30:00
#SBATCH --time=1440:00
#SBATCH --mem=488282M
#SBATCH --signal=USR1@300
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log
#SBATCH --exclusive
#SBATCH --wckey=scaletrain

# Preemption: by partition tier. gpu: PreemptMode=REQUEUE, GraceTime 120 s.

# Of the environment that came with the job only this goes on; the ranks get what the spec names beside it.
dropped=()
while IFS='=' read -r -d '' name _; do
    case "$name" in
    SLURM_*|SLURMD_*|SRUN_*|SCALETRAIN_*|CUDA_*|NVIDIA_*|NCCL_*|UCX_*|FI_*|GLOO_*|ROCR_VISIBLE_DEVICES|\
    HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|KRB5CCNAME|PWD|CUDA_HOME|HOME|LANG|LC_ALL|\
    LD_LIBRARY_PATH|LMOD_PKG|LOGNAME|MODULEPATH|MODULESHOME|PATH|PYTHONPATH|SHELL|SLURM_CONF|SSL_CERT_FILE|\
    TMPDIR|TZ|USER|VIRTUAL_ENV|XDG_CACHE_HOME) continue ;;
    esac
    unset -v "$name" 2>/dev/null || dropped+=("--unset=$name") # a function, or no name that a shell knows
done < <(env -0)

# Programs and modules are searched in no folder relative to the one that the job starts in.
keep_absolute() {
    local name entry kept
    for name; do
        kept=
        while IFS= read -r -d : entry; do
            [ "${entry:0:1}" != / ] || kept+="${kept:+:}$entry"
        done <<<"${!name-}:"
        if [ -n "$kept" ]; then export "$name=$kept"; else unset -v "$name"; fi
    done
}
keep_absolute PATH PYTHONPATH
# A batch shell is no login shell: it may not know `module` yet.
for init in "${MODULESHOME:-}/init/bash" /etc/profile.d/modules.sh /etc/profile.d/lmod.sh /etc/profile.d/z00_lmod.sh; do
    type module >/dev/null 2>&1 || { [ -r "$init" ] && . "$init"; }
done
module load cuda/12.4 nccl/2.21 || { echo 'cluster.slurm.modules could not be loaded' >&2; exit 4; }
. '/opt/it'"'"'s venv/bin/activate' || { echo 'cluster.slurm.activate could not be sourced' >&2; exit 4; }
keep_absolute PATH PYTHONPATH
python=$(type -P python3)
start='import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_module(sys.argv.pop(1), run_name=__name__, alter_sys=True)'
run=/data/runs/llama-7b-h100-1

# The ranks get the signals from their agents; this shell only has to outlive them and judge the end.
# SIGTERM here means that Slurm is ending the job, and a job that someone cancels must stay so.
ended_by_slurm=
trap 'ended_by_slurm=--ended-by-slurm' TERM
trap : USR1

began=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job begin "$run") || exit
[ -n "$began" ] || exit 0 # the run is done already
read -r attempt address port <<<"$began"

# env, not export: no variable of the run can change this shell or its own commands.
env "${dropped[@]}" \
    NCCL_DEBUG=WARN \
    NOTE='it'"'"'s $(not) run' \
    MASTER_ADDR="$address" MASTER_PORT="$port" \
    "$(type -P srun)" --export=ALL --mpi=none --kill-on-bad-exit=0 --wait=30 --cpus-per-task=96 \
    "$python" \
    -c "$start" scaletrain_cli.launch.node.agent "$run" --attempt "$attempt" &
step=$!
while kill -0 "$step" 2>/dev/null; do wait "$step"; done # a trapped signal ends wait early
wait "$step"
code=$?

verdict=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job end "$run" --attempt "$attempt" \
    --srun-exit-code "$code" $ended_by_slurm)
code=$?
read -r verdict exclude <<<"$verdict"
[ "$verdict" = requeue ] || exit "$code"

# Slurm takes a list of nodes to avoid only from a job that waits. The trap keeps this shell alive meanwhile.
requeue() {
    scontrol requeue "$SLURM_JOB_ID" || return
    [ -z "$exclude" ] || scontrol update "JobId=$SLURM_JOB_ID" "ExcNodeList=${exclude#=}"
    exit "$code"
}

for pause in 5 15 30 0; do # the controller may be away for a moment
    [ -z "$ended_by_slurm" ] || break
    requeue
    sleep "$pause" &
    wait $!
done
"$python" -c "$start" scaletrain_cli.launch.backends.slurm.job not-requeued "$run" --attempt "$attempt" $ended_by_slurm
exit "$code"
