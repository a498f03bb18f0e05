"""The texts of plug-ins that cannot be used."""

from scaletrain_cli.reasons import Text

_UPDATE = ("Update or uninstall {package}",)

TEXTS: dict[str, Text] = {
    "not-loaded": Text("the {kind} {name} of the package {package} cannot be loaded ({reference}): {said}", _UPDATE),
    "invalid": Text("the {kind} {name} of the package {package} cannot be used: {reference} {fault}", _UPDATE),
    "failed": Text("the {kind} {name} of the package {package} failed: {said}"),
    "twice": Text("the {kind} {name} is registered by several packages: {packages:list}", ("Uninstall all but one",)),
}
