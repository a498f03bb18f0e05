"""The texts of `scaletrain image`: why no Containerfile can be written, and notes about one."""

from scaletrain_cli.reasons import Texts

TEXTS: Texts = {
    "no-source": ("{path} does not exist", "Give a project folder, uv.lock, requirements.txt or pyproject.toml"),
    "unknown-source": (
        "{path} is no lock file or list of requirements",
        "Give uv.lock, a file *.txt of requirements, or pyproject.toml",
    ),
    "unreadable": "{path} cannot be read: {said}",
    "lock-without-project": "{path} has no pyproject.toml beside it, which uv needs to install it",
    "unusable-source": "{path} cannot be installed in an image",
    "secret": (
        "has the form of a secret, which would be in the image",
        "Remove it, and give the login to the build: --secret, or a netrc file that the build mounts",
    ),
    "local-requirement": (
        "{line} is a local project, which is not in the image",
        "Remove it: the code of a run is sent with each run (code.path)",
    ),
    "outside-context": ("{file} is outside the folder of the build", "Move it below that folder"),
    "exists": ("{path} already exists", "Give another name with --output, or remove the file"),
    "not-written": "{path} cannot be written: {said}",
    "unknown-cuda": (
        "--cuda {given}: no base image is known for this version",
        "Use {known:or}, or name a base image with --base",
    ),
    "cuda-not-found": (
        "--cuda auto: {file} does not pin the CUDA packages of torch, so the version is not known",
        "Use {known:or}",
    ),
    "cuda-and-base": ("--cuda and --base are both given", "Give only one"),
    "root": ("--uid 0 is root, which training pods must not run as", "Use cluster.kubernetes.run_as_user, 1000"),
    "note-own-constraints": "{folder} has no uv.lock, requirements.txt or pyproject.toml: the image has ScaleTrain's "
    "own tested versions",
    "note-not-pinned": "{file} pins no versions: two builds may differ. Use uv.lock, or a list of pinned requirements",
    "note-index": "no checkout of ScaleTrain is known here, so the build installs scaletrain=={version} from its "
    "package index",
    "note-cuda": "torch in {file} is built for CUDA {cuda}; the driver of the nodes must support it",
    "note-registry": "replace REGISTRY with your registry, or give --tag",
}
