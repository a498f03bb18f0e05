"""The lines of the batch script that make the environment of a run's ranks: what goes on, modules, an activation. Pure.

An allow-list on the job's side too: a site's plugins, or someone who hands the script to sbatch by hand, may have put
anything into the environment that the job came with.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from scaletrain_cli.launch.slurm_commands import PASSED_ON
from scaletrain_cli.spec import RunSpec

# Slurm's own and the devices', what sites set for their network, and Kerberos, without which home may be unreadable.
_FAMILIES = (
    *("SLURM_*", "SLURMD_*", "SRUN_*", "SCALETRAIN_*", "CUDA_*", "NVIDIA_*", "NCCL_*", "UCX_*", "FI_*", "GLOO_*"),
    *("ROCR_VISIBLE_DEVICES", "HIP_VISIBLE_DEVICES", "GPU_DEVICE_ORDINAL", "ZE_AFFINITY_MASK", "KRB5CCNAME", "PWD"),
)
# Of the machine outside: an image has its own.
_NOT_IN_CONTAINERS = {"LD_LIBRARY_PATH", "CUDA_HOME", "VIRTUAL_ENV", "PYTHONPATH", "SSL_CERT_FILE"}
_MODULES_SCRIPTS = ("/etc/profile.d/modules.sh", "/etc/profile.d/lmod.sh", "/etc/profile.d/z00_lmod.sh")


def environment_lines(spec: RunSpec) -> Iterator[str]:
    """Drop what is not allowed to go on; ``"${dropped[@]}"`` is for env, of what no shell can unset."""
    yield "# Of the environment that came with the job only this goes on; the ranks get what the spec names beside it."
    yield "dropped=()"
    yield "while IFS='=' read -r -d '' name _; do"
    yield '    case "$name" in'
    if spec.secret_env:  # the agents read their values from the run directory
        yield f"    {'|'.join(spec.secret_env)}) ;;"
    yield from _patterns(spec)
    yield "    esac"
    yield '    unset -v "$name" 2>/dev/null || dropped+=("--unset=$name") # a function, or no name that a shell knows'
    yield "done < <(env -0)"


def module_lines(spec: RunSpec) -> Iterator[str]:
    """Load the modules and source the activation, in this order."""
    slurm = spec.cluster.slurm
    if slurm.modules:
        yield "# A batch shell is no login shell: it may not know `module` yet."
        yield f'for init in "${{MODULESHOME:-}}/init/bash" {" ".join(_MODULES_SCRIPTS)}; do'
        yield '    type module >/dev/null 2>&1 || { [ -r "$init" ] && . "$init"; }'
        yield "done"
        names = " ".join(map(shlex.quote, slurm.modules))
        yield f"module load {names} || {{ echo 'cluster.slurm.modules could not be loaded' >&2; exit 4; }}"
    if slurm.activate is not None:
        path = shlex.quote(slurm.activate)
        yield f". {path} || {{ echo 'cluster.slurm.activate could not be sourced' >&2; exit 4; }}"


def _patterns(spec: RunSpec) -> Iterator[str]:
    """The allowed names as cases, in lines of a readable length."""
    names = PASSED_ON - (_NOT_IN_CONTAINERS if spec.cluster.slurm.container is not None else set())
    line = "    "
    for pattern in [*_FAMILIES, *sorted(names)]:
        if len(line) + len(pattern) > 110:
            yield f"{line}\\"
            line = "    "
        line += f"{pattern}|"
    yield f"{line.removesuffix('|')}) continue ;;"
