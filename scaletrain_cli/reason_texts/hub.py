"""The texts of references to the Hugging Face Hub: why one cannot be resolved, read or fetched."""

from scaletrain_cli.reasons import Texts

_TOKEN = "export HF_TOKEN of an account that may read it; for an endpoint in env, name it in secret_env, too"

_LIST = "Run `scaletrain data prepare SPEC` where the hub can be reached, which keeps the list, or name one file"

TEXTS: Texts = {
    # Why the hub does not give what a reference names.
    "gated": (
        "{repo} is gated, and {who} may not read it (HTTP {status})",
        "Accept its conditions at {url}, then " + _TOKEN,
    ),
    "no-repository": (
        "{endpoint} has no repository {repo} that {who} may read (HTTP {status})",
        "Check the name; for a private repository, " + _TOKEN,
    ),
    "token-refused": (
        "{endpoint} refuses the token in use (HTTP {status}): it is wrong, expired or revoked",
        "Create a new token and export it as HF_TOKEN, or unset HF_TOKEN to read without one",
    ),
    "forbidden": ("{endpoint} does not let {who} read {repo} (HTTP {status})", "E" + _TOKEN[1:]),
    "no-revision": (
        "{repo} has no branch, tag or commit {revision}",
        "Give one of its branches or tags, or a full commit hash",
    ),
    "no-file": ("{repo} at {revision} has no file {path}", "Give the path of a file in the repository"),
    "unreachable": (
        "{endpoint} cannot be reached: {said}",
        "Check the network, or HF_ENDPOINT if a mirror is in use; with a complete cache, set HF_HUB_OFFLINE=1",
    ),
    "busy": ("{endpoint} answers HTTP {status}", "Try again later"),
    "not-a-hub": ("{endpoint} does not answer as the Hugging Face Hub: {said}", "Check HF_ENDPOINT"),
    # What the cache lacks while no request may be sent.
    "offline-commit": (
        "HF_HUB_OFFLINE is set, and the cache {cache} does not contain {place}",
        "Fetch it where the hub can be reached, unset HF_HUB_OFFLINE, or set HF_HUB_CACHE to the cache that has it",
    ),
    "offline-files": (
        "HF_HUB_OFFLINE is set, and the cache {cache} lacks {count:of file} of {place}: {files:list}",
        "Fetch them where the hub can be reached, unset HF_HUB_OFFLINE, or set HF_HUB_CACHE to a complete cache",
    ),
    "list-missing": (
        "the hub was not asked, and the cache has {count:of file} of {place} without the list of all its files: "
        "others that{path} names may be missing",
        _LIST,
    ),
    "files-missing": (
        "the hub was not asked, and the cache lacks {count:of file} of {place} that{path} names: {files:list}",
        _LIST,
    ),
    # What a reference names cannot be used.
    "no-safetensors": (
        "{place} has no *.safetensors files{others}",
        "Use a revision with safetensors; pickled weights are never loaded, because loading one can run its code",
    ),
    "incomplete": ("{place} lacks {files:list}, which {index} names", "Use another revision"),
    "index-unreadable": ("{path} of {place} is not an index of safetensors", "Use another revision"),
    "no-source": (
        "{place} has no file of text that matches{path}; formats that are read: {formats:list}",
        "Give a path or a glob of its files",
    ),
    "not-a-template": ("{path} is not a Jinja template", "Give the path of a file that ends in .jinja"),
    "no-package": ("huggingface_hub is not installed here", "Run {command}"),
    "no-token-on-nodes": ("{repo} is private or gated, and the nodes that fetch it get no token", "{hint}"),
    "variables-not-passed": "{names:list} of this environment decide on the hub here, but the nodes do not get them: "
    "set them in env, too",
    "not-checked": "the nodes use the hub by env in a way that this machine cannot, so that {keys:list} are not all "
    "checked: {why}",
    # The fetch.
    "size-differs": "{path} of {place} has {bytes} bytes, and the hub states {expected}",
    "hash-differs": (
        "{path} of {place} differs from the {algorithm} that the hub states, after {attempts:of download}",
        "Check the network path or the mirror in HF_ENDPOINT; the damaged file was removed",
    ),
    "no-space": (
        "{needed:bytes} have to be fetched to {cache}, and {free:bytes} are free there",
        "Free space, or set HF_HUB_CACHE to a larger file system",
    ),
    "disk-full": (
        "the file system of {cache} became full while files of the hub were fetched: {said}",
        "Free space, or set HF_HUB_CACHE to a larger file system",
    ),
    "not-writable": (
        "{count:of file} have to be fetched to {cache}, which cannot be written: {said}",
        "Set HF_HUB_CACHE to a folder that this user can write to",
    ),
    "fetch-failed": "the files of the hub could not be fetched: {said}",
}
