"""The guide "Write a backend": its code is the example's, which is green, and red when broken."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
GUIDE = ROOT / "docs" / "write-a-backend.md"
EXAMPLE = ROOT / "examples" / "folder_backend"
BLOCK = re.compile(r"<!-- file: (\S+) -->\n\n```python\n(.*?)```\n", re.DOTALL)

SIZE_CHECK = """            if os.fstat(source.fileno()).st_size != sum(map(len, parts)):
                return Code.WRONG_SIZE
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """What an author has: an empty folder with the files of the guide."""
    for name in ("folder_backend.py", "test_folder_backend.py"):
        shutil.copy(EXAMPLE / name, tmp_path)
    return tmp_path


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *arguments]
    return subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600)


def test_the_code_of_the_guide_is_the_example() -> None:
    blocks = dict(BLOCK.findall(GUIDE.read_text()))
    assert list(blocks) == [
        f"examples/folder_backend/{name}"
        for name in ("folder_backend.py", "test_folder_backend.py")
    ]
    for name, code in blocks.items():
        assert code == (ROOT / name).read_text(), f"{name} and its copy in {GUIDE.name} differ"


def test_the_example_of_the_guide_is_green(folder: Path) -> None:
    done = run(folder, "-n2", "--hicache-report=report.json")
    assert done.returncode == 0, done.stdout
    report = json.loads((folder / "report.json").read_text())
    verdicts = {one["verdict"] for one in report["backends"]["folder"]["behaviours"].values()}
    # "not run" are the faults of servers, which are asked for by --hicache-faults.
    assert verdicts == {"passed", "not supported", "not run"}


def test_the_example_with_a_line_broken_is_red_and_says_what_is_right(folder: Path) -> None:
    backend = folder / "folder_backend.py"
    assert SIZE_CHECK in backend.read_text()
    backend.write_text(backend.read_text().replace(SIZE_CHECK, ""))
    done = run(folder, "-n2", "-k", "case_02")
    assert done.returncode == 1
    assert "FAILED test_case_02_an_object_of_another_size_is_a_miss" in done.stdout
    assert "a get that moved other than the page's bytes is False (case 2)" in done.stdout
    assert "a get that moved other than the page's bytes is False (case 2)" in GUIDE.read_text()


def test_the_class_alone_runs_by_its_name_as_the_guide_says(folder: Path) -> None:
    extra_config = json.dumps({"interface_v1": 1, "folder": str(folder / "pages")})
    named = ["--hicache-backend=folder_backend:FolderBackend", "-k", "case_01 or case_13"]
    (folder / "test_folder_backend.py").unlink()
    done = run(folder, "-n2", *named, f"--hicache-extra-config={extra_config}")
    assert done.returncode == 0, done.stdout
    assert "FolderBackend: " in done.stdout
