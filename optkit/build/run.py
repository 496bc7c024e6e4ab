"""The ``build`` stage: a recipe becomes ``<out>/<name>/`` with a checkpoint, an artifact, a report, a benchmark and a sample.

quantize → export → validate → bench → sample; each stage is reused when nothing that shaped it changed (``cache.py``). A limit
that is exceeded does not stop the build: the artifact, the report that says why and the numbers are kept, ``failures`` names
the limits and the command line exits with 6.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TextIO

from optkit.build import stages
from optkit.build.cache import locked
from optkit.build.result import BuildResult, write_build
from optkit.recipe import Recipe, load_recipe


def build(
    recipe: Recipe | str | Path,
    out_dir: str | Path = "artifacts",
    progress: Callable[..., None] | None = None,
    force: bool = False,
    threads: int | None = None,
    stream: TextIO | None = None,
) -> BuildResult:
    """Runs every stage of ``recipe`` that is not done already.

    Args:
        recipe: a :class:`~optkit.recipe.Recipe` or the path of its file.
        out_dir: results go to ``out_dir/<recipe name>/``.
        progress: called with ``(text, done, total)``.
        force: run every stage again.
        threads: CPU threads of the engine that runs the artifact; ``bench.threads`` of the recipe wins for the benchmark.
        stream: where the sample is written as it is generated.

    Raises:
        OptkitError: whatever a stage raises; finished stages stay and are reused by the next run.
    """
    loaded = recipe if isinstance(recipe, Recipe) else load_recipe(recipe)
    directory = Path(out_dir) / loaded.name
    with locked(directory):
        work = stages.Work(loaded, directory, progress or (lambda *_: None), force, threads, stream)
        work.quantize()
        work.export()
        work.validate()
        work.bench()
        work.sample()
        result = BuildResult.of(work)
        write_build(result)
    return result
