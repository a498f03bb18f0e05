"""`scaletrain schema`: the JSON Schema of the run spec."""

from scaletrain_cli.cli.options import AsJson
from scaletrain_cli.errors import ExitCode
from scaletrain_cli.ui.json import print_json, write_json

EXIT_CODES = (ExitCode.DONE, ExitCode.USAGE)


def command(as_json: AsJson = False) -> None:
    """Print the JSON Schema of the run spec, for editors.

    Save it (scaletrain schema > scaletrain.schema.json) and add this line at the top of a spec:

    # yaml-language-server: $schema=scaletrain.schema.json

    With --json the schema is the value of the key `json_schema`.
    """
    from scaletrain_cli.spec.json_schema import json_schema

    if as_json:
        print_json({"json_schema": json_schema()})
    else:
        write_json(json_schema())
