"""``optkit inspect``: what a path is. Reads headers and manifests, no weights; imports onnx only to look into a graph."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from optkit.errors import ArtifactError, CheckpointError, DependencyError, InputError
from optkit.manifest import FILE_NAME, Manifest, check_files, read_manifest

Row = tuple[str, ...]
Section = tuple[str, list[Row]]


def inspect_path(path: str | Path, digests: bool = False) -> dict[str, Any]:
    """What ``path`` is, as plain data with a ``kind``.

    Args:
        path: an optkit directory, a HF checkpoint directory, a ``.gguf`` or an ``.onnx`` file.
        digests: hash every file of an optkit directory and compare.

    Raises:
        InputError: nothing there, or nothing optkit knows.
        ArtifactError: an optkit directory that is damaged.
    """
    path = Path(path)
    if not path.exists():
        raise InputError(f"{path}: no such file or directory")
    if path.is_file():
        return _file(path)
    if (path / FILE_NAME).is_file():
        return _optkit_directory(path, digests)
    if (path / "config.json").is_file():
        return _checkpoint(path)
    graphs = sorted(path.glob("*.onnx"))
    if graphs:
        return {
            "kind": "onnx directory",
            "path": str(path),
            "bytes": _tree_bytes(path),
            "graphs": {g.name: _graph(g) for g in graphs},
        }
    raise InputError(
        f"{path}: neither an optkit directory ({FILE_NAME}), a checkpoint (config.json) nor a folder with .onnx files"
    )


def _file(path: Path) -> dict[str, Any]:
    suffix = path.suffix.lower()
    size = path.stat().st_size
    if suffix == ".onnx":
        return {"kind": "onnx file", "path": str(path), "bytes": size, "graphs": {path.name: _graph(path)}}
    if suffix == ".gguf":
        return {"kind": "gguf file", "path": str(path), "bytes": size, **_gguf(path)}
    if suffix == ".safetensors":
        return {"kind": "safetensors file", "path": str(path), "bytes": size, "tensors": _tensor_summary([path])}
    raise InputError(f"{path}: not a file optkit knows (.onnx, .gguf, .safetensors)")


def _optkit_directory(path: Path, digests: bool) -> dict[str, Any]:
    manifest = read_manifest(path)
    check_files(path, manifest, digests=digests)
    found: dict[str, Any] = {
        "kind": manifest.kind,
        "path": str(path),
        "bytes": sum(entry["bytes"] for entry in manifest.files.values()),
        "complete": True,
        "digests_checked": digests,
        "optkit_version": manifest.optkit_version,
        "source": dict(manifest.source),
        "model": None if manifest.model is None else vars(manifest.model),
        "recipe": dict(manifest.recipe),
        "versions": dict(manifest.versions),
        "files": {name: entry["bytes"] for name, entry in manifest.files.items()},
        "facts": dict(manifest.facts),
    }
    if manifest.kind == "artifact":
        found["graphs"] = {name: _graph(path / name) for name in _graph_files(manifest)}
    return found


def _graph_files(manifest: Manifest) -> list[str]:
    return [name for name in manifest.files if name.endswith(".onnx")]


def _checkpoint(path: Path) -> dict[str, Any]:
    try:
        config = json.loads((path / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        raise CheckpointError(f"{path / 'config.json'}: not valid JSON ({error})") from error
    keys = (
        "model_type",
        "num_hidden_layers",
        "hidden_size",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "max_position_embeddings",
        "tie_word_embeddings",
    )
    return {
        "kind": "HF checkpoint",
        "path": str(path),
        "bytes": _tree_bytes(path),
        "model": {key: config[key] for key in keys if key in config},
        "dtype": config.get("dtype") or config.get("torch_dtype"),
        "quantization": config.get("quantization_config", {}).get("quant_method"),
        "tensors": _tensor_summary(sorted(path.glob("*.safetensors"))),
    }


def _tensor_summary(paths: list[Path]) -> dict[str, Any]:
    """Number, parameters and bytes by stored type, from the safetensors headers."""
    count, parameters, types = 0, 0, Counter[str]()
    for path in paths:
        for entry in _safetensors_header(path).values():
            size = 1
            for n in entry["shape"]:
                size *= n
            count += 1
            parameters += size
            types[entry["dtype"]] += entry["data_offsets"][1] - entry["data_offsets"][0]
    return {"count": count, "elements": parameters, "bytes_by_dtype": dict(types)}


def _safetensors_header(path: Path) -> dict[str, Any]:
    """The header of a safetensors file: an 8-byte little-endian length, then JSON."""
    try:
        with path.open("rb") as handle:
            length = int.from_bytes(handle.read(8), "little")
            if length > path.stat().st_size:
                raise ValueError("the header is longer than the file")
            header: dict[str, Any] = json.loads(handle.read(length))
        header.pop("__metadata__", None)
        end = max((entry["data_offsets"][1] for entry in header.values()), default=0)
        if path.stat().st_size < 8 + length + end:
            raise ValueError(f"{path.stat().st_size} bytes of {8 + length + end}")
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{path}: truncated, or not a safetensors file ({error}); download or copy it again") from error
    return header


def _gguf(path: Path) -> dict[str, Any]:
    """Version and counts from the fixed head of a GGUF file."""
    with path.open("rb") as handle:
        head = handle.read(24)
    if head[:4] != b"GGUF" or len(head) < 24:
        raise CheckpointError(f"{path}: not a GGUF file; download or copy it again")
    version, tensors, entries = (int.from_bytes(head[a:b], "little") for a, b in ((4, 8), (8, 16), (16, 24)))
    return {"gguf_version": version, "tensors": {"count": tensors}, "metadata_entries": entries}


def _graph(path: Path) -> dict[str, Any]:
    """Opset, inputs, outputs and operator counts of an ONNX file, without its weights."""
    try:
        import onnx
    except ImportError as error:
        raise DependencyError(f"{path}: looking into a graph needs onnx: pip install 'optkit[export]'") from error
    try:
        model = onnx.load(str(path), load_external_data=False)
    except Exception as error:  # protobuf's decode errors have no common base
        raise ArtifactError(f"{path}: not a readable ONNX file ({type(error).__name__})") from error
    graph = model.graph
    weights = {tensor.name for tensor in graph.initializer}
    counts = Counter(f"{node.domain + '.' if node.domain else ''}{node.op_type}" for node in graph.node)
    for function in model.functions:
        counts.update(f"{node.domain + '.' if node.domain else ''}{node.op_type}" for node in function.node)
    return {
        "opsets": {entry.domain or "ai.onnx": entry.version for entry in model.opset_import},
        "inputs": [_value(v) for v in graph.input if v.name not in weights],
        "optional_inputs": [_value(v) for v in graph.input if v.name in weights],
        "outputs": [_value(v) for v in graph.output],
        "nodes": len(graph.node),
        "operators": dict(counts.most_common()),
        "initializers": len(weights),
    }


def _value(value: Any) -> dict[str, Any]:
    import onnx

    tensor = value.type.tensor_type
    shape = [d.dim_param or d.dim_value for d in tensor.shape.dim]
    return {"name": value.name, "dtype": onnx.TensorProto.DataType.Name(tensor.elem_type).lower(), "shape": shape}


def _tree_bytes(path: Path) -> int:
    return sum(p.stat().st_size for p in path.rglob("*") if p.is_file())


# ── for people ───────────────────────────────────────────────────────────────────────────────────────────────────────


def sections(found: Mapping[str, Any]) -> list[Section]:
    """``(title, rows)`` of each table of the command's output."""
    shown: list[Section] = [(f"{found['path']}: {found['kind']}, {found['bytes'] / 1e6:.1f} MB", _head_rows(found))]
    if found.get("files"):
        shown.append(("Files", [(name, f"{count / 1e6:.3f} MB") for name, count in found["files"].items()]))
    for name, graph in found.get("graphs", {}).items():
        shown += _graph_sections(name, graph)
    return shown


def _head_rows(found: Mapping[str, Any]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for key in ("optkit_version", "dtype", "quantization", "gguf_version", "metadata_entries"):
        if found.get(key) is not None:
            rows.append((key, str(found[key])))
    for key in ("source", "model", "tensors", "recipe", "versions"):
        rows += [(f"{key}.{name}", _short(value)) for name, value in (found.get(key) or {}).items() if value is not None]
    rows += [(f"facts.{name}", _short(value)) for name, value in (found.get("facts") or {}).items() if name != "graph"]
    return rows


def _short(value: Any, limit: int = 100) -> str:
    text = value if isinstance(value, str) else json.dumps(value, default=list)
    return text if len(text) <= limit else text[: limit - 1] + "…"


def _graph_sections(name: str, graph: Mapping[str, Any]) -> list[Section]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in graph["opsets"].items())
    title = f"{name}: {graph['nodes']} nodes, {graph['initializers']} initializers, opset {opsets}"
    values: list[Row] = [
        (kind, *_io_row(v))
        for kind, key in (("input", "inputs"), ("optional input", "optional_inputs"), ("output", "outputs"))
        for v in graph[key]
    ]
    operators: list[Row] = [(operator, str(count)) for operator, count in graph["operators"].items()]
    return [(title, _folded(values)), (f"{name}: operators", operators)]


def _io_row(value: Mapping[str, Any]) -> tuple[str, str, str]:
    return value["name"], value["dtype"], "[" + ", ".join(map(str, value["shape"])) + "]"


def _folded(rows: list[tuple[str, ...]]) -> list[tuple[str, ...]]:
    """Rows that differ only in the layer number, as one row with the range."""
    import re

    groups: dict[tuple[str, ...], list[int]] = {}
    for kind, name, dtype, shape in rows:
        number = re.search(r"\.(\d+)\.", name)
        key = (kind, re.sub(r"\.\d+\.", ".{i}.", name), dtype, shape)
        groups.setdefault(key, []).append(int(number.group(1)) if number else -1)
    return [
        (k, n + (f"  (i = {min(at)}..{max(at)})" if len(at) > 1 else "") if at[0] >= 0 else n, d, s)
        for (k, n, d, s), at in groups.items()
    ]
