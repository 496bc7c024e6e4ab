"""Who may import whom, enforced by parsing every import; and what the light parts load, observed in subprocesses.

The table is the architecture's: stages talk through directories, not through imports. A module-level import counts
wherever it stands outside a function; an import inside a function body is lazy and only has to respect what the unit may
use of optkit itself (the command line and ``build`` reach the stages that way).
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "optkit"
STANDARD = sys.stdlib_module_names
CORE = {"errors", "scheme", "recipe", "packing", "io_spec", "manifest", "_callable"}
CONSOLE = {"cli", "_console", "_options", "doctor", "inspection", "__main__"}

# unit -> (optkit units at module level, third-party modules at module level)
RULES: dict[str, tuple[set[str], set[str]]] = {
    "core": (set(), {"numpy", "yaml"}),
    "checkpoint": (set(), {"torch", "numpy", "safetensors", "compressed_tensors"}),
    "quantize": ({"checkpoint"}, {"torch", "numpy", "tokenizers"}),
    "export": ({"checkpoint"}, {"torch", "numpy", "onnx", "onnx_ir", "onnxscript", "ml_dtypes"}),
    "runtime": (set(), {"numpy", "tokenizers", "jinja2"}),
    "validate": ({"runtime"}, {"numpy"}),
    "build": (set(), set()),
    "console": (set(), {"click"}),
}
# file -> what it may use beyond its unit
EXTRA: dict[str, set[str]] = {
    "checkpoint/model.py": {"transformers"},
    "checkpoint/hf.py": {"transformers"},
    "checkpoint/gguf_support.py": {"transformers"},
    "export/hooks.py": {"transformers"},
    "export/verify.py": {"runtime", "onnxruntime"},
    "export/segments.py": {"onnxruntime"},
    "export/rounding.py": {"onnxruntime"},
    "export/state_hooks.py": {"transformers"},
    "runtime/backends/ort.py": {"onnxruntime"},
    "runtime/backends/_providers.py": {"onnxruntime"},
    "runtime/backends/torch_ref.py": {"torch", "checkpoint"},
    "runtime/backends/trt.py": {"torch", "tensorrt", "tensorrt_rtx", "cuda"},
    "export/engine.py": {"tensorrt", "tensorrt_rtx"},
}
# transformers is touched in few files, so that a new version is met in few places: loading, its rules for stored tensors and
# its reading of GGUF, the hooks of attention and masks, and the hooks of layers with recurrent state
TRANSFORMERS_FILES = {
    "checkpoint/model.py",
    "checkpoint/hf.py",
    "checkpoint/gguf_support.py",
    "export/hooks.py",
    "export/state_hooks.py",
}
FILES = sorted(ROOT.rglob("*.py"))


def name_of(path):
    return path.relative_to(ROOT).as_posix()


def unit_of(path):
    parts = path.relative_to(ROOT).parts
    if len(parts) > 1:
        return parts[0]
    return "console" if path.stem in CONSOLE else "core"


def imports(path, lazy):
    """``(module, name)`` of the imports of a file: those at module level, or those inside functions."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for node, inside in walk(tree, False, False):
        if inside is not lazy:
            continue
        if isinstance(node, ast.Import):
            for alias in node.names:
                yield alias.name, None
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            for alias in node.names:
                yield node.module, alias.name


def walk(node, inside, typing):
    """Import nodes with whether they stand in a function; those under ``if TYPE_CHECKING`` are left out."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, (ast.Import, ast.ImportFrom)):
            if not typing:
                yield child, inside
        elif isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test):
            for part in child.orelse:
                yield from walk(part, inside, typing)
        else:
            yield from walk(child, inside or isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)), typing)


def optkit_units(module, name):
    """The units of optkit an import reaches."""
    if module == "optkit":
        return {name} if name is not None and (ROOT / name).is_dir() else set()
    part = module.split(".")[1]
    return {part} if (ROOT / part).is_dir() else ({"console"} if part in CONSOLE else set())


def test_there_is_something_to_check():
    assert len(FILES) > 20
    assert {unit_of(path) for path in FILES} >= set(RULES) - {"quantize"}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_module_level_imports_keep_to_the_table(path):
    unit = unit_of(path)
    ours, theirs = RULES[unit]
    extra = EXTRA.get(name_of(path), set())
    for module, name in imports(path, lazy=False):
        top = module.split(".")[0]
        if top == "optkit":
            reached = optkit_units(module, name) - {unit} - ours - extra
            assert not reached, f"{name_of(path)} imports {module}: {unit} may not use {sorted(reached)}"
        elif top not in STANDARD:
            assert top in theirs | extra, f"{name_of(path)} imports {top} at module level: {unit} may use {sorted(theirs)}"


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_lazy_imports_keep_stages_apart(path):
    """Stages reach each other by directories only; build and the command line call them by name."""
    unit = unit_of(path)
    if unit in ("build", "console", "core"):
        return
    ours, _ = RULES[unit]
    for module, name in imports(path, lazy=True):
        if module.split(".")[0] == "optkit":
            reached = optkit_units(module, name) - {unit} - ours - EXTRA.get(name_of(path), set())
            assert not reached, f"{name_of(path)} imports {module} in a function: {unit} may not use {sorted(reached)}"


def test_validate_never_imports_torch_and_transformers_is_met_in_few_files():
    met = set()
    for path in FILES:
        for lazy in (False, True):
            tops = {module.split(".")[0] for module, _ in imports(path, lazy)}
            if unit_of(path) in ("validate", "build", "core"):
                assert not tops & {"torch", "transformers"}, name_of(path)
            if "transformers" in tops:
                met.add(name_of(path))
    assert met <= TRANSFORMERS_FILES, f"transformers is imported in {sorted(met - TRANSFORMERS_FILES)}"


def test_core_files_import_only_downwards():
    """A cycle among the core files would show as one file importing another that imports it."""
    graph = {}
    for path in FILES:
        if unit_of(path) == "core":
            graph[path.stem] = {m.split(".")[1] for m, _ in imports(path, lazy=False) if m.startswith("optkit.")}
    for name, used in graph.items():
        for other in used:
            assert name not in graph.get(other, set()), f"{name} and {other} import each other"


BLOCKER = """
import sys
class Block:
    names = {names!r}
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in self.names:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
sys.meta_path.insert(0, Block())
{code}
"""
HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir", "compressed_tensors", "safetensors")


def python(code, names=HEAVY):
    return subprocess.run(
        [sys.executable, "-c", BLOCKER.format(names=set(names), code=code)], capture_output=True, text=True, cwd=ROOT.parent
    )


def test_import_optkit_loads_nothing_heavy():
    heavy = "{'numpy', 'torch', 'transformers', 'onnxruntime', 'click', 'rich'}"
    code = f"import optkit; print(sorted({{m.split('.')[0] for m in sys.modules}} & {heavy}))"
    result = python(code, ())
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip() == "[]"


def test_the_help_loads_no_engine_and_no_framework():
    heavy = "{'torch', 'transformers', 'onnx', 'onnxruntime', 'tokenizers', 'rich'}"
    code = (
        "from optkit.cli import run\nassert run(['--help']) == 0\n"
        f"print(sorted({{m.split('.')[0] for m in sys.modules}} & {heavy}))"
    )
    result = python(code, ())
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip().endswith("[]")


@pytest.mark.parametrize(
    "module", ["optkit.runtime.session", "optkit.validate.run", "optkit.build.run", "optkit.cli", "optkit.doctor"]
)
def test_what_deployment_and_ci_need_imports_without_torch_and_transformers(module):
    result = python(f"import {module}")
    assert result.returncode == 0, result.stderr


def test_doctor_works_without_anything_heavy_and_says_what_to_install():
    result = python("from optkit.cli import run; sys.exit(run(['doctor']))", (*HEAVY, "onnxruntime"))
    assert result.returncode == 0, result.stderr
    assert "quantize" in result.stdout
