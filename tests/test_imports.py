"""The import rule: the web process never loads torch, the core knows nothing of the web."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LIGHT = {
    "adapter_files",
    "adapter_settings",
    "config",
    "config_checks",
    "event_reader",
    "events",
    "exports",
    "formats",
    "free_memory",
    "memory",
    "model_shape",
    "roots",
    "run_dir",
    "run_folders",
    "sample_shapes",
    "sources",
}


@pytest.mark.parametrize("module", ["webapp.app", "webapp.cli"])
def test_the_web_application_loads_no_torch(module: str) -> None:
    heavy = ("torch", "numpy", "lightning", "peft", "diffusers")
    code = f"import sys, {module}; print([name for name in {heavy} if name in sys.modules])"
    printed = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[]"


def test_an_export_loads_no_torch(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from trainer_core.exports import export; "
        "print([export(Path(sys.argv[1]), name, 'bf16', Path(sys.argv[2]) / name) for name in sys.argv[3:]], "
        "'torch' in sys.modules)"
    )
    adapter = ROOT / "tests" / "fixtures" / "acestep-original-base" / "adapter"
    command = [sys.executable, "-c", code, str(adapter), str(tmp_path), "peft", "diffusers", "comfyui"]
    printed = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert printed.strip() == "[64, 64, 96] False"


def test_webapp_imports_only_the_cores_light_modules() -> None:
    sources = [path.read_text() for path in (ROOT / "webapp").glob("*.py")]
    assert sources
    imported = {name for text in sources for name in re.findall(r"from trainer_core\.(\w+) import", text)}
    imported |= {
        name
        for text in sources
        for names in re.findall(r"from trainer_core import (.+)", text)
        for name in names.split(", ")
    }
    assert imported
    assert imported <= LIGHT


def test_the_core_imports_nothing_of_the_web() -> None:
    for path in (ROOT / "trainer_core").glob("*.py"):
        assert "webapp" not in re.findall(r"^\s*(?:from|import) (\w+)", path.read_text(), flags=re.MULTILINE), path
