"""The texts of plug-ins that cannot be used."""

from scaletrain_cli.reasons import Texts

_UPDATE = ("Update or uninstall {package}",)

TEXTS: Texts = {
    "not-loaded": ("the {kind} {name} of the package {package} cannot be loaded ({reference}): {said}", *_UPDATE),
    "invalid": ("the {kind} {name} of the package {package} cannot be used: {reference} {fault}", *_UPDATE),
    "failed": "the {kind} {name} of the package {package} failed: {said}",
    "twice": ("the {kind} {name} is registered by several packages: {packages:list}", "Uninstall all but one"),
}
