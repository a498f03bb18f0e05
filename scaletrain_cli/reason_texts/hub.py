"""The texts of references to the Hugging Face Hub: why one cannot be resolved, read or fetched."""

from scaletrain_cli.reasons import Text

_TOKEN = "export HF_TOKEN of an account that may read it; for an endpoint in env, name it in secret_env, too"

_LIST = "Run `scaletrain data prepare SPEC` where the hub can be reached, which keeps the list, or name one file"

TEXTS: dict[str, Text] = {
    # Why the hub does not give what a reference names.
    "gated": Text(
        "{repo} is gated, and {who} may not read it (HTTP {status})",
        ("Accept its conditions at {url}, then " + _TOKEN,),
    ),
    "no-repository": Text(
        "{endpoint} has no repository {repo} that {who} may read (HTTP {status})",
        ("Check the name; for a private repository, " + _TOKEN,),
    ),
    "token-refused": Text(
        "{endpoint} refuses the token in use (HTTP {status}): it is wrong, expired or revoked",
        ("Create a new token and export it as HF_TOKEN, or unset HF_TOKEN to read without one",),
    ),
    "forbidden": Text("{endpoint} does not let {who} read {repo} (HTTP {status})", ("E" + _TOKEN[1:],)),
    "no-revision": Text(
        "{repo} has no branch, tag or commit {revision}", ("Give one of its branches or tags, or a full commit hash",)
    ),
    "no-file": Text("{repo} at {revision} has no file {path}", ("Give the path of a file in the repository",)),
    "unreachable": Text(
        "{endpoint} cannot be reached: {said}",
        ("Check the network, or HF_ENDPOINT if a mirror is in use; with a complete cache, set HF_HUB_OFFLINE=1",),
    ),
    "busy": Text("{endpoint} answers HTTP {status}", ("Try again later",)),
    "not-a-hub": Text("{endpoint} does not answer as the Hugging Face Hub: {said}", ("Check HF_ENDPOINT",)),
    # What the cache lacks while no request may be sent.
    "offline-commit": Text(
        "HF_HUB_OFFLINE is set, and the cache {cache} does not know {place}",
        ("Fetch it where the hub can be reached, unset HF_HUB_OFFLINE, or set HF_HUB_CACHE to the cache that has it",),
    ),
    "offline-files": Text(
        "HF_HUB_OFFLINE is set, and the cache {cache} lacks {count:of file} of {place}: {files:list}",
        ("Fetch them where the hub can be reached, unset HF_HUB_OFFLINE, or set HF_HUB_CACHE to a complete cache",),
    ),
    "list-missing": Text(
        "the hub was not asked, and the cache has {count:of file} of {place} without the list of all its files: others "
        "that{path} names may be missing",
        (_LIST,),
    ),
    "files-missing": Text(
        "the hub was not asked, and the cache lacks {count:of file} of {place} that{path} names: {files:list}", (_LIST,)
    ),
    # What a reference names cannot be used.
    "no-safetensors": Text(
        "{place} has no *.safetensors files{others}",
        ("Use a revision with safetensors; pickled weights are never loaded, because loading one can run its code",),
    ),
    "incomplete": Text("{place} lacks {files:list}, which {index} names", ("Use another revision",)),
    "index-unreadable": Text("{path} of {place} is not an index of safetensors", ("Use another revision",)),
    "no-source": Text(
        "{place} has no file of text that matches{path}; formats that are read: {formats:list}",
        ("Give a path or a glob of its files",),
    ),
    "not-a-template": Text("{path} is not a Jinja template", ("Give the path of a file that ends in .jinja",)),
    "no-package": Text("huggingface_hub is not installed here", ("Run {command}",)),
    "no-token-on-nodes": Text("{repo} is private or gated, and the nodes that fetch it get no token", ("{hint}",)),
    "variables-not-passed": Text(
        "{names:list} of this environment decide on the hub here, but the nodes do not get them: set them in env, too"
    ),
    "not-checked": Text(
        "the nodes use the hub by env in a way that this machine cannot, so that {keys:list} are not all checked: {why}"
    ),
    # The fetch.
    "size-differs": Text("{path} of {place} has {bytes} bytes, and the hub states {expected}"),
    "hash-differs": Text(
        "{path} of {place} differs from the {algorithm} that the hub states, after {attempts:of download}",
        ("Check the network path or the mirror in HF_ENDPOINT; the damaged file was removed",),
    ),
    "no-space": Text(
        "{needed:bytes} have to be fetched to {cache}, and {free:bytes} are free there",
        ("Free space, or set HF_HUB_CACHE to a larger file system",),
    ),
    "disk-full": Text(
        "the file system of {cache} became full while files of the hub were fetched: {said}",
        ("Free space, or set HF_HUB_CACHE to a larger file system",),
    ),
    "not-writable": Text(
        "{count:of file} have to be fetched to {cache}, which cannot be written: {said}",
        ("Set HF_HUB_CACHE to a folder that this user can write to",),
    ),
    "fetch-failed": Text("the files of the hub could not be fetched: {said}"),
}
