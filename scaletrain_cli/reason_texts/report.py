"""The texts of the report of runs (``scaletrain_cli.report``): errors, and what a report lacks."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "no-output": ("the file of the report is missing", "Add -o report.html, or --json for the figures"),
    "place": (
        "{option} {file} cannot be written: it is not a file, or {folder} does not exist or cannot be written to",
        "Give the name of a file in an existing folder",
    ),
    "runs-or-sweep": ("names of runs and --sweep exclude each other", "`scaletrain list` shows the runs"),
    "one-sweep": ("{sweep} is a sweep, which is reported alone", "Name only the sweep, or name single runs to compare"),
    "many-runs": ("{runs:of run} are too many for one page; the most are {most}", "Name the runs to compare"),
    "section-damaged": "{section}: {detail}",
    "elsewhere": "curves, diagnosis, ranks, nodes and events: the run directory is on a volume of the cluster that is "
    "not mounted here; run `scaletrain report {run}` in a pod that mounts it",
    "no-metrics": "curves: no step was measured yet; {file} has none",
    "no-ledger": "goodput: no attempt has written its time accounting (attempts/NNNN/ledger.json)",
    "no-telemetry": "ranks, GPUs and nodes: no attempt has telemetry (attempts/NNNN/telemetry)",
    "sampled": "curves: of a long metrics.jsonl {rows} lines were decoded: lines at equal distances, and those with "
    "the least and the greatest loss, gradient norm and step time of each piece",
}
