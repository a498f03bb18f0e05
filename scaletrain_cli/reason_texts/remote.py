"""The texts of remote files that cannot be used: object stores and web servers."""

from scaletrain_cli.reasons import Texts

_CREDENTIALS = (
    "Set the credentials in the environment: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY, AWS_PROFILE, or "
    "AWS_SKIP_SIGNATURE=true for a public bucket"
)

TEXTS: Texts = {
    "of-key": "{key}: {cause}",
    "unknown-scheme": "{path} has no known scheme; known are {schemes:list}",
    "credentials-in-path": (
        "a path of {place} must not contain a user name or password",
        "Set credentials in the environment",
    ),
    "no-bucket-named": ("{path} names no bucket", "Write {scheme}://BUCKET/PATH"),
    "no-file-named": "{path} names no file on the server",
    "query-in-path": (
        "{path} must not have a query, which could be a signature",
        "Use s3://, gs:// or az:// with credentials from the environment",
    ),
    "plain-http": (
        "{path} would be read from {endpoint} without encryption, so that others could change the data",
        "Use https://, or set {variable}=1 if the network is trusted",
    ),
    "store-settings": "the settings of the store of {bucket} are not valid: {error}",
    "profile-without-keys": (
        "the profile {profile} has no static keys",
        'Run eval "$(aws configure export-credentials --profile {profile} --format env)"',
    ),
    "no-credentials": ("there are no credentials for {bucket}", _CREDENTIALS),
    "no-listing": ("{path} is on a web server, whose files cannot be listed", "Name one file for each source"),
    "nothing-found": "no object matches {path}",
    "not-found": "{path} does not exist",
    "no-bucket": "the bucket {bucket} of {path} does not exist",
    "denied": (
        "{path} cannot be accessed (HTTP {status}{code}): the credentials do not permit it, or it does not exist",
        "Check the credentials in the environment, and the rights to read and to list",
    ),
    "refused": (
        "the server rejected the request for {path} (HTTP {status}{code})",
        "Check the region and the endpoint: AWS_REGION, AWS_ENDPOINT_URL",
    ),
    "no-ranges": "the server of {path} cannot send a part of a file",
    "changed": (
        "{path} was replaced since it was listed",
        "Do not change data that is in use: write new data at another path",
    ),
    "unavailable": "{path} could not be accessed within {seconds:seconds}, in {tries:of request}: {error}",
    "not-writable": ("{path} is on a web server, where nothing can be written", "Use s3://, gs:// or az://"),
    "size-differs": "{path} has {bytes:whole} bytes after it was written, instead of {expected:whole}",
    # ---- prepared data ---------------------------------------------------------------------------------------------
    "cache-not-written": "blocks of remote data cannot be kept in {folder}, and are read again each time: {error}",
    "not-prepared": (
        "{path} has no prepared data of this version (dataset.json with the schema {expected})",
        "Prepare the data again and upload them with scaletrain data upload",
    ),
    "damaged": ("{path} is not what was uploaded, in each of {reads} reads", "Upload the data again to another path"),
    "incomplete": ("{path} lacks {missing:of file}, such as {first}", "Upload the data again"),
    "other-data-there": ("{path} already has other prepared data", "Upload to another path, or remove what is there"),
    "not-remote": ("{path} is no remote folder", "Write s3://BUCKET/PATH, or use gs:// or az://"),
    "rows-not-uploaded": (
        "rows for sft and dpo cannot be read from an object store",
        "Keep them below the shared runs root",
    ),
    "images-not-uploaded": (
        "the prepared data of images are an index of files that stay where they are, so that an upload of it would "
        "have no image",
        "Copy the tar shards or parquet files to the store with its own tool, and set data.source to them: "
        "s3://BUCKET/shards/{{0000..0099}}.tar",
    ),
    "prepare-first": ("the data of the spec are not prepared", "Run scaletrain data prepare SPEC"),
}
