"""The texts of sources of images: samples and files that cannot be used."""

from scaletrain_cli.reasons import Texts

_FIELDS = ("Set data.images.fields to the names that the source has",)

TEXTS: Texts = {
    # ---- a source --------------------------------------------------------------------------------------------------
    "source-unusable": "{where}: {problem}",
    "nothing-there": ("{path} names no file", "Correct the path, or the range in its braces"),
    "no-images": (
        "has no file of the format {format}: images in folders, tar shards (webdataset) or parquet files",
        "Correct the path of the source",
    ),
    "other-format": (
        "has no file of the format {format}, but of {found:list}",
        "Set the format of the source to that of its files",
    ),
    "mixed-formats": ("has files of several formats: {found:list}", "Give a glob of one of them, such as folder/*.tar"),
    "compressed-tar": (
        "{file} is compressed, so that samples cannot be read one at a time",
        "Decompress the shards to .tar files",
    ),
    "remote-folder": (
        "has {count:whole} images as separate objects, each of which would be a request to the store",
        "Pack the images into tar shards, or give a local folder",
    ),
    "shards-mix-splits": (
        "{named} names the {split} split and {other} names none, so that it is not clear which files to train on",
        "Give a glob of the files to read, such as folder/*train*.tar, or put the split into the name of each file",
    ),
    "shard-of-two-splits": ("{file} names several splits: {splits:list}", "Rename it, or give a glob without it"),
    "no-training-split": (
        "has files of the splits {splits:list}, and none of a training split",
        "Give a glob of the files to read, or put train into the names of those to train on",
    ),
    "folders-mix-splits": (
        "has folders for a training and a validation split, and {other} lies in neither",
        "Move it into a split, or give the path of the folder to read",
    ),
    "no-numbers-beside": (
        "has no file with the numbers of a target beside its images, with a suffix of {suffixes:list}",
        "Write the target of a.jpg to a.cls, as 1.5 or [1.5, 2], or set data.images.fields.label to the suffix of "
        "such files",
    ),
    "too-many-names": "{path} stands for more than {most:whole} files",
    "no-scikit-learn": ("{source} requires scikit-learn, which is not installed", "Run: pip install scikit-learn"),
    "no-column": ("has no column {columns:or}; it has {found:list}", "Set {key} to the name of the column"),
    "column-without-bytes": (
        "the column {column} must have the bytes of images, or {{bytes, path}}; it has {type}",
        *_FIELDS,
    ),
    "sizes-differ": "targets have {sizes:list} numbers, where all samples must have equally many",
    "none-usable": "none of its {bad:whole} samples can be used; {place}: {problem}",
    "no-training-sample": (
        "has no sample for training; {validation:whole} are for validation",
        "Set data.validation_split lower",
    ),
    "classes-differ": (
        "the sources {first} and {second} have different classes: {missing_count:whole} are only in {first} "
        "({missing:list}) and {added_count:whole} only in {second} ({added:list}), so that a class number would not "
        "mean the same in both",
        "Write the names of all classes to a file, one per line in the order of the labels, and set "
        "data.images.classes to it and model.num_labels to their number",
        "Rename the folders or labels so that both sources have the same classes",
    ),
    "class-order-differs": (
        "the sources {first} and {second} have the same classes in another order: class {number} is {expected} in "
        "{first} and {found} in {second}",
        "Write their names to a file, one per line in the order of the labels, and set data.images.classes to it",
    ),
    "more-classes-than-labels": (
        "the data in {folder} have {classes:whole} classes, and model.num_labels = {labels:whole}",
        "Set model.num_labels to the number of classes",
    ),
    "targets-differ-from-labels": (
        "the targets in {folder} have {numbers:whole} numbers, and model.num_labels = {labels:whole}",
        "Set model.num_labels to the numbers of a target",
    ),
    "index-of-other-settings": (
        "{folder} is an index that was made with {key} = {found}, and the spec has {value}",
        "Set {key} to {found}, or give the source of the images as data.source",
    ),
    "index-of-other-targets": (
        "{folder} is an index that was made for {found}, and has not what training.loss = {loss} needs of a sample",
        "Give the source of the images as data.source, which is then indexed for this loss",
    ),
    "index-not-stored": (
        "the index cannot be stored: {folder} exists and cannot be read",
        "Remove it, or ask its owner to remove it",
    ),
    # ---- names of classes ------------------------------------------------------------------------------------------
    "classes-unreadable": "{key}: {path} cannot be read: {error}",
    "class-without-name": "{key}: {path} has no name in line {line}",
    "class-named-twice": "{key}: {path} has the name {name} a second time in line {line}",
    "zero-shot-without-names": (
        "the classes of {folder} have no names, which are a part of the prompts",
        "Set evaluation.zero_shot.classes to a file with a name per line, in the order of the labels",
    ),
    "zero-shot-without-classes": (
        "{folder} is an index of images without one class each, which evaluation.zero_shot needs",
        "Give the source of the images as evaluation.zero_shot.source, which is then indexed with its labels",
    ),
    "zero-shot-names-differ": (
        "evaluation.zero_shot.classes: {path} has {names:whole} names, and {folder} has {classes:whole} classes",
        "Give a name for each class, in the order of the labels",
    ),
    "zero-shot-label-not-named": (
        "evaluation.zero_shot.classes: {path} has no name for the class {label} of {folder}",
        "Write the class itself or another name for every class, in the order of the labels",
    ),
    # ---- a sample --------------------------------------------------------------------------------------------------
    "bad-sample": (
        "{where}: {problem}",
        "Correct the sample, or set data.on_bad: skip, which leaves such samples out and counts them",
    ),
    "not-decodable": "the image cannot be decoded: {error}",
    "file-unreadable": "cannot be read: {error}",
    "file-too-large": "is larger than {most:gib}, the most that a sample may have",
    "name-not-utf-8": "has a name that is not UTF-8",
    "name-too-long": "has no key, or a name of {bytes:whole} bytes, which is too long",
    "no-label": "has no label",
    "label-not-a-class": ("has the label {given}, which must be the number of a class", *_FIELDS),
    "label-not-numbers": ("has the target {given}, which must be a number or a list of numbers", *_FIELDS),
    "class-beyond": "has the label {given:whole}, and there are {classes:whole} classes, from 0 on",
    "class-unknown": "has the label {given}, which is none of the {classes:whole} names of classes",
    "class-without-names": (
        "has the label {given}, and classes without a file of their names must be numbers",
        "Set data.images.classes, or evaluation.zero_shot.classes for its source, to a file with the names",
    ),
    "other-size": "has a target of {given:whole} numbers, where others have {expected:whole}",
    "no-caption": "has no caption",
    "caption-not-text": ("has the caption {given}, which must be text", *_FIELDS),
    "caption-too-long": "has a caption of {bytes:whole} bytes; the most are {most:whole}",
    "not-utf-8": "has a label or caption that is not UTF-8 text: {error}",
    "not-json": "has a JSON member that cannot be read: {error}",
    "changed": (
        "{where}: {problem}; no step was trained on it",
        "Restore the file from a copy, or run `scaletrain data prepare` to index the source as it is, and start a new "
        "run",
    ),
    "other-content": "the image is not the one that was indexed",
    # ---- a member of a shard, a row of a table ---------------------------------------------------------------------
    "no-image": ("has no image ({suffixes:list}) among its members {members:list}", *_FIELDS),
    "member-twice": "is the second member with the suffix {suffix} in its sample",
    "member-sparse": ("is a sparse member, which cannot be read at a place", "Create the shard without --sparse"),
    "not-a-tar": "is not a tar file: {error}",
    "shard-cut": ("ends within the shard, which is cut at byte {byte:whole}", "Copy the shard again"),
    "shard-damaged": ("is damaged or cut near byte {byte:whole}: {error}", "Copy the shard again"),
    "shard-without-end": (
        "has no end of a tar file at byte {byte:whole}: it is cut or damaged there",
        "Copy the shard again",
    ),
    "table-damaged": "cannot be read as a parquet file: {error}",
    "no-bytes": "has no image in the column {column}",
    "path-without-bytes": (
        "names the file {path} in place of the bytes of its image",
        "Write the table again with the bytes, as Dataset.to_parquet does with embed_external_files",
    ),
}
