"""The file beside every TensorRT plan: what the plan is, where it may run, and how to bind it.

A plan is opaque: it cannot be inspected without a GPU, it only loads in the exact library version that wrote it, only on
the compute capabilities it was compiled for, and two builds of the same graph are not equal byte for byte
(NVIDIA/TensorRT#4730, #3316, #4798, #568). So ``engine.plan`` has ``engine.plan.json`` next to it with the library and its
version, the capabilities, the optimization profiles, names, dtypes and shapes of all inputs and outputs, which outputs
share memory with which inputs, and the digests of the ONNX file, of the timing cache and of the plan itself. A plan whose
sidecar is missing or does not fit is refused with the reason instead of failing inside the engine.
"""

from __future__ import annotations

import importlib.metadata
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from optkit.errors import ArtifactError, DependencyError
from optkit.manifest import file_digest, tree_digest

SUFFIX = ".json"
FORMAT_VERSION = 1
#: flavour -> names of the distributions that may provide it, and what to install
DISTRIBUTIONS = {
    "tensorrt_rtx": (("tensorrt_rtx_cu13", "tensorrt_rtx_cu12", "tensorrt_rtx"), "pip install 'optkit[trt-rtx]'"),
    "tensorrt": (("tensorrt_cu13", "tensorrt_cu12", "tensorrt"), "pip install 'optkit[gpu]'"),
    "tensorrt_lean": (("tensorrt_lean_cu13", "tensorrt_lean_cu12", "tensorrt_lean"), "pip install tensorrt-lean"),
}
FLAVOURS = ("tensorrt_rtx", "tensorrt")


@dataclass(frozen=True)
class TensorInfo:
    """An input or output of a plan. A dynamic dimension is -1; ``dtype`` is a numpy name (or bfloat16)."""

    name: str
    dtype: str
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Sidecar:
    """The content of ``<plan>.json``.

    Attributes:
        flavour: ``tensorrt_rtx`` or ``tensorrt``.
        library_version: exact version of the library that built the plan.
        compute_capabilities: such as ``("8.6", "8.9")``; the plan has code for these and no others.
        profiles: in plan order: ``{"name", "shapes": {input: [min, opt, max]}}``.
        inputs, outputs: the bindings.
        aliases: output -> input whose memory it shares (the caches).
        onnx: ``{"file", "sha256", "external"}`` of the graph; the digest covers the external weight files.
        plan: ``{"file", "sha256", "bytes"}``.
        timing_cache: ``{"file", "sha256", "bytes"}`` or ``None`` when the builder made none.
        build: seconds, peak resident bytes, options and host of the build: for people, nothing is decided by it.
        built_on: name of the GPU a standard TensorRT plan was tuned on; ``None`` for a build without a GPU.
    """

    flavour: str
    library_version: str
    compute_capabilities: tuple[str, ...]
    profiles: tuple[Mapping[str, Any], ...]
    inputs: tuple[TensorInfo, ...]
    outputs: tuple[TensorInfo, ...]
    aliases: Mapping[str, str]
    onnx: Mapping[str, Any]
    plan: Mapping[str, Any]
    timing_cache: Mapping[str, Any] | None = None
    build: Mapping[str, Any] = field(default_factory=dict)
    built_on: str | None = None
    format_version: int = FORMAT_VERSION

    def profile_range(self, profile: int, name: str) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
        """(min, opt, max) shape of an input in a profile; the static shape three times when it is not dynamic."""
        shapes = self.profiles[profile]["shapes"]
        if name in shapes:
            low, best, high = (tuple(s) for s in shapes[name])
            return low, best, high
        fixed = next(t.shape for t in self.inputs if t.name == name)
        return fixed, fixed, fixed


def sidecar_path(plan: str | Path) -> Path:
    return Path(f"{plan}{SUFFIX}")


def write_sidecar(path: str | Path, sidecar: Sidecar) -> None:
    Path(path).write_text(json.dumps(asdict(sidecar), indent=1) + "\n", encoding="utf-8")


def read_sidecar(plan: str | Path) -> Sidecar:
    """The sidecar of ``plan``.

    Raises:
        ArtifactError: there is none, it is damaged, or newer than this optkit.
    """
    path = sidecar_path(plan)
    if not path.is_file():
        raise ArtifactError(f"{plan}: has no {path.name} beside it, so nobody can say where it may run; build the engine again")
    try:
        data = json.loads(path.read_text(encoding="utf-8"))
        if data["format_version"] > FORMAT_VERSION:
            raise ArtifactError(f"{path}: format {data['format_version']} is newer than this optkit; upgrade optkit")
        tensors = {
            key: tuple(TensorInfo(t["name"], t["dtype"], tuple(t["shape"])) for t in data[key]) for key in ("inputs", "outputs")
        }
        lists = {key: tuple(data[key]) for key in ("compute_capabilities", "profiles")}
        return Sidecar(**{**data, **tensors, **lists})
    except (ValueError, KeyError, TypeError) as error:
        raise ArtifactError(f"{path}: damaged ({type(error).__name__}: {error}); build the engine again") from error


def installed_version(flavour: str) -> str:
    """Version of the installed library of ``flavour``; it is not imported.

    Raises:
        DependencyError: not installed, with the command that installs it.
    """
    names, remedy = DISTRIBUTIONS[flavour]
    for name in names:
        try:
            return importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    raise DependencyError(f"{flavour} is not installed: {remedy}")


def check_sidecar(
    plan: str | Path,
    *,
    library_version: str | None = None,
    capability: str | None = None,
    onnx: str | Path | None = None,
    digest: bool = True,
) -> Sidecar:
    """The sidecar of ``plan``, if the plan may be loaded here.

    Args:
        plan: the plan file.
        library_version: version of the library that will load it; ``None`` asks the installed one.
        capability: compute capability of the GPU it will run on, ``"8.6"``; ``None`` does not check it.
        onnx: the graph it should have been built from; ``None`` does not check it.
        digest: also compare the plan's SHA-256 (reads the whole file).

    Raises:
        ArtifactError: plan or sidecar missing, changed, or made for another library, GPU or graph. Says which and what to do.
        DependencyError: the library is not installed.
    """
    plan = Path(plan)
    sidecar = read_sidecar(plan)
    _check_file(plan, sidecar.plan, digest)
    version = installed_version(sidecar.flavour) if library_version is None else library_version
    if version != sidecar.library_version:
        raise ArtifactError(
            f"{plan}: built by {sidecar.flavour} {sidecar.library_version}, and {version} is installed; a plan only loads in "
            f"the version that built it: install {sidecar.library_version}, or build the engine again here"
        )
    if capability is not None and capability not in sidecar.compute_capabilities:
        raise ArtifactError(
            f"{plan}: compiled for compute capability {', '.join(sidecar.compute_capabilities)}, and this GPU is {capability}; "
            f"build the engine again with {capability} among the compute capabilities"
        )
    if onnx is not None and onnx_digest(onnx, sidecar.onnx["external"]) != sidecar.onnx["sha256"]:
        raise ArtifactError(f"{plan}: was not built from {onnx} as it is now (other content); build the engine again")
    return sidecar


def check_timing_cache(path: str | Path, sidecar: Sidecar) -> None:
    """Raises ArtifactError unless the timing cache at ``path`` is the one the plan was built with."""
    if sidecar.timing_cache is None:
        raise ArtifactError(f"{path}: the plan's sidecar records no timing cache, so this one is not its own")
    _check_file(Path(path), sidecar.timing_cache, True)


def onnx_digest(path: str | Path, external: Sequence[str] = ()) -> str:
    """SHA-256 over an ONNX file and its external weight files, given by their names relative to it."""
    path = Path(path)
    missing = [name for name in external if not (path.parent / name).is_file()]
    if missing or not path.is_file():
        raise ArtifactError(f"{path}: {missing[0] + ', which it refers to, is' if missing else 'is'} not there")
    return tree_digest([path, *(path.parent / name for name in external)], path.parent)


def _check_file(path: Path, entry: Mapping[str, Any], digest: bool) -> None:
    if not path.is_file():
        raise ArtifactError(f"{path}: no such file")
    size = path.stat().st_size
    if size != entry["bytes"]:
        raise ArtifactError(
            f"{path}: {size} bytes, and its sidecar says {entry['bytes']}: truncated or replaced; build the engine again"
        )
    if digest and file_digest(path) != entry["sha256"]:
        raise ArtifactError(f"{path}: its content is not what its sidecar recorded; build the engine again")
