"""Everything that a release needs, in dist/: a reproducible wheel, its licences, and its bill of materials.

The wheel's bytes follow from the sources and the last commit. It fails if an index would refuse the wheel, if
CHANGELOG.md has no section for the version, or if a package that kvstore brings along has a licence that is neither
permissive nor on the list in tools/dev/release/exceptions.yaml. Nothing is published.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Final

from kvstore.model.errors import ConfigError
from kvstore.model.version import __version__
from kvstore.tools.dev.arguments import parser_of
from kvstore.tools.dev.release.changelog import changelog_problems
from kvstore.tools.dev.release.checkout import commit_time_s, tags
from kvstore.tools.dev.release.wheel import build_wheel, check_wheel

_ROOT: Final = Path(__file__).resolve().parents[3]
_EXAMPLE: Final = """examples:
  make release                                   all of it
  make wheel                                     the wheel only
"""


def release(root: Path, dist: Path) -> list[Path]:
    """Make all files, and return them.

    Raises:
        ConfigError: names each problem.
    """
    changelog = (root / "CHANGELOG.md").read_text(encoding="utf-8")
    problems = list(changelog_problems(changelog, __version__, is_release=f"v{__version__}" in tags(root)))
    if problems:
        raise ConfigError("\n".join(["CHANGELOG.md is not ready:", *problems]))
    wheel = build_wheel(root, dist)
    check_wheel(wheel)
    return [wheel, *_papers(root, dist)]


def _papers(root: Path, dist: Path) -> list[Path]:
    """Write the licences and the bill of materials."""
    from kvstore.tools.dev.release import installed, licences, sbom  # noqa: PLC0415 - not for the wheel alone

    packages = installed.packages(installed.declared(root))
    found = licences.licences(packages.values())
    problems = [licence.problem for licence in found if licence.problem]
    if problems:
        remedy = "choose others, or give a reason in tools/dev/release/exceptions.yaml"
        raise ConfigError("\n".join([f"these licences are not known to be permissive; {remedy}:", *problems]))
    files = {
        dist / f"vllm_kvstore-{__version__}-licences.md": "\n".join([*licences.table(found), ""]),
        dist / f"vllm_kvstore-{__version__}.cdx.json": sbom.bill_of_materials(
            __version__, commit_time_s(root), packages, found
        ),
    }
    for path, text in files.items():
        path.write_text(text, encoding="utf-8")
    return list(files)


def main() -> int:
    """Make the files, and print their names; returns 1 if something is not ready."""
    parser = parser_of("release", __doc__, _EXAMPLE)
    parser.add_argument("--wheel", action="store_true", help="build the wheel only, and check nothing")
    parser.add_argument("--out", type=Path, default=_ROOT / "dist", help="folder for the files (default: dist)")
    arguments = parser.parse_args()
    try:
        made = [build_wheel(_ROOT, arguments.out)] if arguments.wheel else release(_ROOT, arguments.out)
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    print(*made, sep="\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
