"""The five stages of a build, each: gather what shapes the result, reuse or run, keep a record.

Stages are called by their public names only, and imported when they have to run: a build that finds everything done
loads neither torch nor an engine.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, TextIO

import optkit
from optkit.build.cache import Record, read_record, stage_key, write_record
from optkit.errors import ArtifactError
from optkit.manifest import check_files, json_digest, read_manifest
from optkit.recipe import Recipe

Progress = Callable[..., None]


class Work:
    """One build in one directory; ``records`` fills up stage by stage.

    Attributes:
        records: stage -> record.
        reused: the stages whose result was there already.
        checkpoint, artifact, report: directories; ``checkpoint`` is what is exported (the model if nothing is quantized).
    """

    def __init__(
        self, recipe: Recipe, directory: Path, progress: Progress, force: bool, threads: int | None, stream: TextIO | None
    ) -> None:
        self.recipe = recipe
        self.directory = directory
        self.progress = progress
        self.force = force
        self.threads = threads
        self.stream = stream
        self.records: dict[str, Record] = {}
        self.reused: list[str] = []
        self.checkpoint: str | Path = directory / "checkpoint" if recipe.quantize else recipe.model
        self.artifact = directory / "artifact"
        self.report = directory / "report"

    # ── stages, in order ─────────────────────────────────────────────────────────────────────────────────────────────

    def quantize(self) -> None:
        section = self.recipe.quantize
        if section is None:
            return
        settings = {**dataclasses.asdict(section), "calibration_text": text_digest(section.calibration.source)}

        def run() -> Mapping[str, Any]:
            optkit.quantize(self.recipe.model, section, self.checkpoint, progress=self.progress)
            return {"bytes": directory_bytes(self.checkpoint)}

        self._stage("quantize", {"model": self.model_digest, "settings": settings}, self.checkpoint, run)

    def export(self) -> None:
        section = dataclasses.asdict(self.recipe.export)

        def run() -> Mapping[str, Any]:
            optkit.export(self.checkpoint, self.recipe.export, self.artifact, progress=self.progress)
            return {"bytes": directory_bytes(self.artifact), "model_bytes": weight_bytes(self.recipe.model)}

        self._stage("export", {"source": self.source_digest, "settings": section}, self.artifact, run)

    def validate(self) -> None:
        section = self.recipe.validate
        if section is None:
            return
        settings = {**dataclasses.asdict(section), "text_digest": text_digest(section.text)}
        inputs = {
            "artifact": self.artifact_digest,
            "reference": self.model_digest,
            "checkpoint": self.source_digest,
            "settings": settings,
        }

        def run() -> Mapping[str, Any]:
            report = optkit.validate(
                self.artifact,
                self.recipe.model,
                report_dir=self.report,
                settings=section,
                checkpoint=self.checkpoint if self.recipe.quantize else None,
                checkpoint_limits=section.export_limits,
                threads=self.threads,
                progress=self.progress,
            )
            metrics = [{m.name: m.value for m in comparison.metrics} for comparison in report.comparisons]
            failures = [check.describe() for check in report.failures]
            step = metrics[1] if len(metrics) > 1 else None
            return {"metrics": metrics[0], "export_step": step, "failures": failures, "checks": len(report.checks)}

        self._stage("validate", inputs, self.report / "report.html", run)

    def bench(self) -> None:
        section = self.recipe.bench
        if section is None:
            return
        threads = section.threads or self.threads
        machine = {"cpus": os.cpu_count(), "threads": threads}
        path = self.directory / "bench.json"

        def run() -> Mapping[str, Any]:
            from optkit.runtime.bench import bench_process

            self.progress("measuring speed and memory")
            sizes = {"prompt_tokens": section.prompt_tokens, "new_tokens": section.new_tokens, "rounds": section.rounds}
            measured: dict[str, Any] = bench_process(self.artifact, threads=threads, **sizes)
            path.write_text(json.dumps(measured, indent=1) + "\n", encoding="utf-8")
            return measured

        self._stage(
            "bench", {"artifact": self.artifact_digest, "settings": dataclasses.asdict(section), "machine": machine}, path, run
        )

    def sample(self) -> None:
        section = self.recipe.sample
        if section is None:
            return
        path = self.directory / "sample.txt"

        def run() -> Mapping[str, Any]:
            from optkit.runtime.session import open_session

            session = open_session(self.artifact, threads=self.threads)
            try:
                text = stream_sample(session, section.prompt, section.max_new_tokens, self.stream)
            finally:
                session.close()
            path.write_text(text + "\n", encoding="utf-8")
            return {"prompt": section.prompt, "text": text}

        self._stage("sample", {"artifact": self.artifact_digest, "settings": dataclasses.asdict(section)}, path, run)
        if "sample" in self.reused and self.stream is not None:
            self.stream.write(f"> {section.prompt}\n\n{self.records['sample'].result['text']}\n\n")

    # ── what stages are made from ────────────────────────────────────────────────────────────────────────────────────

    @functools.cached_property
    def model_digest(self) -> str:
        """Of the recipe's model: of the GGUF file, or of the directory's weights, config and tokenizer."""
        from optkit.checkpoint import files

        self.progress("reading the model's content")
        path = files.locate(self.recipe.model)
        return files.cached_file_digest(path) if path.is_file() else files.content_digest(path)

    @property
    def source_digest(self) -> str:
        """Of what is exported."""
        return recorded_digest(Path(self.checkpoint)) if self.recipe.quantize else self.model_digest

    @property
    def artifact_digest(self) -> str:
        return recorded_digest(self.artifact)

    def _stage(self, stage: str, inputs: Mapping[str, Any], output: str | Path, run: Callable[[], Mapping[str, Any]]) -> None:
        """Reuses the stage's result, or runs it and keeps the record."""
        key = stage_key(stage, inputs)
        record = None if self.force else read_record(self.directory, stage)
        if record is not None and record.key == key and usable(Path(output)):
            self.records[stage] = record
            self.reused.append(stage)
            return
        self.progress(stage)
        started = time.monotonic()
        result = run()
        self.records[stage] = Record(stage, key, round(time.monotonic() - started, 3), result)
        write_record(self.directory, self.records[stage])


def usable(output: Path) -> bool:
    """Is a stage's output complete: a file that is there, or a directory whose files have their recorded sizes?"""
    if output.is_file():
        return True
    try:
        check_files(output, read_manifest(output))
    except ArtifactError:
        return False
    return True


def recorded_digest(directory: Path) -> str:
    """Of an optkit directory's content, from the digests in its manifest."""
    manifest = read_manifest(directory)
    return json_digest({"kind": manifest.kind, "files": manifest.files, "facts": manifest.facts})


def text_digest(source: str) -> str | None:
    """Of a text file that shapes a stage; ``None`` for a named text (its package's version is in the key)."""
    from optkit.manifest import file_digest

    return file_digest(source) if Path(source).is_file() else None


def directory_bytes(directory: str | Path) -> int:
    """Size of everything in a directory, its manifest included."""
    return sum(path.stat().st_size for path in Path(directory).rglob("*") if path.is_file())


def weight_bytes(model: str) -> int:
    """Bytes of the model's tensors as its checkpoint holds them (a GGUF file counts in FP16, which is what it is read as)."""
    from optkit.checkpoint.model import open_checkpoint

    tensors = open_checkpoint(model).tensors
    return sum(tensors.nbytes(name) for name in tensors.names())


def stream_sample(session: Any, prompt: str, max_new_tokens: int, stream: TextIO | None) -> str:
    """Greedy text for ``prompt``, written to ``stream`` as it comes."""
    from optkit.runtime.prompting import as_prompt

    if stream is not None:
        stream.write(f"> {prompt}\n\n")
    pieces: list[str] = []
    for event in session.stream(as_prompt(session, prompt), max_new_tokens=max_new_tokens):
        pieces.append(event.text)
        if stream is not None:
            stream.write(event.text)
            stream.flush()
    if stream is not None:
        stream.write("\n\n")
    return "".join(pieces)
