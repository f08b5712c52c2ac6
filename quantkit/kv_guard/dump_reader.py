"""A dump is read back: what was cut, changed or made by another version is a named error."""

import json
from dataclasses import astuple, fields
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from quantkit.errors import QuantkitError, SourceError, first_line
from quantkit.kv_guard.dispatch import MOST_PAGES, Expectations, PageTags
from quantkit.kv_guard.dump import FORMAT, Dump, digest_of
from quantkit.kv_guard.identity import TAG_VERSION, PoolIdentity
from quantkit.kv_guard.settings import PoolSize
from quantkit.kv_guard.tracker import Step


def read_dump(path: Path) -> Dump:
    """Raises SourceError for what this version did not write, and for what has been cut or changed since."""
    if not path.is_file():
        raise SourceError("is no file", remedy="name a dump of the guard's", file=path)
    try:
        with safe_open(path, "pt") as file:
            metadata = file.metadata() or {}
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118  (no mapping)
    except (SafetensorError, OSError) as error:
        raise SourceError(
            f"cannot be read: {first_line(error)}", remedy="name a dump that the guard wrote", file=path
        ) from error
    if metadata.get("format") != FORMAT:
        raise SourceError("is no dump of KV page tags", remedy="name a dump of the guard's", file=path)
    if metadata.get("version") != str(TAG_VERSION):
        raise SourceError(
            f"its tags are of version {metadata.get('version')}, this is {TAG_VERSION}",
            remedy="inspect it with the version that wrote it",
            file=path,
        )
    try:
        if digest_of(tensors, metadata["pool"]) != metadata["sha256"]:
            raise SourceError("is damaged: it is not what was written", remedy="dump the pool again")
        document = json.loads(metadata["pool"])
        identity = PoolIdentity(**document["identity"])
        size = PoolSize(**document["size"])
        names = {int(row): str(name) for row, name in document["names"].items()}
        if type(document["by_token"]) is not bool or not all(type(one) is str for one in astuple(identity)):
            raise TypeError("identity is text, and by_token true or false")
        return _checked_dump(tensors, identity, size, names, document["by_token"])
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise SourceError(
            f"a part of it is missing or is another: {first_line(error)}", remedy="dump the pool again", file=path
        ) from error
    except QuantkitError as error:
        error.file = str(path)
        raise


def _checked_dump(
    tensors: dict[str, Tensor], identity: PoolIdentity, size: PoolSize, names: dict[int, str], by_token: bool
) -> Dump:
    for field in fields(PoolSize):
        if type(getattr(size, field.name)) is not int:
            raise TypeError(f"size.{field.name} is {getattr(size, field.name)!r}")
        if not (-1 if field.name == "null_page" else 1) <= getattr(size, field.name) < MOST_PAGES:
            raise ValueError(f"size.{field.name} is {getattr(size, field.name)}")
    table = tensors["table"]
    if table.ndim != 2 or not table.shape[1]:
        raise SourceError(f"table is {tuple(table.shape)}", tensor="table", remedy="dump the pool again")
    batch = min(tensors["rows"].numel(), size.num_rows)
    for name, dtype, shape in (
        ("seals", torch.int64, (size.num_pages,)),
        ("records", torch.int64, (size.num_pages, 3)),
        ("states", torch.int32, (size.num_pages,)),
        ("expected_seals", torch.int64, (size.num_rows, size.most_pages)),
        ("expected_details", torch.int64, (size.num_rows, size.most_pages, 2)),
        ("table", table.dtype, (size.num_rows, table.shape[-1])),
        ("rows", torch.int64, (batch,)),
        ("lengths", torch.int64, (batch,)),
        *([("firsts", torch.int64, (batch,))] if "firsts" in tensors else []),
    ):
        if tensors[name].dtype != dtype or tuple(tensors[name].shape) != shape:
            found = f"{tensors[name].dtype} {tuple(tensors[name].shape)}"
            raise SourceError(f"{name} is {found}, not {dtype} {shape}", tensor=name, remedy="dump the pool again")
    rows, lengths = tensors["rows"], tensors["lengths"]
    is_batch = (rows >= 0) & (rows < size.num_rows) & (lengths >= 0)
    is_batch &= lengths <= size.most_pages * size.page_size
    if table.dtype not in (torch.int32, torch.int64) or not bool(is_batch.all()):
        raise SourceError("rows or lengths that the pool does not have", tensor="rows", remedy="dump the pool again")
    most = int((lengths.max() + size.page_size - 1) // size.page_size) if batch else 0
    return Dump(
        identity=identity,
        size=size,
        tags=PageTags(seals_P=tensors["seals"], records_P3=tensors["records"], states_P=tensors["states"]),
        expectations=Expectations(
            seals_RL=tensors["expected_seals"],
            details_RL2=tensors["expected_details"],
            openings_R=torch.arange(size.num_rows),  # requests are named by their rows here
        ),
        step=Step(
            table=table,
            rows=rows,
            lengths=lengths,
            firsts=tensors.get("firsts"),
            most_pages=most,
            by_token=by_token,
        ),
        names=names,
    )
