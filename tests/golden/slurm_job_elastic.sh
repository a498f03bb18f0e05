#!/bin/bash
#SBATCH --job-name=a-1
#SBATCH --nodes=2-8
#SBATCH --no-kill
#SBATCH --cpus-per-task=1
#SBATCH --signal=USR1@60
#SBATCH --requeue
#SBATCH --open-mode=append
#SBATCH --output=slurm-%j.log

# Keep only these variables of the job's environment. The ranks also get those that the spec sets.
# dropped: names that bash cannot unset, such as exported functions. env removes them for the agents.
dropped=()
while IFS='=' read -r -d '' name _; do
    case "$name" in
    SLURM_JWT) ;;
    SLURM_*|SLURMD_*|SRUN_*|SCALETRAIN_*|CUDA_*|NVIDIA_*|NCCL_*|UCX_*|FI_*|GLOO_*|ROCR_VISIBLE_DEVICES|\
    HIP_VISIBLE_DEVICES|GPU_DEVICE_ORDINAL|ZE_AFFINITY_MASK|PWD|ALL_PROXY|CUDA_HOME|HOME|HTTPS_PROXY|\
    HTTP_PROXY|KRB5CCNAME|LANG|LC_ALL|LD_LIBRARY_PATH|LMOD_PKG|LOGNAME|MODULEPATH|MODULESHOME|NO_PROXY|PATH|\
    PYTHONPATH|SHELL|SLURM_CONF|SLURM_CONF_SERVER|SSL_CERT_FILE|TMPDIR|TZ|USER|VIRTUAL_ENV|XDG_CACHE_HOME|\
    all_proxy|http_proxy|https_proxy|no_proxy) continue ;;
    esac
    unset -v "$name" 2>/dev/null || dropped+=("--unset=$name")
done < <(env -0)

# Remove empty and relative entries from search paths: they would be looked up in the job's current folder.
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
python=/opt/st/bin/python
# Python code that runs a module, without the current folder in sys.path.
start='import sys; sys.path[:] = filter(None, sys.path); import runpy; runpy.run_module(sys.argv.pop(1), run_name=__name__, alter_sys=True)'
run='/home/ada/my runs/a-1'

# The node agents forward signals to the ranks. This shell survives them, to record the end of the attempt.
# SIGTERM to this shell means that Slurm ends the job: this script then does not requeue it.
ended_by_slurm=
trap 'ended_by_slurm=--ended-by-slurm' TERM
trap : USR1

patience=() # of srun, once an attempt has ended in this job
while :; do
    # Begin an attempt: prints its number and the address of the rendezvous, and its nodes: the job may have more.
    began=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job begin "$run" \
        ${patience:+"--follows"}) || {
        code=$?
        if [ "$code" = 1 ] && [ "${#patience[@]}" != 0 ]; then # as after an outage: requeue the job
            read -r -a decision <<<"${began:-requeue}"
            break
        fi
        exit "$code"
    }
    [ -n "$began" ] || exit 0 # the run has already finished
    read -r attempt address port nodes names held all <<<"$began"
    # Slurm notices a lost node after minutes; this step, which lasts as long as the job, within seconds.
    kill -0 "${watch:-}" 2>/dev/null || {
        "$(type -P srun)" --overlap --mem=0 --export=ALL --mpi=none --kill-on-bad-exit=0 --no-kill \
            --nodes="$held" --ntasks="$held" --ntasks-per-node=1 --nodelist="$all" \
            "$python" -c "$start" scaletrain_cli.launch.backends.slurm.node_watch "$run" --script $$ &
        watch=$!
        trap 'kill -KILL "$watch" 2>/dev/null' EXIT # or srun reports each task that ends with the job
    }

    # env instead of export: no variable of the spec can change this shell or its own commands.
    env "${dropped[@]}" \
        MASTER_ADDR="$address" MASTER_PORT="$port" \
        "$(type -P srun)" "${patience[@]}" --export=ALL --mpi=none --kill-on-bad-exit=0 --wait=30 --cpus-per-task=1 --nodes="$nodes" --ntasks="$nodes" --ntasks-per-node=1 --nodelist="$names" --no-kill \
        "$python" \
        -c "$start" scaletrain_cli.launch.node.agent "$run" --attempt "$attempt" --end-together &
    step=$!
    beside=()
    # Slurm sends no early signal before the end of a reservation.
    if [ -n "${SLURM_JOB_RESERVATION:-}" ]; then
        "$python" -c "$start" scaletrain_cli.launch.backends.slurm.job watch-reservation "$run" --attempt "$attempt" &
        beside+=($!)
    fi
    # While the run has fewer nodes than it could use: look for idle ones, and stop the ranks if a restart pays.
    if [ "$nodes" -lt 8 ]; then
        "$python" -c "$start" scaletrain_cli.launch.backends.slurm.growth "$run" --attempt "$attempt" &
        beside+=($!)
    fi
    # What lost nodes leave of the step would last until Slurm notices them.
    abandoned=$run/attempts/$(printf %04d "$attempt")/abandoned
    leave() { [ ! -e "$abandoned" ] || kill -KILL "$step" 2>/dev/null; }
    while kill -0 "$step" 2>/dev/null; do wait "$step"; leave; done # a trapped signal interrupts wait
    wait "$step"
    code=$?
    [ "${#beside[@]}" = 0 ] || kill "${beside[@]}" 2>/dev/null

    # Record the end of the attempt: prints `restart` and after how many seconds the next one may begin in this
    # job, `requeue` and what changes in the job, or `stop`.
    signaled=$ended_by_slurm ended_by_slurm=
    decision=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job end "$run" --attempt "$attempt" \
        --srun-exit-code "$code" --may-restart $signaled)
    code=$?
    read -r -a decision <<<"$decision"
    [ "${decision[0]-}" = restart ] || break
    sleep "${decision[1]}" &
    wait $!
    decision=(restart)
    [ -z "$ended_by_slurm" ] || break
    # If Slurm cannot kill what is left on a node, srun must not wait for it until the time limit.
    patience=(--immediate=60 --overlap --mem=0)
done
case "${decision[0]-}" in requeue | restart) ;; *) exit "$code" ;; esac
[ "${decision[0]}" = restart ] || ended_by_slurm= # a signal that came before was no end of the job

# Slurm changes pending jobs only: requeue first. The trap keeps this shell alive.
# A run that is cancelled meanwhile begins no attempt: its job must not wait for nodes.
requeue() {
    scontrol requeue "$SLURM_JOB_ID" || return
    [ ! -e "$run/cancelled" ] || { scancel "$SLURM_JOB_ID"; return; }
    [ "${#decision[@]}" = 1 ] || scontrol update "JobId=$SLURM_JOB_ID" "${decision[@]:1}"
    exit "$code"
}

for pause in 5 15 30 0; do # retry: slurmctld may be down for a moment
    [ -z "$ended_by_slurm" ] && [ ! -e "$run/cancelled" ] || break
    requeue
    sleep "$pause" &
    wait $!
done
"$python" -c "$start" scaletrain_cli.launch.backends.slurm.job not-requeued "$run" --attempt "$attempt" $ended_by_slurm
exit "$code"
