"""The README says what is true."""

import re
import subprocess
from importlib import metadata
from pathlib import Path

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def section(title: str) -> str:
    return README.partition(f"\n## {title}\n")[2].partition("\n## ")[0]


def test_the_tree_names_every_file_once_and_says_what_each_is_for() -> None:
    tracked = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split()
    tracked = [path for path in tracked if not path.startswith("tests/fixtures/acestep")]
    folder = ""
    described: list[str] = []
    for line in re.findall(r"```\n(.*?)```", section("The tree"), flags=re.DOTALL)[0].splitlines():
        path, _, purpose = line.strip().partition("  ")
        assert purpose.strip(), line
        if path.endswith("/"):
            folder = path
        else:
            described.append(folder + path if line.startswith(" ") else path)
    plain = [path for path in tracked if not path.endswith("__init__.py") or (ROOT / path).stat().st_size]
    assert sorted(described) == sorted(plain)


def test_every_dependency_is_explained() -> None:
    names = {re.split(r"[^\w-]", requirement)[0] for requirement in metadata.requires("descant") or []}
    explained = set(re.findall(r"^\| `([\w-]+)` \|", section("What each dependency is for"), flags=re.MULTILINE))
    assert explained == names


def test_it_opens_with_a_sentence_a_screenshot_and_two_commands() -> None:
    title, sentence, picture, commands = README.split("\n\n")[:4]
    assert title == "# Descant"
    assert sentence.count(". ") == 0
    shown = re.fullmatch(r"!\[.+\]\((.+)\)", picture)
    assert shown
    assert (ROOT / shown[1]).read_bytes().startswith(b"\x89PNG")
    assert "make run" in commands
    assert "make test" in commands
