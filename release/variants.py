"""A preview, for drafts of standards (PEP 817, 825): one page a torch minor, from which an installer picks the CUDA.

whl/variants/torch2.14/ holds every CUDA of that torch and the CPU build, which is the null variant, under one version.
The wheels are the ordinary ones, renamed; the ordinary channels know nothing of these.
"""

from __future__ import annotations

import base64
import hashlib
import html
import io
import json
import re
import zipfile
from collections.abc import Iterable
from pathlib import Path
from urllib.parse import quote

from . import wheel_file
from .index import PROJECT, ChannelError, page, put
from .matrix import Matrix
from .torch_info import CPU
from .wheel_file import WheelFileError

# Of the draft that uv and variantlib implement, which find out what the machine has with this provider.
_FORMAT = {
    "$schema": "https://variants-schema.wheelnext.dev/v0.2.0.json",
    "default-priorities": {"namespace": ["nvidia"]},
    "providers": {
        "nvidia": {
            "plugin-api": "nvidia_variant_provider.plugin:NvidiaVariantPlugin",
            "requires": ["nvidia-variant-provider>=0.0.1"],
        }
    },
}


def _split(path: Path) -> tuple[str, str, str]:
    """Version, CUDA label and torch minor of an ordinary wheel: "1.0.0", "cu130", "2.14"."""
    match = re.match(r"[^-]+-([^-+]+)\+(cpu|cu\d+)torch([^-]+)-", path.name)
    if match is None:
        raise ChannelError(f"{path.name} carries no label such as +cu130torch2.14, so it is no variant")
    return match[1], match[2], match[3]


def _description(variants: dict[str, dict[str, object]]) -> bytes:
    return (json.dumps({**_FORMAT, "variants": variants}, indent=4, sort_keys=True) + "\n").encode()


def _properties(data: Matrix, cuda: str) -> dict[str, dict[str, object]]:
    """The variant's label and what it asks of the machine."""
    if cuda == CPU:
        return {"null": {}}
    if cuda not in data.cuda:
        raise ChannelError(f"the matrix has no {cuda}, so nothing says which drivers it is for: add its table")
    return {cuda: {"nvidia": {"cuda_version_lower_bound": [data.cuda[cuda].toolkit]}}}


def _row(name: str, data: bytes) -> str:
    digest = base64.urlsafe_b64encode(hashlib.sha256(data).digest()).rstrip(b"=").decode()
    return f"{name},sha256={digest},{len(data)}\n"


def make(data: Matrix, path: Path, folder: Path) -> Path:
    """The variant of an ordinary wheel, in `folder`. The same wheel gives the same bytes."""
    wheel = wheel_file.read(path)
    try:
        old_record = wheel_file.in_info(wheel.files, "RECORD")
    except WheelFileError as error:
        raise WheelFileError(f"{path}: {error}") from None
    base, cuda, minor = _split(path)
    version = f"{base}+torch{minor}"
    (label, variant), = _properties(data, cuda).items()  # fmt: skip
    old, new = f"{wheel_file.NAME}-{wheel.version}.dist-info", f"{wheel_file.NAME}-{version}.dist-info"
    record = f"{new}/RECORD"
    files = {name.replace(old, new): contents for name, contents in wheel.files.items() if name != old_record}
    files[f"{new}/METADATA"] = wheel.metadata.replace(
        f"\nVersion: {wheel.version}\n".encode(), f"\nVersion: {version}\n".encode()
    )
    files[f"{new}/variant.json"] = _description({label: variant})
    rows = "".join(_row(name, contents) for name, contents in files.items())
    files[record] = f"{rows}{record},,\n".encode()
    target = folder / f"{path.stem.replace(wheel.version, version)}-{label}.whl"
    with zipfile.ZipFile(path) as source:
        infos = {info.filename.replace(old, new): info for info in source.infolist()}
    example = infos[f"{new}/METADATA"]
    archived = io.BytesIO()
    with zipfile.ZipFile(archived, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents in files.items():
            info = zipfile.ZipInfo(name, example.date_time)
            info.external_attr = infos.get(name, example).external_attr
            info.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(info, contents)
    put(target, archived.getvalue())
    return target


def write(data: Matrix, root: Path, wheels: Iterable[Path]) -> list[Path]:
    """Adds the variants of ordinary `wheels` to the pages below `root`. Returns those pages' channels."""
    channels: dict[Path, None] = {}
    for path in wheels:
        _, _, minor = _split(path)
        folder = root / "whl" / "variants" / f"torch{minor}"
        make(data, path, folder / PROJECT)
        channels[folder] = None
    for folder in channels:
        project = folder / PROJECT
        versions: dict[str, dict[str, dict[str, object]]] = {}
        links = []
        for path in sorted(project.glob("*.whl")):
            _, version, *_, label = path.stem.split("-")
            versions.setdefault(version, {}).update(_properties(data, CPU if label == "null" else label))
            links.append(path)
        for version, variants in versions.items():
            name = f"{wheel_file.NAME}-{version}-variants.json"
            put(project / name, _description(variants))
            links.append(project / name)
        text = [
            f'<a href="{quote(path.name)}#sha256={hashlib.sha256(path.read_bytes()).hexdigest()}">'
            f"{html.escape(path.name)}</a>"
            for path in links
        ]
        put(project / "index.html", page(f"Variants of {PROJECT}", text).encode())
        put(folder / "index.html", page("Simple index", [f'<a href="{PROJECT}/">{PROJECT}</a>']).encode())
    return list(channels)
