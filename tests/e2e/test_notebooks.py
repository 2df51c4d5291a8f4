"""The notebooks: kept without outputs, described by their table, and run from top to bottom."""

from __future__ import annotations

import ast
import importlib.util
import re

import pytest

from tests.support import recipes

nbformat = pytest.importorskip("nbformat", reason="the notebooks need the extra: pip install 'trl_ext[notebooks]'")

FOLDER = recipes.RECIPES / "notebooks"
PATHS = sorted(FOLDER.glob("*.ipynb"))
NAMES = [path.stem for path in PATHS]
TABLE = (FOLDER / "README.md").read_text(encoding="utf-8")
# Folders of one machine; commands and names of hub models have none of them.
ABSOLUTE = re.compile(r"(?<![\w.:/])/(?:home|root|tmp|work|mnt|opt|usr|var|Users|content)/|\b[A-Z]:\\")

each_notebook = pytest.mark.parametrize("path", PATHS, ids=NAMES)


def read(path):
    return nbformat.read(path, nbformat.NO_CONVERT)


def code(notebook) -> list[str]:
    return [cell.source for cell in notebook.cells if cell.cell_type == "code"]


def test_all_are_there_and_in_the_table():
    assert len(NAMES) == 6
    assert re.findall(r"^\| \[(\w+)\]\((\w+\.ipynb)\) \|", TABLE, flags=re.MULTILINE) == [
        (name, f"{name}.ipynb") for name in NAMES
    ]


@each_notebook
def test_is_stripped_and_its_cells_have_names(path):
    """A format with cell ids (4.5), nothing of a run in the file, and ids that a reader can understand."""
    notebook = read(path)
    nbformat.validate(notebook)
    assert (notebook.nbformat, notebook.nbformat_minor) == (4, 5)
    ids = [cell.id for cell in notebook.cells]
    assert len(set(ids)) == len(ids)
    for cell in notebook.cells:
        assert re.fullmatch(r"[a-z]+(-[a-z]+)*", cell.id), cell.id
        assert not cell.metadata, cell.id
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None, cell.id
        assert not ABSOLUTE.search(cell.source), cell.id


@each_notebook
def test_imports_resolve_and_are_public(path):
    for source in code(read(path)):
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.Import):
                for alias in node.names:
                    importlib.import_module(alias.name)
            elif isinstance(node, ast.ImportFrom):
                module = importlib.import_module(node.module)
                for alias in node.names:
                    assert not alias.name.startswith("_")
                    if not hasattr(module, alias.name):
                        importlib.import_module(f"{node.module}.{alias.name}")


# What is certain of the printed lines, beyond the line that sums each notebook up.
PRINTED = {
    # At a margin m the loss is max(0, 1 - m / 2) squared: 1, 1/4, 0, 0 for 0, 1, 2, 5.
    "02_your_own_loss": ["losses: [1.0, 0.25, 0.0, 0.0]"],
    # With p of 8 right the absolute advantages sum to 16 p (1 - p), over the deviation to 16 sqrt(p (1 - p)).
    # p (1 - p) is 7/64 for 1 of 8 and 1/4 for 4 of 8: 0.4375 of it, or sqrt(0.4375) = 0.661.
    # A mean over 5 and over 40 tokens gives a token 1/5 and 1/40; a constant gives both the same.
    "04_policy_gradients": [
        "grpo     share clipped: 0.0000 in the first update of a rollout, 0.",
        "gspo     share clipped: 0.0000 in the first update of a rollout, 0.",
        "group_normalized: a group with 1 of 8 right pushes 0.66 times",
        "group_centered: a group with 1 of 8 right pushes 0.44 times",
        "grpo     token of the short answer over token of the long one: 8; long over short answer as a whole: 1",
        "dr_grpo  token of the short answer over token of the long one: 1; long over short answer as a whole: 8",
    ],
    "05_verified_rewards": [
        "format 0, reward 0:  The answer is 85.",
        "format 1, reward 1:  <think>no idea</think> <answer>85</answer>",
        "round 1: ",
        "round 4: ",
    ],
    # Wilson's interval of 87 of 128: centre (0.6797 + 0.0150) / 1.0300 = 0.6745, half width 0.0798.
    "06_judge_and_report": ["a win rate of 0.68 over  128 prompts: [0.59, 0.75]", "0 problems with the runs' files"],
}
# Effects that are many intervals wide and that the text is about.
FOUND = {
    "01_quickstart": "The whole interval is above 0: it improved.",
    "03_reward_hacking": "KEY RESULT: the proxy is hacked: it rose, and the answers are worse",
    "05_verified_rewards": ": it learned.",
}


def execute(path, notebook, tmp_path, monkeypatch) -> str:
    """Run every cell in a folder of its own; returns what was printed. Every figure must be drawn."""
    from nbclient import NotebookClient

    monkeypatch.setenv("IPYTHONDIR", str(tmp_path / "ipython"))
    folder = tmp_path / "notebook"
    folder.mkdir()
    before = path.read_bytes()
    resources = {"metadata": {"path": str(folder)}}
    NotebookClient(notebook, timeout=600, kernel_name="python3", resources=resources).execute()

    outputs = [output for cell in notebook.cells if cell.cell_type == "code" for output in cell.outputs]
    assert not [output for output in outputs if output.output_type == "error"]
    figures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert len(figures) == sum(source.count("plt.show()") for source in code(notebook)) > 0
    assert [entry.name for entry in folder.iterdir()] in (["runs"], [])
    assert path.read_bytes() == before
    printed = "".join(o.text for o in outputs if o.output_type == "stream" and o.name == "stdout")
    assert "KEY RESULT" in printed
    return printed


@pytest.mark.slow
@pytest.mark.parametrize(
    "path", [pytest.param(path, marks=[] if path == PATHS[0] else pytest.mark.long) for path in PATHS], ids=NAMES
)
def test_runs_from_top_to_bottom(path, tmp_path, monkeypatch):
    """Every cell runs, every figure is drawn, and the statement that the notebook works towards is printed."""
    printed = execute(path, read(path), tmp_path, monkeypatch)
    for text in PRINTED.get(path.stem, []):
        assert text in printed
    assert FOUND.get(path.stem, "") in printed
