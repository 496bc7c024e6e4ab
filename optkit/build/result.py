"""What a build returns and writes as its own ``optkit.json`` (kind ``build``)."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from optkit.build.stages import Work
from optkit.manifest import FILE_NAME, Manifest, json_digest, library_versions, read_manifest, write_manifest

VERSIONS = (
    "torch",
    "transformers",
    "compressed-tensors",
    "onnx",
    "onnxscript",
    "onnx-ir",
    "onnxruntime",
    "numpy",
    "tokenizers",
)


@dataclass(frozen=True)
class BuildResult:
    """A finished build.

    Attributes:
        name: the recipe's.
        directory: everything is below it.
        artifact: what is deployed.
        checkpoint: the quantized checkpoint, ``None`` for an unquantized recipe.
        report_html: ``None`` if the recipe does not validate.
        stages: stage -> result.
        seconds: stage -> time it took when it ran.
        reused: stages that were done already.
        failures: limits that were exceeded.
    """

    name: str
    directory: Path
    artifact: Path
    checkpoint: Path | None
    report_html: Path | None
    stages: Mapping[str, Mapping[str, Any]]
    seconds: Mapping[str, float]
    reused: tuple[str, ...]
    failures: tuple[str, ...]
    recipe: Mapping[str, Any] = field(repr=False, default_factory=dict)
    source: Mapping[str, Any] = field(repr=False, default_factory=dict)

    @classmethod
    def of(cls, work: Work) -> BuildResult:
        stages = {name: dict(record.result) for name, record in work.records.items()}
        return cls(
            name=work.recipe.name,
            directory=work.directory,
            artifact=work.artifact,
            checkpoint=Path(work.checkpoint) if work.recipe.quantize else None,
            report_html=work.report / "report.html" if "validate" in stages else None,
            stages=stages,
            seconds={name: record.seconds for name, record in work.records.items()},
            reused=tuple(work.reused),
            failures=tuple(stages.get("validate", {}).get("failures", ())),
            recipe=work.recipe.to_dict(),
            source={"digest": work.model_digest, "spec": work.recipe.model},
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for JSON."""
        data = {key: str(value) if isinstance(value, Path) else value for key, value in vars(self).items()}
        return {**data, "passed": not self.failures}


def write_build(result: BuildResult) -> None:
    """Writes the build's manifest, unless the one that is there says the same already."""
    facts = {"stages": result.stages, "seconds": result.seconds, "failures": list(result.failures)}
    digest = json_digest({"recipe": result.recipe, "source": result.source, "facts": facts})
    path = result.directory / FILE_NAME
    if path.is_file() and read_manifest(result.directory).facts.get("digest") == digest:
        return
    manifest = Manifest(
        kind="build",
        source=result.source,
        recipe=result.recipe,
        versions=library_versions(*VERSIONS),
        model=read_manifest(result.artifact).model,
        facts={**facts, "digest": digest},
    )
    write_manifest(result.directory, manifest)
