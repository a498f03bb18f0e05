"""The texts of verbs that run on the login node of a cluster."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    # ---- the connection --------------------------------------------------------------------------------------------
    "no-ssh": (
        "this machine has no ssh client to reach {host} with",
        "Install one (openssh-client on Debian and Ubuntu, openssh-clients on Red Hat), or add its folder to PATH",
    ),
    "unreachable": (
        "ssh to {host} failed: {said}",
        "Try `ssh {host}` in a terminal; ~/.ssh/config sets user, port and key",
    ),
    "failed": "a command on {host} ended with exit code {exit_code}: {said}",
    "cut": (
        "the connection to {host} failed or was cut; what was requested may have been done",
        "Repeat the command: `submit` with the same --run-id starts no second job",
    ),
    "not-installed": (
        "{command} does not exist on {host}",
        "Install it there: scaletrain cluster setup {cluster}. Or set clusters.{cluster}.host.scaletrain to its path",
    ),
    # ---- scaletrain cluster setup ----------------------------------------------------------------------------------
    "other-version": (
        "the login node of {cluster} has ScaleTrain {here}, and the machine that sent this {there}",
        "scaletrain cluster setup {cluster} installs that of the machine where it is called",
    ),
    "setup-without-host": (
        "the cluster {cluster} of {file} has no login node, so that its verbs run on this machine",
        "Add clusters.{cluster}.host, the destination for ssh",
    ),
    "not-a-package": (
        "this ScaleTrain was not installed by pip, so that it cannot be sent to a login node",
        "pip install -e . in its checkout",
    ),
    "no-python": (
        "{host} has no Python of version 3.10 or later with the module venv; {said}",
        "Name one: scaletrain cluster setup {cluster} --python PATH. Sites often have one behind `module avail python`",
    ),
    "not-writable": (
        "{folder} on {host} cannot be written: {said}",
        "See rights, quota and free space there (quota -s; df -h ~), then repeat the command. The folder may be a link "
        "to another file system",
    ),
    "not-installable": (
        "pip failed on {host}: {said}",
        "Without a network there, let pip use an index or a folder of the site: ~/.config/pip/pip.conf with index-url, "
        "or with no-index and find-links. `pip download` elsewhere fills such a folder. Then repeat the command",
    ),
    "setup-cut": (
        "ssh to {host} failed, or was cut: {said}",
        "Repeat the command: it continues, and waits for what still runs there",
    ),
    # ---- what is sent ----------------------------------------------------------------------------------------------
    "config-outside": (
        "hf_config = {path}: only a file below {folder}, the current folder, is sent to the login node",
        "Move it there, or use hf://org/name@revision",
    ),
    "no-plot": ("--plot writes a file on the login node", "Leave it out"),
    "moves-by-mirror": (
        "{run} is on another cluster than {cluster}, and moves there by its mirror alone",
        "scaletrain resume {run} --from-mirror URL --cluster {cluster}",
    ),
    "no-calibration": (
        "{run} is on the cluster of {host}, and `plan` runs on this machine",
        "Calibrate there, where `submit` plans its runs: ssh {host} {command} plan SPEC --calibrate {run}",
    ),
    # ---- the runs --------------------------------------------------------------------------------------------------
    "several-runs": ("{name} matches several runs on login nodes: {runs:list}", "Use a longer prefix"),
    "several-places": (
        "these runs are on more than one machine: {runs:list}",
        "Give the runs of one cluster at a time",
    ),
    "id-elsewhere": (
        "{run} was sent to the cluster {cluster}, and verbs for it run there",
        "Use another --run-id; `scaletrain rm {run}` removes a run that has ended",
    ),
    "no-host": (
        "{run} was submitted through the login node of the cluster {cluster}, which clusters.yaml does not name",
        "Add clusters.{cluster}.host to it",
    ),
    "list-without-host": (
        "the cluster {cluster} has no login node, so its runs are those of this machine",
        "Leave --cluster out",
    ),
}
