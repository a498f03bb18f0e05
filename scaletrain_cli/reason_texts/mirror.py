"""The texts of mirrors of runs, and of resuming from them."""

from scaletrain_cli.reasons import Texts

_TAKE_OVER = ("Stop the run there first, or add --take-over: the other place then stops at its next checkpoint",)

TEXTS: Texts = {
    "local-file-damaged": "{file} does not have the hash in its manifest, so that its checkpoint is not copied to the "
    "mirror",
    "local-file-missing": "{file} was deleted while it was copied to the mirror",
    "files-not-here": (
        "files of {checkpoint} are not visible on the first node, which copies them to the mirror",
        "Set checkpoint.dir to a folder that all nodes share",
    ),
    "wrong-bytes": "{file} has other bytes than were written, in each of {writes:of write}",
    "damaged": "{file} in the mirror is not what was written there, in each of {reads:of read}",
    "history-damaged": "{file} in the mirror is not the file that {list} names",
    "claim-damaged": "{claim} in {place} is not the claim of a run",
    "superseded": "another place continues this run from the mirror {place}: {run_dir} on {host} (generation "
    "{generation}), so that it stops here",
    "other-volume": "the mirror {place} has other files than before, as if a volume was mounted or unmounted there",
    "stops": "the run continues in {owner}",
    "other-process": "{run} is mirrored by another process at the moment",
    # ---- settings --------------------------------------------------------------------------------------------------
    "no-library": ("a mirror in an object store needs obstore, which is not installed here", "Run `{command}`"),
    "not-writable": "cannot be written to: {cause}",
    "inside-run": ("{place} is in the runs root itself, which it should survive", "Use another file system"),
    "not-checked": "the mirror {place} was not checked here: {cause}",
    # ---- resume ----------------------------------------------------------------------------------------------------
    "no-place": "the mirror {place} {problem}",
    "no-run": ("{place} has no run {run}", "Give the value of checkpoint.mirror of the run, without the run id"),
    "no-checkpoint": "the mirror {place} has no valid checkpoint of {run}: {problems}",
    "active-elsewhere": (
        "{run} may still train in {run_dir} on {host}, which last wrote to the mirror {seconds:seconds} ago",
        *_TAKE_OVER,
    ),
    "continues-elsewhere": (
        "{run} continues in {run_dir} on {host} since it was resumed from the mirror {place}",
        "Resume it there, or here with --from-mirror {place}",
    ),
    "later-on-volume": (
        "{place} on the volume belongs to a later owner of {run} than this job: {run_dir} on {host}",
        "Delete this job, and resume {run} there",
    ),
    "exists-here": (
        "{folder} is a directory of this run, which needs no mirror",
        "Run `scaletrain resume {run}`, or move the folder away if its checkpoints are lost",
    ),
    "claimed-meanwhile": "another place has just continued {run} from the mirror {place}",
    "changes-meanwhile": (
        "the place before commits or deletes checkpoints in the mirror {place} faster than they are received here",
        "Stop {run} there, then repeat the command, which continues",
    ),
    "sizes-planned-again": "the mirror lacks the plans of the sizes {sizes:list} of {run}; planned again, it may "
    "start on {nodes:list} nodes",
    "sizes-lost": (
        "the mirror lacks the plans of the sizes {sizes:list} of {run}, and they cannot be planned here: {why}. It "
        "continues on {nodes:of node} only",
        "Give the range again with `scaletrain resume {run} --set cluster.nodes=...`",
    ),
    "no-mirror-set": ("{run} has no mirror", "Set checkpoint.mirror with `scaletrain resume {run} --set`"),
    "other-version": "{place} was written by another version: {cause}",
}
