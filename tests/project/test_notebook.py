"""The notebook runs from its first cell to its last, in a folder that has nothing else."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
NOTEBOOK = ROOT / "examples" / "laptop.ipynb"
# as a notebook does it: cells share names, and a first line %%writefile writes the rest
RUN = """
import json, sys
from pathlib import Path

for cell in json.loads(Path(sys.argv[1]).read_text())["cells"]:
    if cell["cell_type"] == "code":
        first, *rest = cell["source"]
        if first.startswith("%%writefile "):
            Path(first.split()[1]).write_text("".join(rest))
        else:
            exec(compile("".join(cell["source"]), cell["id"], "exec"), globals())
print(Picture(Path("step1.svg").read_text())._repr_svg_()[:4])
"""


@pytest.mark.thorough
def test_the_notebook_runs(tmp_path):
    ran = subprocess.run(
        [sys.executable, "-c", RUN, NOTEBOOK], cwd=tmp_path, capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}, timeout=900,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    assert "zigzag      0000111122223333" in ran.stdout
    assert "hop 1, keys of 0: " in ran.stdout
    assert ran.stdout.endswith("<svg\n")


def test_the_notebook_is_kept_without_what_it_printed():
    notebook = json.loads(NOTEBOOK.read_text())
    assert notebook["nbformat"] == 4
    for cell in notebook["cells"]:
        assert cell["cell_type"] == "markdown" or (cell["outputs"], cell["execution_count"]) == (
            [],
            None,
        )
