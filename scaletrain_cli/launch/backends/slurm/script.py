"""Render the batch script of a run as text. Pure functions.

Every value is quoted with shlex.quote, or is a word that the schema of the spec has validated; an `#SBATCH` line
contains a single word. The script contains no secrets: the node agent reads them from the run directory.
slurm/README.md describes which process gets which signal.
"""

import math
import shlex
import sys
import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

from scaletrain_cli.errors import SchedulerError
from scaletrain_cli.launch.backends.slurm.commands import PASSED_ON, TOKEN
from scaletrain_cli.own_processes import START, absolute_paths
from scaletrain_cli.reasons import Reason
from scaletrain_cli.spec import ClusterSpec, RunSpec
from scaletrain_cli.spec.loader_processes import cores_per_rank, decodes_beside_gpus, set_cores
from scaletrain_cli.spec.slurm import UNLIMITED_SECONDS

# Variables of Slurm, devices, and the cluster's network.
_FAMILIES = (
    *("SLURM_*", "SLURMD_*", "SRUN_*", "SCALETRAIN_*", "CUDA_*", "NVIDIA_*", "NCCL_*", "UCX_*", "FI_*", "GLOO_*"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "PWD"),
)
# Variables of the host that are not passed into a container: the image has its own.
_NOT_IN_CONTAINERS = {"LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "PYTHONPATH", "SSL_CERT_FILE"}
_MODULES_SCRIPTS = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")


def environment_lines(spec: RunSpec) -> Iterator[str]:
    """Yield lines that unset all variables that are not allowed; those that bash cannot unset go to ``dropped``."""
    yield "# Keep only these variables of the job's environment. The ranks also get those that the spec sets."
    yield "# dropped: names that bash cannot unset, such as exported functions. env removes them for the agents."
    yield "dropped=()"
    yield "while IFS='=' read -r -d '' name _; do"
    yield '    case "$name" in'
    # The agents read the values of secrets from the run directory.
    yield f"    {'|'.join([TOKEN, *spec.secret_env])}) ;;"
    # In lines of readable length.
    names = PASSED_ON - {TOKEN} - (_NOT_IN_CONTAINERS if spec.cluster.slurm.container is not None else set())
    lines = textwrap.wrap(" ".join([*_FAMILIES, *sorted(names)]), 106)
    yield "|\\\n".join(f"    {line.replace(' ', '|')}" for line in lines) + ") continue ;;"
    yield "    esac"
    yield '    unset -v "$name" 2>/dev/null || dropped+=("--unset=$name")'
    yield "done < <(env -0)"


def module_lines(spec: RunSpec) -> Iterator[str]:
    """Yield lines that load the modules, then source the activation script."""
    slurm = spec.cluster.slurm
    if slurm.modules:
        yield "# A batch shell is not a login shell: `module` may not be defined yet."
        yield f'for init in "${{MODULESHOME:-}}/init/bash" {" ".join(_MODULES_SCRIPTS)}; do'
        yield '    type module >/dev/null 2>&1 || { [ -r "$init" ] && . "$init"; }'
        yield "done"
        names = " ".join(map(shlex.quote, slurm.modules))
        yield f"module load {names} || {{ echo 'cluster.slurm.modules could not be loaded' >&2; exit 4; }}"
    if slurm.activate is not None:
        words = shlex.join([slurm.activate, *slurm.activate_arguments])
        yield f". {words} || {{ echo 'cluster.slurm.activate could not be sourced' >&2; exit 4; }}"
    if slurm.modules or slurm.activate is not None:
        yield "keep_absolute PATH PYTHONPATH"


# These override the image's values. All others keep the image's values; the agent sets those of the ranks.
_FROM_THE_JOB = "MASTER_ADDR,MASTER_PORT"


def srun_words(cluster: ClusterSpec, run_folder: Path) -> Iterator[str]:
    """Yield the options of srun that the container needs."""
    container = cluster.slurm.container
    if container is None or container.runtime != "pyxis":
        return
    yield shlex.quote(f"--container-image={container.image}")
    yield shlex.quote(f"--container-mounts={','.join(_mounts(cluster, run_folder))}")
    yield f"--container-env={_FROM_THE_JOB}"
    for name, value in sorted(container.options.items()):
        if value is not False:
            yield f"--{name}" if value is True else shlex.quote(f"--{name}={value}")


def session_srun_words(cluster: ClusterSpec, run_folder: Path) -> Iterator[str]:
    """Yield the options of srun for a step beside that of the agents: in its container if that has a name.

    Without a name Pyxis creates the container once more, from the same image.
    """
    container = cluster.slurm.container
    name = None if container is None or container.runtime != "pyxis" else container.options.get("container-name")
    if name is None or isinstance(name, bool):
        yield from srun_words(cluster, run_folder)
    else:
        yield shlex.quote(f"--container-name={str(name).partition(':')[0]}:exec")


def agent_words(cluster: ClusterSpec, run_folder: Path, *, gpus: bool = True) -> Iterator[str]:
    """Yield the words of srun's command up to the interpreter. ``gpus``: of the node, for the container."""
    container = cluster.slurm.container
    if container is None:
        yield '"$python"'
        return
    if container.runtime == "apptainer":
        yield "apptainer exec"
        if gpus and cluster.gpu != "cpu":
            yield "--nv"
        for mount in _mounts(cluster, run_folder):
            yield f"--bind {shlex.quote(mount)}"
        yield shlex.quote(container.image)
    yield shlex.quote(container.python)
    yield "-s"  # only the image's packages: the home folder, with user site-packages, is often mounted


def _mounts(cluster: ClusterSpec, run_folder: Path) -> list[str]:
    """Return the mounts, the runs root first: datasets and the list of bad nodes are beside the run."""
    assert cluster.slurm.container is not None
    root = str(run_folder.parent)
    if set(root) & set(",:\n"):
        raise SchedulerError(Reason("slurm.unmountable-runs-root", {"root": root}))
    return [f"{root}:{root}", *cluster.slurm.container.mounts]


def session_script(spec: RunSpec, run_folder: Path, words: Sequence[str]) -> str:
    """Return a script that runs the interpreter of the run on a node, with ``words``, as the batch script does.

    Its standard output is that of the interpreter only: modules may print to it.
    """
    interpreter = " ".join(agent_words(spec.cluster, run_folder))
    lines = [
        "exec 3>&1 1>&2",
        *keep_absolute_lines(),
        *module_lines(spec),
        python_line(spec, sys.executable),
        "exec 1>&3 3>&-",
        f"exec {interpreter} {shlex.join(words)}",
    ]
    return "\n".join(lines) + "\n"


# After one agent has ended, srun ends the others in this time (--wait): they would wait for ranks that are gone. Those
# of a run that has finished end together (--end-together).
_AGENTS_END_WITHIN_SECONDS = 30
_LONGEST_WAIT_FOR_NODES_SECONDS = 60  # what a requeue costs at least on most sites is twice that
_LEAST_LEAD_SECONDS = 60  # Slurm checks time limits about every 30 s
_REQUEUE_PAUSES_SECONDS = (5, 15, 30, 0)
# The script and srun set these for the agents; in the ranks the engine contract overrides the user's values.
_OWN_VARIABLES = frozenset({"MASTER_ADDR", "MASTER_PORT", "NODE_RANK"})


def job_script(
    spec: RunSpec,
    run_id: str,
    run_folder: Path,
    python: str = sys.executable,
    *,
    exclude: str | None = None,
    preemption: str = "",
    sizes: Sequence[int] = (),
    in_array: bool = False,
) -> str:
    """Return the batch script. Slurm runs it on the first node, and from the start again after each requeue.

    ``exclude``: a hostlist that replaces the spec's; ``preemption``: a comment about the site's preemption rule;
    ``sizes``: the numbers of nodes on which an attempt may start, fewest first, if there are several.
    ``in_array``: a task of a job array runs it, or a job of its own if the array was never queued.
    """
    # The plain number of a task may be that of the whole array, all of whose tasks would be requeued.
    job = (
        "${SLURM_ARRAY_JOB_ID:-$SLURM_JOB_ID}${SLURM_ARRAY_TASK_ID:+_$SLURM_ARRAY_TASK_ID}"
        if in_array
        else "$SLURM_JOB_ID"
    )
    lines = [
        "#!/bin/bash",
        *(f"#SBATCH --{option}" for option in sbatch_options(spec, run_id, exclude, sizes)),
        "",
        *(f"# {line}" for line in textwrap.wrap(preemption, 116)),
        *([""] if preemption else []),
        *environment_lines(spec),
        "",
        *keep_absolute_lines(),
        *module_lines(spec),
        python_line(spec, python),
        "# Python code that runs a module, without the current folder in sys.path.",
        f"start={shlex.quote(START)}",
        f"run={shlex.quote(str(run_folder))}",
        "",
        "# The node agents forward signals to the ranks. This shell survives them, to record the end of the attempt.",
        "# SIGTERM to this shell means that Slurm ends the job: this script then does not requeue it.",
        "ended_by_slurm=",
        "trap 'ended_by_slurm=--ended-by-slurm' TERM",
        "trap : USR1",
        "",
        "patience=() # of srun, once an attempt has ended in this job",
        "while :; do",
        *(f"    {line}" if line else "" for line in _attempt_lines(spec, run_folder, sizes)),
        "done",
        *_freed_memory(spec, run_folder),
        'case "${decision[0]-}" in requeue | restart) ;; *) exit "$code" ;; esac',
        '[ "${decision[0]}" = restart ] || ended_by_slurm= # a signal that came before was no end of the job',
        "",
        "# Slurm changes pending jobs only: requeue first. The trap keeps this shell alive.",
        "# A run that is cancelled meanwhile begins no attempt: its job must not wait for nodes.",
        "requeue() {",
        f'    scontrol requeue "{job}" || return',
        f'    [ ! -e "$run/cancelled" ] || {{ scancel "{job}"; return; }}',
        f'    [ "${{#decision[@]}}" = 1 ] || scontrol update "JobId={job}" "${{decision[@]:1}}"',
        '    exit "$code"',
        "}",
        "",
        f"for pause in {' '.join(map(str, _REQUEUE_PAUSES_SECONDS))}; do # retry: slurmctld may be down for a moment",
        '    [ -z "$ended_by_slurm" ] && [ ! -e "$run/cancelled" ] || break',
        "    requeue",
        '    sleep "$pause" &',
        "    wait $!",
        "done",
        '"$python" -c "$start" scaletrain_cli.launch.backends.slurm.job not-requeued "$run" --attempt "$attempt" '
        "$ended_by_slurm",
        'exit "$code"',
    ]
    return "\n".join(lines) + "\n"


def _attempt_lines(spec: RunSpec, run_folder: Path, sizes: Sequence[int]) -> Iterator[str]:
    """Yield the lines of an attempt, with a ``break`` from the loop over attempts unless the next one follows here."""
    exchanges = exchanges_nodes(spec.cluster, sizes)
    yield "# Begin an attempt: prints its number and the address of the rendezvous" + (
        ", and its nodes: the job may have more." if exchanges else "."
    )
    yield 'began=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job begin "$run" \\'
    yield '    ${patience:+"--follows"}) || {'
    yield "    code=$?"
    yield '    if [ "$code" = 1 ] && [ "${#patience[@]}" != 0 ]; then # as after an outage: requeue the job'
    if exchanges:
        yield '        read -r -a decision <<<"${began:-requeue}"'
    yield "        break"
    yield "    fi"
    yield '    exit "$code"'
    yield "}"
    yield '[ -n "$began" ] || exit 0 # the run has already finished'
    yield f'read -r attempt address port{" nodes names held all" if exchanges else ""} <<<"$began"'
    if exchanges:
        yield "# Slurm notices a lost node after minutes; this step, which lasts as long as the job, within seconds."
        yield 'kill -0 "${watch:-}" 2>/dev/null || {'
        yield '    "$(type -P srun)" --overlap --mem=0 --export=ALL --mpi=none --kill-on-bad-exit=0 --no-kill \\'
        yield '        --nodes="$held" --ntasks="$held" --ntasks-per-node=1 --nodelist="$all" \\'
        yield '        "$python" -c "$start" scaletrain_cli.launch.backends.slurm.node_watch "$run" --script $$ &'
        yield "    watch=$!"
        yield "    trap 'kill -KILL \"$watch\" 2>/dev/null' EXIT # or srun reports each task that ends with the job"
        yield "}"
    yield ""
    yield "# env instead of export: no variable of the spec can change this shell or its own commands."
    yield 'env "${dropped[@]}" \\'
    yield from (f"    {name}={shlex.quote(value)} \\" for name, value in spec_environment(spec).items())
    yield '    MASTER_ADDR="$address" MASTER_PORT="$port" \\'
    yield f"    {_srun(spec, run_folder, exchanges=exchanges)} \\"
    yield f"    {' '.join(agent_words(spec.cluster, run_folder))} \\"
    yield '    -c "$start" scaletrain_cli.launch.node.agent "$run" --attempt "$attempt" --end-together &'
    yield "step=$!"
    yield "beside=()"
    yield "# Slurm sends no early signal before the end of a reservation."
    yield 'if [ -n "${SLURM_JOB_RESERVATION:-}" ]; then'
    yield from _beside("job watch-reservation")
    yield "fi"
    if len(sizes) > 1 and spec.cluster.node_range is not None and spec.cluster.node_range.grow:
        look = "look for idle ones, and stop the ranks if a restart pays."
        yield f"# While the run has fewer nodes than it could use: {look}"  # the attempt does not depend on what looks
        yield f'if [ "$nodes" -lt {sizes[-1]} ]; then'
        yield from _beside("growth")
        yield "fi"
    if exchanges:
        yield "# What lost nodes leave of the step would last until Slurm notices them."
        yield 'abandoned=$run/attempts/$(printf %04d "$attempt")/abandoned'
        yield 'leave() { [ ! -e "$abandoned" ] || kill -KILL "$step" 2>/dev/null; }'
    leave = " leave;" if exchanges else ""
    yield f'while kill -0 "$step" 2>/dev/null; do wait "$step";{leave} done # a trapped signal interrupts wait'
    yield 'wait "$step"'
    yield "code=$?"
    yield '[ "${#beside[@]}" = 0 ] || kill "${beside[@]}" 2>/dev/null'
    yield ""
    yield "# Record the end of the attempt: prints `restart` and after how many seconds the next one may begin in this"
    yield "# job, `requeue` and what changes in the job, or `stop`."
    yield "signaled=$ended_by_slurm ended_by_slurm="
    yield 'decision=$("$python" -c "$start" scaletrain_cli.launch.backends.slurm.job end "$run" --attempt "$attempt" \\'
    yield '    --srun-exit-code "$code" --may-restart $signaled)'
    yield "code=$?"
    yield 'read -r -a decision <<<"$decision"'
    yield '[ "${decision[0]-}" = restart ] || break'
    yield 'sleep "${decision[1]}" &'
    yield "wait $!"
    yield "decision=(restart)"
    yield '[ -z "$ended_by_slurm" ] || break'
    yield "# If Slurm cannot kill what is left on a node, srun must not wait for it until the time limit."
    # A step of which a lost node is left holds its CPUs and its memory on all nodes.
    beside = " --overlap --mem=0" if exchanges else ""
    yield f"patience=(--immediate={_LONGEST_WAIT_FOR_NODES_SECONDS}{beside})"


def _freed_memory(spec: RunSpec, run_folder: Path) -> Iterator[str]:
    """Yield lines that remove the copies in host memory: after an attempt, the agents leave them for the next one."""
    if spec.checkpoint.in_memory != "off":
        from scaletrain_cli.rundir.paths import RunDir, copies_folder  # `validate` needs no other part of it

        yield "# No attempt follows in this job: give back the memory of the nodes."
        yield "timeout 60 srun --overlap --mem=0 --mpi=none --kill-on-bad-exit=0 --ntasks-per-node=1 \\"
        yield '    --nodes="$SLURM_JOB_NUM_NODES" --ntasks="$SLURM_JOB_NUM_NODES" \\'
        yield f"    rm -rf -- {shlex.quote(str(copies_folder(RunDir(run_folder))))} 2>/dev/null &"
        yield "wait $!"


def _beside(module: str) -> Iterator[str]:
    """Yield lines that start a process of the launcher that ends with the attempt, on which nothing depends."""
    yield f'    "$python" -c "$start" scaletrain_cli.launch.backends.slurm.{module} "$run" --attempt "$attempt" &'
    yield "    beside+=($!)"


def keep_absolute_lines() -> Iterator[str]:
    """Yield lines that define ``keep_absolute`` and apply it to the search paths of the shell itself."""
    yield "# Remove empty and relative entries from search paths: they would be looked up in the job's current folder."
    yield "keep_absolute() {"
    yield "    local name entry kept"
    yield "    for name; do"
    yield "        kept="
    yield "        while IFS= read -r -d : entry; do"
    yield '            [ "${entry:0:1}" != / ] || kept+="${kept:+:}$entry"'
    yield '        done <<<"${!name-}:"'
    yield '        if [ -n "$kept" ]; then export "$name=$kept"; else unset -v "$name"; fi'
    yield "    done"
    yield "}"
    yield "keep_absolute PATH PYTHONPATH"


def python_line(spec: RunSpec, python: str = sys.executable) -> str:
    """Return the line that sets ``python``, the interpreter outside of a container."""
    return f"python={'$(type -P python3)' if spec.cluster.slurm.activate is not None else shlex.quote(python)}"


def sbatch_options(spec: RunSpec, run_id: str, exclude: str | None = None, sizes: Sequence[int] = ()) -> Iterator[str]:
    """Yield the long options of sbatch without their dashes. ``exclude``: a hostlist that replaces the spec's.

    ``sizes``: the numbers of nodes on which an attempt may start, fewest first, if there are several.
    """
    cluster, slurm = spec.cluster, spec.cluster.slurm
    yield f"job-name={run_id}"
    if len(sizes) > 1:
        # Without ntasks-per-node, with which Slurm gives no more than the fewest nodes (seen in 22.05.8).
        yield f"nodes={sizes[0] + cluster.spare_nodes}-{sizes[-1] + cluster.spare_nodes}"
    else:
        yield f"nodes={cluster.allocated_nodes}"
        yield "ntasks-per-node=1"
    if exchanges_nodes(cluster, sizes):
        yield "no-kill"  # the job continues without a node that fails
    resources, gpus = [*slurm.gres], f"{f'{slurm.gres_type}:' if slurm.gres_type else ''}{cluster.gpus_per_node}"
    if cluster.gpu != "cpu" and slurm.gpu_request == "gpus-per-node":
        yield f"gpus-per-node={gpus}"
    elif cluster.gpu != "cpu" and slurm.gpu_request == "gres":
        resources.insert(0, f"gpu:{gpus}")
    elif cluster.gpu != "cpu" and "exclusive" not in slurm.extra:
        yield "exclusive"  # or another job could use the same GPUs
    if resources:
        yield f"gres={','.join(resources)}"
    if (cores := cores_per_node(spec)) is not None:
        yield f"cpus-per-task={cores}"
    for name in ("partition", "account", "qos", "reservation", "constraint", "exclude", "nodelist", "licenses"):
        value = exclude if name == "exclude" and exclude is not None else getattr(slurm, name)
        if value is not None:
            yield f"{name}={value}"
    if slurm.switches is not None:
        wait = f"@{minutes_seconds(slurm.switches_wait)}" if slurm.switches_wait is not None else ""
        yield f"switches={slurm.switches}{wait}"
    if slurm.time is not None:
        yield f"time={minutes_seconds(slurm.time)}"
    if slurm.memory_per_node is not None:
        yield f"mem={math.ceil(slurm.memory_per_node / 2**20)}M"
    # To the tasks, not to the batch script (B:): the agents forward the signal to the ranks.
    yield f"signal=USR1@{lead_seconds(cluster)}"
    yield "requeue"
    yield "open-mode=append"
    yield "output=slurm-%j.log"
    for name, extra in sorted(slurm.extra.items()):
        if extra is not False:
            yield name if extra is True else f"{name}={extra}"


def exchanges_nodes(cluster: ClusterSpec, sizes: Sequence[int]) -> bool:
    """Return whether an attempt may begin on other nodes of the job than the one before it."""
    return len(sizes) > 1 or cluster.spare_nodes > 0


def lead_seconds(cluster: ClusterSpec) -> int:
    """Return how many seconds before the time limit Slurm signals the ranks."""
    return max(_LEAST_LEAD_SECONDS, math.ceil(cluster.grace_seconds))


def cores_per_node(spec: RunSpec) -> int | None:
    """Return the number of CPU cores to request on each node; None for the cluster's default."""
    cluster = spec.cluster
    requested = set_cores(spec) or cluster.gpu == "cpu" or decodes_beside_gpus(spec)
    return cores_per_rank(spec) * cluster.gpus_per_node if requested else None


def spec_environment(spec: RunSpec) -> dict[str, str]:
    """Return the variables that the agents get from the spec; the ranks get the others from the agents."""
    return absolute_paths({name: value for name, value in spec.env.items() if name not in _OWN_VARIABLES})


def _srun(spec: RunSpec, run_folder: Path, *, exchanges: bool = False) -> str:
    # --wait instead of --kill-on-bad-exit: an agent that exits with 75 must not kill the others, which are still
    # saving. Since 22.05 srun does not inherit --cpus-per-task from the job.
    cores = cores_per_node(spec)
    options = [
        '"${patience[@]}"',
        "--export=ALL",
        "--mpi=none",
        "--kill-on-bad-exit=0",
        f"--wait={_AGENTS_END_WITHIN_SECONDS}",
    ]
    if cores is not None:
        options.append(f"--cpus-per-task={cores}")
    if exchanges:  # the first node, where this script runs, is the first of the names
        options += ['--nodes="$nodes"', '--ntasks="$nodes"', "--ntasks-per-node=1", '--nodelist="$names"', "--no-kill"]
    options += srun_words(spec.cluster, run_folder)
    return " ".join(['"$(type -P srun)"', *options])  # resolved before PATH is set from the spec


def minutes_seconds(seconds: float) -> str:
    """Return a duration as sbatch takes it: minutes:seconds, or UNLIMITED."""
    if seconds >= UNLIMITED_SECONDS:
        return "UNLIMITED"
    minutes, rest = divmod(math.ceil(seconds), 60)
    return f"{minutes}:{rest:02d}"
