"""Published studies: what is kept of runs, the page rebuilt from it, and a run's place among them."""

from __future__ import annotations

import json
import re
import subprocess
import sys

import pytest
import yaml

from tests.support import REPOSITORY
from tests.support.files import read_rows
from tests.support.report_runs import LOSS, TIE, WIN, change, write_policy, write_reward_model
from trl_ext import published
from trl_ext.evaluation.methods.runs import read_method_run
from trl_ext.evaluation.reporting.runs import find_runs
from trl_ext.evaluation.statistics.intervals import prediction_interval
from trl_ext.published import compare, keep, page

GAINS = {"dpo": (0.10, 0.20, 0.30), "aot": (0.25, 0.30, 0.50)}


@pytest.fixture(autouse=True)
def data(tmp_path, monkeypatch):
    """An empty folder in place of the package's data."""
    monkeypatch.setattr(published, "DATA", tmp_path / "data")
    return tmp_path / "data"


def write_run(folder, objective="dpo", seed=0, gain=0.1, **settings):
    """A run with scores, of four prompts whose gains are -0.4, 0, 0.1 and twice the last one's."""
    write_policy(folder, objective=f"{objective} (beta 0.1)", seed=seed, gain=gain, outcomes=(WIN, TIE, LOSS, WIN))
    change(folder, "run", "settings_digest", to=objective)
    rows = read_rows(folder / "generations.jsonl")
    for row, own in zip(rows, (-0.4, 0.0, 0.1, 4 * gain + 0.3), strict=True):
        row |= {"base_score": 0.5, "score": 0.5 + own}
    (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    written = {"learning_rate": 1e-4, "beta": 0.1, "seed": seed, "output_dir": str(folder), **settings}
    (folder / "config.yaml").write_text(yaml.safe_dump(written))
    return folder


@pytest.fixture
def runs(tmp_path):
    """Three seeds of two methods."""
    for method, gains in GAINS.items():
        for seed, gain in enumerate(gains):
            write_run(tmp_path / "runs" / f"{method}-{seed}", method, seed, gain)
    return tmp_path / "runs"


@pytest.fixture
def kept(runs):
    keep.keep(runs, "study", processor="some processor", commit="abc1234")
    return runs


def refused(capsys, main, *arguments) -> str:
    """The one line that a command ends with."""
    with pytest.raises(SystemExit) as end:
        main([*map(str, arguments)])
    found = capsys.readouterr()
    assert end.value.code == 2 and found.err.startswith("error: ") and found.err.count("\n") == 1
    return found.err


# ---- The band ----


def test_band_by_hand():
    """1, 2, 3: mean 2, s = 1, t(2) = 4.3027, sqrt(1 + 1/3) = 1.1547: half-width 4.968.

    0, 1: mean 0.5, s = 0.70711, t(1) = 12.7062, sqrt(1 + 1/2) = 1.22474: half-width 11.004.
    """
    assert prediction_interval([1, 2, 3]) == pytest.approx((2 - 4.968, 2 + 4.968), abs=1e-3)
    assert prediction_interval([0, 1]) == pytest.approx((0.5 - 11.004, 0.5 + 11.004), abs=1e-3)
    assert prediction_interval([1]) is None


# ---- Keeping ----


def test_kept_runs_have_the_figures_and_ten_texts(kept, data):
    assert published.studies() == ["study"]
    folder = data / "study" / "dpo-1"
    results = json.loads((folder / "results.json").read_text())
    assert results["score"]["gain"]["mean"] == 0.2
    assert results["kept"] == {"processor": "some processor", "hours": 0.0, "commit": "abc1234"}
    own = read_method_run(kept / "dpo-1", "dpo", 1)
    short = read_method_run(folder, "dpo", 1)
    assert list(short.rows) == list(own.rows)
    assert [one["score"] for one in short.rows.values()] == pytest.approx([one["score"] for one in own.rows.values()])
    assert not any("response_text" in row for row in short.rows.values())
    assert yaml.safe_load((folder / "config.yaml").read_text()) == {"learning_rate": 1e-4, "beta": 0.1, "seed": 1}


def test_worst_are_by_gain_and_the_others_the_first_by_row_id():
    """Gains 0.00, 0.05, ... by falling row_id; rows 03 and 04 are made the worst, 03 by its lower score."""
    rows = [{"row_id": f"{i:02}", "score": 0.9 - i / 50, "base_score": 0.0, "response_text": "x"} for i in range(20)]
    rows[3] |= {"score": 0.1, "base_score": 0.6}
    rows[4] |= {"score": 0.3, "base_score": 0.8}
    found = keep.choose_texts(rows[::-1])
    assert [row["row_id"] for row in found if "worst" not in row] == ["00", "01", "02", "05", "06", "07", "08"]
    assert [(row["row_id"], row["worst"]) for row in found if "worst" in row] == [("03", 1), ("04", 2), ("19", 3)]


def test_long_metrics_are_thinned():
    rows = [{"step": step, "loss": step / 3, "reward": 0.1, "learning_rate": 1.0} for step in range(1000)]
    rows += [{"step": step, "eval_kl": 1.0, "eval_runtime": 2.0} for step in range(0, 1000, 10)]
    found = keep.thin_metrics(rows)
    training = [row["step"] for row in found if "loss" in row]
    assert (len(training), training[0], training[-1]) == (keep.TRAINING_ROWS, 0, 999)
    assert len(found) == keep.TRAINING_ROWS + keep.HELD_OUT_ROWS
    assert {name for row in found for name in row} == {"step", "loss", "reward", "eval_kl"}
    assert found[1]["loss"] == float(f"{found[1]['step'] / 3:.4g}")


@pytest.mark.parametrize(
    ("value", "short"),
    [
        ("/home/ann/my.py:score", "my.py:score"),
        ("file:/home/ann/my.py", "file:my.py"),
        ("~/runs/model", "model"),
        (r"C:\Users\ann\model", "model"),
        ("runs/reward_model-0", "runs/reward_model-0"),
        ("https://huggingface.co/a/b", "https://huggingface.co/a/b"),
        (["/a/b", {"c": "/d/e"}], ["b", {"c": "e"}]),
    ],
)
def test_folders_of_absolute_paths_are_not_kept(value, short):
    assert keep.clean(value) == short


def test_keeping_again_changes_nothing(kept, data):
    before = {path: path.stat().st_mtime_ns for path in data.rglob("*")}
    lines = keep.keep(kept, "study")
    assert all(": unchanged, " in line for line in lines) and len(lines) == 6
    assert {path: path.stat().st_mtime_ns for path in data.rglob("*")} == before


def test_unfinished_runs_are_named_and_taken_later(runs, data, capsys):
    results = (runs / "dpo-2" / "results.json").rename(runs / "results.json")
    keep.main([str(runs), "--study", "study"])
    assert "dpo-2: not finished (no results.json), not kept\n" in capsys.readouterr().out
    assert not (data / "study" / "dpo-2").exists()
    results.rename(runs / "dpo-2" / "results.json")
    taken = [line for line in keep.keep(runs, "study") if "unchanged" not in line]
    assert len(taken) == 1 and taken[0].startswith("dpo-2: kept, ")


def test_a_reward_model_is_kept_without_prompts(runs, data):
    write_reward_model(runs / "reward_model-7")
    keep.keep(runs, "study")
    assert (data / "study" / "reward_model-7" / "results.json").is_file()
    assert "reward_model" not in compare.published_runs("study")


def test_keep_refuses_in_one_line(kept, data, tmp_path, capsys):
    (tmp_path / "empty" / "dpo-0").mkdir(parents=True)
    said = refused(capsys, keep.main, tmp_path / "empty", "--study", "study")
    assert "no finished run" in said and "dpo-0: not finished" in said
    assert "no folder" in refused(capsys, keep.main, tmp_path / "nowhere", "--study", "study")
    assert "lower-case" in refused(capsys, keep.main, kept, "--study", "../study")
    write_run(tmp_path / "more" / "dpo-3", seed=3, learning_rate=2e-4, beta=0.1)
    change(tmp_path / "more" / "dpo-3", "run", "settings_digest", to="others")
    said = refused(capsys, keep.main, tmp_path / "more", "--study", "study")
    assert "differ in more than their seed: learning_rate" in said
    assert not (data / "study" / "dpo-3").exists()
    # How many prompts the KL is measured on is no part of the method.
    write_run(tmp_path / "longer" / "dpo-3", seed=3, num_kl_prompts=64)
    change(tmp_path / "longer" / "dpo-3", "run", "settings_digest", to="others")
    keep.main([str(tmp_path / "longer"), "--study", "study"])
    assert (data / "study" / "dpo-3" / "results.json").is_file()


# ---- A run among the published ones ----


def test_a_run_inside_and_outside_the_band(kept, tmp_path):
    """Gains 0.1, 0.2, 0.3: mean 0.2, s = 0.1, half-width 4.3027 x 0.1 x 1.1547 = 0.4968. All KLs and lengths agree."""
    found = compare.compare_with_published(write_run(tmp_path / "mine", seed=5, gain=0.69))
    assert (found["study"], found["method"], found["seeds"], found["same_seed"]) == ("study", "dpo", [0, 1, 2], False)
    gain = found["figures"]["gain in score"]
    assert gain["band"] == pytest.approx((-0.2968, 0.6968), abs=1e-4) and gain["place"] == "inside"
    assert found["same_prompts"] and found["differences"] == {}
    above = compare.compare_with_published(write_run(tmp_path / "above", seed=5, gain=0.70))
    assert above["figures"]["gain in score"]["place"] == "above"
    assert above["figures"]["KL (nats)"]["place"] == "inside"
    # 0.25, 0.3, 0.5: mean 0.35, s = 0.1323, half-width 0.6573. No gain is above 1.
    aot = compare.compare_with_published(write_run(tmp_path / "aot", "aot", seed=5, gain=0.3))
    assert aot["figures"]["gain in score"]["band"] == pytest.approx((-0.3073, 1.0), abs=1e-4)


def test_on_other_prompts_the_sampling_errors_are_added(kept, tmp_path):
    """Half-widths 0.4968 of the seeds and 0.03 of each run's gain: sqrt(0.4968^2 + 2 x 0.03^2) = 0.4986."""
    run = write_run(tmp_path / "mine", seed=5, gain=0.2)
    rows = read_rows(run / "generations.jsonl")[:3]
    (run / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    found = compare.compare_with_published(run)
    assert found["figures"]["gain in score"]["band"] == pytest.approx((-0.2986, 0.6986), abs=1e-4)
    assert found["differences"] == {"held-out prompts": (3, 4)} and "other prompts" in compare.render(found)


def test_settings_that_differ_are_named(kept, tmp_path, capsys):
    run = write_run(tmp_path / "mine", "aot", seed=0, learning_rate=3e-4, save_steps=7, num_kl_prompts=64)
    change(run, "run", "optimizer_steps", to=20)
    compare.main([str(run)])
    said = capsys.readouterr().out
    assert "Different settings: optimizer steps 20 (published: 40); learning_rate 0.0003 (published: 0.0001)." in said
    assert "A published run has this seed" in said and "beside aot of study, seeds 0, 1, 2" in said
    compare.main([str(run), "--json"])
    assert json.loads(capsys.readouterr().out)["differences"]["learning_rate"] == [3e-4, 1e-4]


def test_one_seed_gives_no_band(runs, tmp_path, capsys):
    for seed in (1, 2):
        (runs / f"dpo-{seed}" / "results.json").unlink()
    keep.keep(runs, "study")
    compare.main([str(write_run(tmp_path / "mine", seed=5))])
    said = capsys.readouterr().out
    assert "there is no band" in said and re.search(r"gain in score .* 0\.100 .* - .*no band", said)


def test_what_cannot_be_compared_ends_in_one_line(runs, tmp_path, capsys):
    mine = write_run(tmp_path / "mine", "ipo")
    assert "no study is published yet" in refused(capsys, compare.main, mine)
    keep.keep(runs, "study")
    said = refused(capsys, compare.main, mine)
    assert "no published run of 'ipo' on pairs" in said and "Published: aot, dpo" in said
    assert "Published: study" in refused(capsys, compare.main, mine, "--study", "studies")
    change(mine, "run", "dataset", to="toy")
    assert "no published run on the data 'toy': study is on pairs" in refused(capsys, compare.main, mine)
    assert "holds 6 runs: name one" in refused(capsys, compare.main, runs)
    (mine / "results.json").unlink()
    assert "no results.json, last logged at step 40" in refused(capsys, compare.main, mine)


# ---- The page ----


def test_the_page_and_the_table_in_the_docs(kept, tmp_path, capsys):
    docs = tmp_path / "results.md"
    docs.write_text(f"before\n\n{page.BEGIN.format(study='study')}\nold\n{page.END.format(study='study')}\n\nafter\n")
    for _ in range(2):
        page.main(["study", "--out", str(tmp_path / "page.html"), "--docs", str(docs)])
    text = docs.read_text()
    # dpo: the mean gain of the four prompts is (-0.4 + 0 + 0.1 + 4 g + 0.3) / 4 = g, with the mean 0.2 over seeds.
    assert re.search(r"\| dpo \| 0\.0001 \| 40 \| 0, 1, 2 \| 0\.200 \\\[-\d\.\d+, \d\.\d+\\\] \|", text)
    assert text.startswith("before\n") and text.endswith("\nafter\n") and "\nold" not in text
    assert text.count("Methods of the study") == 1 and "some processor" in text and "abc1234" in text
    html = (tmp_path / "page.html").read_text()
    assert page.CURVES_TITLE in html and 'id="table-worst"' in html and html.count("-0.40") >= 6
    docs.write_text("no markers")
    assert "lacks the lines" in refused(capsys, page.main, "study", "--docs", docs)
    assert "no published study" in refused(capsys, page.main, "other")


def test_gains_in_which_cuts_cost_nothing_by_hand(tmp_path):
    """A cut response has lost half of its score on `instructions`, the base's too."""
    folder = write_run(tmp_path / "runs" / "dpo-0")
    change(folder, "run", "dataset", to="instructions")
    rows = read_rows(folder / "generations.jsonl")
    scores = ((0.5, False, 0.5, True), (1.0, True, 0.25, False), (0.0, False, 0.0, False), (0.5, True, 0.5, True))
    for row, values in zip(rows, scores, strict=True):
        row |= dict(zip(("score", "finished", "base_score", "base_finished"), values, strict=True))
    (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep.keep(tmp_path / "runs", "study")
    (run,), _ = find_runs([published.study_folder("study")])
    table = page.study_table([run])
    cells = dict(zip(table.columns, table.rows[0], strict=True))
    assert cells["gain in score"].text == "0.188"  # (0 + 0.75 + 0 + 0) / 4
    assert cells["gain, cuts cost nothing"].text == "0.250"  # (0.5 + 0.5 + 0 + 0) / 4
    assert cells["cut"].text == "0.50" and "gain, greedy" not in cells


def test_gains_of_greedy_answers_by_hand(tmp_path):
    """Problems have a greedy response beside the sampled one, for policy and base."""
    folder = write_run(tmp_path / "runs" / "grpo_math-0", "grpo_math")
    rows = read_rows(folder / "generations.jsonl")
    answers = (
        ("correct", "wrong_answer"),
        ("correct", "correct"),
        ("wrong_format", "correct"),
        ("correct", "wrong_format"),
    )
    for row, (own, base) in zip(rows, answers, strict=True):
        row |= {"greedy_category": own, "base_greedy_category": base}
    (folder / "generations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    keep.keep(tmp_path / "runs", "study")
    (run,), _ = find_runs([published.study_folder("study")])
    table = page.study_table([run])
    assert dict(zip(table.columns, table.rows[0], strict=True))["gain, greedy"].text == "0.250"  # (1 + 0 - 1 + 1) / 4


# ---- What comes with the package ----


SHIPPED = sorted((REPOSITORY / "trl_ext" / "published" / "data").glob("*/*"))


@pytest.mark.parametrize("folder", SHIPPED, ids=lambda path: path.name)
def test_shipped_runs_are_small_and_name_no_machine(folder):
    texts = {path.name: path.read_text() for path in folder.iterdir()}
    assert sum(len(text.encode()) for text in texts.values()) < 90_000
    for name in ("results.json", "config.yaml"):
        content = yaml.safe_load(texts[name])
        assert keep.clean(content) == content


@pytest.mark.parametrize("study", sorted({folder.parent.name for folder in SHIPPED}))
def test_the_documentation_has_the_table_of_the_shipped_runs(study, tmp_path, monkeypatch):
    monkeypatch.setattr(published, "DATA", REPOSITORY / "trl_ext" / "published" / "data")
    text = (REPOSITORY / "docs" / "results.md").read_text()
    (tmp_path / "results.md").write_text(text)
    page.write_page(study, tmp_path / "page.html", tmp_path / "results.md")
    assert (tmp_path / "results.md").read_text() == text, "run python -m trl_ext.published.page with --docs"


@pytest.mark.long
def test_real_runs_are_kept_and_compared(tmp_path):
    short = ["--use_cpu=true", "--max_steps=2", "--num_eval_prompts=8", "--eval_strategy=no"]
    short += ["--generation_eval_every=0"]
    for seed in "012":
        command = [sys.executable, "recipes/dpo.py", "--seed", seed, "--output_dir", str(tmp_path / f"dpo-{seed}")]
        subprocess.run([*command, *short], cwd=REPOSITORY, check=True, capture_output=True, timeout=300)
    mine = (tmp_path / "dpo-2").rename(tmp_path / "mine")
    keep.keep(tmp_path, "toy")
    found = compare.compare_with_published(mine)
    assert (found["seeds"], found["differences"], len(found["figures"])) == ([0, 1], {}, 4)
    page.write_page("toy", tmp_path / "page.html")
