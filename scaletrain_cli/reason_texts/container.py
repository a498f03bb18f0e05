"""The texts of `scaletrain image`: why no Containerfile can be written, and notes about one."""

from scaletrain_cli.reasons import Text

TEXTS: dict[str, Text] = {
    "no-source": Text("{path} does not exist", ("Give a project folder, uv.lock, requirements.txt or pyproject.toml",)),
    "unknown-source": Text(
        "{path} is no lock file or list of requirements",
        ("Give uv.lock, a file *.txt of requirements, or pyproject.toml",),
    ),
    "unreadable": Text("{path} cannot be read: {said}"),
    "lock-without-project": Text("{path} has no pyproject.toml beside it, which uv needs to install it"),
    "unusable-source": Text("{path} cannot be installed in an image"),
    "secret": Text(
        "has the form of a secret, which would be in the image",
        ("Remove it, and give the login to the build: --secret, or a netrc file that the build mounts",),
    ),
    "local-requirement": Text(
        "{line} is a local project, which is not in the image",
        ("Remove it: the code of a run is sent with each run (code.path)",),
    ),
    "outside-context": Text("{file} is outside the folder of the build", ("Move it below that folder",)),
    "exists": Text("{path} already exists", ("Give another name with --output, or remove the file",)),
    "not-written": Text("{path} cannot be written: {said}"),
    "unknown-cuda": Text(
        "--cuda {given}: no base image is known for this version", ("Use {known:or}, or name a base image with --base",)
    ),
    "cuda-not-found": Text(
        "--cuda auto: {file} does not pin the CUDA packages of torch, so the version is not known", ("Use {known:or}",)
    ),
    "cuda-and-base": Text("--cuda and --base are both given", ("Give only one",)),
    "root": Text("--uid 0 is root, which training pods must not run as", ("Use cluster.kubernetes.run_as_user, 1000",)),
    "note-own-constraints": Text(
        "{folder} has no uv.lock, requirements.txt or pyproject.toml: the image has ScaleTrain's own tested versions"
    ),
    "note-not-pinned": Text(
        "{file} pins no versions: two builds may differ. Use uv.lock, or a list of pinned requirements"
    ),
    "note-index": Text(
        "no checkout of ScaleTrain is known here, so the build installs scaletrain=={version} from its package index"
    ),
    "note-cuda": Text("torch in {file} is built for CUDA {cuda}; the driver of the nodes must support it"),
    "note-registry": Text("replace REGISTRY with your registry, or give --tag"),
}
