"""Checks the documents: every relative link leads to a file (and heading), every command and option they show exists.

Run by ``make docs``. It reads README.md, CONTRIBUTING.md, CHANGELOG.md and everything below docs/ and recipes/. Commands
are taken from fenced ``console``/``bash`` blocks: a line that starts with ``optkit `` (after ``$ ``) must name a command
of the program and only options that command has; a ``make`` line must name a target of the Makefile.
"""

from __future__ import annotations

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))
LINK = re.compile(r"(?<!\!)\[[^\]]*\]\(([^)\s]+)\)")
FENCE = re.compile(r"```(?:console|bash|sh)\n(.*?)```", re.DOTALL)


def documents() -> list[Path]:
    found = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "CHANGELOG.md")]
    return [*found, *sorted((ROOT / "docs").rglob("*.md")), *sorted((ROOT / "recipes").rglob("*.md"))]


def anchors(path: Path) -> set[str]:
    """GitHub's anchors of a document's headings."""
    titles = re.findall(r"^#+ (.+)$", path.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.replace("`", "").lower()).strip().replace(" ", "-") for title in titles}


def broken_links(path: Path) -> list[str]:
    problems = []
    for target in LINK.findall(path.read_text(encoding="utf-8")):
        if re.match(r"[a-z]+:", target):
            continue
        file, _, anchor = target.partition("#")
        place = (path.parent / file).resolve() if file else path
        if not place.exists():
            problems.append(f"{path.relative_to(ROOT)}: link to {target}, which is not there")
        elif anchor and place.suffix == ".md" and anchor not in anchors(place):
            problems.append(f"{path.relative_to(ROOT)}: link to {target}, and there is no such heading")
    return problems


def command_lines(path: Path) -> list[str]:
    """The shown commands, continued lines joined."""
    lines = []
    for block in FENCE.findall(path.read_text(encoding="utf-8")):
        for line in block.replace("\\\n", " ").splitlines():
            lines.append(line.removeprefix("$ ").strip())
    return lines


def wrong_commands(path: Path) -> list[str]:
    from optkit.cli import cli

    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    problems = []
    for line in command_lines(path):
        words = shlex.split(line, comments=True)
        if words[:1] == ["make"] and not {w for w in words[1:] if "=" not in w} <= targets:
            problems.append(f"{path.relative_to(ROOT)}: {line!r}: the Makefile has no such target")
        if words[:1] != ["optkit"] or len(words) < 2 or words[1].startswith("-"):
            continue
        command = cli.commands.get(words[1])
        if command is None:
            problems.append(f"{path.relative_to(ROOT)}: {line!r}: optkit has no such command")
            continue
        known = {name for p in command.params for name in (*p.opts, *p.secondary_opts)} | {"--help", "-h"}
        for word in words[2:]:
            if word.startswith("--") and word.partition("=")[0] not in known:
                problems.append(f"{path.relative_to(ROOT)}: {line!r}: {words[1]} has no option {word}")
    return problems


def main() -> None:
    problems = [problem for path in documents() for problem in (*broken_links(path), *wrong_commands(path))]
    for problem in problems:
        print(problem, file=sys.stderr)
    print(f"{len(documents())} documents, {len(problems)} problems")
    sys.exit(bool(problems))


if __name__ == "__main__":
    main()
